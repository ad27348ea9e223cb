"""Statistics as small pure functions; the examples in the docstrings are run as tests."""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int64]


def ratio(above: Any, below: Any, least: Any = 0.0) -> Array:
    """`above / below` where `below` is above `least`, NaN elsewhere.

    >>> ratio(np.array([1.0, 1.0]), np.array([4.0, 0.0])).tolist()
    [0.25, nan]
    """
    above, below = np.broadcast_arrays(np.asarray(above, float), np.asarray(below, float))
    result: Array = np.full(above.shape, np.nan)
    np.divide(above, below, out=result, where=below > least)
    return result


def pearson(x: Array, y: Array) -> float:
    """Linear correlation; NaN if one of the two never changes.

    >>> round(pearson(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0])), 4)
    0.982
    """
    x, y = standardise(x), standardise(y)
    return float(x @ y / len(x))


def spearman(x: Array, y: Array) -> float:
    """Correlation of the ranks; ties share their mean rank.

    >>> round(spearman(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 9.0])), 4)
    0.8
    """
    return pearson(stats.rankdata(x), stats.rankdata(y))


def standardise(x: Array) -> Array:
    """Mean 0 and variance 1; all NaN if `x` never changes.

    >>> standardise(np.array([1.0, 3.0])).tolist()
    [-1.0, 1.0]
    """
    if len(x) == 0 or x.min() == x.max():
        return np.full(len(x), np.nan)
    x = (x - x.mean()) / np.abs(x - x.mean()).max()  # first to size 1, lest tiny squares vanish
    return np.asarray(x / x.std(), float)


def correlation_of_sums(n: Array, x: Array, y: Array, xx: Array, yy: Array, xy: Array) -> Array:
    """Pearson from sums of x, y, x*x, y*y and x*y over n points; elementwise.

    >>> one = lambda v: np.array([float(v)])
    >>> correlation_of_sums(one(3), one(6), one(7), one(14), one(21), one(17)).round(4).tolist()
    [0.982]
    """
    spread = (n * xx - x * x) * (n * yy - y * y)
    # What rounding leaves of a spread that is truly zero must not pass for one.
    spread = np.where(spread > 1e-14 * (n * xx) * (n * yy), spread, 0.0)
    return ratio(n * xy - x * y, np.sqrt(spread))


def spearman_influence(x: Array, y: Array) -> Array:
    """How much each point moves the rank correlation, to first order; the mean is 0.

    Resampling these values resamples the rank correlation without ranking again each time.
    Ties are counted half. With u, v the mid-distribution values of x and y the correlation is
    A / sqrt(B D), A = E[uv] - 1/4, B = E[uu] - 1/4, D = E[vv] - 1/4; each part is differentiated
    in the distribution, u and v included.

    >>> spearman_influence(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])).round(6).tolist()
    [0.0, 0.0, 0.0]
    """
    u, v = mid_distribution(x), mid_distribution(y)
    a, b, d = (float(np.mean(s * t)) - 0.25 for s, t in ((u, v), (u, u), (v, v)))
    if b <= 0 or d <= 0:
        return np.full(len(x), np.nan)
    move_a = u * v + _mean_above(x, v) + _mean_above(y, u) - 3 * np.mean(u * v)
    move_b = u * u + 2 * _mean_above(x, u) - 3 * np.mean(u * u)
    move_d = v * v + 2 * _mean_above(y, v) - 3 * np.mean(v * v)
    moves: Array = move_a / np.sqrt(b * d) - a / np.sqrt(b * d) / 2 * (move_b / b + move_d / d)
    return moves


def mid_distribution(x: Array) -> Array:
    """Share of points below each point, its ties counted half.

    >>> mid_distribution(np.array([5.0, 7.0, 7.0, 9.0])).tolist()
    [0.125, 0.5, 0.5, 0.875]
    """
    return np.asarray((stats.rankdata(x) - 0.5) / len(x), float)


def _mean_above(x: Array, values: Array) -> Array:
    """Mean over all points of `values` where x is larger than here, ties counted half."""
    _, place = np.unique(x, return_inverse=True)
    here = np.bincount(place, weights=values)
    above = here.sum() - np.cumsum(here)
    return np.asarray(((above + here / 2) / len(x))[place], float)


def places(values: Array) -> Codes:
    """Each value's place from the largest, 0, down; of equal ones the earlier first.

    >>> places(np.array([3.0, 9.0, 3.0])).tolist()
    [1, 0, 2]
    """
    order = np.empty(len(values), dtype=np.int64)
    order[np.argsort(-values, kind="stable")] = np.arange(len(values))
    return order


def mcnemar(first: Any, second: Any) -> Array:
    """Exact two-sided p for `first` against `second`: how often only the one, only the other.

    >>> mcnemar(1, 5).round(5).tolist()
    0.21875
    """
    first, second = np.asarray(first), np.asarray(second)
    tail = stats.binom.cdf(np.minimum(first, second), first + second, 0.5)
    return np.asarray(np.minimum(1.0, 2 * tail), float)


def mcnemar_clustered(difference: Array) -> Array:
    """The same with whole clusters as the unit; `difference` is first minus second, per cluster.

    Student's t test of a mean difference of zero over clusters, which lie along the last axis. It
    is never below the chance that all clusters lean one way: leans of one size have no spread.

    >>> mcnemar_clustered(np.array([[2.0, 0.0, 1.0, 1.0, -1.0], [1.0] * 5])).round(4).tolist()
    [0.3046, 0.0625]
    """
    difference = np.asarray(difference, float)
    count = difference.shape[-1]
    error = difference.std(axis=-1, ddof=1) / np.sqrt(count)
    t = ratio(np.abs(difference.mean(axis=-1)), error)
    p = np.maximum(2 * stats.t.sf(t, count - 1), 2.0 ** (1 - count))
    same = np.where(difference.any(axis=-1), 2.0 ** (1 - count), 1.0)
    return np.asarray(np.where(np.isnan(t), same, p), float)


def holm(p: Array) -> Array:
    """Holm's correction for making several comparisons at once.

    >>> holm(np.array([0.01, 0.04, 0.03])).round(4).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p, kind="stable")
    steps = p[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return corrected
