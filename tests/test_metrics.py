"""From scores to results: definitions by hand, properties, planted truth, the files."""

import dataclasses
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from ponderttt import (
    bootstrap,
    gate,
    measure,
    metrics,
    params,
    provenance,
    results,
    stage,
    stats,
    streams,
    tables,
)
from ponderttt.gate import chosen
from ponderttt.measure import Value
from ponderttt.rows import Measured
from ponderttt.streams import Key, Stream

ROOT = Path(__file__).parents[1]
SETTINGS = params.load(ROOT / "params.yaml")
READS = ("run", "corpus", "chunks", "scores", "gate", "metrics")
KEY = Key("smollm2-135m", 0, "python", "plain")


def small_view(resamples: int = 100, **run: Any) -> SimpleNamespace:
    """Params with few resamples."""
    view = stage.view(SETTINGS, READS)
    view.run = dataclasses.replace(view.run, **run)
    view.metrics = dataclasses.replace(view.metrics, resamples=resamples)
    view.gate = dataclasses.replace(view.gate, random_seeds=20)
    return view


def to_stream(rows: pa.Table) -> Stream:
    return streams._to_stream(KEY, rows)


def hand_stream(skip: list[float], update: list[float], tokens: list[int]) -> Stream:
    """A stream of chunks with those NLL sums; `base` is one nat above `skip`."""
    rows = synthetic.scores(len(skip), seed=0, per_document=1).to_pydict()
    rows |= {"nll_skip": skip, "nll_update": update, "n_predicted": tokens}
    rows["nll_base"] = [value + 1 for value in skip]
    return to_stream(pa.table(rows).cast(tables.SCORES))


def measured(stream: Stream, view: SimpleNamespace) -> Measured:
    traces = {p.name: gate.decide(p, stream, view.gate) for p in gate.policies()}
    return metrics.measure_stream(stream, traces, view)


def value(found: Measured, metric: str, **about: str) -> float:
    return float(found.find(metric, **about).draws[0])


def test_shares_by_hand() -> None:
    # Gains 4, 0, 2, -2 over 10 tokens each; the oracle takes chunks 0 and 2.
    stream = hand_stream([20, 20, 20, 20], [16, 20, 18, 22], [10] * 4)
    view = small_view()
    oracle = gate.oracle(stream, "skip", 0.5)
    ours = chosen(np.array([True, True, False, False]))
    other = gate.oracle(stream, "base", 0.5)
    columns = measure.all_columns(
        stream, {"ema_recon": ours, "oracle_skip": oracle, "oracle_base": other}
    )
    s = measure.sum_columns(columns, stream, view.metrics, plain=True)
    found = {
        (v.metric, v.reference): v.draws[0]
        for v in measure.policy_values(s, "ema_recon", calibrated=False)
    }
    assert found["loss", "skip"] == pytest.approx((80 - 4) / 40)
    assert found["loss", "base"] == pytest.approx((84 - 6) / 40)
    assert found["recovery", "skip"] == pytest.approx(4 / 6)
    assert found["capture", "skip"] == pytest.approx((4 - 2) / (6 - 2))  # random wins 4 / 2
    assert found["accuracy", "skip"] == pytest.approx(0.5)
    assert found["overlap", "skip"] == pytest.approx(0.5)
    assert found["improvement", "skip"] == pytest.approx(4 / 80)
    assert found["below_random", "skip"] == pytest.approx((4 - 2) / 40)
    assert found["rate", ""] == 0.5
    assert found["cost_nominal", ""] == 2.0


def test_losses_weigh_tokens_and_the_oracle_chunks() -> None:
    # A short chunk wins more per token, a long one more nats: the oracle is greedy per token.
    stream = hand_stream([20, 200], [15, 190], [10, 100])
    assert gate.oracle(stream, "skip", 0.5).update.tolist() == [True, False]
    found = measured(stream, small_view())
    assert value(found, "loss", policy="arm_skip") == pytest.approx(220 / 110)
    loss = value(found, "loss", policy="oracle_skip", reference="skip")
    assert loss == pytest.approx(215 / 110)


