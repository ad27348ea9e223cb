"""The bootstrap: whole clusters are drawn, and every statistic is made from resampled sums.

A resample is a count per cluster, so that all resamples of all columns are one matrix product.
Every column meets the same counts: differences between policies are paired.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from threadpoolctl import threadpool_limits

from ponderttt.stats import Array, Codes

LEVEL = 0.95
BLOCK = 256  # resamples held at once; the draws do not depend on it
FEWEST = 5  # with fewer clusters no interval is worth its name
MOST_UNDEFINED = 0.025  # share of resamples in which a statistic may have no value


def codes(names: Sequence[str]) -> Codes:
    """Number the clusters 0, 1, ... in the order of their names.

    >>> codes(["b", "a", "b"]).tolist()
    [1, 0, 1]
    """
    return np.asarray(np.unique(np.asarray(names, dtype=object), return_inverse=True)[1], np.int64)


def cluster_sums(columns: Array, clusters: Codes) -> Array:
    """Sum the rows of `columns` [n, k] within each cluster.

    >>> cluster_sums(np.array([[1.0], [2.0], [4.0]]), np.array([1, 0, 1])).tolist()
    [[2.0], [5.0]]
    """
    order = np.argsort(clusters, kind="stable")
    starts = np.searchsorted(clusters[order], np.arange(clusters.max() + 1))
    return np.asarray(np.add.reduceat(columns[order], starts, axis=0), float)


def draw_counts(clusters: int, resamples: int, seed: int) -> Iterator[Array]:
    """How often each cluster is drawn in each resample, in blocks [rows, clusters]."""
    rng = np.random.default_rng(seed)
    for start in range(0, resamples, BLOCK):
        rows = min(BLOCK, resamples - start)
        block = np.empty((rows, clusters))
        for row in block:
            row[:] = np.bincount(rng.integers(0, clusters, clusters), minlength=clusters)
        yield block


def resampled_sums(columns: Array, clusters: Codes, resamples: int, seed: int) -> Array:
    """Column sums in every resample of the clusters: [resamples, k]."""
    sums = cluster_sums(columns, clusters)
    # Threads would wait for each other: on a busy machine two were seen ten times slower than one.
    with threadpool_limits(limits=1, user_api="blas"):
        return np.concatenate([c @ sums for c in draw_counts(len(sums), resamples, seed)])


@functools.cache
def tails(clusters: int) -> tuple[float, float]:
    """Quantiles of the draws that bound the interval, widened as Student's t is for few clusters.

    Plain percentiles are too narrow by sqrt((c - 1) / c) and by the normal tail.

    >>> [round(t, 4) for t in tails(10)], [round(t, 4) for t in tails(100000)]
    ([0.0086, 0.9914], [0.025, 0.975])
    """
    wide = stats.t.ppf((1 - LEVEL) / 2, clusters - 1) * np.sqrt(clusters / (clusters - 1))
    low = float(stats.norm.cdf(wide))
    return low, 1 - low


def interval(draws: Array, clusters: int) -> tuple[float, float]:
    """The 95 % interval of one statistic from its draws."""
    low, high = np.quantile(draws, tails(clusters))
    return float(low), float(high)


def two_sided_p(value: float, draws: Array, clusters: int) -> float:
    """Whether `value` can be zero: Student's t with the draws' spread as its standard error.

    The spread is too small by sqrt((c - 1) / c). Shares of draws would have a floor that a
    correction for many comparisons lifts above any level. NaN without spread or with one cluster.

    >>> round(two_sided_p(2.0, np.array([1.0, 3.0, 1.0, 3.0]), 1000), 3)
    0.084
    """
    draws = draws[np.isfinite(draws)]
    if len(draws) < 2 or clusters < 2 or np.ptp(draws) == 0:
        return float("nan")
    error = draws.std(ddof=1) * np.sqrt(clusters / (clusters - 1))
    return float(2 * stats.t.sf(abs(value) / error, clusters - 1))


@dataclass(frozen=True)
class Estimate:
    """A number, its interval over clusters, its plain one over chunks; NaN for what is missing."""

    value: float
    low: float
    high: float
    plain_low: float
    plain_high: float
    reason: str  # why something is missing; else empty


class Sums:
    """Named sums over chunks: entry 0 over the data, then over cluster and plain resamples.

    A statistic written on these arrays, elementwise, gives its value and all its draws at once.
    `plain: False` leaves out the plain resamples, each chunk for itself, which cost the most.
    """

    def __init__(
        self,
        columns: Mapping[str, Array],
        clusters: Codes,
        *,
        resamples: int,
        seed: int,
        plain: bool = True,
    ) -> None:
        table = np.stack(list(columns.values()), axis=1)
        each = np.arange(len(clusters))
        parts = [table.sum(axis=0, keepdims=True), resampled_sums(table, clusters, resamples, seed)]
        if plain:
            parts.append(resampled_sums(table, each, resamples, seed))
        self._places = {name: place for place, name in enumerate(columns)}
        self._sums = np.ascontiguousarray(np.concatenate(parts).T)

    def __getitem__(self, name: str) -> Array:
        """The sums of one column: [1 + resamples (+ resamples)]."""
        sums: Array = self._sums[self._places[name]]
        return sums


def estimate(values: Array, n: int, clusters: int, resamples: int) -> Estimate:
    """Split `values` as `Sums` lays them out into a value and its intervals."""
    none = float("nan")
    if not np.isfinite(values[0]):
        return Estimate(none, none, none, none, none, "undefined: its denominator is not positive")
    draws = values[1 : 1 + resamples]
    lost = len(draws) - int(np.isfinite(draws).sum())
    if clusters >= FEWEST and lost > MOST_UNDEFINED * len(draws):
        reason = f"undefined in {lost} of {len(draws)} resamples: its denominator may be zero"
        return Estimate(none, none, none, none, none, reason)
    low, high, reason = _bounds(draws, clusters, "clusters")
    plain_low, plain_high, _ = _bounds(values[1 + resamples :], n, "chunks")
    return Estimate(float(values[0]), low, high, plain_low, plain_high, reason)


def _bounds(draws: Array, units: int, name: str) -> tuple[float, float, str]:
    """Both ends of the interval, or why there is none."""
    none = float("nan")
    if len(draws) == 0:
        return none, none, "no interval: not resampled"
    if units < FEWEST:
        return none, none, f"no interval and no p: {units} {name}, fewer than {FEWEST}"
    finite = draws[np.isfinite(draws)]
    if len(finite) == 0:
        return none, none, "no interval: undefined in every resample"
    return *interval(finite, units), ""
