"""What one chunk costs in each part of the model: operations counted, seconds measured."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ponderttt import backbone as backbones
from ponderttt import layers, result_tables, tables
from ponderttt.backbone import Backbone
from ponderttt.ttt import TTTLayer

ROUNDS = 9
Parts = dict[str, Callable[[], Any]]


def product_flops(_into: Any, first: Any, second: Any, **_: Any) -> int:
    """Operations of `into += first @ second`, from the shapes [n, p, q] and [n, q, r]."""
    return 2 * int(math.prod(first)) * int(second[-1])


# The counter knows the product of matrices, but not its in-place form that the layer uses.
MORE = {torch.ops.aten.baddbmm_: product_flops}


def model_parts(backbone: Backbone, layer: TTTLayer, tokens: Tensor) -> Parts:
    """The parts of one chunk's work, each as a call; tokens [1, T]."""
    hidden = backbone.hidden(tokens)
    return {
        "backbone": lambda: backbone.hidden(tokens),
        "layer_skip": lambda: layer(hidden, update=False),
        "layer_update": lambda: layer(hidden, update=True),
        "head": lambda: backbone.logits(hidden),
    }


@torch.inference_mode()
def count_flops(parts: Parts) -> dict[str, int]:
    """Floating-point operations of the matrix products, by torch's own counter.

    Elementwise work, such as norms and activations, is not counted.
    """
    counts = {}
    for name, call in parts.items():
        with FlopCounterMode(display=False, custom_mapping=MORE) as counter:
            call()
        counts[name] = int(counter.get_total_flops())
    return counts


@torch.inference_mode()
def time_parts(parts: Parts, rounds: int, device: torch.device) -> dict[str, float]:
    """Seconds of each part, taken in turn, so that a busy machine slows all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + 1):
        for name, call in parts.items():
            taken = _seconds(call, device)
            if turn > 0:  # the first call also sets things up
                seconds[name].append(taken)
    return {name: quiet(found) for name, found in seconds.items()}


def quiet(seconds: Sequence[float]) -> float:
    """The lower quartile, as others on the machine only ever add time.

    >>> quiet([3.0, 1.0, 2.0, 9.0, 8.0])
    2.0
    """
    return sorted(seconds)[len(seconds) // 4]


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cost_table(backbone: Backbone, layer: TTTLayer, tokens: Tensor, rounds: int) -> pa.Table:
    """Count and time one chunk."""
    parts = model_parts(backbone, layer, tokens)
    flops, seconds = count_flops(parts), time_parts(parts, rounds, backbone.device)
    lines = [
        {
            "part": name,
            "flops": flops[name],
            "seconds": seconds[name],
            "rounds": rounds,
            "threads": torch.get_num_threads(),
            "device": backbone.device.type,
        }
        for name in parts
    ]
    return pa.Table.from_pylist(lines, schema=result_tables.COST)


def make(_view: Any, scale: str, seed: str) -> None:
    """Measure on the first whole training chunk of a scale, with the layer of a seed."""
    model = backbones.load(Path(f"data/backbone/scale={scale}"), backbones.best_device())
    folder = Path(f"data/ttt/scale={scale}/seed={seed}")
    layer = layers.load(folder, model.card["weights"]).to(model.device)
    tokens = longest_chunk(Path(f"data/chunks/scale={scale}/set=train")).to(model.device)
    out = Path(f"data/cost/scale={scale}/seed={seed}/part-00000.parquet")
    tables.write(out, cost_table(model, layer, tokens, ROUNDS), result_tables.COST)


def longest_chunk(folder: Path) -> Tensor:
    """The tokens [1, T] of the first chunk that no other is longer than."""
    rows = tables.read_folder(folder, tables.CHUNKS)
    counts = rows["n_tokens"].to_pylist()
    place = counts.index(max(counts))
    return torch.tensor([rows["tokens"][place].as_py()[: counts[place]]])