@settings(max_examples=15, deadline=None)
@given(st.integers(12, 60), st.integers(0, 1000), st.floats(0.2, 0.8))
def test_ends_of_the_scale(n: int, seed: int, rate: float) -> None:
    view = small_view(resamples=20)
    view.gate = dataclasses.replace(view.gate, rate=rate)
    found = measured(to_stream(synthetic.scores(n, seed=seed)), view)
    for r in streams.REFERENCES:
        loss = value(found, "loss", policy="never", reference=r)
        assert loss == pytest.approx(value(found, "loss", policy=f"arm_{r}"))
        update = value(found, "loss", policy="arm_update")
        assert value(found, "loss", policy="always", reference=r) == pytest.approx(update)
        recovery = found.find("recovery", policy=f"oracle_{r}", reference=r).draws[0]
        if np.isfinite(recovery):
            assert recovery == pytest.approx(1)
            assert value(found, "recovery", policy="never", reference=r) == 0
        assert value(found, "capture", policy=f"oracle_{r}", reference=r) == pytest.approx(1)
        assert value(found, "accuracy", policy=f"oracle_{r}", reference=r) == pytest.approx(1)


@settings(max_examples=15, deadline=None)
@given(st.integers(12, 60), st.integers(0, 1000), st.floats(0.2, 0.8))
def test_random_and_capture_from_the_losses(n: int, seed: int, rate: float) -> None:
    # Each gain by hand: Random saves its share of all, the oracle the largest per token.
    view = small_view(resamples=20)
    view.gate = dataclasses.replace(view.gate, rate=rate)
    stream = to_stream(synthetic.scores(n, seed=seed))
    found = measured(stream, view)
    update = gate.CONTROLLERS["ema"](stream.signals["recon"], view.gate).update
    budget = int(np.floor(rate * n + 0.5))
    for r in streams.REFERENCES:
        gain = stream.nll[r] - stream.nll["update"]
        best = np.sort(gain / stream.n_predicted)[-budget:]
        won = gain[np.isin(gain / stream.n_predicted, best)].sum()
        blind = gain.sum() * budget / n
        loss = (stream.nll[r].sum() - blind) / stream.n_predicted.sum()
        assert value(found, "loss", policy="random", reference=r) == pytest.approx(loss)
        capture = (gain[update].sum() - blind) / (won - blind)
        assert value(found, "capture", policy="ema_recon", reference=r) == pytest.approx(capture)


def test_capture_of_random_draws_is_zero_on_average() -> None:
    stream = to_stream(synthetic.scores(200, seed=3))
    view = small_view()
    many = dataclasses.replace(view.gate, random_seeds=4000)
    draws = measure.random_draws(len(stream), 0.5, many)
    gain, best = stream.gain("skip"), gate.oracle(stream, "skip", 0.5).update
    blind = gain.sum() / 2
    capture = (gain @ draws - blind) / (gain @ best - blind)
    assert capture.mean() == pytest.approx(0, abs=4 * capture.std() / np.sqrt(4000))
    found = measured(stream, view)
    spread = value(found, "loss_sd_of_draws", policy="random", reference="skip")
    mean = value(found, "loss_mean_of_draws", policy="random", reference="skip")
    exact = value(found, "loss", policy="random", reference="skip")
    assert mean == pytest.approx(exact, abs=4 * spread / np.sqrt(20))


def test_a_gate_that_updates_more_gets_no_credit_for_it_at_its_own_rate() -> None:
    stream = to_stream(synthetic.scores(4000, seed=5, correlation=0))
    view = small_view()
    often = gate.random(len(stream), 0.8, seed=9)
    traces = {
        "ema_recon": often,
        **{f"oracle_{r}": gate.oracle(stream, r, 0.5) for r in streams.REFERENCES},
    }
    s = measure.sum_columns(measure.all_columns(stream, traces), stream, view.metrics, plain=True)
    found = {
        (v.metric, v.reference): v.draws[0]
        for v in measure.policy_values(s, "ema_recon", calibrated=False)
    }
    assert found["capture", "skip"] > 0.2
    assert found["capture_matched", "skip"] == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("rate", [0.2, 0.8])
def test_a_blind_gate_is_not_ahead_at_any_rate(rate: float) -> None:
    # Chosen blindly, at a rate of its own: agreement with the oracle is what chance gives.
    stream, view = to_stream(synthetic.scores(400, seed=5)), small_view(resamples=200)
    oracles = {f"oracle_{r}": gate.oracle(stream, r, 0.4) for r in streams.REFERENCES}
    ahead, covered = [], []
    for seed in range(200):
        traces = {"ema_recon": gate.random(400, rate, seed=seed), **oracles}
        columns = measure.all_columns(stream, traces)
        s = measure.sum_columns(columns, stream, view.metrics, plain=False)
        numbers = measure.blind_numbers(s, "ema_recon", "skip")
        assert numbers["accuracy_blind"][0] == pytest.approx(0.4 * rate + 0.6 * (1 - rate))
        assert numbers["overlap_blind"][0] == pytest.approx(rate)
        e = bootstrap.estimate(numbers["ahead"], 400, 100, 200)
        ahead.append(e.value)
        covered.append(e.low <= 0 <= e.high)
    assert np.mean(ahead) == pytest.approx(0, abs=4 * np.std(ahead) / np.sqrt(200))
    assert 0.9 <= np.mean(covered) <= 0.99


