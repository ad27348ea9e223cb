"""Statistics against scipy, closed forms, hand-made numbers and simulated truth."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats as scipy_stats

from ponderttt import bootstrap, plots, stats

Points = hnp.arrays(
    np.float64, st.tuples(st.integers(3, 60), st.just(2)), elements=st.floats(-9, 9)
)
Ties = hnp.arrays(np.float64, st.tuples(st.integers(4, 40), st.just(2)), elements=st.integers(0, 5))


@pytest.mark.parametrize("module", [stats, bootstrap, plots])
def test_examples_in_docstrings(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0


@given(Points)
def test_correlations_equal_scipys(points: np.ndarray) -> None:
    x, y = points.T
    if np.ptp(x) < 1e-6 or np.ptp(y) < 1e-6:
        return
    assert stats.pearson(x, y) == pytest.approx(scipy_stats.pearsonr(x, y)[0], abs=1e-9)
    assert stats.spearman(x, y) == pytest.approx(scipy_stats.spearmanr(x, y)[0], abs=1e-9)


def test_correlation_with_a_constant_is_not_a_number() -> None:
    assert np.isnan(stats.pearson(np.ones(5), np.arange(5.0)))
    one = np.ones(1)
    assert np.isnan(
        stats.correlation_of_sums(5 * one, 5 * one, 10 * one, 5 * one, 30 * one, 10 * one)
    )


def full_ranking_draws(x: np.ndarray, y: np.ndarray, draws: int) -> np.ndarray:
    """The obvious form: draw chunks, rank them again."""
    rng = np.random.default_rng(0)
    places = rng.integers(0, len(x), (draws, len(x)))
    return np.array([scipy_stats.spearmanr(x[i], y[i])[0] for i in places])


@pytest.mark.parametrize("digits", [None, 0])
@pytest.mark.parametrize("strength", [0.0, 0.6, 0.95])
def test_rank_influence_spreads_like_ranking_again(strength: float, digits: int | None) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=400)
    y = strength * x + np.sqrt(1 - strength**2) * rng.normal(size=400)
    if digits is not None:
        x, y = x.round(digits), y.round(digits)
    moves = stats.spearman_influence(x, y)
    assert moves.mean() == pytest.approx(0, abs=1e-12)
    slow = full_ranking_draws(x, y, 400).std()
    assert moves.std() / np.sqrt(400) == pytest.approx(slow, rel=0.12)


@given(Ties)
def test_rank_influence_is_the_derivative(points: np.ndarray) -> None:
    x, y = points.T
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return
    moves, n = stats.spearman_influence(x, y), len(x)
    # Each point many times over, the first a few times more: the correlation moves by its share.
    many = 2000
    counts = np.full(n, many)
    counts[0] += 10
    more = stats.spearman(np.repeat(x, counts), np.repeat(y, counts))
    share = 10 / counts.sum()
    assert (more - stats.spearman(x, y)) / share == pytest.approx(moves[0], abs=0.05)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_test(first: int, second: int) -> None:
    if first + second == 0:
        assert stats.mcnemar(0, 0) == 1
        return
    exact = scipy_stats.binomtest(first, first + second, 0.5).pvalue
    assert float(stats.mcnemar(first, second)) == pytest.approx(exact, rel=1e-9)


def test_clustered_mcnemar_is_the_t_test_over_clusters() -> None:
    difference = np.array([1.0] * 30 + [-1.0] * 12 + [0.0] * 50)
    exact = scipy_stats.ttest_1samp(difference, 0).pvalue
    assert float(stats.mcnemar_clustered(difference)) == pytest.approx(exact)
    # With single chunks and many of them it is the classic statistic.
    classic = scipy_stats.chi2.sf((30 - 12) ** 2 / (30 + 12), 1)
    assert float(stats.mcnemar_clustered(difference)) == pytest.approx(classic, rel=0.2)
    assert float(stats.mcnemar_clustered(np.zeros(4))) == 1
    assert float(stats.mcnemar_clustered(np.full(8, -3.0))) == 2 / 2**8


@pytest.mark.parametrize("clusters", [7, 40])
def test_clustered_mcnemar_keeps_its_level_where_the_plain_one_does_not(clusters: int) -> None:
    rng = np.random.default_rng(0)
    sign = rng.choice([-1.0, 1.0], (4000, clusters)) * rng.integers(0, 4, (4000, clusters))
    clustered = stats.mcnemar_clustered(sign * 5)  # five chunks that all say the same
    plain = stats.mcnemar(5 * sign.clip(min=0).sum(1), -5 * sign.clip(max=0).sum(1))
    assert np.mean(clustered < 0.05) == pytest.approx(0.05, abs=0.02)
    assert np.mean(plain < 0.05) > 0.4


@given(hnp.arrays(np.float64, st.integers(1, 20), elements=st.floats(0, 1)))
def test_holm_is_ordered_and_never_smaller(p: np.ndarray) -> None:
    corrected = stats.holm(p)
    assert (corrected >= p).all()
    assert (corrected <= 1).all()
    assert (corrected <= np.minimum(1, p * len(p)) + 1e-15).all()
    order = np.argsort(p, kind="stable")
    assert (np.diff(corrected[order]) >= 0).all()


@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 3))
def test_cluster_sums_add_up(clusters: int, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = np.concatenate([np.arange(clusters), rng.integers(0, clusters, extra)])
    columns = rng.normal(size=(len(codes), 3))
    expected = [columns[codes == c].sum(axis=0) for c in range(clusters)]
    assert bootstrap.cluster_sums(columns, codes) == pytest.approx(np.array(expected))


def test_resampled_sums_are_sums_over_drawn_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    columns, codes = rng.normal(size=(50, 2)), rng.integers(0, 9, 50)
    fast = bootstrap.resampled_sums(columns, codes, 600, 3)
    again = np.random.default_rng(3)
    for row in fast[:5]:
        drawn = again.integers(0, 9, 9)
        assert row == pytest.approx(sum(columns[codes == c].sum(axis=0) for c in drawn))
    monkeypatch.setattr(bootstrap, "BLOCK", 7)
    assert np.array_equal(bootstrap.resampled_sums(columns, codes, 600, 3).round(9), fast.round(9))


def test_bootstrap_error_of_a_mean_is_the_closed_form() -> None:
    x = np.random.default_rng(0).normal(size=300)
    draws = bootstrap.resampled_sums(x[:, None], np.arange(300), 20000, 0)[:, 0] / 300
    assert draws.std() == pytest.approx(x.std() / np.sqrt(300), rel=0.02)
    low, high = bootstrap.interval(draws, 300)
    t = scipy_stats.t.ppf(0.975, 299) * x.std(ddof=1) / np.sqrt(300)
    assert (low, high) == pytest.approx((x.mean() - t, x.mean() + t), abs=0.005)


def simulate(rng: np.random.Generator, clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """Chunks of documents of unequal length that share an effect; the true mean is 0."""
    sizes = rng.integers(1, 9, clusters)
    codes = np.repeat(np.arange(clusters), sizes)
    return rng.normal(size=clusters)[codes] + rng.normal(size=len(codes)), codes


def covers(x: np.ndarray, codes: np.ndarray, truth: float, seed: int) -> bool:
    columns = np.stack([x, np.ones(len(x))], axis=1)
    sums = bootstrap.resampled_sums(columns, codes, 400, seed)
    low, high = bootstrap.interval(sums[:, 0] / sums[:, 1], int(codes.max()) + 1)
    return low <= truth <= high


@pytest.mark.parametrize("clusters", [20, 100])
def test_intervals_over_clusters_cover_and_plain_ones_do_not(clusters: int) -> None:
    rng = np.random.default_rng(11)
    clustered, plain = [], []
    for seed in range(500):
        x, codes = simulate(rng, clusters)
        clustered.append(covers(x, codes, 0, seed))
        plain.append(covers(x, np.arange(len(x)), 0, seed))
    print(f"{clusters} clusters: covered {np.mean(clustered):.3f}, plain {np.mean(plain):.3f}")
    assert 0.93 <= np.mean(clustered) <= 0.97
    assert np.mean(plain) < 0.85


def test_estimates_say_why_something_is_missing() -> None:
    nan = float("nan")
    few = bootstrap.estimate(np.ones(21), 40, 4, 10)
    assert (few.value, few.plain_low) == (1, 1)
    assert np.isnan(few.low)
    assert few.reason == "no interval and no p: 4 clusters, fewer than 5"
    none = bootstrap.estimate(np.array([nan, 1.0]), 40, 9, 1)
    assert np.isnan(none.value)
    assert "denominator is not positive" in none.reason
    torn = bootstrap.estimate(np.array([1.0, nan, 1.0, 1.0]), 40, 9, 3)
    assert torn.reason.startswith("undefined in 1 of 3 resamples")
    assert np.isnan(torn.value)
    assert "not resampled" in bootstrap.estimate(np.ones(1), 40, 9, 100).reason


@settings(max_examples=30)
@given(st.integers(5, 40), st.integers(0, 9))
def test_sums_pair_their_columns(n: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=n)
    codes = np.arange(n) // 2
    sums = bootstrap.Sums({"x": x, "twice": 2 * x}, codes, resamples=20, seed=seed)
    assert sums["twice"] == pytest.approx(2 * sums["x"])
    assert sums["x"][0] == pytest.approx(x.sum())
    assert len(sums["x"]) == 41


def test_p_of_draws_is_the_t_test_of_a_mean() -> None:
    x = np.random.default_rng(0).normal(0.3, 1, size=30)
    draws = bootstrap.resampled_sums(x[:, None], np.arange(30), 20000, 0)[:, 0] / 30
    p = bootstrap.two_sided_p(x.mean(), draws, 30)
    assert p == pytest.approx(scipy_stats.ttest_1samp(x, 0).pvalue, rel=0.05)
    # No floor: a clear effect stays clear after a correction for many comparisons.
    assert bootstrap.two_sided_p(x.mean() + 2, draws + 2, 30) < 1e-9
    assert np.isnan(bootstrap.two_sided_p(1.0, np.array([np.nan]), 30))
    assert np.isnan(bootstrap.two_sided_p(1.0, np.ones(9), 30))
    assert np.isnan(bootstrap.two_sided_p(x.mean(), draws, 1))


@given(st.integers(12, 60), st.floats(-4, 4))
def test_p_and_interval_agree(clusters: int, effect: float) -> None:
    draws = np.random.default_rng(1).normal(size=4000) + effect
    low, high = bootstrap.interval(draws, clusters)
    p = bootstrap.two_sided_p(effect, draws, clusters)
    if p < 0.04:
        assert low > 0 or high < 0
    if p > 0.06:
        assert low <= 0 <= high


@pytest.mark.parametrize(("clusters", "most"), [(8, 0.085), (21, 0.075), (60, 0.07)])
def test_p_rejects_a_true_null_about_as_often_as_it_says(clusters: int, most: float) -> None:
    # Documents of unequal length make it a little too sure: 7 % at 8 documents, 6 % at 21.
    rng = np.random.default_rng(7)
    chances = []
    for seed in range(1000):
        x, codes = simulate(rng, clusters)
        columns = np.stack([x, np.ones(len(x))], axis=1)
        sums = bootstrap.resampled_sums(columns, codes, 200, seed)
        chances.append(bootstrap.two_sided_p(x.mean(), sums[:, 0] / sums[:, 1], clusters))
    print(f"{clusters} clusters: rejected {np.mean(np.array(chances) < 0.05):.3f}")
    assert 0.035 <= np.mean(np.array(chances) < 0.05) <= most
    assert 0.004 <= np.mean(np.array(chances) < 0.01) <= 0.025
