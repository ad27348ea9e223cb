"""Example chunks for the report, packed small enough for a page that is one file.

Numbers become base-64 digits of fixed width, in steps fine enough for the largest to fit. The
page's script unpacks them; `unpack` here is the same in Python, for the tests.
"""

import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ponderttt import tables
from ponderttt.gate import Trace
from ponderttt.plots import spread
from ponderttt.stats import Array, places
from ponderttt.streams import ARMS, REFERENCES, Key, Stream

TOKENS = Path("data/tokens")
DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
BASE = len(DIGITS)
LARGEST = BASE * BASE - 1  # of two digits
MIDDLE = LARGEST // 2  # zero of a signed number

Example = dict[str, Any]
Traces = dict[str, Trace]


def read_tokens(key: Key, folder: Path = TOKENS) -> list[Example]:
    """The chunks of a stream whose tokens were kept, in order; none if the run kept none."""
    paths = sorted((folder / key.folder).glob("*.parquet"))
    rows = [row for path in paths for row in tables.read(path, tables.TOKENS).to_pylist()]
    return sorted(rows, key=lambda row: int(row["order"]))


def examples(stream: Stream, traces: Traces, ours: str, folder: Path = TOKENS) -> list[Example]:
    """The chunks of a stream whose tokens were kept, with all that the gate knew and did."""
    where = {chunk: i for i, chunk in enumerate(stream.chunk_id)}
    ranks = {name: percentiles(values) for name, values in stream.signals.items()}
    return [
        {**row, **about(stream, where[row["chunk_id"]], traces, ours, ranks)}
        for row in read_tokens(stream.key, folder)
    ]


def take(found: Sequence[Example], count: int) -> list[Example]:
    """At most `count` of the examples of a stream."""
    return [found[i] for i in choose([e["decision"] != "calibration" for e in found], count)]


def choose(free: Sequence[bool], count: int) -> list[int]:
    """Which chunks to show: spread evenly, a sixth of them at most from the calibration.

    On calibration chunks the gate has no choice, so others come first; they fill up what is left.

    >>> choose([False, False, True, True, True], 3)
    [2, 3, 4]
    >>> choose([False, False, True], 3)
    [0, 1, 2]
    """
    ours = [i for i, flag in enumerate(free) if flag]
    forced = [i for i, flag in enumerate(free) if not flag]
    wanted = min(len(ours), count - min(count // 6, len(forced)))
    chosen = [ours[i] for i in spread(len(ours), wanted)]
    chosen += [forced[i] for i in spread(len(forced), count - len(chosen))]
    return sorted(chosen)


def percentiles(values: Array) -> list[int]:
    """The share of the stream below each value, in per cent.

    >>> percentiles(np.array([3.0, 1.0, 2.0]))
    [67, 0, 33]
    """
    below = len(values) - 1 - places(values)
    return [round(100 * int(b) / len(values)) for b in below]


def about(
    stream: Stream, i: int, traces: Traces, ours: str, ranks: dict[str, list[int]]
) -> Example:
    """What the page says about chunk `i` of a stream."""
    trace, n = traces[ours], stream.n_predicted[i]
    tau = float(trace.threshold[i])
    return {
        "language": stream.key.language,
        "scale": stream.key.scale,
        "repo": stream.repos[i],
        "decision": decision(trace, i),
        "threshold": None if np.isnan(tau) else significant(tau),
        "oracle": {r: bool(traces[f"oracle_{r}"].update[i]) for r in REFERENCES},
        "loss": {arm: significant(stream.nll[arm][i] / n) for arm in ARMS},
        "signals": {
            name: [significant(v[i]), ranks[name][i]] for name, v in stream.signals.items()
        },
    }


def decision(trace: Trace, i: int) -> str:
    """What the gate did with a chunk; during calibration it had no choice."""
    if i < trace.calibration:
        return "calibration"
    return "update" if trace.update[i] else "skip"


def significant(value: float) -> float:
    """Five significant digits are enough to read."""
    return float(f"{value:.5g}")


def pack(chosen: Sequence[Example]) -> dict[str, Any]:
    """The examples as plain data for the page's script."""
    losses = [v for e in chosen for v in e["nll_update"] if v is not None]
    gaps = [abs(d) for e in chosen for r in REFERENCES for d in differences(e, r) if d is not None]
    steps = {
        "loss": max(losses, default=1.0) / (LARGEST - 1) or 1.0,
        "gap": max(gaps, default=1.0) / MIDDLE or 1.0,
    }
    # Where shades are deepest: all but the largest twentieth of the differences lie below.
    deep = sorted(gaps)[len(gaps) * 19 // 20] if gaps else 1.0
    return {
        "steps": steps,
        "deep": float(f"{deep:.2g}") or 1.0,
        "chunks": [pack_one(example, steps) for example in chosen],
    }


def differences(example: Example, reference: str) -> list[float | None]:
    """Nats that UPDATE saved on each token; none on the first, which nothing predicts."""
    pairs = zip(example[f"nll_{reference}"], example["nll_update"], strict=True)
    return [None if a is None or b is None else a - b for a, b in pairs]


def pack_one(example: Example, steps: dict[str, float]) -> dict[str, Any]:
    """One chunk: its text, the length of each token in UTF-16 units, its losses."""
    pieces = example["pieces"]
    dropped = ("pieces", *(f"nll_{arm}" for arm in ARMS))
    packed = {name: value for name, value in example.items() if name not in dropped}
    packed["text"] = "".join(pieces)
    packed["lengths"] = "".join(length_digits(len(p.encode("utf-16-le")) // 2) for p in pieces)
    packed["update"] = "".join(loss_digits(v, steps["loss"]) for v in example["nll_update"])
    for r in REFERENCES:
        gaps = differences(example, r)
        packed[f"gap_{r}"] = "".join(gap_digits(d, steps["gap"]) for d in gaps)
    return packed


def length_digits(length: int) -> str:
    """A length as digits: the largest digit means that another one follows.

    >>> length_digits(3), length_digits(63), length_digits(64)
    ('D', '/A', '/B')
    """
    more, rest = divmod(length, BASE - 1)
    return DIGITS[-1] * more + DIGITS[rest]


def two_digits(value: int) -> str:
    """A number below 4096.

    >>> two_digits(0), two_digits(65), two_digits(4095)
    ('AA', 'BB', '//')
    """
    return DIGITS[value // BASE] + DIGITS[value % BASE]


def loss_digits(value: float | None, step: float) -> str:
    """A loss in steps, from 1 on; 0 is no loss."""
    return two_digits(0 if value is None else 1 + round(value / step))


def gap_digits(value: float | None, step: float) -> str:
    """A signed difference in steps about the middle."""
    return two_digits(MIDDLE if value is None else MIDDLE + round(value / step))


def unpack(digits: str) -> Iterator[int]:
    """The numbers behind two-digit codes.

    >>> list(unpack("AABB"))
    [0, 65]
    """
    codes = [DIGITS.index(c) for c in digits]
    return (a * BASE + b for a, b in zip(codes[::2], codes[1::2], strict=True))
