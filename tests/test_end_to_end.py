"""The four daily commands on a tiny project: real git, real DVC, every stage."""

import json

import polars as pl
import pytest
import tiny
import yaml


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """A project under git and DVC after its first `dvc repro`."""
    folder = tiny.project(tmp_path_factory.mktemp("daily"))
    (folder / ".gitignore").write_text("/data\n__pycache__\n")
    for command in (
        ("git", "init", "-q"),
        ("git", "config", "user.email", "tests@example.org"),
        ("git", "config", "user.name", "tests"),
        ("dvc", "init", "-q"),
        ("dvc", "repro"),
        ("git", "add", "."),
        ("git", "commit", "-qm", "first run"),
    ):
        tiny.run(folder, *command)
    return folder


def test_every_artifact_is_there(reproduced):
    for name in ("corpus", "backbone", "chunks", "hidden", "ttt", "scores", "gate", "metrics"):
        assert any((reproduced / "data" / name).rglob("*.*")), name
    metrics = json.loads((reproduced / "metrics/metrics.json").read_text())
    assert set(metrics["tiny"]) == {"python", "javascript"}
    assert (reproduced / "metrics/report.html").read_text().startswith("<!doctype html>")


def test_a_second_repro_has_nothing_to_do(reproduced):
    done = tiny.run(reproduced, "dvc", "repro")
    assert "Running stage" not in done.stdout
    assert "up to date" in done.stdout


def test_an_experiment_reruns_only_what_it_must(reproduced):
    before = json.loads((reproduced / "metrics/metrics.json").read_text())
    done = tiny.run(reproduced, "dvc", "exp", "run", "-S", "gate.rate=0.7")
    ran = [
        line.split("'")[1] for line in done.stdout.splitlines() if line.startswith("Running stage")
    ]
    assert ran == ["gate", "metrics", "report"]
    after = json.loads((reproduced / "metrics/metrics.json").read_text())
    assert after != before
    shown = json.loads(tiny.run(reproduced, "dvc", "metrics", "diff", "--json").stdout)
    changed = shown["metrics/metrics.json"]
    assert "tiny.python.rate" in changed
    assert yaml.safe_load((reproduced / "params.yaml").read_text())["gate"]["rate"] == 0.7


def test_changed_code_is_noticed(reproduced):
    path = reproduced / "ponderttt/ttt.py"
    text = path.read_text()
    path.write_text(text + "\n# changed\n")
    status = json.loads(tiny.run(reproduced, "dvc", "status", "--json").stdout)
    path.write_text(text)
    assert {name.split("@")[0] for name in status} >= {"ttt", "scores"}
    assert not any(name.startswith(("corpus", "chunks", "hidden")) for name in status)


def test_one_query_over_the_scores(reproduced):
    loss = (
        pl.scan_parquet(reproduced / "data/scores")
        .filter(variant="plain")
        .group_by("language")
        .agg(pl.col("nll_update").sum() / pl.col("n_predicted").sum(), pl.len())
        .sort("language")
        .collect()
    )
    assert loss["language"].to_list() == ["javascript", "python"]
    assert loss["nll_update"].is_finite().all()
