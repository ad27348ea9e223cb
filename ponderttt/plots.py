"""Small CSV files for `dvc plots`: loss against rate, signal against advantage, thresholds."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from ponderttt.files import atomic
from ponderttt.measure import Traces, headline_policy
from ponderttt.rows import Row, tidy
from ponderttt.streams import Stream

FOLDER = Path("metrics/plots")
POINTS = 1600  # lines of a file, over all streams
WHERE = ("scale", "seed", "language")
CURVE = (*WHERE, "policy", "target", "rate", "loss", "low", "high")
SIGNAL = (*WHERE, "signal", "advantage", "decision")
TRACE = (*WHERE, "order", "signal", "threshold", "rate")
Line = dict[str, Any]


class Plots:
    """Collects the lines of each plot while streams go by. Plain streams only."""

    def __init__(self, streams: int) -> None:
        self.points = max(20, POINTS // max(1, streams))
        self.signal: list[Line] = []
        self.trace: list[Line] = []

    def add(self, stream: Stream, traces: Traces, view: Any) -> None:
        """Take a few points of one stream."""
        if stream.key.variant != "plain":
            return
        self.signal += signal_lines(stream, traces, view, self.points)
        self.trace += trace_lines(stream, traces, view, self.points)

    def write(self, rows: list[Row], view: Any) -> None:
        """Write the three files."""
        write_csv(FOLDER / "loss_rate.csv", CURVE, curve_lines(rows, view))
        write_csv(FOLDER / "signal_advantage.csv", SIGNAL, self.signal)
        write_csv(FOLDER / "threshold.csv", TRACE, self.trace)


def about(stream: Stream) -> Line:
    """What every line says first."""
    key = stream.key
    return {"scale": key.scale, "seed": key.seed, "language": key.language}


def spread(n: int, points: int) -> list[int]:
    """At most `points` places, evenly over 0 .. n - 1.

    >>> spread(10, 4), spread(3, 4)
    ([0, 2, 5, 7], [0, 1, 2])
    """
    return [i * n // points for i in range(points)] if n > points else list(range(n))


def signal_lines(stream: Stream, traces: Traces, view: Any, points: int) -> list[Line]:
    """Signal and advantage of chunks spread evenly over the stream."""
    signal = stream.signals[view.gate.signal]
    advantage = stream.advantage(view.metrics.reference)
    update = traces[headline_policy(view.gate)].update
    return [
        {
            **about(stream),
            "signal": tidy(signal[i]),
            "advantage": tidy(advantage[i]),
            "decision": "update" if update[i] else "skip",
        }
        for i in spread(len(stream), points)
    ]


def trace_lines(stream: Stream, traces: Traces, view: Any, points: int) -> list[Line]:
    """Threshold and running rate of the headline gate from the end of its calibration on."""
    trace = traces[headline_policy(view.gate)]
    free = np.arange(trace.calibration, len(stream))
    return [
        {
            **about(stream),
            "order": int(stream.order[free[i]]),
            "signal": tidy(stream.signals[view.gate.signal][free[i]]),
            "threshold": tidy(trace.threshold[free[i]]),
            "rate": tidy(trace.rate[free[i]]),
        }
        for i in spread(len(free), points)
    ]


def curve_lines(rows: list[Row], view: Any) -> list[Line]:
    """Loss of the headline gate, Random and the oracle at every rate, headline reference."""
    r = view.metrics.reference
    names = {headline_policy(view.gate): "gate", "random": "random", f"oracle_{r}": "oracle"}
    chosen = [row for row in rows if row["table"] == "curve" and row["policy"] in names]
    rates = {_place(row): row["value"] for row in chosen if row["metric"] == "rate"}
    return [
        {
            **{name: row[name] for name in WHERE},
            "policy": names[row["policy"]],
            "target": row["rate"],
            "rate": rates[_place(row)],
            "loss": row["value"],
            "low": row["low"],
            "high": row["high"],
        }
        for row in chosen
        if row["metric"] == "loss" and row["reference"] == r
    ]


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("scale", "seed", "language", "policy", "rate"))


def write_csv(path: Path, fields: tuple[str, ...], lines: list[Line]) -> None:
    """Write lines under their header, which is there even without a line."""
    with atomic(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
