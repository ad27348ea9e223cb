"""Gates: which chunks get UPDATE. Controllers are pure functions of numbers in stream order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ponderttt import params, result_tables, stage, streams, tables
from ponderttt.errors import UserError
from ponderttt.signals import LABEL_FREE, WITH_LABELS
from ponderttt.stats import Array, Flags, places
from ponderttt.streams import REFERENCES, Stream

OUT = Path("data/gate")
Controller = Callable[[Array, params.Gate], "Trace"]


@dataclass(frozen=True)
class Trace:
    """What a gate did; `threshold` and `rate` are those in force at each chunk, NaN for none."""

    update: Flags
    threshold: Array
    rate: Array
    calibration: int = 0  # chunks at the start that were UPDATE whatever they were


def budget(rate: float, n: int) -> int:
    """How many of n chunks a rate stands for: the nearest whole number, a half going up."""
    return int(np.floor(rate * n + 0.5))


def ema(signal: Array, rate: float, alpha: float, calibration: int) -> Trace:
    """The paper's gate: UPDATE above a threshold that steers the update rate towards `rate`.

    The first `calibration` chunks are UPDATE and set the threshold to the (1 - rate) percentile of
    their signals. `threshold` and `rate` of the trace have one entry more than there are chunks:
    the last is what a next chunk would meet.
    """
    head = min(calibration, len(signal))
    update, thresholds, rates = [True] * head, [np.nan] * head, [np.nan] * head
    # A stream that ends within its calibration never gets a threshold.
    tau, r = np.nan, np.nan
    if head == calibration:
        tau, r = float(np.percentile(signal[:head], 100 * (1 - rate))), rate
    for s in signal[head:].tolist():
        d = s > tau
        update.append(d)
        thresholds.append(tau)
        rates.append(r)
        # Both from the old r, as the paper writes it.
        tau, r = tau + alpha * (r - rate) * abs(tau), (1 - alpha) * r + alpha * d
    thresholds.append(tau)
    rates.append(r)
    return Trace(np.array(update, dtype=bool), np.array(thresholds), np.array(rates), head)


def fixed(signal: Array, rate: float, calibration: int) -> Trace:
    """UPDATE above the threshold that the calibration chunks set; it never moves."""
    return ema(signal, rate, 0.0, calibration)


def chosen(update: Flags) -> Trace:
    """A trace without a threshold."""
    nothing = np.full(len(update) + 1, np.nan)
    return Trace(update, nothing, nothing)


def topk(signal: Array, rate: float) -> Trace:
    """UPDATE on the share with the largest signals; it must look ahead to know them."""
    return chosen(places(signal) < budget(rate, len(signal)))


def random(n: int, rate: float, seed: int, draw: int = 0) -> Trace:
    """UPDATE on that share of the chunks, drawn blindly."""
    return topk(np.random.default_rng([seed, draw]).random(n), rate)


def oracle(stream: Stream, reference: str, rate: float) -> Trace:
    """UPDATE on the share that it helps most, per token. Needs labels."""
    return topk(stream.advantage(reference), rate)


def calibration(stream: int, wanted: int) -> int:
    """How many chunks calibrate: a short stream gives at most a quarter of itself away.

    >>> [calibration(n, 16) for n in (3, 12, 64, 16_000)]
    [1, 3, 16, 16]
    """
    return min(wanted, max(1, stream // 4))


CONTROLLERS: dict[str, Controller] = {
    "ema": lambda s, g: ema(s, g.rate, g.alpha, calibration(len(s), g.calibration_chunks)),
    "fixed": lambda s, g: fixed(s, g.rate, calibration(len(s), g.calibration_chunks)),
    "topk": lambda s, g: topk(s, g.rate),
}


@dataclass(frozen=True)
class Policy:
    """A controller and the signal it looks at, if it does."""

    name: str
    controller: str
    signal: str | None = None
    reference: str | None = None  # only the oracle's choice depends on it


def policies() -> list[Policy]:
    """Every policy, in the order of the tables."""
    found = [Policy("never", "never"), Policy("always", "always"), Policy("random", "random")]
    found += [Policy(f"oracle_{r}", "oracle", reference=r) for r in REFERENCES]
    found += [Policy(f"{c}_{s}", c, s) for c in CONTROLLERS for s in LABEL_FREE]
    return found + [Policy(f"topk_{s}", "topk", s) for s in WITH_LABELS]


def decide(policy: Policy, stream: Stream, settings: params.Gate) -> Trace:
    """Run one policy over one stream."""
    n = len(stream)
    if policy.signal is not None:
        return CONTROLLERS[policy.controller](stream.signals[policy.signal], settings)
    if policy.reference is not None:
        return oracle(stream, policy.reference, settings.rate)
    if policy.controller == "random":
        return random(n, settings.rate, settings.seed)
    return chosen(np.full(n, policy.controller == "always"))


def to_rows(policy: Policy, stream: Stream, trace: Trace) -> pa.Table:
    """One policy's decisions as rows of the gate table."""
    n = len(stream)
    signal = np.full(n, np.nan) if policy.signal is None else stream.signals[policy.signal]
    columns = {
        **{name: pa.repeat(value, n) for name, value in stream.key._asdict().items()},
        "chunk_id": pa.array(stream.chunk_id),
        "order": pa.array(stream.order),
        "policy": pa.repeat(policy.name, n),
        "signal": pa.array(signal, from_pandas=True),
        "threshold": pa.array(trace.threshold[:n], from_pandas=True),
        "rate_ema": pa.array(trace.rate[:n], from_pandas=True),
        "calibration": pa.array(np.arange(n) < trace.calibration),
        "update": pa.array(trace.update),
    }
    return pa.table(columns).cast(result_tables.GATE)


def decide_all(stream: Stream, settings: params.Gate) -> Iterator[pa.Table]:
    """The rows of every policy on one stream."""
    for policy in policies():
        yield to_rows(policy, stream, decide(policy, stream, settings))


def make(view: Any) -> None:
    """Decide for every stream and policy; one file per stream."""
    work = stage.work_folder("gate", [stage.plain(s) for s in vars(view).values()])
    for number, key in enumerate(streams.keys(view)):
        rows = pa.concat_tables(decide_all(streams.read(key), view.gate))
        tables.write(work / part_name(number), rows, result_tables.GATE)
    stage.publish(work, OUT)


def part_name(number: int) -> str:
    """The file of the stream with that place in `streams.keys`."""
    return f"part-{number:05d}.parquet"


def read(number: int, stream: Stream, folder: Path = OUT) -> dict[str, Trace]:
    """The traces of every policy on a stream, from the gate table."""
    path = folder / part_name(number)
    rows = tables.read(path, result_tables.GATE)
    return {policy.name: _to_trace(rows, i, stream, path) for i, policy in enumerate(policies())}


def _to_trace(rows: pa.Table, place: int, stream: Stream, path: Path) -> Trace:
    part = rows.slice(place * len(stream), len(stream))
    policy = policies()[place].name
    same = part["chunk_id"].to_pylist() == list(stream.chunk_id)
    if not same or part["policy"].unique().to_pylist() != [policy]:
        raise UserError(f"{path}: does not belong to these scores; run `dvc repro gate`")
    threshold, rate = (part[name].to_numpy() for name in ("threshold", "rate_ema"))
    calibration = int(part["calibration"].to_numpy().sum())
    return Trace(part["update"].to_numpy(), threshold, rate, calibration)