def test_agreement_is_judged_at_the_gates_own_rate() -> None:
    stream, view = to_stream(synthetic.scores(400, seed=6, correlation=0.6)), small_view()
    view.gate = dataclasses.replace(view.gate, rate=0.25)
    traces = {p.name: gate.decide(p, stream, view.gate) for p in gate.policies()}
    found = metrics.measure_stream(stream, traces, view)
    about = {"policy": "ema_recon", "reference": "skip"}
    oracle, ours = traces["oracle_skip"].update, traces["ema_recon"].update
    p, q = oracle.mean(), ours.mean()
    blind = p * q + (1 - p) * (1 - q)
    assert value(found, "accuracy_blind", **about) == pytest.approx(blind)
    ahead = found.row(found.find("mcnemar", **about))
    assert ahead["value"] == pytest.approx((oracle == ours).mean() - blind)
    assert 0 < ahead["low"] < ahead["value"] < ahead["high"]
    assert ahead["p"] < 0.001
    draws = measure.random_draws(400, q, view.gate)
    assert (draws.sum(axis=0) == ours.sum()).all()
    right, theirs = (ours == oracle)[:, None], draws == oracle[:, None]
    assert theirs.mean() == pytest.approx(blind, abs=0.02)
    chances = stats.mcnemar((right & ~theirs).sum(axis=0), (~right & theirs).sum(axis=0))
    assert ahead["p"] == pytest.approx(np.median(chances))


def test_too_few_documents_have_no_clustered_p() -> None:
    stream = to_stream(synthetic.scores(40, seed=0, per_document=10))
    found = measured(stream, small_view())
    row = found.row(found.find("mcnemar_clustered", policy="ema_recon", reference="skip"))
    assert (row["p"], row["low"]) == (None, None)
    assert row["reason"] == "no interval and no p: 4 clusters, fewer than 5"
    assert found.find("mcnemar", policy="ema_recon", reference="skip").p is not None


def test_what_has_no_denominator_is_null_with_a_reason() -> None:
    # UPDATE hurts everywhere: an oracle that must update half has nothing to win.
    stream = hand_stream([20.0] * 8, [21.0 + i for i in range(8)], [10] * 8)
    found = measured(stream, small_view())
    row = found.row(found.find("recovery", policy="ema_recon", reference="skip"))
    assert row["value"] is None
    assert "denominator is not positive" in row["reason"]
    always = found.row(found.find("capture_matched", policy="always", reference="skip"))
    assert always["value"] is None  # at rate 1 random and oracle are the same


def test_one_document_has_numbers_but_no_intervals() -> None:
    stream = to_stream(synthetic.scores(30, seed=0, per_document=30))
    found = measured(stream, small_view())
    row = found.row(found.find("loss", policy="ema_recon", reference="skip"))
    assert row["value"] is not None
    assert (row["low"], row["high"]) == (None, None)
    assert row["plain_low"] < row["value"] < row["plain_high"]
    assert row["reason"] == "no interval and no p: 1 clusters, fewer than 5"


@pytest.mark.parametrize("truth", [0.2, 0.6, 0.9])
def test_planted_correlation_comes_back(truth: float) -> None:
    stream = to_stream(synthetic.scores(4000, seed=8, correlation=truth))
    found = measured(stream, small_view(resamples=400))
    for metric in ("pearson", "spearman"):
        row = found.row(found.find(metric, signal="recon", reference="skip"))
        assert row["value"] == pytest.approx(truth, abs=0.05)
        assert row["low"] < row["value"] < row["high"]
    # For normal variables the mean gain of the top half is r times that of the oracle's.
    capture = value(found, "capture", policy="topk_recon", reference="skip")
    assert capture == pytest.approx(truth, abs=0.06)


