import copy

import pytest
import tiny
import yaml

from ponderttt import params
from ponderttt.errors import UserError

RAW = yaml.safe_load((tiny.ROOT / "params.yaml").read_text())


def changed(**values):
    """The project's params with dotted keys set; None deletes."""
    raw = copy.deepcopy(RAW)
    for dotted, value in values.items():
        *path, last = dotted.split("__")
        place = raw
        for name in path:
            place = place[name]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return raw


def test_the_projects_own_params_are_right():
    assert params.load(tiny.ROOT / "params.yaml").size.train_chunks >= 200


def test_params_are_frozen():
    loaded = params.parse(RAW)
    with pytest.raises(AttributeError):
        loaded.gate.rate = 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate__rte": 0.5}, "gate.rte: unknown key; allowed: rate,"),
        ({"gate__rate": None}, "gate.rate: missing"),
        ({"gate__rate": 1.5}, "gate.rate: must be between 0 and 1, is 1.5"),
        ({"gate__rate": "half"}, "gate.rate: must be of type float, is 'half'"),
        ({"gate__signal": "magic"}, "gate.signal: must be one of recon,"),
        ({"budget": "huge"}, "budget: 'huge' is not in budgets; allowed: smoke, laptop, paper"),
        ({"run__scales": ["gpt5"]}, "run.scales: 'gpt5' is not in scales; allowed: smollm2-135m,"),
        ({"run__seeds": []}, "run.seeds: must not be empty"),
        ({"run__seeds": [1, 1]}, "run.seeds: must not repeat an entry"),
        ({"run__languages": ["cobol"]}, "run.languages: 'cobol' is not in corpus.languages"),
        ({"ttt__diagonal": 1}, "ttt.diagonal: must be one of 0, -1"),
        ({"ttt__diagonal": False}, "ttt.diagonal: must be one of 0, -1, is False"),
        ({"ttt__heads": 0}, "ttt.heads: must be at least 1"),
        ({"run__seeds": [0, -1]}, "run.seeds: must hold no number below 0"),
        ({"corpus__seed": -1}, "corpus.seed: must be at least 0"),
        ({"chunks__seed": -1}, "chunks.seed: must be at least 0"),
        ({"gate__seed": -1}, "gate.seed: must be at least 0"),
        ({"metrics__seed": -1}, "metrics.seed: must be at least 0"),
        ({"corpus__decontaminate": ""}, "corpus.decontaminate: must name a file; an empty list"),
        ({"corpus__stack__opt_out": ""}, "corpus.stack.opt_out: must name a file"),
        ({"ttt__heads": "many"}, "ttt.heads: must be of type int"),
        ({"chunks__min_tokens": 600}, "chunks.min_tokens: must not exceed chunks.length"),
        ({"corpus__source": "folder"}, "corpus.folder: must name a directory"),
        ({"hidden__batch": 0}, "hidden.batch: must be at least 1"),
        ({"ray__workers": True}, "ray.workers"),
        ({"ray__gpus_per_worker": 1.5}, "ray.gpus_per_worker"),
        ({"ray__address": "auto"}, "ray.address: must be HOST:PORT, as `ray start --head` prints"),
        ({"ray__address": "ray://head:10001"}, "ray.address: must be HOST:PORT"),
        (
            {"run__scales": ["gemma-3-270m"]},
            "scales.gemma-3-270m.accept_terms: must be true before this model is used; read",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(change, message):
    with pytest.raises(UserError, match=r"params\.yaml") as caught:
        params.parse(changed(**change))
    assert message in str(caught.value)


def test_terms_once_accepted_let_a_model_through():
    raw = changed(**{"run__scales": ["gemma-3-270m"], "scales__gemma-3-270m__accept_terms": True})
    assert params.parse(raw).run.scales == ("gemma-3-270m",)
    assert not params.parse(RAW).scales["gemma-3-270m"].accept_terms  # never by default


def test_all_errors_come_at_once():
    with pytest.raises(UserError) as caught:
        params.parse(changed(gate__rate=7, hidden__batch=0, run__speed=3))
    for key in ("gate.rate", "hidden.batch", "run.speed"):
        assert key in str(caught.value)


def test_what_ties_two_values_is_checked_beside_other_errors():
    wrong = {"gate__rate": 7, "budget": "huge", "run__languages": ["cobol"]}
    with pytest.raises(UserError) as caught:
        params.parse(changed(**wrong, chunks__min_tokens=600, scores__batch=0))
    for key in ("gate.rate", "budget:", "run.languages", "chunks.min_tokens", "scores.batch"):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "https://me:planted@store.example",
        "https://planted@store.example",
        "https://store.example/?key=planted",
        "https://store.example/#planted",
        "ftp://store.example/planted",
        "store.example/planted",
        "https:///planted",
        "https://[planted",
    ],
)
def test_an_address_that_may_hold_a_secret_is_refused_and_not_shown(address):
    with pytest.raises(UserError, match=r"corpus\.stack\.endpoint: must be an http") as caught:
        params.parse(changed(corpus__stack__endpoint=address))
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:9000", "https://store.example/s3/"])
def test_a_plain_address_is_let_through(address):
    assert params.parse(changed(corpus__stack__endpoint=address)).corpus.stack.endpoint == address


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("gate: [")
    with pytest.raises(UserError, match=r"params\.yaml: not valid YAML"):
        params.load(path)
    with pytest.raises(UserError, match="not found"):
        params.load(tmp_path / "other.yaml")


def test_a_stage_stops_before_any_work(tmp_path):
    project = tiny.project(tmp_path)
    raw = tiny.plain_params()
    raw["gate"]["rate"] = 3
    tiny.write_params(project, raw)
    done = tiny.stage(project, "corpus", check=False)
    assert done.returncode == 1
    assert "error: params.yaml:\n  gate.rate: must be between 0 and 1, is 3" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "data").exists()
