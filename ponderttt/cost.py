"""Cost of a gate three ways side by side: the paper's model, counted operations, seconds.

A gate looks before it decides, so it runs the skip arm on every chunk and the update arm on those
it chooses: skip + rate * update. Dense updating need not look: update alone. The paper's model
counts 1 + 2 rate for the gate, and 3 for dense updating.
"""

from collections.abc import Iterator
from pathlib import Path

from ponderttt import result_tables, tables
from ponderttt.measure import Value, headline_policy
from ponderttt.params import Gate
from ponderttt.rows import Measured, Row, label, tidy
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


def layer_cost(parts: Parts, policy: str, rate: float) -> float:
    """What the layer costs on the average chunk."""
    if policy == "never":
        return parts["layer_skip"]
    if policy == "always":
        return parts["layer_update"]
    return parts["layer_skip"] + rate * parts["layer_update"]


def cost_table(measured: Measured, settings: Gate, folder: Path = COSTS) -> list[Row]:
    """Rows of the cost of no updates, of dense updates and of the headline gate."""
    units = read(measured.key, folder)
    rows: list[Row] = []
    for policy in ("never", "always", headline_policy(settings)):
        rate = float(measured.find("rate", policy=policy).draws[0])
        nominal = measured.find("cost_nominal", policy=policy)
        rows.append(measured.row(nominal))
        for unit, parts in units.items():
            rows += _unit_rows(measured, nominal, unit, parts, rate)
    return label("cost", rows)


def _unit_rows(
    measured: Measured, about: Value, unit: str, parts: Parts, rate: float
) -> Iterator[Row]:
    """The layer alone and the whole model, in full and over the skip arm's."""
    how = "counted" if unit == "flops" else "the median of a few rounds on one chunk"
    reason = f"no interval: {how}" if parts else "not measured; run `dvc repro cost`"
    for metric, number in _numbers(parts, about.policy, rate).items():
        row = measured.row(about) | {"metric": f"{unit}_{metric}", "value": tidy(number)}
        row |= dict.fromkeys(("low", "high", "plain_low", "plain_high"))
        yield row | {"reason": reason}


def _numbers(parts: Parts, policy: str, rate: float) -> dict[str, float]:
    """Cost of the layer and of everything, in full and over the skip arm's; NaN if unknown."""
    if not parts:
        names = ("layer", "layer_relative", "total", "total_relative")
        return dict.fromkeys(names, float("nan"))
    around = parts["backbone"] + parts["head"]
    spent, least = layer_cost(parts, policy, rate), layer_cost(parts, "never", 0)
    return {
        "layer": spent,
        "layer_relative": spent / least,
        "total": around + spent,
        "total_relative": (around + spent) / (around + least),
    }
