"""The plot files, and DVC drawing them with the project's templates."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import synthetic
import yaml
from test_metrics import small_view

from ponderttt import gate, metrics, plots, streams

ROOT = Path(__file__).parents[1]
NOBODY = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
DRAWN = {
    "loss_rate.csv": {"template": "curves", "x": "rate", "y": "loss"},
    "signal_advantage.csv": {"template": "points", "x": "signal", "y": "advantage"},
    "threshold.csv": {"template": "traces", "x": "order", "y": "threshold"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Plots of synthetic scores."""
    folder, view = tmp_path_factory.mktemp("made"), small_view(resamples=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        synthetic.write_all(streams.SCORES, view, chunks=3000)
        gate.make(view)
        metrics.make(view)
    return SimpleNamespace(folder=folder, view=view)


def lines(made: SimpleNamespace, name: str) -> list[dict[str, str]]:
    with (made.folder / plots.FOLDER / name).open() as file:
        return list(csv.DictReader(file))


def test_files_are_small_and_headed(made: SimpleNamespace) -> None:
    for name in DRAWN:
        path = made.folder / plots.FOLDER / name
        assert 1000 < path.stat().st_size < 200_000
    assert set(lines(made, "loss_rate.csv")[0]) == set(plots.CURVE)
    assert set(lines(made, "signal_advantage.csv")[0]) == set(plots.SIGNAL)
    assert set(lines(made, "threshold.csv")[0]) == set(plots.TRACE)


def test_curves_have_every_rate_of_every_language(made: SimpleNamespace) -> None:
    found = {(r["language"], r["policy"], r["target"]) for r in lines(made, "loss_rate.csv")}
    languages = made.view.run.languages
    assert len(found) == len(languages) * 3 * 9
    loss = {
        (r["policy"], r["target"]): float(r["loss"])
        for r in lines(made, "loss_rate.csv")
        if r["language"] == "python"
    }
    for rate in ("0.3", "0.5", "0.7"):
        assert loss["oracle", rate] < loss["gate", rate] < loss["random", rate]


def test_points_are_those_of_the_stream(made: SimpleNamespace) -> None:
    stream = streams.read(streams.keys(made.view)[0], made.folder / streams.SCORES)
    rows = [r for r in lines(made, "signal_advantage.csv") if r["language"] == "python"]
    places = plots.spread(len(stream), len(rows))
    assert len(places) == len(rows) > 100
    for place, row in zip(places, rows, strict=True):
        assert float(row["signal"]) == pytest.approx(stream.signals["recon"][place])
        assert float(row["advantage"]) == pytest.approx(stream.advantage("skip")[place])


def test_thresholds_start_after_the_calibration(made: SimpleNamespace) -> None:
    rows = [r for r in lines(made, "threshold.csv") if r["language"] == "go"]
    assert rows[0]["order"] == str(made.view.gate.calibration_chunks)
    assert float(rows[0]["rate"]) == made.view.gate.rate


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_dvc_draws_them_with_our_templates(made: SimpleNamespace, tmp_path: Path) -> None:
    dvc = str(Path(sys.executable).with_name("dvc"))
    run(tmp_path, "git", "init", "-q")
    run(tmp_path, dvc, "init", "-q")
    shutil.copytree(ROOT / ".dvc/plots", tmp_path / ".dvc/plots")
    shutil.copytree(made.folder / plots.FOLDER, tmp_path / plots.FOLDER)
    outs = [{f"{plots.FOLDER}/{n}": {"cache": False} | how} for n, how in DRAWN.items()]
    stage = {"cmd": "true", "plots": outs}
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"metrics": stage}}))
    run(tmp_path, "git", "add", ".")
    run(tmp_path, "git", *NOBODY, "commit", "-qm", "plots")
    drawn = json.loads(run(tmp_path, dvc, "plots", "show", "--json"))["data"]
    assert len(drawn) == 3
    for name, how in DRAWN.items():
        (plot,) = drawn[f"{plots.FOLDER}/{name}"]
        text = json.dumps(plot["content"])
        assert "<DVC_METRIC" not in text  # nothing is left to fill in
        assert f'"field": "{how["y"]}"' in text
        assert len(plot["content"]["data"]["values"]) == len(lines(made, name))
