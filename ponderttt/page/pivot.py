"""Result tables laid out by their own rows: what they are about down, metrics across."""

from dataclasses import dataclass, field
from typing import Any

from ponderttt.page.beside import stated
from ponderttt.page.cells import Cell, Kind, cell, dash, show
from ponderttt.page.lines import COMMAND, Block, Line
from ponderttt.page.lookup import Results, Row

WORDS = ("scale", "seed", "language", "variant", "policy", "signal", "reference", "rate")


@dataclass(frozen=True)
class Pivot:
    """How a table is shown: its metrics in order, with the head and kind of each.

    `words` renames what lines start with, `gaps` says why a line may lack a number.
    """

    name: str
    title: str
    text: str
    columns: dict[str, tuple[str, Kind]]
    words: dict[str, str] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)
    mark: str = ""  # lines that have this metric are marked


PIVOTS = (
    Pivot(
        name="cost",
        title="Cost of an update",
        text="Three ways side by side: the paper's nominal model (1 + 2 rate), floating-point "
        "operations of matrix products counted on the real layer, and seconds measured on one "
        "machine, per chunk. A gate runs what its signal needs on every chunk, then what the "
        "chosen arm still lacks. Ratios are to no update.",
        columns={
            "cost_nominal": ("nominal", "times"),
            "flops_layer": ("layer, GFLOP", "giga"),
            "flops_layer_relative": ("ratio", "times"),
            "flops_total": ("whole model, GFLOP", "giga"),
            "flops_total_relative": ("ratio", "times"),
            "seconds_layer": ("layer, s", "plain"),
            "seconds_layer_relative": ("ratio", "times"),
            "seconds_total": ("whole model, s", "plain"),
            "seconds_total_relative": ("ratio", "times"),
        },
    ),
    Pivot(
        name="paper",
        title="Stated beside recomputed",
        text="Numbers that the paper states, and what its own other numbers give. In brackets: the "
        "range that the rounding of the printed numbers leaves. Marked: what lies outside of it.",
        columns={
            "stated": ("stated", "plain"),
            "recomputed": ("recomputed", "plain"),
            "differs_by": ("differs by", "plain"),
        },
        words={"policy": "what"},
        gaps={
            "stated": "not stated in the paper",
            "differs_by": "nothing beyond what rounding explains, or nothing stated",
        },
        mark="differs_by",
    ),
)


def other_tables(results: Results) -> dict[str, dict[str, Any]]:
    """The tables of this kind, by name."""
    return {layout.name: pivot(layout, results) for layout in PIVOTS}


def pivot(layout: Pivot, results: Results) -> dict[str, Any]:
    """A table as the template takes it; words that are the same in all lines are left out."""
    rows = results.rows.get(layout.name, [])
    named = [w for w in WORDS if len({row[w] for row in rows}) > 1]
    counted = any(row["n"] is not None for row in rows)
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[w] for w in named), {})[row["metric"]] = row
    lines = [_line(layout, key, cells, counted) for key, cells in found.items()]
    return {
        "title": layout.title,
        "text": layout.text,
        "notes": [],
        "paper": "",
        "heads": [*(layout.words.get(w, w) for w in named), *(["n"] if counted else [])],
        "columns": [head for head, _ in layout.columns.values()],
        "blocks": [Block((*lines, *_paper_lines(layout)))] if lines else [],
        "command": COMMAND,
        "file": f"data/metrics/{layout.name}.parquet",
    }


def _line(layout: Pivot, key: tuple[Any, ...], found: dict[str, Row], counted: bool) -> Line:
    words = ["" if word is None else str(word) for word in key]
    if counted:
        words.append(", ".join(sorted({str(row["n"]) for row in found.values() if row["n"]})))
    cells = tuple(
        _cell(found[metric], kind) if metric in found else _gap(layout, metric)
        for metric, (_, kind) in layout.columns.items()
    )
    return Line(tuple(words), cells, marked=layout.mark in found)


def _cell(row: Row, kind: Kind) -> Cell:
    """A number; where an interval makes no sense its place stays empty."""
    shown = cell(row, kind)
    return shown if row["low"] is not None else Cell(shown.text, title=shown.title)


def _gap(layout: Pivot, metric: str) -> Cell:
    return dash(layout.gaps.get(metric, "does not apply"))


def _paper_lines(layout: Pivot) -> list[Line]:
    """The paper's own figures, under the same columns."""
    lines = []
    for entry in stated(layout.name):
        cells = tuple(
            Cell(show(entry.values[m], kind)) if m in entry.values else dash("not in the paper")
            for m, (_, kind) in layout.columns.items()
        )
        lines.append(Line((f"{entry.language}: the paper",), cells, paper=True))
    return lines
