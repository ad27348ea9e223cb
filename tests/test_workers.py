"""Real Ray: the same bytes whoever did the work, and nothing lost when somebody dies."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import polars as pl
import psutil
import pytest
import tiny
from tqdm import tqdm

from ponderttt import cores, files, hidden, params, shards, workers
from ponderttt.errors import UserError

pytestmark = pytest.mark.ray


def settings(**changes):
    raw = tiny.plain_params()
    raw["ray"] |= changes
    return params.parse(raw).ray


def folder_bytes(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def set_workers(project, **changes):
    raw = tiny.plain_params()
    raw["ray"] |= changes
    tiny.write_params(project, raw)


@pytest.mark.parametrize("count", [1, 2])
def test_scores_and_hidden_states_are_the_same_bytes_for_any_workers(copied, count):
    before = {n: folder_bytes(copied / "data" / n) for n in ("hidden", "scores", "tokens")}
    set_workers(copied, workers=count)
    for stage in (("hidden", "tiny"), ("scores", "tiny", "0")):
        shutil.rmtree(copied / "data" / stage[0])
        tiny.stage(copied, *stage)
    assert {n: folder_bytes(copied / "data" / n) for n in before} == before


# What follows drives the pool from this process, with work slow enough to be disturbed.


def slow_start(folder, settings, seconds, log):
    """The real work on hidden states, with time to be killed between its two halves."""
    work = hidden.start(folder, settings)

    def slow(shard):
        with (log / f"{shard.out.parent.name}-{shard.out.name}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        return work(shard)

    return slow


def failing_start():
    def fail(_):
        raise ZeroDivisionError("of our own making")

    return fail


@pytest.fixture
def in_project(copied, monkeypatch):
    from ray import cloudpickle

    monkeypatch.chdir(copied)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield copied
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def slow_run(project, log, **changes):
    """Map slow work over the project's shards; the folder it wrote."""
    log.mkdir()
    out = project / "data/.work/slow"
    todo = hidden.list_shards(Path("data/chunks/scale=tiny"), out)
    start = partial(
        slow_start,
        Path("data/backbone/scale=tiny"),
        params.parse(tiny.plain_params()).hidden,
        0.2,
        log,
    )
    with tqdm(disable=True) as bar:
        workers.run(start, todo, settings(workers=2, **changes), bar)
    return out


def wanted_hidden(project):
    return folder_bytes(project / "data/hidden/scale=tiny")


def without_leftovers(folder):
    return {p: c for p, c in folder_bytes(folder).items() if not p.name.endswith(".tmp")}


def kill_first_worker(log):
    """Wait until a worker is in the middle of its second shard, then kill it."""
    while True:
        for path in log.glob("*"):
            pids = path.read_text().split()
            done = sum(pids[:1] == other.read_text().split()[:1] for other in log.glob("*"))
            if pids and done >= 2:
                os.kill(int(pids[0]), signal.SIGKILL)
                return
        time.sleep(0.02)


def test_a_killed_actor_costs_nothing(in_project, tmp_path):
    log = tmp_path / "log"
    killer = threading.Thread(target=kill_first_worker, args=(log,), daemon=True)
    killer.start()
    out = slow_run(in_project, log)
    killer.join(timeout=1)
    assert not killer.is_alive()
    assert without_leftovers(out) == wanted_hidden(in_project)
    repeated = [path for path in log.glob("*") if len(path.read_text().split()) > 1]
    assert len(repeated) == 1


def test_a_worker_that_always_dies_is_given_up(in_project, tmp_path):
    def suicide():
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        tqdm(disable=True) as bar,
        pytest.raises(UserError, match=r"the worker of one died 2 times.*raise ray\.max_retries"),
    ):
        workers.run(suicide, ["one"], settings(workers=1, max_retries=1), bar)


