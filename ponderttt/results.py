"""The paper's tables, and those it left to later, from the statistics of the streams."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ponderttt import gate, params
from ponderttt.bootstrap import two_sided_p
from ponderttt.measure import (
    Traces,
    Value,
    all_columns,
    headline_policy,
    policy_values,
    random_values,
    sum_columns,
)
from ponderttt.rows import Measured, Row, label, tidy
from ponderttt.signals import LABEL_FREE, PAPER, WITH_LABELS
from ponderttt.stats import Array, holm
from ponderttt.streams import REFERENCES, Stream

RATES = tuple(round(0.1 * i, 1) for i in range(1, 10))
CURVE = ("loss", "recovery", "capture", "recovery_matched", "capture_matched", "rate")
SHARES = ("recovery", "capture", "recovery_matched", "capture_matched")
LOSSES = ("loss", "ppl", "improvement")
RATE = ("rate", "rate_after", "cost_nominal")
AGREEMENT = ("accuracy", "overlap")
BLIND = ("accuracy_blind", "overlap_blind", "mcnemar", "mcnemar_clustered", "rate")
CORRELATION = ("pearson", "spearman")
OVER_RANDOM = ("below_random", "loss_mean_of_draws", "loss_sd_of_draws")
ENTROPY = ("entropy_update", "entropy_skip", "entropy_gap", "entropy_pearson")
ARM_POLICIES = ("arm_base", "arm_skip", "arm_update")
ORACLES = tuple(f"oracle_{r}" for r in REFERENCES)


def select(rows: Sequence[Row], metrics: Sequence[str], about: Sequence[str]) -> list[Row]:
    """Rows of those metrics about those policies or signals.

    An oracle for one reference says nothing about the other, so such rows are left out.
    """
    return [
        row
        for row in rows
        if row["metric"] in metrics
        and (row["policy"] or row["signal"]) in about
        and not _foreign_oracle(row)
    ]


def _foreign_oracle(row: Row) -> bool:
    policy, reference = row["policy"] or "", row["reference"]
    return policy in ORACLES and reference is not None and policy != f"oracle_{reference}"


def paper_tables(rows: Sequence[Row], settings: params.Gate, train: str) -> list[Row]:
    """The tables that need one stream at a time, from the rows of all plain streams."""
    ours, signal = headline_policy(settings), settings.signal
    gates = (ours, "random", *ORACLES)
    here = [row for row in rows if row["language"] == train]
    elsewhere = [row for row in rows if row["language"] != train]
    main = (*LOSSES, *SHARES, *RATE, *OVER_RANDOM)
    deltas = ("delta", "topk_delta", "fixed_delta", "ema_delta")
    return [
        *label("main", select(here, main, (*ARM_POLICIES, *gates))),
        *label("ood", select(elsewhere, main, (*ARM_POLICIES, *gates))),
        *label("correlation", select(rows, (*CORRELATION, *SHARES), (signal, ours))),
        *label("accuracy", select(rows, (*AGREEMENT, *BLIND), (ours, "random"))),
        *label("random_vs_gate", select(rows, (*LOSSES, *OVER_RANDOM), gates)),
        *label("dense", select(rows, LOSSES, (*ARM_POLICIES, "always", *gates))),
        *label("delta", select(rows, (*CORRELATION, *LOSSES, *SHARES, *AGREEMENT, *RATE), deltas)),
        *label("entropy", select(rows, ENTROPY, (ours,))),
    ]


def curve_settings(settings: params.Gate) -> list[params.Gate]:
    """The gate's settings at every rate of the curve."""
    return [replace(settings, rate=rate) for rate in RATES]


def curve_policies() -> list[gate.Policy]:
    """The policies whose rate can be chosen."""
    fixed = ("never", "always", "random")
    return [p for p in gate.policies() if p.name not in fixed and p.signal not in WITH_LABELS]


def curve_values(stream: Stream, settings: params.Gate, metrics: params.Metrics) -> Iterator[Value]:
    """Loss and shares of every policy at every rate."""
    for at in curve_settings(settings):
        traces: Traces = {p.name: gate.decide(p, stream, at) for p in curve_policies()}
        s = sum_columns(all_columns(stream, traces), stream, metrics, plain=False)
        values = [*random_values(s)]
        for name, trace in traces.items():
            values += policy_values(s, name, calibrated=trace.calibration > 0)
        for value in values:
            if value.metric in CURVE and not _wrong_oracle(value):
                yield replace(value, rate=at.rate)


def _wrong_oracle(value: Value) -> bool:
    return _foreign_oracle({"policy": value.policy, "reference": value.reference or None})


# How good a signal is: at the exact rate with lookahead, and online at the rate it came to.
RANKED: dict[str, Callable[[str], tuple[str, str]]] = {
    "capture_topk": lambda s: (f"topk_{s}", "capture"),
    "recovery_topk": lambda s: (f"topk_{s}", "recovery"),
    "overlap_topk": lambda s: (f"topk_{s}", "overlap"),
    "capture_ema": lambda s: (f"ema_{s}", "capture_matched"),
}


def signal_table(measured: Measured) -> list[Row]:
    """Every signal: capture and correlation, and their paired differences to the paper's signal."""
    found: list[Row] = []
    for reference in REFERENCES:
        for metric in (*RANKED, *CORRELATION):
            found += _rank(measured, metric, reference)
    return label("signals", found)


