"""A plan as plain values, and those as lines to read."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ponderttt.params import Params
from ponderttt.plan import (
    GB,
    GPUS,
    MB,
    UTILISATION,
    UTILISATION_FLOAT32,
    Plan,
    ScalePlan,
    Stage,
    gpu_speeds,
)
from ponderttt.speed import Speeds

HERE = "this machine"
UNKNOWN = "its sizes are not known yet; log in to the hub and run `dvc repro backbone`"

Report = dict[str, Any]


def report(params: Params, plan: Plan, here: Speeds | None) -> Report:
    """Everything that `plan --json` prints; without a measurement this machine's time is null."""
    places = {HERE: here} | {gpu.name: gpu_speeds(gpu) for gpu in GPUS}
    first, *last = [(None, stage) for stage in plan.common]  # the corpus, and what follows scores
    own = [(scale.name, stage) for scale in plan.scales for stage in scale.stages]
    return {
        "budget": params.budget,
        "corpus": params.corpus.source,
        "seeds": list(params.run.seeds),
        "workers": plan.split.workers,
        "threads": plan.split.threads,
        "chunks": plan.chunks,
        "scored": plan.scored,
        "tokens": plan.tokens,
        "scales": [_scale(scale) for scale in plan.scales],
        "unknown": dict.fromkeys(plan.unknown, UNKNOWN),
        "stages": [_stage(name, stage, places) for name, stage in [first, *own, *last]],
        "hours": {name: speeds and plan.seconds(speeds) / 3600 for name, speeds in places.items()},
        "disk_mb": [*_disk(None, plan.common_disk), *_disks(plan.scales)],
        "disk_total_mb": plan.disk / MB,
        "gflops": here and {kind: speed / 1e9 for kind, speed in here.items()},
        "gpus": [dataclasses.asdict(gpu) for gpu in GPUS],
        "utilisation": UTILISATION,
        "utilisation_float32": UTILISATION_FLOAT32,
    }


def _scale(scale: ScalePlan) -> Report:
    return {
        "name": scale.name,
        **dataclasses.asdict(scale.shape),
        "memory_gb": {stage: size / GB for stage, size in scale.memory.items()},
        "gpu_memory_gb": scale.gpu_memory / GB,
    }


def _stage(scale: str | None, stage: Stage, places: Mapping[str, Speeds | None]) -> Report:
    return {
        "scale": scale,
        "stage": stage.name,
        "tflop": sum(stage.flops.values()) / 1e12,
        "seconds": {name: speeds and stage.seconds(speeds) for name, speeds in places.items()},
    }


def _disks(scales: Sequence[ScalePlan]) -> Iterator[Report]:
    for scale in scales:
        yield from _disk(scale.name, scale.disk)


def _disk(scale: str | None, sizes: Mapping[str, float]) -> Iterator[Report]:
    for artifact, size in sizes.items():
        yield {"scale": scale, "artifact": artifact, "mb": size / MB}


def text(found: Report) -> str:
    """The report as a page for a terminal."""
    parts = [
        _head(found),
        *map(_scale_line, found["scales"]),
        *(f"  {name}: {why}" for name, why in found["unknown"].items()),
        "",
        _time_table(found),
        "",
        _disk_table(found),
        "",
        _small_print(found),
    ]
    return "\n".join(parts)


def _head(found: Report) -> str:
    sets = ", ".join(f"{name} {count:,}" for name, count in found["chunks"].items())
    return (
        f"budget {found['budget']}, corpus {found['corpus']}, {len(found['seeds'])} seed(s), "
        f"{found['workers']} worker(s) of {found['threads']} thread(s)\n"
        f"  chunks per scale: {sum(found['chunks'].values()):,} ({sets})\n"
        f"  real tokens per scale: {found['tokens']:,}; scored chunks per seed: {found['scored']:,}"
    )


def _scale_line(scale: Report) -> str:
    memory = ", ".join(f"{stage} {size:.1f}" for stage, size in scale["memory_gb"].items())
    return (
        f"  {scale['name']}: {scale['parameters'] / 1e6:,.0f} M parameters, width "
        f"{scale['width']}, {scale['heads']} heads, {scale['vocabulary']:,} words "
        f"(from {scale['source']})\n"
        f"    GB per worker: {memory}; on a GPU: {scale['gpu_memory_gb']:.1f}"
    )


def _time_table(found: Report) -> str:
    places = list(found["hours"])
    rows = [["stage", "scale", "TFLOP", *places]]
    for stage in found["stages"]:
        times = [duration(stage["seconds"][place]) for place in places]
        rows.append([stage["stage"], stage["scale"] or "", f"{stage['tflop']:,.0f}", *times])
    hours = [found["hours"][place] for place in places]
    total = sum(stage["tflop"] for stage in found["stages"])
    rows.append(
        ["all", "", f"{total:,.0f}", *(duration(h and h * 3600) for h in hours)],
    )
    return table(rows)


def _disk_table(found: Report) -> str:
    rows = [["artifact", "scale", "MB"]]
    rows += [[d["artifact"], d["scale"] or "", f"{d['mb']:,.1f}"] for d in found["disk_mb"]]
    return table([*rows, ["all", "", f"{found['disk_total_mb']:,.1f}"]])


def _small_print(found: Report) -> str:
    if found["gflops"]:
        kinds = ", ".join(f"{kind} {speed:,.0f}" for kind, speed in found["gflops"].items())
        lines = [f"{HERE}, measured in GFLOP/s: {kinds}"]
    else:
        lines = [f"{HERE}: not measured"]
    return "\n".join(
        [
            *lines,
            _assumed("bfloat16", found["gpus"], "tflops", found["utilisation"]),
            _assumed("float32", found["gpus"], "tflops_float32", found["utilisation_float32"]),
        ]
    )


def _assumed(precision: str, gpus: Sequence[Report], peak: str, used: Mapping[str, float]) -> str:
    peaks = ", ".join(f"{gpu['name']} {gpu[peak]:g}" for gpu in gpus)
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in used.items())
    return f"one GPU, {precision}: peak TFLOP/s {peaks}; assumed share of it: {shares}"


def duration(seconds: float | None) -> str:
    """Seconds as one reads them.

    >>> duration(42), duration(600), duration(9000), duration(None)
    ('42 s', '10.0 min', '2.5 h', '-')
    """
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns in line; the first two to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
