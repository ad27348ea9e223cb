"""How tests disturb a run: other workers, lost nodes, killed processes, full disks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import psutil
import tiny
from safetensors import safe_open
from tqdm import tqdm

from ponderttt import hidden, params, ray_pool, shards

STEPS = 150  # of a training run that is long enough to be disturbed


def settings(**changes):
    raw = tiny.plain_params()
    raw["ray"] |= changes
    return params.parse(raw).ray


def folder_bytes(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def set_workers(project, steps=None, **changes):
    raw = tiny.plain_params()
    raw["ray"] |= changes
    if steps:
        raw["budgets"]["smoke"]["steps"] = steps
    tiny.write_params(project, raw)


def without_leftovers(folder):
    return {p: c for p, c in folder_bytes(folder).items() if not p.name.endswith(".tmp")}


class TwoNodes:
    """`two_nodes.py`, driven through its standard input."""

    def __init__(self, log, **environment):
        script = Path(__file__).with_name("two_nodes.py")
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | environment,
            text=True,
            start_new_session=True,
        )
        self.address = self._process.stdout.readline().strip()
        assert self.address, log.read_text()

    def lose_one(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "removed\n"

    def stop(self):
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._log.close()


def start_repro(project, name):
    """`dvc repro` of a stage whose script has changed; the processes of dvc and of the stage."""
    script = project / f"stages/{name.partition('@')[0]}.py"
    script.write_text(script.read_text() + "# changed\n")
    return subprocess.Popen(
        [str(Path(sys.executable).parent / "dvc"), "repro", name],
        cwd=project,
        env=tiny.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def driver_of(process):
    """The stage's own process, as soon as dvc has started it."""
    while True:
        assert process.poll() is None, "dvc ended before the stage began"
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.cmdline()[1:2] == ["-m"] and child.cmdline()[2].startswith("stages."):
                    return child
        time.sleep(0.02)


def kill_when(process, condition):
    """SIGKILL the stage that dvc runs as soon as `condition` holds; dvc fails with it."""
    driver = driver_of(process)
    while not condition():
        assert driver.is_running(), "the stage ended before it could be killed"
        time.sleep(0.005)
    driver.kill()
    assert process.wait(timeout=60) != 0


def finished(project, stage, suffix):
    """Modification times of finished shards, by their path below the work folder."""
    (work,) = (project / "data/.work").glob(f"{stage}@*-*")
    return {
        path.relative_to(work): path.stat().st_mtime_ns
        for path in work.rglob(suffix if "*" in suffix else f"*{suffix}")
        if not path.name.startswith(".")
    }


def some_finished(project, stage, suffix, count):
    return any((project / "data/.work").glob(f"{stage}@*-*")) and (
        len(finished(project, stage, suffix)) >= count
    )


def published(stage, path):
    """Where a file of the work folder of `hidden` or `scores` ends up below data/."""
    if stage == "hidden":
        return Path("hidden/scale=tiny", path)
    return Path(path.parts[0], "scale=tiny/seed=0", *path.parts[1:])


def checkpointed(project):
    """The measured speed of every step in the checkpoint of a run that is not finished."""
    (work,) = (project / "data/.work").glob("ttt@*-*")
    with safe_open(work / "checkpoint.safetensors", framework="pt") as file:
        history = json.loads(file.metadata()[shards.NOTES])["history"]
    return [row["tokens_per_second"] for row in history]


class Trained(NamedTuple):
    """A finished training run: its layer, its losses, and the measured speed of every step,
    which is never the same again."""

    layer: bytes
    losses: np.ndarray
    speeds: list[float]


def trained(project):
    folder = project / "data/ttt/scale=tiny/seed=0"
    history = pl.read_parquet(folder / "history.parquet")
    return Trained(
        layer=(folder / "layer.safetensors").read_bytes(),
        losses=history.select("ce", "recon", "grad_norm").to_numpy(),
        speeds=history["tokens_per_second"].to_list(),
    )


def press_ctrl_c(process):
    """As a terminal does it: everybody of the stage hears it."""
    for everybody in (process, *psutil.Process(process.pid).children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            everybody.send_signal(signal.SIGINT)


# Slow work for the pool, driven from a test's own process.


def slow_start(folder, settings, seconds, log):
    """The real work on hidden states, with time to be killed between its two files."""
    work, write = hidden.start(folder, settings), shards.write

    def late(*args):
        time.sleep(seconds)
        write(*args)

    shards.write = late  # in the worker's process

    def told(shard):
        with (log / f"{shard.out.parent.name}-{shard.out.name}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return work(shard)

    return told


def failing_start():
    def fail(_):
        raise ZeroDivisionError("of our own making")

    return fail


def slow_run(project, log, seconds=0.2, **changes):
    """Map slow work over the project's shards; the folder it wrote."""
    log.mkdir()
    out = project / "data/.work/slow"
    todo = hidden.list_shards(Path("data/chunks/scale=tiny"), out)
    start = partial(
        slow_start,
        Path("data/backbone/scale=tiny"),
        params.parse(tiny.plain_params()).hidden,
        seconds,
        log,
    )
    with tqdm(disable=True) as bar:
        ray_pool.run(start, todo, settings(**{"workers": 2} | changes), bar)
    return out


def wanted_hidden(project):
    return folder_bytes(project / "data/hidden/scale=tiny")