def test_intervals_of_correlation_and_capture_cover_the_truth() -> None:
    view, planted = small_view(resamples=300), 0.6
    names = {"topk_recon": "capture", "ema_recon": "capture_matched"}
    policies = [p for p in gate.policies() if p.name in names or p.controller == "oracle"]
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(500):
        stream = to_stream(synthetic.scores(240, seed=seed, correlation=planted))
        traces = {p.name: gate.decide(p, stream, view.gate) for p in policies}
        columns = measure.all_columns(stream, traces) | measure.signal_columns(stream)
        s = measure.sum_columns(columns, stream, view.metrics, plain=False)
        values = [v for v in measure.signal_values(s, stream) if v.signal == "recon"]
        for name, metric in names.items():
            online = traces[name].calibration > 0
            of_policy = measure.policy_values(s, name, calibrated=online)
            values += [v for v in of_policy if v.metric == metric]
        values += [
            Value(
                metric="ahead", reference=r, draws=measure.blind_numbers(s, "ema_recon", r)["ahead"]
            )
            for r in streams.REFERENCES
        ]
        for v in values:
            if v.reference == "skip":
                e = bootstrap.estimate(v.draws, 240, 60, 300)
                found.setdefault(v.metric, []).append((e.value, e.low, e.high))
    # What an online gate should win has no closed form: its mean over all data sets stands in.
    truth = {"pearson": planted, "spearman": 6 / np.pi * np.arcsin(planted / 2), "capture": planted}
    covered = {}
    for metric, intervals in found.items():
        point, low, high = np.array(intervals).T
        aim = truth.get(metric, point.mean())
        covered[metric] = np.mean((low <= aim) & (aim <= high))
    print(f"covered: {covered}")
    assert set(covered) == {"pearson", "spearman", "capture", "capture_matched", "ahead"}
    assert all(0.93 <= share <= 0.97 for share in covered.values())


def test_documents_widen_the_interval() -> None:
    stream = to_stream(synthetic.scores(2000, seed=8, per_document=10))
    found = measured(stream, small_view(resamples=400))
    row = found.row(found.find("loss", policy="arm_skip"))
    assert row["high"] - row["low"] > 1.5 * (row["plain_high"] - row["plain_low"])


def test_correlation_draws_equal_the_obvious_form() -> None:
    stream = to_stream(synthetic.scores(60, seed=2))
    view = small_view(resamples=5)
    found = measured(stream, view).find("pearson", signal="recon", reference="skip").draws
    codes = np.unique(stream.documents, return_inverse=True)[1]
    rng = np.random.default_rng(view.metrics.seed)
    for draw in found[1:6]:
        drawn = rng.integers(0, codes.max() + 1, codes.max() + 1)
        chunks = np.concatenate([np.flatnonzero(codes == c) for c in drawn])
        again = stats.pearson(stream.signals["recon"][chunks], stream.advantage("skip")[chunks])
        assert draw == pytest.approx(again)


def test_entropy_of_decisions_leaves_out_the_calibration() -> None:
    stream = to_stream(synthetic.scores(100, seed=2))
    found = measured(stream, small_view())
    update = gate.ema(stream.signals["recon"], 0.5, 0.1, 16).update
    h, free = stream.signals["entropy_base"], np.arange(100) >= 16
    on, off = h[free & update].mean(), h[free & ~update].mean()
    about = {"policy": "ema_recon", "signal": "entropy_base"}
    assert value(found, "entropy_gap", **about) == pytest.approx(on - off)
    r = stats.pearson(h[free], update[free].astype(float))
    assert value(found, "entropy_pearson", **about) == pytest.approx(r)


def test_signal_table_finds_the_better_signal() -> None:
    stream = to_stream(synthetic.scores(2000, seed=4, correlation=0.5))
    rows = results.signal_table(measured(stream, small_view(resamples=400)))
    gaps = {
        row["signal"]: row
        for row in rows
        if row["metric"] == "capture_topk_minus_recon" and row["reference"] == "skip"
    }
    assert len(gaps) == 9
    assert gaps["gain_kl"]["low"] > 0.2
    assert gaps["gain_kl"]["p_holm"] < 0.05
    assert gaps["out_norm"]["high"] < 0
    assert all(row["p"] <= row["p_holm"] for row in gaps.values())


def test_few_documents_can_tell_signals_apart_after_holm() -> None:
    # Twelve documents and 400 resamples: a p of counted draws would be stuck near 0.005 * 9.
    stream = to_stream(synthetic.scores(600, seed=4, correlation=0.1, per_document=50))
    rows = results.signal_table(measured(stream, small_view(resamples=400)))
    about = {"signal": "gain_kl", "reference": "skip"}
    for metric in ("capture_topk", "capture_ema", "pearson"):
        assert only(rows, metric=f"{metric}_minus_recon", **about)["p_holm"] < 0.005


