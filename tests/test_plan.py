import dataclasses
import json
import sys

import pytest
import tiny
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from ponderttt import params, plan, plan_text, shapes, speed, timing
from ponderttt.cores import Split
from ponderttt.ttt import LayerConfig, build_layer, count_parameters

ONE = Split(workers=0, threads=1, gpus=0.0)
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "gemma-3-270m": 268_098_176,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gemma-3-1b": 999_885_952,
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder without models."""
    monkeypatch.chdir(tmp_path)
    return params.load(tiny.ROOT / "params.yaml")


def tiny_shape(family="llama"):
    return shapes.shape_of(tiny.configs()[family], family)


def tiny_settings(**changes):
    raw = tiny.plain_params()
    for section, values in changes.items():
        raw[section] |= values
    return params.parse(raw)


def layer_of(width=32, heads=2):
    return LayerConfig(width=width, heads=heads)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_published(elsewhere, name):
    shape = shapes.find(name, elsewhere.scales[name])
    assert shape.parameters == PUBLISHED[name]
    assert shape.source == "table"


def test_every_scale_of_the_project_is_known(elsewhere):
    assert elsewhere.scales.keys() == PUBLISHED.keys()


def test_a_models_own_config_counts_more_than_the_table(elsewhere, tmp_path):
    tiny.configs()["gpt2"].save_pretrained(tmp_path / "data/backbone/scale=gpt2")
    shape = shapes.find("gpt2", elsewhere.scales["gpt2"])
    assert (shape.width, shape.source) == (32, "data/backbone/scale=gpt2")
    folder = params.Scale(source="hub", name=str(tiny.save_model(tmp_path / "own")))
    assert shapes.find("own", folder).vocabulary == tiny.VOCABULARY


def test_an_unknown_model_is_said_to_be_unknown(elsewhere):
    assert shapes.find("x", params.Scale(source="hub", name="nobody/nothing")) is None
    planned = plan.make(elsewhere, {"x": None}, ONE)
    assert planned.unknown == ("x",)
    text = plan_text.text(plan_text.report(elsewhere, planned, None))
    assert "x: its sizes are not known yet; log in to the hub" in text


@pytest.mark.parametrize("family", tiny.configs())
def test_operations_of_the_body_are_those_counted(family):
    shape, config = tiny_shape(family), tiny.configs()[family]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model.base_model(input_ids=torch.zeros(1, 64, dtype=torch.int64), use_cache=False)
    counted = counter.get_total_flops()
    # Eager attention also multiplies what the mask then hides.
    assert shape.body_flops(64) < counted
    assert counted == pytest.approx(shape.body_flops(64) + 2 * shape.mixing * 64**2, rel=0.01)


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (96, 2)])
def test_operations_of_the_layer_are_those_counted(width, heads):
    config = layer_of(width, heads)
    layer, hidden = build_layer(config, seed=0), torch.randn(1, 64, width)
    counted = timing.count_flops({"score": lambda: layer.score(hidden)})["score"]
    assert speed.score_flops(config, 64) == pytest.approx(counted, rel=0.15)
    forward = timing.count_flops({"update": lambda: layer(hidden)})["update"]
    assert speed.train_flops(config, 64) == pytest.approx(3 * forward, rel=0.15)
    assert plan.layer_parameters(config) == count_parameters(layer)


def test_sets_and_rows_are_those_of_a_real_run(scored):
    settings = params.load(scored / "params.yaml")
    found = {path.name.removeprefix("set=") for path in scored.glob("data/chunks/*/set=*")}
    assert plan.set_sizes(settings).keys() == found
    variants = {path.parent for path in scored.glob("data/scores/*/*/*/*/*.parquet")}
    assert plan.scored_chunks(settings) == len(variants) * settings.size.test_chunks


def test_disk_is_that_of_a_real_run(scored, monkeypatch):
    monkeypatch.chdir(scored)
    settings = params.load()
    made = plan.make(settings, {"tiny": shapes.find("tiny", settings.scales["tiny"])}, ONE)
    for name in ("hidden", "ttt"):
        tensors = scored.glob(f"data/{name}/**/*.safetensors")
        assert made.scales[0].disk[name] == pytest.approx(
            sum(path.stat().st_size for path in tensors), rel=0.25
        )


def test_more_work_takes_more_of_everything():
    small, large = tiny_settings(), tiny_settings(run={"seeds": [0, 1]})
    plans = [plan.make(each, {"tiny": tiny_shape()}, ONE) for each in (small, large)]
    speeds = dict.fromkeys(speed.KINDS, 1e9)
    assert plans[1].seconds(speeds) > plans[0].seconds(speeds)
    assert plans[1].disk > plans[0].disk
    halved = dict.fromkeys(speed.KINDS, 5e8)
    hidden = next(stage for stage in plans[0].stages if stage.name == "hidden")
    assert hidden.seconds(halved) - hidden.start == pytest.approx(
        2 * (hidden.seconds(speeds) - hidden.start)
    )


def test_a_gpu_takes_half_the_memory_for_weights():
    shape = dataclasses.replace(tiny_shape(), parameters=10**9)
    settings, layer = tiny_settings(), layer_of()
    needs = [plan.worker_memory(settings, shape, layer, ONE, size)["hidden"] for size in (4, 2)]
    assert needs[0] - needs[1] == 2 * 10**9


def test_the_stack_is_planned_by_its_files(elsewhere):
    raw = tiny.plain_params()
    raw["corpus"] |= {"source": "stack_v2"}
    raw["corpus"]["stack"] |= {"train_files": 1000, "test_files": 100}
    settings = params.parse(raw)
    assert plan.corpus_files(settings) == 1100  # python, whose tests are held out, and javascript
    assert plan.corpus_bytes(settings) == 1100 * plan.CORPUS_FILE


@pytest.mark.parametrize("family", tiny.configs())
def test_every_family_can_be_measured(family):
    trial = speed.Trial(
        config=tiny.configs()[family],
        shape=tiny_shape(family),
        layer=layer_of(),
        length=64,
        body_rows=2,
        score_rows=2,
        train_rows=1,
        max_logits_mb=1,
    )
    found = speed.measure(trial, ONE, seconds=0.1)
    assert found.keys() == set(speed.KINDS)
    assert min(found.values()) > 0


def test_the_worked_estimate_of_the_docs_is_the_plans(elsewhere):
    raw = yaml.safe_load((tiny.ROOT / "params.yaml").read_text())
    raw["budget"], raw["hidden"]["dtype"] = "paper", "bfloat16"
    raw["run"]["scales"] = ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    settings = params.parse(raw)
    found = {name: shapes.find(name, settings.scales[name]) for name in settings.run.scales}
    made = plan.make(settings, found, Split(workers=1, threads=1, gpus=1.0))
    speeds = plan.gpu_speeds(next(gpu for gpu in plan.GPUS if gpu.memory_gb == 48))
    text = (tiny.ROOT / "docs/cluster.md").read_text()
    for scale in made.scales:
        stages = {stage.name: stage.seconds(speeds) for stage in scale.stages}
        minutes = [f"{stages[name] / 60:.0f}" for name in ("hidden", "ttt", "scores")]
        flops = sum(sum(stage.flops.values()) for stage in scale.stages)
        row = [scale.name, f"{scale.shape.parameters / 1e6:,.0f} M", f"{flops / 1e18:.2f}"]
        row += [*minutes, f"{sum(stages.values()) / 3600:.1f}"]
        row += [f"{scale.disk['hidden'] / 1e9:.0f} GB"]
        assert f"| {' | '.join(row)} |" in text
        assert f"{scale.gpu_memory / 1e9:.1f}" in text


def test_the_command_prints_a_plan_for_programs_and_people(scored):
    command = [sys.executable, "-m", "ponderttt", "plan"]
    found = json.loads(tiny.run(scored, *command, "--json", "--seconds", "0.2").stdout)
    assert found["scales"][0]["width"] == 32
    assert found["hours"]["this machine"] > 0
    assert found["hours"]["H100"] <= found["hours"]["L4"]
    names = [stage["stage"] for stage in found["stages"]]
    assert (names[0], names[-1]) == ("corpus", "report")
    text = tiny.run(scored, *command, "--seconds", "0").stdout
    assert "this machine: not measured" in text
    assert "GB per worker" in text


def test_two_workers_measure_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tiny.ROOT))
    raw = tiny.plain_params()
    raw["ray"] |= {"workers": 2}
    tiny.write_params(tmp_path, raw)
    tiny.save_model(tmp_path / "models/tiny")
    done = tiny.run(tmp_path, sys.executable, "-m", "ponderttt", "plan", "--seconds", "0.2")
    assert "2 worker(s) of 1 thread(s)" in done.stdout
    assert "measured in GFLOP/s" in done.stdout


def test_wrong_params_are_told_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tiny.ROOT))
    raw = tiny.plain_params()
    raw["gate"]["rate"] = 3
    tiny.write_params(tmp_path, raw)
    done = tiny.run(tmp_path, sys.executable, "-m", "ponderttt", "plan", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: params.yaml:\n  gate.rate: must be between")
