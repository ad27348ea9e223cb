"""What one stream shows: every statistic of every policy and signal, with all its draws.

Names of columns: `update:P` marks the chunks that policy P updates, `gain:R` is what UPDATE saves
against reference R in nats, `gain:P:R` what P saves. Loss of P is loss of R minus what P saves.
`best:P:R` is what an oracle saves with as many updates as P, `size:R` the sum of |gain|.
Decisions are held fixed when chunks are resampled, and so is the number of updates: see `saved`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ponderttt import bootstrap, gate, params
from ponderttt.bootstrap import Sums
from ponderttt.gate import Trace
from ponderttt.stats import (
    Array,
    Codes,
    Flags,
    correlation_of_sums,
    mcnemar,
    mcnemar_clustered,
    ratio,
    spearman,
    spearman_influence,
    standardise,
)
from ponderttt.streams import ARMS, REFERENCES, Stream

ENTROPIES = ("entropy_base", "entropy_skip")
DUST = 1e-9
BORDER = 0.05  # share of the chunks on each side of the border that tell its gain

# What a policy sorts or thresholds chunks by; the oracles by their own advantage.
RANKED_BY = {p.name: p.signal or p.name for p in gate.policies()}


@dataclass(frozen=True, kw_only=True)
class Value:
    """A statistic: entry 0 of `draws` is its value, the rest its resamples as in `Sums`."""

    metric: str
    draws: Array
    policy: str = ""
    signal: str = ""
    reference: str = ""
    rate: float | None = None
    p: float | None = None


Traces = Mapping[str, Trace]
Columns = dict[str, Array]


def sum_columns(columns: Columns, stream: Stream, settings: params.Metrics, *, plain: bool) -> Sums:
    """Resample columns of a stream as params say."""
    clusters = bootstrap.codes(stream.clusters(settings.cluster))
    return Sums(columns, clusters, resamples=settings.resamples, seed=settings.seed, plain=plain)


def stream_columns(stream: Stream) -> Columns:
    """What does not depend on any policy."""
    columns = {"chunks": np.ones(len(stream)), "tokens": stream.n_predicted}
    columns |= {f"nll:{arm}": stream.nll[arm] for arm in ARMS}
    columns |= {f"gain:{r}": stream.gain(r) for r in REFERENCES}
    return columns | {f"size:{r}": np.abs(stream.gain(r)) for r in REFERENCES}


def policy_columns(stream: Stream, name: str, trace: Trace, oracles: Traces) -> Columns:
    """What a policy updates and saves, and what an oracle would with as many updates."""
    update = trace.update
    columns = {f"update:{name}": update.astype(float)}
    if trace.calibration:
        after = np.arange(len(update)) >= trace.calibration
        columns[f"after:{name}"] = after.astype(float)
        columns[f"update-after:{name}"] = (update & after).astype(float)
    for r in REFERENCES:
        gain, best = stream.gain(r), stream.places[f"oracle_{r}"]
        columns[f"gain:{name}:{r}"] = saved(gain, update, stream.places.get(RANKED_BY[name]))
        columns[f"best:{name}:{r}"] = saved(gain, best < update.sum(), best)
        columns[f"both:{name}:{r}"] = (update & oracles[f"oracle_{r}"].update).astype(float)
    return columns


def all_columns(stream: Stream, traces: Traces) -> Columns:
    """The columns of the stream and of every policy."""
    columns = stream_columns(stream)
    for name, trace in traces.items():
        columns |= policy_columns(stream, name, trace, traces)
    return columns


def saved(gain: Array, update: Flags, places: Codes | None) -> Array:
    """Nats saved per chunk, with the number of updates held fixed when chunks are resampled.

    A resample that happens to hold more updated chunks would save more at a larger budget. So each
    update above the policy's share is charged what the border chunk saves: the sum over the data
    stays the same, and its resamples compare equal budgets to first order. The border is where
    the chunks' places, by what the policy looks at, pass its number of updates; a policy that
    looks at nothing has the average chunk there.
    """
    count = int(update.sum())
    near = slice(None) if places is None else np.abs(places + 0.5 - count) <= len(gain) * BORDER + 1
    moved: Array = gain * update - gain[near].mean() * (update - count / len(gain))
    return moved


def arm_values(s: Sums) -> Iterator[Value]:
    """Loss of each arm on every chunk."""
    for arm in ARMS:
        loss = s[f"nll:{arm}"] / s["tokens"]
        yield Value(metric="loss", policy=f"arm_{arm}", draws=loss)
        yield Value(metric="ppl", policy=f"arm_{arm}", draws=np.exp(loss))


def policy_values(s: Sums, name: str, *, calibrated: bool) -> Iterator[Value]:
    """Everything about one policy, against both references.

    Only a threshold leaves the rate to the chunks; the others have it set.
    """
    rate = s[f"update:{name}"] / s["chunks"] if calibrated else share(s, name)
    numbers = {"rate": rate, "cost_nominal": 1 + 2 * rate}
    if calibrated:
        numbers["rate_after"] = ratio(s[f"update-after:{name}"], s[f"after:{name}"])
    for metric, draws in numbers.items():
        yield Value(metric=metric, policy=name, draws=draws)
    for r in REFERENCES:
        gain = s[f"gain:{name}:{r}"]
        for metric, draws in {
            **loss_numbers(s, gain, r),
            **share_numbers(s, gain, r),
            **matched_numbers(s, name, r),
            **agreement_numbers(s, name, r),
        }.items():
            yield Value(metric=metric, policy=name, reference=r, draws=draws)


def random_values(s: Sums) -> Iterator[Value]:
    """Random as the mean over all its draws, which needs no draw: every chunk is as likely."""
    for r in REFERENCES:
        p = share(s, f"oracle_{r}")
        gain = p * s[f"gain:{r}"]
        numbers = {
            **loss_numbers(s, gain, r),
            **share_numbers(s, gain, r),
            "accuracy": p * p + (1 - p) * (1 - p),
            "overlap": p,
        }
        for metric, draws in numbers.items():
            yield Value(metric=metric, policy="random", reference=r, draws=draws)
    p = share(s, f"oracle_{REFERENCES[0]}")
    yield Value(metric="rate", policy="random", draws=p)
    yield Value(metric="cost_nominal", policy="random", draws=1 + 2 * p)


def share(s: Sums, name: str) -> Array:
    """The share that a policy updates in the data, the same for every resample."""
    return np.full_like(s["chunks"], s[f"update:{name}"][0] / s["chunks"][0])


def loss_numbers(s: Sums, gain: Array, r: str) -> Columns:
    """Loss per token, perplexity, and the share of the reference's loss that is saved."""
    loss = (s[f"nll:{r}"] - gain) / s["tokens"]
    return {"loss": loss, "ppl": np.exp(loss), "improvement": gain / s[f"nll:{r}"]}