def run_all(view: SimpleNamespace, chunks: int, **planted: Any) -> dict[str, list[dict[str, Any]]]:
    """Both stages on synthetic scores; the tables that come out."""
    synthetic.write_all(streams.SCORES, view, chunks, **planted)
    gate.make(view)
    metrics.make(view)
    return {path.stem: pq.read_table(path).to_pylist() for path in metrics.OUT.iterdir()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only(rows: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    found = [row for row in rows if all(row[k] == v for k, v in about.items())]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.usefixtures("project")
def test_every_table_is_written_and_whole() -> None:
    found = run_all(small_view(languages=("python", "go"), seeds=(0, 1)), chunks=60)
    papers = "main ood correlation accuracy random_vs_gate dense shuffled diagonal delta cost"
    others = "curve seeds signals entropy all paper"
    assert set(found) == {*papers.split(), *others.split()}
    assert all(row["value"] is not None for row in found.pop("paper"))
    for name, rows in found.items():
        assert rows, name
        assert all(row["table"] == name for row in rows)
        assert all(row["value"] is not None or row["reason"] for row in rows)
        assert {r["reference"] for r in rows} >= {"skip", "base"} or name in ("entropy", "cost")
        keys = ("scale", "seed", "language", "variant", "policy", "signal", "reference", "rate")
        places = [(*(row[k] for k in keys), row["metric"]) for row in rows]
        if name not in ("shuffled", "diagonal"):
            assert len(set(places)) == len(places), name
    assert {row["language"] for row in found["main"]} == {"python"}
    assert {row["language"] for row in found["ood"]} == {"go"}
    assert {row["rate"] for row in found["curve"]} == set(results.RATES)


@pytest.mark.usefixtures("project")
def test_variants_are_paired_with_plain() -> None:
    # The strict mask costs UPDATE the same on every token: no doubt about the difference.
    found = run_all(small_view(languages=("python",)), chunks=60, strict=0.25)
    about = {"metric": "loss_minus_plain"}
    row = only(found["diagonal"], **about, policy="arm_update")
    assert (row["value"], row["low"], row["high"]) == pytest.approx((0.25, 0.25, 0.25))
    assert only(found["diagonal"], **about, policy="arm_skip")["value"] == 0
    rate = only(found["all"], policy="ema_recon", metric="rate", variant="strict")["value"]
    gate_row = only(found["diagonal"], **about, policy="ema_recon", reference="skip")
    assert gate_row["value"] == pytest.approx(0.25 * rate, abs=0.02)
    losses = [r for r in found["diagonal"] if (r["metric"], r["policy"]) == ("loss", "arm_update")]
    plain, strict = sorted(losses, key=lambda row: row["variant"])
    assert strict["value"] - plain["value"] == pytest.approx(0.25)


@pytest.mark.usefixtures("project")
def test_seeds_are_averaged_and_their_spread_is_told() -> None:
    view = small_view(languages=("python",), seeds=(0, 1, 2))
    found = run_all(view, chunks=60)
    about = {"policy": "arm_update", "metric": "loss"}
    each = [only(found["all"], **about, seed=s, variant="plain")["value"] for s in (0, 1, 2)]
    mean = only(found["seeds"], **about)
    assert mean["seed"] is None
    assert mean["value"] == pytest.approx(np.mean(each), rel=1e-9)
    spread = only(found["seeds"], policy="arm_update", metric="loss_sd")
    assert spread["value"] == pytest.approx(np.std(each, ddof=1), rel=1e-6)
    headline = json.loads(metrics.HEADLINE.read_text())["smollm2-135m"]["python"]
    assert headline["loss_update"] == round(mean["value"], 6)
    # The curve's mean over seeds at the target rate is that of the gate itself.
    ours = {"policy": "ema_recon", "metric": "rate"}
    curve = only(found["seeds"], **ours, rate=0.5)
    assert curve["value"] == pytest.approx(only(found["seeds"], **ours, rate=None)["value"])
    assert headline["rate"] == round(curve["value"], 6)


@pytest.mark.usefixtures("project")
def test_planted_signal_through_both_stages() -> None:
    view = small_view(resamples=300, languages=("python",))
    found = run_all(view, chunks=3000, correlation=0.7)
    pearson = only(found["correlation"], metric="pearson", reference="skip")
    assert pearson["value"] == pytest.approx(0.7, abs=0.04)
    assert pearson["low"] < pearson["value"] < pearson["high"] < 0.8
    about = {"metric": "capture_topk", "signal": "recon", "reference": "skip"}
    capture = only(found["signals"], **about)
    assert capture["value"] == pytest.approx(0.7, abs=0.06)
    # The moving threshold follows each document's level, and loses a little by it.
    online = only(found["main"], metric="capture_matched", policy="ema_recon", reference="skip")
    assert 0.5 < online["value"] < capture["value"]
    best = [
        row["signal"]
        for row in found["signals"]
        if row["metric"] == "capture_topk"
        and row["reference"] == "skip"
        and row["value"] > capture["high"]
    ]
    assert best == ["gain_kl"]


@pytest.mark.usefixtures("project")
def test_headline_is_short_and_the_same_every_time() -> None:
    view = small_view()
    run_all(view, chunks=30)
    first = {path: path.read_bytes() for path in Path("metrics").rglob("*") if path.is_file()}
    tables_first = {path: path.read_bytes() for path in metrics.OUT.iterdir()}
    metrics.make(view)
    assert first == {path: path.read_bytes() for path in first}
    assert tables_first == {path: path.read_bytes() for path in metrics.OUT.iterdir()}
    headline = json.loads(metrics.HEADLINE.read_text())["smollm2-135m"]
    assert sum(len(numbers) for numbers in headline.values()) == 40
    assert list(headline) == sorted(view.run.languages)


@pytest.mark.usefixtures("project")
def test_shards_do_not_change_a_number() -> None:
    view, made = small_view(languages=("python",)), []
    for shard in (11, 1000):
        for key in streams.keys(view):
            for old in (streams.SCORES / key.folder).glob("*"):
                old.unlink()
            synthetic.write(streams.SCORES, key, synthetic.scores(60, seed=1), shard)
        gate.make(view)
        metrics.make(view)
        made.append([path.read_bytes() for path in sorted(metrics.OUT.iterdir())])
    assert made[0] == made[1]


@pytest.mark.usefixtures("project")
def test_origin_names_data_params_and_versions() -> None:
    view = small_view(languages=("python",))
    run_all(view, chunks=30)
    origin = json.loads(metrics.ORIGIN.read_text())
    assert set(origin["data"]) == {"data/scores"}
    assert (origin["commit"], origin["dirty"]) == (None, None)  # not a repository
    assert "numpy" in origin["versions"]


def test_changes_since_the_commit_are_told(project: Path) -> None:
    def git(*words: str) -> None:
        nobody = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        subprocess.run(["git", *nobody, *words], check=True, capture_output=True)

    (project / "code.py").write_text("x = 1")
    (project / "dvc.lock").write_text("one")
    git("init", "-q")
    assert provenance.dirty() is None  # no commit yet
    git("add", ".")
    git("commit", "-qm", "first")
    for path in ("data/a", "metrics/b"):
        (project / path).parent.mkdir()
        (project / path).write_text("made by a stage")
    (project / "dvc.lock").write_text("two")
    assert provenance.dirty() is False
    (project / "code.py").write_text("x = 2")
    assert provenance.dirty() is True


@pytest.mark.usefixtures("project")
def test_a_run_without_the_language_trained_on_has_its_costs() -> None:
    found = run_all(small_view(languages=("go",)), chunks=40)
    assert {row["language"] for row in found["cost"]} == {"go"}
    assert "main" not in found


@pytest.mark.usefixtures("project")
def test_a_stream_shorter_than_its_calibration_still_decides() -> None:
    """Ten chunks: two calibrate, eight are decided on."""
    found = run_all(small_view(languages=("python",)), chunks=10)
    rate = only(found["main"], policy="ema_recon", metric="rate")["value"]
    after = only(found["main"], policy="ema_recon", metric="rate_after")["value"]
    assert after * 8 == round(after * 8)
    assert rate == pytest.approx((2 + 8 * after) / 10)
    assert rate < 1


@pytest.mark.usefixtures("project")
def test_one_chunk_has_no_rate_after_its_calibration() -> None:
    found = run_all(small_view(languages=("python",)), chunks=1)
    assert only(found["main"], policy="ema_recon", metric="rate")["value"] == 1
    assert only(found["main"], policy="ema_recon", metric="rate_after")["value"] is None
