"""Time the TTT layer against its four projections alone.

Prints the ratio of medians for each arm, all measured in turn in the same run so that a noisy
machine slows everything alike. `--json` writes the same as JSON.

    python -m benchmarks.layer --threads 2
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ponderttt.ttt import LayerConfig, TTTLayer, build_layer

TARGETS = {"update": 2.5, "skip": 1.6, "train": 2.8}


def main() -> None:
    """Measure and print."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    seconds = measure(cases(options), options.rounds)
    result = summarise(seconds) | {"config": vars(options), "torch": torch.__version__}
    print(json.dumps(result, indent=2) if options.json else table(result))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 768), ("heads", 12), ("tokens", 512), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Name what is timed: `base` is the four projections, forward; `train_base` with backward."""
    config = LayerConfig(width=options.width, heads=options.heads)
    layer = build_layer(config, seed=0)
    with torch.no_grad():
        layer.out_proj.weight.normal_(std=0.02)
    linears = [nn.Linear(options.width, options.width, bias=False) for _ in range(4)]
    h = torch.randn(options.batch, options.tokens, options.width)
    return {
        "base": lambda: forward_base(linears, h),
        "skip": lambda: forward_layer(layer, h, update=False),
        "update": lambda: forward_layer(layer, h, update=True),
        "score": lambda: layer.score(h),
        "train_base": lambda: train_base(linears, h),
        "train": lambda: train_layer(layer, h),
    }


@torch.no_grad()
def forward_base(linears: list[nn.Linear], h: Tensor) -> list[Tensor]:
    """Run the projections."""
    return [linear(h) for linear in linears]


@torch.no_grad()
def forward_layer(layer: TTTLayer, h: Tensor, *, update: bool) -> Tensor:
    """Run one arm of the layer."""
    return layer(h, update=update)[0]


def train_base(linears: list[nn.Linear], h: Tensor) -> None:
    """Run the projections and their gradients, of weights and input."""
    h = h.clone().requires_grad_()
    outs = [linear(h) for linear in linears]
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    clear(linears)


def train_layer(layer: TTTLayer, h: Tensor) -> None:
    """Run the update arm and all its gradients, the reconstruction loss included."""
    h = h.clone().requires_grad_()
    out, _, losses = layer(h)
    (out.sum() + 0.1 * losses.before.mean()).backward()
    clear([layer])


def clear(modules: list[Any]) -> None:
    """Drop the gradients, as an optimizer does after its step."""
    for module in modules:
        module.zero_grad(set_to_none=True)


def measure(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time every case once per round, after a round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, run in cases.items():
            begin = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def summarise(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Give medians in milliseconds, and ratios to the projections."""
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    ratios = {name: medians[name] / medians["base"] for name in ("skip", "update", "score")}
    ratios["train"] = medians["train"] / medians["train_base"]
    return {"milliseconds": medians, "ratios": ratios, "targets": TARGETS}


def table(result: dict[str, Any]) -> str:
    """Lay the result out for reading."""
    lines = [f"{'case':<12}{'ms':>9}{'ratio':>8}{'target':>8}"]
    for name, median in result["milliseconds"].items():
        ratio, target = result["ratios"].get(name), result["targets"].get(name)
        cells = [f"{value:8.2f}" if value else " " * 8 for value in (ratio, target)]
        lines.append(f"{name:<12}{median:9.1f}{''.join(cells)}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    main()