def _rank(measured: Measured, metric: str, reference: str) -> Iterator[Row]:
    """One metric of all signals, then how far each is from the paper's signal."""
    names = [s for s in (*LABEL_FREE, *WITH_LABELS) if s in LABEL_FREE or metric != "capture_ema"]
    draws = {name: _signal_draws(measured, metric, name, reference) for name in names}
    for name in names:
        value = Value(metric=metric, signal=name, reference=reference, draws=draws[name])
        yield measured.row(value)
    gaps = {name: draws[name] - draws[PAPER] for name in LABEL_FREE if name != PAPER}
    yield from compare(measured, f"{metric}_minus_{PAPER}", gaps, reference)


def _signal_draws(measured: Measured, metric: str, name: str, reference: str) -> Array:
    if metric in CORRELATION:
        return measured.find(metric, signal=name, reference=reference).draws
    policy, column = RANKED[metric](name)
    return measured.find(column, policy=policy, reference=reference).draws


def compare(
    measured: Measured, metric: str, gaps: dict[str, Array], reference: str
) -> Iterator[Row]:
    """Rows of paired differences, with p and Holm's p over all of them."""
    rows = [
        measured.row(Value(metric=metric, signal=name, reference=reference, draws=draws))
        for name, draws in gaps.items()
    ]
    chance = [_chance(measured, draws) for draws in gaps.values()]
    # Without a value, an interval or any spread there is nothing to test.
    tested = [i for i, row in enumerate(rows) if row["low"] is not None and chance[i] >= 0]
    for i, corrected in zip(tested, holm(np.array([chance[i] for i in tested])), strict=True):
        rows[i] |= {"p": tidy(chance[i]), "p_holm": tidy(float(corrected))}
    yield from rows


def _chance(measured: Measured, draws: Array) -> float:
    return two_sided_p(draws[0], draws[1 : 1 + measured.resamples], len(measured.clusters))


def variant_table(table: str, plain: Measured, other: Measured, ours: str) -> list[Row]:
    """Losses and improvements of a variant beside the plain ones, and their difference."""
    rows: list[Row] = []
    for value in plain.values:
        if value.metric not in ("loss", "improvement") or value.policy not in (*ARM_POLICIES, ours):
            continue
        about = {"policy": value.policy, "reference": value.reference}
        twin = other.find(value.metric, **about)
        rows += [
            plain.row(value),
            other.row(twin),
            other.row(_difference(plain, value, other, twin)),
        ]
    return label(table, rows)


def _difference(plain: Measured, value: Value, other: Measured, twin: Value) -> Value:
    """The variant minus plain; draws are paired only if both drew from the same documents."""
    paired = plain.clusters == other.clusters
    draws = twin.draws - value.draws if paired else twin.draws[:1] - value.draws[:1]
    return replace(twin, metric=f"{value.metric}_minus_plain", draws=draws)


SEEDED = (*SHARES, *CORRELATION, "loss", "improvement", "below_random", "accuracy", *RATE)


def seed_table(runs: Sequence[Measured], settings: params.Gate) -> list[Row]:
    """Mean over the seeds of one scale and language, and their spread."""
    ours = (headline_policy(settings), settings.signal, "random", "always", *ARM_POLICIES)
    rows: list[Row] = []
    for value in runs[0].values:
        if (value.policy or value.signal) not in ours:
            continue
        if value.metric in SEEDED:
            rows += _over_seeds(runs, value)
    return label("seeds", [{**row, "seed": None} for row in rows])


def _over_seeds(runs: Sequence[Measured], value: Value) -> Iterator[Row]:
    about = {"policy": value.policy, "signal": value.signal, "reference": value.reference}
    draws = [run.find(value.metric, **about).draws for run in runs]
    paired = all(run.clusters == runs[0].clusters for run in runs)
    table = np.stack([d if paired else d[:1] for d in draws])
    yield runs[0].row(replace(value, draws=table.mean(axis=0)))
    spread = table[:, 0].std(ddof=1) if len(runs) > 1 else np.nan
    row = runs[0].row(replace(value, metric=f"{value.metric}_sd", draws=np.array([spread])))
    yield row if len(runs) > 1 else {**row, "reason": "one seed has no spread: run.seeds"}


def seed_curves(rows: Sequence[Row], settings: params.Gate) -> list[Row]:
    """The means over seeds of the curves of the headline gate, Random and the oracles."""
    names = (headline_policy(settings), "random", *ORACLES)
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["table"] == "curve" and row["policy"] in names and row["metric"] in ("loss", "rate"):
            about = ("scale", "language", "policy", "reference", "rate", "metric")
            found.setdefault(tuple(row[name] for name in about), []).append(row)
    return label("seeds", [_mean_row(group) for group in found.values()])


def _mean_row(group: Sequence[Row]) -> Row:
    """One row for all seeds; its value only, as the draws are gone."""
    values = [row["value"] for row in group if row["value"] is not None]
    mean = tidy(float(np.mean(values))) if len(values) == len(group) else None
    row = group[0] | dict.fromkeys(("low", "high", "plain_low", "plain_high"))
    reason = "no interval: a mean of curves" if mean is not None else group[0]["reason"]
    return row | {"seed": None, "value": mean, "reason": reason}
