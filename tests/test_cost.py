"""Costs: operations of the real layer against closed forms, and how a gate's are added up."""

import dataclasses
from pathlib import Path

import pytest
import synthetic
import tiny
import torch
from test_metrics import KEY, small_view, to_stream

from ponderttt import (
    backbone,
    cost,
    gate,
    layers,
    metrics,
    models,
    params,
    result_tables,
    stage,
    tables,
    timing,
)
from ponderttt.signals import BY_NAME, SIGNALS
from ponderttt.ttt import LayerConfig, build_layer

TOKENS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> backbone.Backbone:
    """A tiny Llama with random weights."""
    folder = tmp_path_factory.mktemp("model")
    source = tiny.save_model(folder / "source", "llama")
    models.prepare(params.Scale(source="hub", name=str(source)), folder / "kept", folder)
    return backbone.load(folder / "kept")


def layer_flops(config: LayerConfig, tokens: int, *, update: bool) -> int:
    """Matrix products by hand: projections, rates, and the inner loop's reads and steps."""
    d, e, m = config.width, config.head_width, config.mini_batch
    outer = 4 * 2 * tokens * d * d + 2 * tokens * d * config.heads
    read = 2 * tokens * (e + 1) * d  # [T, e + 1] x [e + 1, e] per head; the one is the bias
    if not update:
        return outer + 2 * read  # queries, and keys for the signal
    mix = 2 * tokens * m * (e + 1) * config.heads + 2 * tokens * m * d
    step = 2 * tokens * (e + 1) * d
    return outer + 2 * read + mix + step


@pytest.mark.parametrize("update", [False, True])
def test_counted_operations_are_those_of_the_formulas(update: bool) -> None:
    config = LayerConfig(width=64, heads=4)
    layer, hidden = build_layer(config, seed=0).eval(), torch.randn(1, TOKENS, 64)
    found = timing.count_flops({"layer": lambda: layer(hidden, update=update)})["layer"]
    assert found == layer_flops(config, TOKENS, update=update)


def test_the_head_is_one_matrix_product(model: backbone.Backbone) -> None:
    config = layers.config_for(params.load(Path("params.yaml")).ttt, model.card)
    tokens = torch.ones(1, TOKENS, dtype=torch.long)
    parts = timing.model_parts(model, build_layer(config, seed=0).eval(), tokens)
    flops = timing.count_flops(parts)
    assert flops["head"] == 2 * TOKENS * model.width * model.vocabulary
    assert 0 < flops["layer_skip"] < flops["layer_update"]
    rows = timing.cost_table(model, build_layer(config, seed=0).eval(), tokens, rounds=2)
    assert rows["part"].to_pylist() == ["backbone", "layer_skip", "layer_update", "head"]
    assert all(seconds > 0 for seconds in rows["seconds"].to_pylist())


def test_a_gate_pays_for_looking(tmp_path: Path) -> None:
    synthetic.write_cost(tmp_path, KEY)
    view = small_view()
    stream = to_stream(synthetic.scores(40, seed=1))
    traces = {p.name: gate.decide(p, stream, view.gate) for p in gate.policies()}
    measured = metrics.measure_stream(stream, traces, view)
    rows = {
        (row["policy"], row["metric"]): row["value"]
        for row in cost.cost_table(measured, view.gate, tmp_path)
    }
    rate = traces["ema_recon"].update.mean()
    assert rows["never", "flops_layer"] == 100
    assert rows["always", "flops_layer"] == 150
    assert rows["ema_recon", "flops_layer"] == pytest.approx(100 + rate * 150)
    assert rows["ema_recon", "flops_layer_relative"] == pytest.approx(1 + 1.5 * rate)
    assert rows["always", "seconds_total"] == pytest.approx((1000 + 400 + 150) / 100)
    assert rows["never", "seconds_total_relative"] == 1
    assert rows["always", "cost_nominal"] == 3
    assert rows["ema_recon", "cost_nominal"] == pytest.approx(1 + 2 * rate)


PARTS = {"backbone": 1000.0, "layer_skip": 100.0, "layer_update": 150.0, "head": 400.0}


@pytest.mark.parametrize(
    ("signal", "layer", "heads"),
    [
        ("recon", 100 + 0.25 * 150, 1),
        ("out_norm", 100 + 0.25 * 150, 1),
        ("delta", 150 + 0.75 * 100, 1),  # all are updated, then some thrown away
        ("recon_step", 150 + 0.75 * 100, 1),
        ("recon_last", 150 + 0.75 * 100, 1),
        ("entropy_base", 0.75 * 100 + 0.25 * 150, 2),  # decides before any arm runs
        ("entropy_skip", 100 + 0.25 * 150, 1.25),
        ("gain_kl", 100 + 0.25 * 150, 2.25),
    ],
)
def test_a_signal_is_paid_for(signal: str, layer: float, heads: float) -> None:
    found = cost.spent(PARTS, BY_NAME[signal].needs, 0.25)
    assert found == pytest.approx((layer, heads * 400))


def test_words_of_a_cost_follow_from_what_a_signal_needs() -> None:
    free = {s.name for s in SIGNALS if s.cost.startswith("none")}
    assert free == {"recon", "recon_prefix", "out_norm"}
    late = {s.name for s in SIGNALS if "update arm on every chunk" in s.cost}
    assert late == {s.name for s in SIGNALS if s.sees == "update"}
    assert "uncounted" in BY_NAME["grad_norm"].cost


def test_the_headline_gate_is_charged_for_its_signal(tmp_path: Path) -> None:
    synthetic.write_cost(tmp_path, KEY)
    view = small_view()
    view.gate = dataclasses.replace(view.gate, signal="gain_kl")
    stream = to_stream(synthetic.scores(40, seed=1))
    traces = {p.name: gate.decide(p, stream, view.gate) for p in gate.policies()}
    measured = metrics.measure_stream(stream, traces, view)
    rate = traces["ema_gain_kl"].update.mean()
    rows = {
        (row["policy"], row["metric"]): row["value"]
        for row in cost.cost_table(measured, view.gate, tmp_path)
    }
    whole = 1000 + 100 + rate * 150 + (2 + rate) * 400
    assert rows["ema_gain_kl", "flops_total"] == pytest.approx(whole)
    assert rows["ema_gain_kl", "seconds_total_relative"] == pytest.approx(whole / 1500)


def test_costs_that_were_not_measured_are_null_with_a_reason(tmp_path: Path) -> None:
    view = small_view()
    stream = to_stream(synthetic.scores(40, seed=1))
    traces = {p.name: gate.decide(p, stream, view.gate) for p in gate.policies()}
    measured = metrics.measure_stream(stream, traces, view)
    for row in cost.cost_table(measured, view.gate, tmp_path):
        if row["metric"] == "cost_nominal":
            assert row["value"] >= 1
        else:
            assert (row["value"], row["reason"]) == (None, "not measured; run `dvc repro cost`")


def test_the_stage_writes_one_table(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied)
    view = stage.view(params.load(), [])
    timing.make(view, "tiny", "0")
    rows = tables.read(Path("data/cost/scale=tiny/seed=0/part-00000.parquet"), result_tables.COST)
    assert len(rows) == 4
