"""How fast this machine does each kind of work, by a short trial of the real code.

The trial runs as the stages do: as many processes at once, with as many threads each. Weights are
made up, as time does not depend on them.
"""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ponderttt import backbone as backbones
from ponderttt import losses
from ponderttt.backbone import Backbone
from ponderttt.cores import Split
from ponderttt.shapes import Shape, shape_of
from ponderttt.timing import quiet
from ponderttt.ttt import LayerConfig, build_layer

LAYERS = 2  # of the body; all layers of a model take the same time
WORDS = 64  # rows of the trial's embedding, which costs nothing to look up
KINDS = ("body", "head", "learn", "score", "train")

Speeds = dict[str, float]  # operations per second of each kind, of all workers together
Calls = dict[str, tuple[Callable[[], Any], float]]  # what to run, and its operations


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One process's share of the work, as the stages would give it."""

    config: Any  # of the backbone
    shape: Shape
    layer: LayerConfig
    length: int
    body_rows: int
    score_rows: int
    train_rows: int
    max_logits_mb: int


def measure(trial: Trial, split: Split, seconds: float) -> Speeds:
    """Operations per second of each kind on the whole machine, in about `seconds`."""
    if split.workers == 0:
        return run(trial, split.threads, seconds)
    # Children made by copying a process that uses threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(split.workers, mp_context=context) as pool:
        tasks = [
            pool.submit(run, trial, split.threads, seconds, number)
            for number in range(split.workers)
        ]
        found = [task.result() for task in tasks]
    return {kind: sum(speeds[kind] for speeds in found) for kind in KINDS}


def run(trial: Trial, threads: int, seconds: float, number: int = 0) -> Speeds:
    """The speeds of this process alone, on the GPU that a worker of this number would have."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cards = torch.cuda.device_count()
        device = f"cuda:{number % cards}" if cards else "cpu"
        return _speeds(make_calls(trial, device), seconds)
    finally:
        torch.set_num_threads(before)


def _speeds(calls: Calls, seconds: float) -> Speeds:
    """All kinds in turn until the time is up; what disturbs the machine meets all alike."""
    taken: dict[str, list[float]] = {kind: [] for kind in calls}
    for call, _ in calls.values():
        _time(call)  # the first also sets things up
    end = time.perf_counter() + seconds
    while not all(taken.values()) or time.perf_counter() < end:
        for kind, (call, _) in calls.items():
            taken[kind].append(_time(call))
    return {kind: flops / quiet(taken[kind]) for kind, (_, flops) in calls.items()}


def _time(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def make_calls(trial: Trial, device: str) -> Calls:
    """Each kind of work on made-up rows of the real sizes."""
    model, length, width = cut_model(trial, device), trial.length, trial.shape.width
    limit = trial.max_logits_mb
    layer = build_layer(trial.layer, seed=0).to(device)
    body = shape_of(model.model.config, "trial")
    rows = torch.randn(max(trial.score_rows, trial.train_rows), length, width, device=device)
    tokens = torch.randint(1, WORDS, (trial.body_rows, length), device=device)
    counts = torch.full((1,), length, device=device)

    def train() -> None:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            out, _, inner = layer(rows[: trial.train_rows])
        (out.sum() + inner.before.sum()).backward()

    def head() -> None:
        losses.predict(model, rows[:1], tokens[:1], counts, max_logits_mb=limit)

    drawn, weights = rows[:1].flatten(0, 1), torch.ones(length, device=device)

    def learn() -> None:
        losses.weighted_ce(model, drawn, tokens[0], weights, max_logits_mb=limit)

    scored = rows[: trial.score_rows]
    return {
        "body": (lambda: model.hidden(tokens), trial.body_rows * body.body_flops(length)),
        "head": (head, (length - 1) * trial.shape.head_flops),
        "learn": (learn, 2 * length * trial.shape.head_flops),
        "score": (lambda: layer.score(scored), len(scored) * score_flops(trial.layer, length)),
        "train": (train, trial.train_rows * train_flops(trial.layer, length)),
    }


def cut_model(trial: Trial, device: str) -> Backbone:
    """Two layers of the backbone under a head of full size."""
    config = type(trial.config).from_dict(_cut(trial.config.to_dict()))
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    head = torch.nn.utils.skip_init(
        torch.nn.Linear, trial.shape.width, trial.shape.vocabulary, bias=False
    )
    head.weight.requires_grad_(False).fill_(0.01)
    model.set_output_embeddings(head)
    return backbones.place(model, {"vocabulary": trial.shape.vocabulary, "bos": None}, device)


def _cut(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with fewer layers and words, and with no token outside them."""
    cut: dict[str, Any] = dict(config)
    if "text_config" in cut:
        return cut | {"text_config": _cut(cut["text_config"])}
    cut |= dict.fromkeys({"n_layer", "num_hidden_layers"} & cut.keys(), LAYERS)
    if cut.get("layer_types"):
        cut["layer_types"] = cut["layer_types"][:LAYERS]
    ends = {key for key in cut if key.endswith("_token_id")}
    return cut | {"vocab_size": WORDS} | dict.fromkeys(ends, 0)


def score_flops(layer: LayerConfig, tokens: int) -> float:
    """Operations of both arms and all signals on one row: projections, reads of W, its steps."""
    d, e, m = layer.width, layer.head_width, layer.mini_batch
    return float(tokens * d * (10 * d + 14 * e + 4 * m))


def train_flops(layer: LayerConfig, tokens: int) -> float:
    """Operations of the update arm forward and backward, the latter twice the former."""
    d, e, m = layer.width, layer.head_width, layer.mini_batch
    return float(3 * tokens * d * (8 * d + 6 * e + 4 * m))
