"""Statistics as rows of the result table: rounded, with their intervals, never NaN."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ponderttt import result_tables
from ponderttt.bootstrap import estimate
from ponderttt.measure import Value
from ponderttt.streams import Key

Row = dict[str, Any]
DIGITS = 10  # significant ones kept, so that the last bit of a long sum never shows


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The statistics of one stream; `clusters` names what was drawn, in the order of its codes."""

    key: Key
    n: int
    clusters: tuple[str, ...]
    resamples: int
    values: list[Value]

    def find(self, metric: str, **about: str) -> Value:
        """The one value of that metric, policy, signal and reference."""
        wanted = {"policy": "", "signal": "", "reference": "", **about, "metric": metric}
        found = [v for v in self.values if all(getattr(v, k) == w for k, w in wanted.items())]
        if len(found) != 1:
            raise LookupError(f"{len(found)} values of {wanted} in {self.key}")
        return found[0]

    def rows(self, values: Iterable[Value] | None = None) -> Iterator[Row]:
        """One row per value."""
        for value in self.values if values is None else values:
            yield self.row(value)

    def row(self, value: Value) -> Row:
        """A value with its intervals."""
        e = estimate(value.draws, self.n, len(self.clusters), self.resamples)
        return {
            "table": "",
            **self.key._asdict(),
            "policy": value.policy or None,
            "signal": value.signal or None,
            "reference": value.reference or None,
            "rate": value.rate,
            "metric": value.metric,
            "value": tidy(e.value),
            "low": tidy(e.low),
            "high": tidy(e.high),
            "plain_low": tidy(e.plain_low),
            "plain_high": tidy(e.plain_high),
            "p": None if value.p is None else tidy(value.p),
            "p_holm": None,
            "n": self.n,
            "clusters": len(self.clusters),
            "reason": e.reason or None,
        }

    def keep(self, policies: Iterable[str], signals: Iterable[str]) -> "Measured":
        """Only what later tables compare between streams: draws take room."""
        kept = {*policies, *signals}
        chosen = [v for v in self.values if (v.policy or v.signal) in kept]
        return replace(self, values=chosen)


def tidy(number: float) -> float | None:
    """Round to `DIGITS` significant digits; None for what is not a number."""
    return float(f"{number:.{DIGITS}g}") if np.isfinite(number) else None


def label(table: str, rows: Iterable[Row]) -> list[Row]:
    """Copies of rows, as rows of a table."""
    return [{**row, "table": table} for row in rows]


def to_arrow(rows: list[Row]) -> pa.Table:
    """Rows as an Arrow table."""
    return pa.Table.from_pylist(rows, schema=result_tables.METRICS)