def share_numbers(s: Sums, gain: Array, r: str) -> Columns:
    """Recovery and capture against oracle and random at the target rate."""
    best = s[f"gain:oracle_{r}:{r}"]
    blind = share(s, f"oracle_{r}") * s[f"gain:{r}"]
    return {
        "recovery": shares(s, gain, best, r),
        "capture": shares(s, gain - blind, best - blind, r),
    }


def shares(s: Sums, won: Array, possible: Array, r: str) -> Array:
    """`won` over `possible`; what rounding leaves of a zero does not count as possible."""
    return ratio(won, possible, DUST * s[f"size:{r}"])


def matched_numbers(s: Sums, name: str, r: str) -> Columns:
    """The same against oracle and random that update as often as this policy does."""
    gain, best = s[f"gain:{name}:{r}"], s[f"best:{name}:{r}"]
    blind = share(s, name) * s[f"gain:{r}"]
    return {
        "recovery_matched": shares(s, gain, best, r),
        "capture_matched": shares(s, gain - blind, best - blind, r),
        "below_random": (gain - blind) / s["tokens"],
    }


def agreement_numbers(s: Sums, name: str, r: str) -> Columns:
    """How often a policy decides as the oracle, and the share of the oracle's chunks it updates."""
    both, oracle = s[f"both:{name}:{r}"], s[f"update:oracle_{r}"]
    differ = s[f"update:{name}"] + oracle - 2 * both
    return {"accuracy": 1 - differ / s["chunks"], "overlap": ratio(both, oracle)}


def signal_columns(stream: Stream) -> Columns:
    """What the correlations of signals and advantages are made of."""
    columns: Columns = {}
    for r in REFERENCES:
        y = standardise(stream.advantage(r))
        columns |= {f"y:{r}": y, f"yy:{r}": y * y}
    for name, signal in stream.signals.items():
        x = standardise(signal)
        columns |= {f"x:{name}": x, f"xx:{name}": x * x}
        for r in REFERENCES:
            columns[f"xy:{name}:{r}"] = x * columns[f"y:{r}"]
            columns[f"move:{name}:{r}"] = spearman_influence(signal, stream.advantage(r))
    return columns


def signal_values(s: Sums, stream: Stream) -> Iterator[Value]:
    """Correlation of every signal with the advantage over each reference."""
    for name, signal in stream.signals.items():
        for r in REFERENCES:
            x, y, xx, yy = s[f"x:{name}"], s[f"y:{r}"], s[f"xx:{name}"], s[f"yy:{r}"]
            linear = correlation_of_sums(s["chunks"], x, y, xx, yy, s[f"xy:{name}:{r}"])
            ranked = rank_draws(s, f"move:{name}:{r}", spearman(signal, stream.advantage(r)))
            yield Value(metric="pearson", signal=name, reference=r, draws=linear)
            yield Value(metric="spearman", signal=name, reference=r, draws=ranked)


def rank_draws(s: Sums, column: str, value: float) -> Array:
    """Draws of a rank correlation from its influence values."""
    draws = np.clip(value + s[column] / s["chunks"], -1, 1)
    draws[0] = value
    return draws


