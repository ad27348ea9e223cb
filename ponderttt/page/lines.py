"""The lines of the report's tables, from the result rows and the paper's figures."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from ponderttt.page.beside import Stated, stated
from ponderttt.page.cells import Cell, cell, dash
from ponderttt.page.lookup import Place, Results, Row
from ponderttt.page.sheets import SHEETS, Column, Run, Sheet
from ponderttt.page.verdicts import signal_verdicts
from ponderttt.results import RATES
from ponderttt.signals import BY_NAME, LABEL_FREE, PAPER, WITH_LABELS
from ponderttt.streams import REFERENCES

COMMAND = "dvc repro metrics"


class Spot(NamedTuple):
    """What one line is about."""

    place: Place
    reference: str
    rate: float | None = None
    signal: str | None = None


@dataclass(frozen=True)
class Line:
    """One line of a table: words first, then numbers."""

    heads: tuple[str, ...]
    cells: tuple[Cell, ...]
    paper: bool = False
    marked: bool = False


@dataclass(frozen=True)
class Block:
    """Lines that belong together; one with a summary can be folded."""

    lines: tuple[Line, ...]
    summary: str = ""
    unfolded: bool = True


def all_sheets(results: Results, run: Run) -> dict[str, dict[str, Any]]:
    """Every table of the page, by name."""
    return {sheet.name: fill(sheet, results, run) for sheet in SHEETS}


def fill(sheet: Sheet, results: Results, run: Run) -> dict[str, Any]:
    """One table as the template takes it."""
    return {
        "title": sheet.title,
        "text": sheet.text.format(units=run.units),
        "notes": notes(sheet, results, run),
        "paper": sheet.paper,
        "heads": heads(sheet, run),
        "columns": [column.head for column in sheet.columns],
        "blocks": folded(sheet, results, run) if sheet.over else whole(sheet, results, run),
        "command": COMMAND,
        "file": f"data/metrics/{sheet.name}.parquet",
    }


def notes(sheet: Sheet, results: Results, run: Run) -> list[str]:
    """What a table says, in sentences made from its rows."""
    if sheet.over != "signal":
        return []
    places = [place for place in results.places(sheet.name) if place.seed == run.seeds[0]]
    return signal_verdicts(results, places, scales=len(run.scales) > 1)


def heads(sheet: Sheet, run: Run) -> tuple[str, ...]:
    """The names of the words that start each line; what never changes is left out."""
    if sheet.over:
        return {"rate": ("target rate",), "signal": ("signal", "sees", "extra cost")}[sheet.over]
    named = ["scale"] if len(run.scales) > 1 else []
    named += ["seed"] if len(run.seeds) > 1 and sheet.name != "seeds" else []
    named += ["language", "against"] if sheet.references else ["language"]
    return (*named, "n", run.units)


def whole(sheet: Sheet, results: Results, run: Run) -> list[Block]:
    """A short table: this run's lines, then the paper's; none where this run has none."""
    lines = [line(sheet, results, run, spot) for spot in spots(sheet, results, run)]
    beside = [paper_line(sheet, entry) for entry in stated(sheet.name)]
    return [Block((*lines, *beside))] if lines else []


def folded(sheet: Sheet, results: Results, run: Run) -> list[Block]:
    """A long table, by language and reference; the headline's is open."""
    found = []
    for (place, r), group in groupby(spots(sheet, results, run), key=lambda spot: spot[:2]):
        lines = tuple(line(sheet, results, run, spot) for spot in group)
        n = results.find("all", place, "loss", policy="arm_update")
        words = f"{place.language}, against {r}: {n.get('n', 0)} chunks of {n.get('clusters', 0)} "
        scale = f"{place.scale}, " if len(run.scales) > 1 else ""
        first = place.language == run.language and r == run.reference
        found.append(Block(lines, scale + words + run.units, unfolded=first))
    return found


def spots(sheet: Sheet, results: Results, run: Run) -> Iterator[Spot]:
    """What there is a line for. Long tables show the first seed; Parquet has the others."""
    for place in results.places(sheet.name):
        if sheet.over and place.seed != run.seeds[0]:
            continue
        for r in REFERENCES if sheet.references else ("",):
            if sheet.over == "rate":
                yield from (Spot(place, r, rate=rate) for rate in RATES)
            elif sheet.over == "signal":
                yield from (Spot(place, r, signal=s) for s in ranked(results, place, r))
            else:
                yield Spot(place, r)


def ranked(results: Results, place: Place, r: str) -> list[str]:
    """All signals, the largest capture first, those without one last."""

    def worth(name: str) -> float:
        row = results.find("signals", place, "capture_topk", signal=name, reference=r)
        return float("-inf") if row["value"] is None else float(row["value"])

    return sorted((*LABEL_FREE, *WITH_LABELS), key=worth, reverse=True)


def line(sheet: Sheet, results: Results, run: Run, spot: Spot) -> Line:
    """The numbers of one spot."""
    rows = [find(sheet, column, results, run, spot) for column in sheet.columns]
    pairs = zip(rows, sheet.columns, strict=True)
    cells = tuple(cell(row, column.kind, column.field) for row, column in pairs)
    words = first_words(run, spot, next((row for row in rows if "n" in row), {}))
    return Line(tuple(words[name] for name in heads(sheet, run)), cells)


def find(sheet: Sheet, column: Column, results: Results, run: Run, spot: Spot) -> Row:
    """The row behind a cell."""
    names = {"ours": run.ours, "signal": spot.signal or run.signal, "r": spot.reference}
    row = results.find(
        sheet.name,
        spot.place,
        column.metric,
        policy=column.policy and column.policy.format(**names),
        signal=column.signal and column.signal.format(**names),
        reference=spot.reference if column.reference else None,
        variant=column.variant,
        rate=spot.rate,
    )
    if "n" not in row and spot.signal in (PAPER, *WITH_LABELS):
        return row | {"reason": "does not apply to the paper's own signal or to labels"}
    return row


def first_words(run: Run, spot: Spot, counted: Row) -> dict[str, str]:
    """All words that a line may start with."""
    words = {
        **{name: str(value) for name, value in spot.place._asdict().items()},
        "against": spot.reference,
        "n": str(counted.get("n", "")),
        run.units: str(counted.get("clusters", "")),
    }
    if spot.rate is not None:
        words["target rate"] = f"{100 * spot.rate:.0f} %"
    if spot.signal is not None:
        signal = BY_NAME[spot.signal]
        words |= {"signal": signal.name, "sees": signal.sees, "extra cost": signal.cost}
    return words


def paper_line(sheet: Sheet, entry: Stated) -> Line:
    """The paper's own figures, under the same columns."""
    cells = tuple(
        cell({"value": entry.values[c.head]}, c.kind)
        if c.head in entry.values
        else dash("not in the paper")
        for c in sheet.columns
    )
    return Line((f"{entry.language}: the paper, {entry.scale}",), cells, paper=True)
