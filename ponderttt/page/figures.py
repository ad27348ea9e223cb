"""The report's figures. Each function gives the SVG text of one panel, or none without data."""

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ponderttt.gate import Trace
from ponderttt.page.cells import DASH, between, show
from ponderttt.page.lookup import Place, Results, Row
from ponderttt.page.svg import HEIGHT, WIDTH, Panel, Point, spanning
from ponderttt.plots import spread
from ponderttt.results import RATES
from ponderttt.signals import LABEL_FREE
from ponderttt.stats import Array
from ponderttt.streams import Stream

POINTS = 400  # marks of one panel; more become a density
CELLS = (38, 24)  # of a density, across and up
SHADES = 6
ROW = 22  # height of a line of a forest plot
LOWEST = -1.0  # captures below are drawn here
WINDOW = (-1.5, 2.5)  # shares of a forest plot's axis
ARROWS = ("\N{BLACK LEFT-POINTING SMALL TRIANGLE}", "\N{BLACK RIGHT-POINTING SMALL TRIANGLE}")


def loss_against_rate(
    results: Results,
    place: Place,
    ours: str,
    reference: str,
    target: float,
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> str:
    """Loss of Random, the gate and the oracle at every update rate, ends included."""
    names = {"random": "random", f"oracle_{reference}": "oracle", ours: "ours"}
    curves = {kind: curve(results, place, name, reference) for name, kind in names.items()}
    ends = [_arm(results, place, reference, 0.0), _arm(results, place, "update", 1.0)]
    curves["random"] = [ends[0], *curves["random"], ends[1]]
    curves["oracle"] = [ends[0], *curves["oracle"], ends[1]]
    heights = [y for points in curves.values() for _, y in points]
    panel = Panel((0.0, 1.0), spanning(heights, 0.1), *size)
    panel.axes("share of chunks with UPDATE", "loss, nats per token")
    panel.stroke((target, panel.y[0]), (target, panel.y[1]), "target")
    for kind, points in curves.items():
        panel.line(points, kind)
    _whisker(panel, results, place, ours, reference)
    for x, y in curves["ours"]:
        panel.dot((x, y), "ours", f"gate: update rate {x:.2f}, loss {y:.3f}")
    return panel.render(f"Loss against update rate, {place.language}: Random, gate, oracle")


def curve(results: Results, place: Place, policy: str, reference: str) -> list[Point]:
    """Realised rate and loss at each target rate."""
    found, table = [], table_of(place, "curve")
    for rate in RATES:
        about = {"policy": policy, "rate": rate}
        x = results.find(table, place, "rate", **about)["value"]
        y = results.find(table, place, "loss", reference=reference, **about)["value"]
        if x is not None and y is not None:
            found.append((x, y))
    return found


def table_of(place: Place, table: str) -> str:
    """Where the numbers of one seed are, or their means over all seeds."""
    return "seeds" if place.seed is None else table


def _arm(results: Results, place: Place, arm: str, rate: float) -> Point:
    loss = results.find(table_of(place, "dense"), place, "loss", policy=f"arm_{arm}")["value"]
    return rate, math.nan if loss is None else loss


def _whisker(panel: Panel, results: Results, place: Place, ours: str, reference: str) -> None:
    """The paired interval of gate against Random at the gate's own rate, about Random's loss."""
    about, table = {"policy": ours, "reference": reference}, table_of(place, "all")
    gap = results.find(table, place, "below_random", **about)
    loss = results.find(table, place, "loss", **about)["value"]
    rate = results.find(table, place, "rate", policy=ours)["value"]
    if None in (gap["low"], gap["high"], loss, rate):
        return
    blind = loss + gap["value"]
    low, high = (min(max(blind - g, panel.y[0]), panel.y[1]) for g in (gap["high"], gap["low"]))
    panel.stroke((rate, low), (rate, high), "interval ours")


def capture_against_rate(results: Results, place: Place, signal: str, reference: str) -> str:
    """What each signal's online gate captures at its own rate; the headline's stands out."""
    lines = {s: captures(results, place, f"ema_{s}", reference) for s in LABEL_FREE}
    heights = [y for points in lines.values() for _, y in points]
    if not heights:
        return ""
    best = best_signal(results, place, reference)
    panel = Panel((0.0, 1.0), spanning([*(max(y, LOWEST) for y in heights), 0.0, 1.0], 0.05))
    panel.axes("target rate", "capture at its own rate")
    panel.stroke((0.0, 0.0), (1.0, 0.0), "zero")
    for name, points in lines.items():
        kind = "ours" if name == signal else "best" if name == best else "other"
        panel.line([(x, max(y, LOWEST)) for x, y in points], kind)
    return panel.render(f"Capture against update rate, {place.language}, every signal")


def best_signal(results: Results, place: Place, reference: str) -> str:
    """The signal whose online gate captures most, on average over the rates."""

    def worth(name: str) -> float:
        found = captures(results, place, f"ema_{name}", reference)
        return sum(y for _, y in found) / len(found) if found else -math.inf

    return max(LABEL_FREE, key=worth)


def captures(results: Results, place: Place, policy: str, reference: str) -> list[Point]:
    """Capture at each target rate."""
    rows = {
        rate: results.find(
            "curve", place, "capture_matched", policy=policy, reference=reference, rate=rate
        )
        for rate in RATES
    }
    return [(rate, row["value"]) for rate, row in rows.items() if row["value"] is not None]


def signal_against_advantage(
    stream: Stream, trace: Trace, signal: str, reference: str, r: Row
) -> str:
    """Every chunk as a point, or their density where there are many; a fitted line and r."""
    x, y = stream.signals[signal], stream.advantage(reference)
    panel = Panel(spanning(x), spanning(y))
    panel.axes(signal, f"advantage over {reference}, nats")
    if panel.y[0] < 0 < panel.y[1]:
        panel.stroke((panel.x[0], 0.0), (panel.x[1], 0.0), "zero")
    if len(x) > POINTS:
        density(panel, x, y)
    else:
        for flag, kind in ((False, "skip"), (True, "update")):
            chosen = trace.update == flag
            panel.dots(list(zip(x[chosen], y[chosen], strict=True)), kind, 2.4)
    panel.line(fit(x, y), "fit")
    return panel.render(f"{signal} against advantage, {stream.key.language}: {r_words(r)}")


def r_words(r: Row) -> str:
    """A correlation with its interval."""
    if r["value"] is None:
        return "r is undefined"
    words = f"r = {show(r['value'], 'r')}"
    return words if r["low"] is None else f"{words} {between(r['low'], r['high'], 'r')}"


def fit(x: Array, y: Array) -> list[Point]:
    """The ends of the least-squares line; nothing if all signals are the same."""
    spread_x = float(((x - x.mean()) ** 2).sum())
    if spread_x == 0:
        return []
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread_x
    ends = (float(x.min()), float(x.max()))
    return [(e, float(y.mean()) + slope * (e - float(x.mean()))) for e in ends]


def density(panel: Panel, x: Array, y: Array) -> None:
    """Cells shaded by the square root of how many chunks they hold."""
    counts, xs, ys = np.histogram2d(x, y, bins=CELLS, range=(panel.x, panel.y))
    depth = np.ceil(SHADES * np.sqrt(counts / max(counts.max(), 1))).astype(int)
    for i, j in np.argwhere(depth > 0):
        panel.box((xs[i], xs[i + 1]), (ys[j], ys[j + 1]), f"cell d{depth[i, j]}")


def threshold_over_time(stream: Stream, trace: Trace, signal: str) -> str:
    """Signals as they came, the threshold they met, and the calibration at the start."""
    shown = spread(len(stream), POINTS)
    order, values = stream.order, stream.signals[signal]
    tau = trace.threshold
    panel = Panel((0.0, float(order[-1]) + 1), spanning([*values, *tau[np.isfinite(tau)]]))
    _calibration(panel, trace)
    panel.axes("chunk of the stream", signal)
    for flag, kind in ((False, "skip"), (True, "update")):
        points = [(order[i], values[i]) for i in shown if trace.update[i] == flag]
        panel.dots(points, kind, 2.2)
    panel.line([(order[i], tau[i]) for i in shown], "threshold")
    return panel.render(f"Signal and threshold over the stream, {stream.key.language}")


def rate_over_time(stream: Stream, trace: Trace, target: float) -> str:
    """The running update rate against its target."""
    shown = spread(len(stream), POINTS)
    panel = Panel((0.0, float(stream.order[-1]) + 1), (0.0, 1.0))
    _calibration(panel, trace)
    panel.axes("chunk of the stream", "running update rate")
    panel.stroke((panel.x[0], target), (panel.x[1], target), "target")
    panel.line([(stream.order[i], trace.rate[i]) for i in shown], "ours")
    return panel.render(f"Running update rate over the stream, {stream.key.language}")


def _calibration(panel: Panel, trace: Trace) -> None:
    panel.box((panel.x[0], min(float(trace.calibration), panel.x[1])), panel.y, "calibration")


def forest(rows: Sequence[tuple[str, str, Row]], name: str) -> str:
    """One line per (words, kind, row): a share, its interval over clusters, the plain one.

    The axis holds 0, 1 and every share within `WINDOW`; what lies further is cut at its edge.
    """
    values = [row["value"] for *_, row in rows if row["value"] is not None]
    if not values:
        return ""
    near = [min(max(v, WINDOW[0]), WINDOW[1]) for v in values]
    across = spanning([*near, 0.0, 1.0], 0.3)
    panel = Panel(across, (0.0, float(len(rows))), 560, 50 + ROW * len(rows), 150)
    panel.axes(name, "", y_ticks=False)
    for mark in (0.0, 1.0):
        panel.stroke((mark, 0.0), (mark, panel.y[1]), "zero")
    for i, (words, kind, row) in enumerate(rows):
        _forest_line(panel, len(rows) - i - 0.5, words, kind, row)
    return panel.render(f"Forest plot of {name}")


def _forest_line(panel: Panel, y: float, words: str, kind: str, row: Row) -> None:
    x0, base = panel.at((panel.x[0], y))
    panel.text(f"{x0 - 8:.0f}", f"{base + 4:.1f}", words, "row end")
    for ends, style, shift in (
        (("plain_low", "plain_high"), "plain", -0.22),
        (("low", "high"), "interval", 0.0),
    ):
        known = [row[end] for end in ends if row.get(end) is not None]
        if len(known) == 2:
            a, b = (min(max(e, panel.x[0]), panel.x[1]) for e in known)
            panel.stroke((a, y + shift), (b, y + shift), f"{style} {kind}")
    if row["value"] is None:
        panel.text(f"{x0 + 4:.0f}", f"{base + 4:.1f}", DASH, "tick")
    elif panel.x[0] <= row["value"] <= panel.x[1]:
        panel.dot((row["value"], y), kind, f"{words}: {show(row['value'], 'loss')}")
    else:
        _beyond(panel, y, row["value"])


def _beyond(panel: Panel, y: float, value: float) -> None:
    """A share too far off for the axis: an arrow and the number at its edge."""
    left = value < panel.x[0]
    x, base = panel.at((panel.x[0 if left else 1], y))
    words = f"{ARROWS[0]} {show(value, 'r')}" if left else f"{show(value, 'r')} {ARROWS[1]}"
    panel.text(
        f"{x + (4 if left else -4):.0f}", f"{base + 4:.1f}", words, "row" if left else "row end"
    )


def history(runs: Sequence[pa.Table], column: str, name: str) -> str:
    """One training curve per seed: each step faint, a running mean strong."""
    steps = [run["step"].to_numpy() for run in runs]
    values = [run[column].to_numpy() for run in runs]
    panel = Panel((0.0, float(max(s[-1] for s in steps))), spanning(np.concatenate(values)))
    panel.axes("training step", name)
    for step, value in zip(steps, values, strict=True):
        shown = spread(len(step), POINTS)
        smooth = running_mean(value, max(1, len(value) // 12))
        panel.line([(step[i], value[i]) for i in shown], "faint")
        panel.line([(step[i], smooth[i]) for i in shown], "ours")
    return panel.render(f"{name} during training")


def running_mean(values: Array, window: int) -> Array:
    """The mean of the last `window` values, of fewer at the start.

    >>> running_mean(np.array([1.0, 3.0, 5.0]), 2).tolist()
    [1.0, 2.0, 4.0]
    """
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    return np.asarray((total[end] - total[start]) / (end - start))