def entropy_columns(stream: Stream, trace: Trace) -> Columns:
    """Entropies of the chunks on which the gate had a choice."""
    free = (np.arange(len(stream)) >= trace.calibration).astype(float)
    update = free * trace.update
    columns: Columns = {"free": free, "free-update": update}
    for name in ENTROPIES:
        h = stream.signals[name]
        columns |= {f"h:{name}": free * h, f"hh:{name}": free * h * h, f"dh:{name}": update * h}
    return columns


def entropy_values(s: Sums, policy: str) -> Iterator[Value]:
    """Whether a gate updates where the model is unsure."""
    free, update = s["free"], s["free-update"]
    for name in ENTROPIES:
        h, dh = s[f"h:{name}"], s[f"dh:{name}"]
        on, off = ratio(dh, update), ratio(h - dh, free - update)
        r = correlation_of_sums(free, update, h, update, s[f"hh:{name}"], dh)
        numbers = {"entropy_update": on, "entropy_skip": off, "entropy_gap": on - off}
        for metric, draws in {**numbers, "entropy_pearson": r}.items():
            yield Value(metric=metric, policy=policy, signal=name, draws=draws)


def random_draws(n: int, rate: float, settings: params.Gate) -> Flags:
    """Decisions of Random at that rate, one column per draw: [n, draws]."""
    draws = range(settings.random_seeds)
    return np.stack([gate.random(n, rate, settings.seed, i).update for i in draws], axis=1)


def spread_values(stream: Stream, draws: Flags) -> Iterator[Value]:
    """Mean and spread of Random's loss over its draws, as a check on the exact mean."""
    for r in REFERENCES:
        saved = stream.gain(r) @ draws
        loss = (stream.nll[r].sum() - saved) / stream.n_predicted.sum()
        spread = loss.std(ddof=1) if len(loss) > 1 else np.nan
        for metric, value in {
            "loss_mean_of_draws": loss.mean(),
            "loss_sd_of_draws": spread,
        }.items():
            yield Value(metric=metric, policy="random", reference=r, draws=np.array([value]))


def blind_numbers(s: Sums, name: str, r: str) -> Columns:
    """What agreement with the oracle is worth: that of blind decisions at the policy's rate.

    `ahead`, the gate's accuracy less the blind one, is twice the covariance of its decisions and
    the oracle's, so that no rate wins by itself.
    """
    p, q = (s[f"update:{which}"] / s["chunks"] for which in (f"oracle_{r}", name))
    both = s[f"both:{name}:{r}"] / s["chunks"]
    blind = p * q + (1 - p) * (1 - q)
    return {"accuracy_blind": blind, "overlap_blind": q, "ahead": 2 * (both - p * q)}


def blind_values(
    s: Sums, stream: Stream, name: str, traces: Traces, draws: Flags, cluster: str
) -> Iterator[Value]:
    """Whether a gate agrees with the oracle more than Random, which updates as often as it does.

    `draws` are Random's; p is the median over them.
    """
    clusters = bootstrap.codes(stream.clusters(cluster))
    for r in REFERENCES:
        numbers = blind_numbers(s, name, r)
        ahead = numbers.pop("ahead")
        for metric, found in numbers.items():
            yield Value(metric=metric, policy=name, reference=r, draws=found)
        for metric, p in mcnemar_tests(traces, name, r, draws, clusters).items():
            yield Value(metric=metric, policy=name, reference=r, draws=ahead, p=p)


def mcnemar_tests(
    traces: Traces, name: str, r: str, draws: Flags, clusters: Codes
) -> dict[str, float | None]:
    """McNemar's p by chunks and by clusters; none for too few clusters."""
    right = traces[f"oracle_{r}"].update
    ours = (traces[name].update == right)[:, None]
    theirs = draws == right[:, None]
    only, other = (ours & ~theirs).sum(axis=0), (~ours & theirs).sum(axis=0)
    lean = bootstrap.cluster_sums(ours.astype(float) - theirs, clusters).T
    enough = lean.shape[1] >= bootstrap.FEWEST
    return {
        "mcnemar": float(np.median(mcnemar(only, other))),
        "mcnemar_clustered": float(np.median(mcnemar_clustered(lean))) if enough else None,
    }


def headline_policy(settings: params.Gate) -> str:
    """The gate that the headline is about."""
    return f"ema_{settings.signal}"


def measure(
    stream: Stream, traces: Traces, gating: params.Gate, settings: params.Metrics
) -> list[Value]:
    """Everything about one stream at the target rate."""
    ours = headline_policy(gating)
    columns = all_columns(stream, traces) | signal_columns(stream)
    columns |= entropy_columns(stream, traces[ours])
    s = sum_columns(columns, stream, settings, plain=True)
    values = [
        *arm_values(s),
        *random_values(s),
        *signal_values(s, stream),
        *entropy_values(s, ours),
    ]
    for name, trace in traces.items():
        if name != "random":
            values += policy_values(s, name, calibrated=trace.calibration > 0)
    n = len(stream)
    values += spread_values(stream, random_draws(n, gating.rate, gating))
    as_often = random_draws(n, traces[ours].update.mean(), gating)
    values += blind_values(s, stream, ours, traces, as_often, settings.cluster)
    return values