def test_our_own_exception_is_not_retried_and_comes_with_its_traceback(in_project):
    with tqdm(disable=True) as bar, pytest.raises(UserError) as caught:
        workers.run(failing_start, ["shard 7", "shard 8"], settings(workers=1), bar)
    message = str(caught.value)
    assert "a worker failed on shard 7" in message
    assert "ZeroDivisionError" in message
    assert "of our own making" in message


def test_a_failure_names_its_chunks(in_project):
    def break_in():
        with shards.naming(["abc-0001", "abc-0002"]):
            raise RuntimeError("broken")

    with tqdm(disable=True) as bar, pytest.raises(UserError, match="chunks abc-0001, abc-0002"):
        workers.run(break_in, ["one"], settings(workers=1), bar)


def test_a_request_that_cannot_be_met_shows_asked_and_available(in_project):
    with (
        tqdm(disable=True) as bar,
        pytest.raises(
            UserError, match=r"64 workers ask for 64 CPU, 0 GPU; the cluster has \d+ CPU"
        ),
    ):
        workers.run(failing_start, ["one"], settings(workers=64), bar)


def test_a_dead_address_is_told(in_project):
    with (
        tqdm(disable=True) as bar,
        pytest.raises(UserError, match=r"nothing answers at 127\.0\.0\.1:9 .*ray start --head"),
    ):
        workers.run(failing_start, ["one"], settings(workers=1, address="127.0.0.1:9"), bar)


def test_two_nodes_and_one_is_lost(in_project, tmp_path):
    from ray.cluster_utils import Cluster

    log = tmp_path / "log"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()

        def remove():
            while len(list(log.glob("*"))) < 3:
                time.sleep(0.02)
            cluster.remove_node(second, allow_graceful=False)

        remover = threading.Thread(target=remove, daemon=True)
        remover.start()
        # One worker can go on alone when the other's node is gone.
        out = slow_run(in_project, log, address=cluster.address, max_retries=3)
        remover.join(timeout=30)
        assert not remover.is_alive()
    finally:
        cluster.shutdown()
    assert without_leftovers(out) == wanted_hidden(in_project)


def test_a_node_without_the_project_folder_says_so(tmp_path):
    with pytest.raises(UserError, match=r"does not see the project folder .*every node mounts"):
        workers.enter(str(tmp_path), 1)


# What follows kills whole stages from outside.


