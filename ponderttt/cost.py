"""Cost of a gate three ways side by side: the paper's model, counted operations, seconds.

A gate looks before it decides: it runs what its signal needs on every chunk, then what the chosen
arm needs and has not run yet. With `recon` that is skip + rate * update for the layer. Never and
always updating need not look. The paper's model counts 1 + 2 rate for the gate, and 3 for dense
updating.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ponderttt import result_tables, tables
from ponderttt.measure import Value, headline_policy
from ponderttt.params import Gate
from ponderttt.rows import Measured, Row, label, tidy
from ponderttt.signals import BY_NAME, SKIP, UPDATE, Part
from ponderttt.streams import Key

COSTS = Path("data/cost")
UNITS = ("flops", "seconds")
Parts = dict[str, float]


def read(key: Key, folder: Path = COSTS) -> dict[str, Parts]:
    """Operations and seconds of each part of the model, per chunk; empty if never measured."""
    place = folder / f"scale={key.scale}" / f"seed={key.seed}"
    if not place.exists():
        return {unit: {} for unit in UNITS}
    lines = tables.read_folder(place, result_tables.COST).to_pylist()
    return {unit: {line["part"]: float(line[unit]) for line in lines} for unit in UNITS}


def times_run(needs: Sequence[Part], rate: float) -> dict[Part, float]:
    """How often each part runs on the average chunk.

    >>> times_run(("layer_skip",), 0.25)
    {'layer_skip': 1.0, 'head_skip': 0.75, 'layer_update': 0.25, 'head_update': 0.25}
    """
    runs: dict[Part, float] = dict.fromkeys(needs, 1.0)
    for arm, share in ((SKIP, 1 - rate), (UPDATE, rate)):
        for part in arm:
            runs.setdefault(part, share)
    return runs


def spent(parts: Parts, needs: Sequence[Part], rate: float) -> tuple[float, float]:
    """What the layer and the head cost on the average chunk; the head costs the same on any arm."""
    layer = head = 0.0
    for part, times in times_run(needs, rate).items():
        if part.startswith("head"):
            head += times * parts["head"]
        else:
            layer += times * parts[part]
    return layer, head


def cost_table(measured: Measured, settings: Gate, folder: Path = COSTS) -> list[Row]:
    """Rows of the cost of no updates, of dense updates and of the headline gate."""
    units = read(measured.key, folder)
    looks = {"never": (), "always": (), headline_policy(settings): BY_NAME[settings.signal].needs}
    rows: list[Row] = []
    for policy, needs in looks.items():
        nominal = measured.find("cost_nominal", policy=policy)
        rate = float(measured.find("rate", policy=policy).draws[0])
        rows.append(measured.row(nominal))
        for unit, parts in units.items():
            rows += _unit_rows(measured, nominal, unit, _numbers(parts, needs, rate))
    return label("cost", rows)


def _unit_rows(
    measured: Measured, about: Value, unit: str, numbers: dict[str, float]
) -> Iterator[Row]:
    """The layer alone and the whole model, in full and over the skip arm's."""
    how = "counted" if unit == "flops" else "the lower quartile of a few rounds on one chunk"
    for metric, number in numbers.items():
        known = tidy(number)
        row = measured.row(about) | {"metric": f"{unit}_{metric}", "value": known}
        row |= dict.fromkeys(("low", "high", "plain_low", "plain_high"))
        missing = "not measured; run `dvc repro cost`"
        yield row | {"reason": missing if known is None else f"no interval: {how}"}


def _numbers(parts: Parts, needs: Sequence[Part], rate: float) -> dict[str, float]:
    """Cost of the layer and of everything, in full and over the skip arm's; NaN if unknown."""
    if not parts:
        names = ("layer", "layer_relative", "total", "total_relative")
        return dict.fromkeys(names, float("nan"))
    layer, head = spent(parts, needs, rate)
    least_layer, least_head = spent(parts, (), 0.0)
    total = parts["backbone"] + layer + head
    return {
        "layer": layer,
        "layer_relative": layer / least_layer,
        "total": total,
        "total_relative": total / (parts["backbone"] + least_layer + least_head),
    }
