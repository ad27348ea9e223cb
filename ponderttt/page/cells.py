"""Numbers as the report shows them: with an interval, or a dash and the reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["loss", "gap", "ppl", "percent", "r", "times", "p", "giga", "plain"]

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
DECIMALS = {"loss": 3, "gap": 4, "ppl": 2, "percent": 1, "r": 2, "times": 2}


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, the interval below it, and what a pointer brings up."""

    text: str
    interval: str = ""
    title: str = ""


def show(value: float, kind: Kind) -> str:
    """A number in the manner of its kind; shares are shown in per cent.

    >>> show(0.5, "percent"), show(1.23456, "loss"), show(-0.0001, "loss"), show(0.00004, "p")
    ('50.0', '1.235', '0.000', '<0.0001')
    """
    if kind == "p":
        return "<0.0001" if value < 0.0001 else f"{value:.2g}"
    if kind == "giga":
        return f"{value / 1e9:.3g}"
    if kind == "plain":
        return (f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}").replace("-", MINUS)
    scaled = 100 * value if kind == "percent" else value
    # Adding zero turns minus zero into zero.
    rounded = round(scaled, DECIMALS[kind]) + 0.0
    return f"{rounded:.{DECIMALS[kind]}f}".replace("-", MINUS)


def between(low: float, high: float, kind: Kind) -> str:
    """An interval.

    >>> between(0.1, 0.25, "percent")
    '[10.0, 25.0]'
    """
    return f"[{show(low, kind)}, {show(high, kind)}]"


def dash(reason: str) -> Cell:
    """No number, and why."""
    return Cell(DASH, title=reason)


def cell(row: Mapping[str, Any], kind: Kind, field: str = "value") -> Cell:
    """A result row as a cell."""
    value = row.get(field)
    if value is None:
        return dash(row.get("reason") or "undefined for these chunks")
    if field != "value":
        return Cell(show(value, kind))
    if row.get("low") is None:
        reason = row.get("reason")
        return Cell(show(value, kind), f"[{DASH}]" if reason else "", reason or "")
    title = row.get("reason") or ""
    if row.get("plain_low") is not None:
        title = "if chunks were independent: " + between(row["plain_low"], row["plain_high"], kind)
    return Cell(show(value, kind), between(row["low"], row["high"], kind), title)