def start_stage(project, *args):
    command = [sys.executable, "-m", f"stages.{args[0]}", *args[1:]]
    return subprocess.Popen(
        command,
        cwd=project,
        env=tiny.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill_when(process, condition):
    """SIGKILL the driver as soon as `condition` holds."""
    while not condition():
        assert process.poll() is None, "the stage ended before it could be killed"
        time.sleep(0.005)
    process.kill()
    process.wait()


def finished(project, stage, suffix):
    return {
        path: path.stat().st_mtime_ns
        for path in (project / "data/.work").glob(f"{stage}-*/**/*{suffix}")
        if not path.name.startswith(".")
    }


@pytest.mark.parametrize(
    ("stage", "suffix"),
    [(("hidden", "tiny"), ".safetensors"), (("scores", "tiny", "0"), ".parquet")],
)
def test_a_killed_driver_resumes_and_redoes_no_shard(copied, stage, suffix):
    name = stage[0]
    before = folder_bytes(copied / "data" / name)
    shutil.rmtree(copied / "data" / name)
    process = start_stage(copied, *stage)
    kill_when(process, lambda: len(finished(copied, name, suffix)) >= 2)
    kept = finished(copied, name, suffix)
    assert not (copied / "data" / name).exists()
    times = {path.name + path.parent.name: when for path, when in kept.items()}
    tiny.stage(copied, *stage)
    assert folder_bytes(copied / "data" / name) == before
    after = {
        p.name + p.parent.name: p.stat().st_mtime_ns for p in (copied / "data").rglob(f"*{suffix}")
    }
    assert times.items() <= after.items()


def test_a_killed_training_driver_resumes_to_the_same_bits(copied):
    layer = copied / "data/ttt/scale=tiny/seed=0/layer.safetensors"
    before = layer.read_bytes()
    shutil.rmtree(copied / "data/ttt")
    process = start_stage(copied, "ttt", "tiny", "0")
    kill_when(process, lambda: finished(copied, "ttt", "checkpoint.safetensors"))
    assert not layer.exists()
    tiny.stage(copied, "ttt", "tiny", "0")
    assert layer.read_bytes() == before


def history(project):
    path = project / "data/ttt/scale=tiny/seed=0/history.parquet"
    return pl.read_parquet(path).select("ce", "recon", "grad_norm").to_numpy()


def train_processes():
    return [
        p for p in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in str(p.info["cmdline"])
    ]


def test_two_ranks_train_like_one_and_survive_a_kill(copied):
    """Two ranks give the losses of one; a killed rank changes no bit of the result."""
    one = history(copied)
    layer = copied / "data/ttt/scale=tiny/seed=0/layer.safetensors"
    set_workers(copied, workers=2)
    shutil.rmtree(copied / "data/ttt")
    tiny.stage(copied, "ttt", "tiny", "0")
    two, undisturbed = history(copied), layer.read_bytes()
    assert abs(one - two).max() <= 1e-4
    shutil.rmtree(copied / "data/ttt")
    process = start_stage(copied, "ttt", "tiny", "0")
    while not train_processes():
        assert process.poll() is None
        time.sleep(0.05)
    train_processes()[-1].kill()
    assert process.wait(timeout=300) == 0
    assert layer.read_bytes() == undisturbed


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def test_a_full_disk_is_told_and_leaves_nothing_half_written(copied):
    shutil.rmtree(copied / "data/hidden")
    done = subprocess.run(
        [sys.executable, "-m", "stages.hidden", "tiny"],
        cwd=copied,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit_files,
    )
    assert done.returncode == 1
    assert "cannot be written: the file is larger than this system allows" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (copied / "data/hidden").exists()
    left = [p for p in (copied / "data/.work").rglob("*") if p.suffix in (".tmp", ".safetensors")]
    assert left == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte, where it may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_really_full_disk_keeps_finished_shards(copied, small_disk):
    shutil.rmtree(copied / "data/hidden")
    (copied / "data/.work").mkdir(exist_ok=True)
    (copied / "data/.work").rmdir()
    (copied / "data/.work").symlink_to(small_disk)
    done = tiny.stage(copied, "hidden", "tiny", check=False)
    assert done.returncode == 1
    assert "no space left on the disk; free some and run `dvc repro` again" in done.stderr
    kept = list(small_disk.rglob("*.safetensors"))
    assert kept
    for path in kept:
        shards.read(path)
    assert not list(small_disk.rglob(".*.tmp"))


def test_a_read_only_folder_is_told(copied, small_disk):
    shutil.rmtree(copied / "data/hidden")
    (copied / "data/.work").rmdir()
    (copied / "data/.work").symlink_to(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = tiny.stage(copied, "hidden", "tiny", check=False)
    assert done.returncode == 1
    assert "the disk is read-only; mount it for writing" in done.stderr


def test_cores_are_split_as_told():
    count = len(os.sched_getaffinity(0))
    one = cores.split_cores(settings(workers="auto", threads=1))
    assert one == cores.Split(workers=count if count > 1 else 0, threads=1, gpus=0)
    assert cores.split_cores(settings(workers=3, threads=2)).workers == 3
    whole = cores.split_cores(settings(workers="auto", threads=count))
    assert whole == cores.Split(workers=0, threads=count, gpus=0)
    trial = cores.split_cores(settings(workers="auto", threads="auto"))
    assert max(1, trial.workers) * trial.threads == count


def test_publishing_drops_what_a_killed_worker_left(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "a").mkdir(parents=True)
    (work / "a/.part.1.tmp").write_text("half")
    (work / "a/part").write_text("whole")
    files.publish(work, out)
    assert folder_bytes(out) == {Path("a/part"): b"whole"}
