import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import tiny

from ponderttt import doctor, params

SECRET = "hf_" + "planted" * 5


def settings_with(**changes):
    raw = tiny.plain_params()
    for section, values in changes.items():
        raw[section] |= values
    return params.parse(raw)


def run_doctor(folder, *arguments):
    return tiny.run(folder, sys.executable, "-m", "ponderttt", "doctor", *arguments, check=False)


def states(done):
    return {check["name"]: check["state"] for check in json.loads(done.stdout)}


def test_a_bare_folder_is_sent_to_the_remedies(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tiny.ROOT))
    done = run_doctor(tmp_path, "--json")
    assert done.returncode == 1
    found = states(done)
    assert [found[name] for name in ("git", "dvc", "params")] == ["fail"] * 3
    for check in json.loads(done.stdout):
        assert check["remedy"] or check["state"] == "ok", check


def test_a_whole_project_passes(tmp_path):
    folder = tiny.project(tmp_path / "project")
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"]
    tiny.run(folder, "git", "init", "-q")
    assert states(run_doctor(folder, "--json"))["git"] == "fail"  # no commit yet
    tiny.run(folder, "dvc", "init", "-q")
    tiny.run(folder, "git", "add", "params.yaml", "dvc.yaml")
    tiny.run(folder, "git", *commit)
    done = run_doctor(folder)
    assert done.returncode == 0, done.stdout
    for line in ("ok    git: commit", "ok    ray: not used", "ok    hub: not needed; token"):
        assert line in done.stdout


def test_a_full_disk_is_foreseen(scored, monkeypatch):
    monkeypatch.chdir(scored)
    raw = tiny.plain_params()
    raw["budgets"]["smoke"]["train_chunks"] = 10**12
    disk, *_ = doctor.resources(params.parse(raw))
    assert disk.state == "fail"
    assert "hidden.dtype" in disk.remedy
    assert {check.state for check in doctor.resources(settings_with())} == {"ok"}


@pytest.mark.parametrize(
    ("ray", "state", "found"),
    [
        ({"workers": 0}, "ok", "not used"),
        ({"workers": 10_000}, "fail", "10000 workers of 1 threads"),
        ({"workers": 1, "address": "127.0.0.1:1"}, "fail", "no cluster answers"),
    ],
)
def test_ray_is_checked_without_being_started(ray, state, found):
    (check,) = doctor.ray(settings_with(ray=ray))
    assert check.state == state
    assert found in check.found
    assert bool(check.remedy) == (state == "fail")


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does about repositories that are open, gated, missing or down."""

    def do_GET(self):
        name = self.path.split("/")[4]
        code, error = {
            "open": (200, ""),
            "gated": (403, "GatedRepo"),
            "missing": (404, "RepoNotFound"),
            "down": (500, ""),
        }[name]
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()

    def log_message(self, *_):
        """Stay silent."""


def test_the_hub_is_asked_and_no_token_is_shown():
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = (
        "from ponderttt import doctor\n"
        "for name in ('open', 'gated', 'missing', 'down'):\n"
        "    print(doctor.line(doctor.reach(f'someone/{name}', 'model', 'present')))\n"
    )
    address = f"http://127.0.0.1:{server.server_port}"
    more = {"HF_ENDPOINT": address, "HF_TOKEN": SECRET, "PYTHONPATH": str(tiny.ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | more | {"HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    server.shutdown()
    marks = [line[:4] for line in done.stdout.splitlines() if line[:4].strip()]
    assert marks == ["ok  ", "FAIL", "FAIL", "FAIL"], done.stdout + done.stderr
    for words in ("may be read", "accept the terms", "correct the name", "no answer (HfHub"):
        assert words in done.stdout
    assert SECRET not in done.stdout + done.stderr
    assert address not in done.stdout


def test_a_model_that_is_only_on_the_hub_needs_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    raw = tiny.plain_params()
    raw["scales"]["tiny"]["name"] = "someone/model"
    (check,) = doctor.hub(params.parse(raw))
    assert (check.name, check.state) == ("hub someone/model", "fail")
    assert "HF_HUB_OFFLINE" in check.remedy
