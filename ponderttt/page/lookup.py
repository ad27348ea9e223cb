"""Result rows, found by what they are about."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ponderttt import result_tables, tables

Row = dict[str, Any]
FIELDS = (
    "table",
    "scale",
    "seed",
    "language",
    "variant",
    "policy",
    "signal",
    "reference",
    "rate",
    "metric",
)


class Place(NamedTuple):
    """The run that a row belongs to; no seed means all of them."""

    scale: str
    seed: int | None
    language: str


class Results:
    """The rows of all result tables."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.index: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            self.rows.setdefault(row["table"], []).append(row)
            self.index[tuple(row[name] for name in FIELDS)] = row

    def places(self, table: str) -> list[Place]:
        """The runs a table has rows of, in the order of the table."""
        found = self.rows.get(table, [])
        return list(dict.fromkeys(Place(r["scale"], r["seed"], r["language"]) for r in found))

    def find(self, table: str, place: Place, metric: str, **about: Any) -> Row:
        """One row; where there is none, an empty one that says so."""
        wanted = {"variant": "plain", "policy": None, "signal": None, "reference": None}
        wanted |= {"rate": None, **about}
        key = {**wanted, "table": table, "metric": metric, **place._asdict()}
        missing = {"value": None, "low": None, "high": None, "reason": "not measured in this run"}
        return self.index.get(tuple(key[name] for name in FIELDS), missing)


def read(folder: Path) -> Results:
    """Every table of the metrics stage."""
    return Results(tables.read_folder(folder, result_tables.METRICS).to_pylist())
