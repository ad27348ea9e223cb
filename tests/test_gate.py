"""Gates: the paper's formula to the last bit, budgets, order, and what the table says."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ponderttt import gate, params, result_tables, signals, stage, streams, tables
from ponderttt.errors import UserError
from ponderttt.streams import Key

ROOT = Path(__file__).parents[1]
GOLDEN = json.loads((ROOT / "tests/golden/gating.json").read_text())
SETTINGS = params.load(ROOT / "params.yaml")
READS = ("run", "corpus", "chunks", "scores", "gate", "metrics")

Signals = hnp.arrays(
    np.float64, st.integers(1, 80), elements=st.floats(-5, 5, allow_nan=False, width=32)
)
Rates = st.floats(0.05, 0.95)


def small_view(**changes: object) -> SimpleNamespace:
    """Params with one language."""
    view = stage.view(SETTINGS, READS)
    view.run = dataclasses.replace(view.run, languages=("python",))
    for name, value in changes.items():
        setattr(view, name, value)
    return view


def null(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


@pytest.mark.parametrize("run", GOLDEN["runs"], ids=lambda r: f"{r['stream']}-{r['target_rate']}")
def test_ema_equals_the_papers_formula_exactly(run: dict) -> None:
    stream = np.array(GOLDEN["streams"][run["stream"]])
    trace = gate.ema(stream, run["target_rate"], run["ema_alpha"], run["calibration_samples"])
    assert "".join(str(int(d)) for d in trace.update) == run["decision"]
    # The golden file holds the state after each chunk: what the next one meets.
    assert null(trace.threshold[1:]) == run["threshold"]
    assert null(trace.rate[1:]) == run["ema_rate"]
    assert trace.threshold[run["calibration_samples"]] == run["tau_calibrated"]
    assert trace.update.mean() == run["update_rate_all"]


def test_ema_by_hand() -> None:
    # Calibration on 1, 3: median 2. Then 5 > 2 (r 0.5 -> 0.75), tau stays as the old r is 0.5.
    # 1 > 2 no (r 0.375), tau = 2 + 0.5 * 0.25 * 2 = 2.25. 3 > 2.25 yes.
    trace = gate.ema(np.array([1.0, 3.0, 5.0, 1.0, 3.0]), 0.5, 0.5, 2)
    assert trace.update.tolist() == [True, True, True, False, True]
    assert null(trace.threshold) == [None, None, 2.0, 2.0, 2.25, 2.25 - 0.5 * 0.125 * 2.25]
    assert null(trace.rate) == [None, None, 0.5, 0.75, 0.375, 0.6875]
    assert trace.calibration == 2


def test_stream_within_calibration_is_all_update() -> None:
    trace = gate.ema(np.array([1.0, 2.0]), 0.5, 0.1, 16)
    assert trace.update.all()
    assert np.isnan(trace.threshold).all()
    assert trace.calibration == 2


@given(Signals, Rates, st.integers(1, 20), st.floats(0.01, 0.9))
def test_ema_decides_only_on_the_past(x: np.ndarray, rate: float, first: int, alpha: float) -> None:
    whole = gate.ema(x, rate, alpha, first)
    cut = max(first, len(x) // 2)
    part = gate.ema(x[:cut], rate, alpha, first)
    assert np.array_equal(part.update, whole.update[:cut])
    assert np.array_equal(part.threshold, whole.threshold[: len(x[:cut]) + 1], equal_nan=True)


@given(Signals, Rates, st.integers(1, 20))
def test_fixed_threshold_never_moves(x: np.ndarray, rate: float, first: int) -> None:
    trace = gate.fixed(x, rate, first)
    rest = trace.threshold[trace.calibration :]
    assert np.isnan(rest).all() or (rest == rest[0]).all()
    after = slice(trace.calibration, None)
    assert np.array_equal(trace.update[after], x[after] > trace.threshold[:-1][after])


@given(Signals, Rates)
def test_topk_takes_the_largest(x: np.ndarray, rate: float) -> None:
    update = gate.topk(x, rate).update
    assert update.sum() == gate.budget(rate, len(x))
    if update.any() and not update.all():
        assert x[update].min() >= x[~update].max()


def test_of_equal_signals_the_earlier_is_taken() -> None:
    assert gate.topk(np.zeros(4), 0.5).update.tolist() == [True, True, False, False]
    assert gate.budget(0.5, 5) == 3


@given(st.integers(1, 200), Rates, st.integers(0, 5))
def test_random_keeps_its_budget_and_its_seed(n: int, rate: float, seed: int) -> None:
    first, again = gate.random(n, rate, seed, 1), gate.random(n, rate, seed, 1)
    assert first.update.sum() == gate.budget(rate, n)
    assert np.array_equal(first.update, again.update)


def test_ema_holds_its_rate_under_a_shift() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.lognormal(0, 0.3, 3000), rng.lognormal(1, 0.3, 3000)])
    late = slice(4000, None)
    assert gate.ema(x, 0.3, 0.1, 16).update[late].mean() == pytest.approx(0.3, abs=0.02)
    assert gate.fixed(x, 0.3, 16).update[late].mean() > 0.95


def test_every_label_free_signal_has_its_policies() -> None:
    names = [policy.name for policy in gate.policies()]
    assert len(set(names)) == len(names)
    for signal in signals.LABEL_FREE:
        assert {f"ema_{signal}", f"fixed_{signal}", f"topk_{signal}"} <= set(names)
    assert [n for n in names if n.endswith("_ce_skip")] == ["topk_ce_skip"]  # no gate on labels


def test_signal_table_and_params_agree() -> None:
    assert {s.name for s in signals.SIGNALS if s.label_free} == set(signals.LABEL_FREE)
    assert set(signals.LABEL_FREE) <= set(tables.SCORES.names)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder to run stages in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("project")
def test_the_table_holds_what_the_gates_did() -> None:
    view = small_view()
    synthetic.write_all(streams.SCORES, view, chunks=40)
    gate.make(view)
    for number, key in enumerate(streams.keys(view)):
        stream = streams.read(key)
        rows = tables.read(gate.OUT / gate.part_name(number), result_tables.GATE)
        assert len(rows) == 40 * len(gate.policies())
        for policy in gate.policies():
            expected = gate.decide(policy, stream, view.gate)
            found = gate.read(number, stream)[policy.name]
            assert np.array_equal(found.update, expected.update)
            assert np.array_equal(found.threshold, expected.threshold[:40], equal_nan=True)
            assert found.calibration == expected.calibration


@pytest.mark.usefixtures("project")
def test_shards_and_runs_do_not_change_a_byte() -> None:
    view, made = small_view(), []
    for shard in (7, 40):
        for key in streams.keys(view):
            for old in (streams.SCORES / key.folder).glob("*"):
                old.unlink()
            synthetic.write(streams.SCORES, key, synthetic.scores(40, seed=1), shard)
        gate.make(view)
        made.append([path.read_bytes() for path in sorted(gate.OUT.iterdir())])
    assert made[0] == made[1]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("column", "value"), [("nll_skip", np.nan), ("recon", np.inf)])
def test_a_number_that_is_none_stops_the_stage(column: str, value: float) -> None:
    view = small_view()
    synthetic.write_all(streams.SCORES, view, chunks=20)
    key = streams.keys(view)[0]
    rows = synthetic.scores(20, seed=1)
    numbers = rows[column].to_numpy().copy()
    numbers[13] = value
    place = rows.schema.get_field_index(column)
    synthetic.write(streams.SCORES, key, rows.set_column(place, column, pa.array(numbers)))
    with pytest.raises(UserError, match=rf"part-00000.parquet: {column} of chunk doc-13"):
        gate.make(view)
    assert not gate.OUT.exists()


@pytest.mark.usefixtures("project")
def test_missing_scores_and_foreign_gates_are_named() -> None:
    view = small_view()
    with pytest.raises(UserError, match="language=python/variant=plain: holds no scores"):
        gate.make(view)
    synthetic.write_all(streams.SCORES, view, chunks=20)
    gate.make(view)
    key = Key("smollm2-135m", 0, "python", "plain")
    synthetic.write(streams.SCORES, key, synthetic.scores(20, seed=1, name="other"))
    with pytest.raises(UserError, match="does not belong to these scores"):
        gate.read(0, streams.read(key))


@pytest.mark.usefixtures("project")
def test_a_chunk_that_is_there_twice_is_refused() -> None:
    key = Key("smollm2-135m", 0, "python", "plain")
    rows = synthetic.scores(20, seed=1)
    synthetic.write(streams.SCORES, key, pa.concat_tables([rows, rows.slice(3, 1)]))
    with pytest.raises(UserError, match="a chunk is there twice"):
        streams.read(key)


def test_only_named_streams_are_read() -> None:
    found = streams.keys(small_view())
    assert [key.variant for key in found] == ["plain", "shuffled", "strict"]
    only = dataclasses.replace(SETTINGS.scores, variants=("plain",))
    assert len(streams.keys(small_view(scores=only))) == 1
    without = dataclasses.replace(SETTINGS.scores, variants=("strict",))
    with pytest.raises(UserError, match=r"scores\.variants: must contain plain"):
        streams.keys(small_view(scores=without))
