"""How tests disturb a run: other workers, lost nodes, killed processes, full disks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
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

from ponderttt import hidden, params, ray_pool, scores, shards, tables

STEPS = 150  # of a training run that is long enough to be disturbed


def settings(**changes):
    raw = tiny.plain_params()
    raw["ray"] |= changes
    return params.parse(raw).ray


def wait_until(condition, alive=lambda: True, seconds=300.0):
    """Look often; `alive` says whether it can still come to pass. What the condition found."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert alive(), "it ended too early"
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)
    return found


@contextlib.contextmanager
def meanwhile(action):
    """Do something in a thread beside the block; it must have come to its end by the block's."""
    failures = []

    def run():
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - told when the block ends
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert not failures, failures


@contextlib.contextmanager
def started(*command, **options):
    """A process that does not outlive the block; what it started ends with it."""
    process = subprocess.Popen(
        command, **{"env": tiny.environment(), "stdout": subprocess.DEVNULL} | options
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


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

    def __init__(self, log, cpus=1, gpus=0, **environment):
        script = Path(__file__).with_name("two_nodes.py")
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(cpus), str(gpus)],
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
        try:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed next
                self._process.wait(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._log.close()


def hold_cpus(count):
    """Take so many CPUs of the cluster that this process has joined, as others' work does."""
    import ray

    class Other:
        def here(self):
            pass

    others = [ray.remote(num_cpus=1)(Other).remote() for _ in range(count)]
    ray.get([other.here.remote() for other in others])
    return others


def repro(project, name):
    """`dvc repro` of a stage whose script has changed."""
    script = project / f"stages/{name.partition('@')[0]}.py"
    script.write_text(script.read_text() + "# changed\n")
    dvc = str(Path(sys.executable).parent / "dvc")
    return started(dvc, "repro", name, cwd=project, stderr=subprocess.DEVNULL)


def children_of(process, wanted):
    """What `process` started, itself or through others, and whose command line is as `wanted`."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if wanted(child.cmdline()):
                found.append(child)
    return found


def driver_of(process):
    """The stage's own process, as soon as dvc has started it."""

    def find():
        return children_of(process, lambda line: line[1:2] == ["-m"] and "stages." in line[2])

    return wait_until(find, lambda: process.poll() is None)[0]


def kill_when(process, condition):
    """SIGKILL the stage that dvc runs as soon as `condition` holds; dvc fails with it."""
    driver = driver_of(process)
    wait_until(condition, driver.is_running)
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


def slow(work, module, seconds, log):
    """Real work on shards that says who began which, and takes its time before each write."""
    write = module.write

    def late(*args):
        time.sleep(seconds)
        write(*args)

    if seconds:
        module.write = late  # in the worker's process

    def told(shard):
        with (log / shard_name(shard)).open("a") as file:
            file.write(f"{os.getpid()}\n")
        return work(shard)

    return told


def shard_name(shard):
    return place_name(shard.out if isinstance(shard, hidden.Shard) else shard.out("scores"))


def place_name(path):
    """A file of a shard as one name, without its ending."""
    return f"{path.parent.parent.name}-{path.parent.name}-{path.stem}"


def failing_start():
    def fail(_):
        raise ZeroDivisionError("of our own making")

    return fail


def slow_hidden(chosen, *how):
    return slow(hidden.start(Path("data/backbone/scale=tiny"), chosen.hidden), shards, *how)


def slow_scores(chosen, *how):
    layer, limit = Path("data/ttt/scale=tiny/seed=0"), chosen.hidden.max_logits_mb
    model = Path("data/backbone/scale=tiny")
    return slow(scores.start(model, layer, chosen.scores, "chunk", limit), tables, *how)


def slow_run(stage, log, seconds=0.2, **changes):
    """Map slow work over the project's shards of `hidden` or `scores`; the folder it wrote."""
    log.mkdir()
    chunks, out = Path("data/chunks/scale=tiny"), Path(f"data/.work/{log.name}")
    raw = tiny.plain_params()
    raw["scores"]["token_chunks"] = 1000  # so that every shard of scores has two files
    chosen = params.parse(raw)
    if stage == "hidden":
        begin, todo = slow_hidden, hidden.list_shards(chunks, out)
    else:
        languages, shuffled = chosen.run.languages, chosen.chunks.shuffled
        kept = Path("data/hidden/scale=tiny")
        begin = slow_scores
        todo = scores.list_shards(chunks, kept, out, languages, shuffled, chosen.scores)
    with tqdm(disable=True) as bar:
        how = settings(**{"workers": 2} | changes)
        ray_pool.run(partial(begin, chosen, seconds, log), todo, how, bar)
    return out


def wanted_hidden(project):
    return folder_bytes(project / "data/hidden/scale=tiny")
