"""Real Ray: the same bytes whoever did the work, and nothing lost when somebody dies."""

import contextlib
import json
import math
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
from safetensors import safe_open
from tqdm import tqdm

from ponderttt import cores, files, hidden, params, shards, stage, tables, workers
from ponderttt.errors import UserError

pytestmark = pytest.mark.ray


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


@pytest.mark.parametrize("count", [1, 2])
def test_scores_and_hidden_states_are_the_same_bytes_for_any_workers(copied, count):
    before = {n: folder_bytes(copied / "data" / n) for n in ("hidden", "scores", "tokens")}
    set_workers(copied, workers=count)
    for names in (("hidden", "tiny"), ("scores", "tiny", "0")):
        shutil.rmtree(copied / "data" / names[0])
        tiny.stage(copied, *names)
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
        workers.run(start, todo, settings(**{"workers": 2} | changes), bar)
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


def dying_start(folder, settings, log):
    """The real work, by a worker that dies once after its shard is there, before it says so."""
    work = hidden.start(folder, settings)

    def die(shard):
        done = work(shard)
        if not log.exists():
            log.write_text(f"{shard.hidden.stat().st_mtime_ns} {shard.hidden}")
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    return die


def test_a_shard_finished_by_a_worker_that_died_is_not_done_again(in_project, tmp_path):
    log = tmp_path / "log"
    todo = hidden.list_shards(Path("data/chunks/scale=tiny"), Path("data/.work/dying"))
    chosen = params.parse(tiny.plain_params()).hidden
    start = partial(dying_start, Path("data/backbone/scale=tiny"), chosen, log)
    with tqdm() as bar:
        workers.run(start, todo, settings(workers=1), bar)
        assert bar.n == sum(tables.count(shard.chunks) for shard in todo)
    when, path = log.read_text().split(" ", 1)
    assert Path(path).stat().st_mtime_ns == int(when)
    assert without_leftovers(Path("data/.work/dying")) == wanted_hidden(in_project)


def test_a_worker_that_always_dies_is_given_up(in_project, tmp_path):
    def suicide():
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        tqdm(disable=True) as bar,
        pytest.raises(
            UserError, match=r"the worker of one died 2 times.*or raise ray\.max_retries"
        ),
    ):
        workers.run(suicide, ["one"], settings(workers=1, max_retries=1), bar)


def test_no_set_mixes_shards_of_two_kinds_of_device(in_project):
    chunks, out = Path("data/chunks/scale=tiny"), Path("data/hidden/scale=tiny")
    assert hidden.made_on([]) == ""
    earlier = hidden.made_on(hidden.list_shards(chunks, out))
    assert earlier == "cpu"
    model, chosen = Path("data/backbone/scale=tiny"), params.parse(tiny.plain_params()).hidden
    assert hidden.start(model, chosen, earlier)
    with pytest.raises(UserError, match=r"computes on cpu, but its finished .* made on cuda"):
        hidden.start(model, chosen, "cuda")


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
    began = time.perf_counter()
    with (
        tqdm(disable=True) as bar,
        pytest.raises(
            UserError,
            match=r"64 workers ask for 64 CPU, 0 GPU; the cluster has \d+ CPU, 0 GPU on 1 nodes",
        ),
    ):
        workers.run(failing_start, ["one"], settings(workers=64), bar)
    assert time.perf_counter() - began < 10  # seconds are what is promised here


def test_a_dead_address_is_told(in_project):
    with (
        tqdm(disable=True) as bar,
        pytest.raises(UserError, match=r"nothing answers at 127\.0\.0\.1:9 .*ray start --head"),
    ):
        workers.run(failing_start, ["one"], settings(workers=1, address="127.0.0.1:9"), bar)


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


@pytest.fixture
def two_nodes(tmp_path):
    cluster = TwoNodes(tmp_path / "cluster.log")
    yield cluster
    cluster.stop()


def test_a_cluster_that_asks_for_a_token(copied, tmp_path, monkeypatch):
    """Ray asks for one as soon as its head finds a token, and never sends one by itself."""
    key = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    monkeypatch.setenv("HOME", str(tmp_path))  # where no token is
    for name in key:
        monkeypatch.delenv(name, raising=False)
    cluster = TwoNodes(tmp_path / "cluster.log", **key)
    try:
        set_workers(copied, workers="auto", address=cluster.address)
        shutil.rmtree(copied / "data/hidden")
        refused = tiny.stage(copied, "hidden", "tiny", check=False)
        for name, text in key.items():
            monkeypatch.setenv(name, text)
        let_in = tiny.stage(copied, "hidden", "tiny")
    finally:
        cluster.stop()
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "does not let us in" in refused.stderr
    assert "export RAY_AUTH_MODE=token" in refused.stderr
    assert key["RAY_AUTH_TOKEN"] not in refused.stderr + let_in.stderr


def test_two_nodes_and_one_is_lost(in_project, tmp_path, two_nodes):
    log = tmp_path / "log"

    def remove():
        while len(list(log.glob("*"))) < 3:
            time.sleep(0.02)
        two_nodes.lose_one()

    remover = threading.Thread(target=remove, daemon=True)
    remover.start()
    # Half of `auto`'s two workers can go on alone, while the other's successor finds no place.
    out = slow_run(
        in_project, log, seconds=0.6, workers="auto", address=two_nodes.address, max_retries=3
    )
    remover.join(timeout=30)
    assert not remover.is_alive()
    # Somebody began a shard again, so the node had a worker, and lost it in the middle.
    assert any(len(path.read_text().splitlines()) == 2 for path in log.glob("*"))
    assert without_leftovers(out) == wanted_hidden(in_project)


def test_training_goes_on_with_the_node_that_is_left(copied, two_nodes):
    """`auto` takes a rank on each node; when one is lost, one rank goes on from the checkpoint."""
    set_workers(copied, workers="auto", address=two_nodes.address, steps=150)
    shutil.rmtree(copied / "data/ttt")
    with (copied / "errors.txt").open("w") as errors:
        command = [sys.executable, "-m", "stages.ttt", "tiny", "0"]
        process = subprocess.Popen(command, cwd=copied, env=tiny.environment(), stderr=errors)
        while not some_finished(copied, "ttt", "checkpoint.safetensors", 1):
            assert process.poll() is None
            time.sleep(0.01)
        two_nodes.lose_one()
        assert process.wait(timeout=300) == 0, (copied / "errors.txt").read_text()
    assert "lost or found no place; going on with 1" in (copied / "errors.txt").read_text()
    disturbed = history(copied)
    set_workers(copied, workers=0, steps=150)
    tiny.stage(copied, "ttt", "tiny", "0")
    assert abs(history(copied) - disturbed).max() <= 1e-4


def test_a_wait_for_others_on_the_cluster_is_told(in_project, capsys):
    import ray

    class Other:
        def here(self):
            pass

    with workers.cluster(settings(workers=2)) as split:
        workers.tell_of_wait(split)
        assert "held by other work" not in capsys.readouterr().err
        other = ray.remote(num_cpus=1)(Other).remote()
        ray.get(other.here.remote())
        while ray.available_resources()["CPU"] == cores.here().cpus:
            time.sleep(0.05)
        workers.tell_of_wait(cores.Split(workers=int(cores.here().cpus), threads=1, gpus=0))
        told = capsys.readouterr().err
    assert f"ask for {cores.here().cpus} CPU, 0 GPU; {cores.here().cpus - 1} CPU" in told
    assert "who finds no place waits" in told


def test_a_node_without_the_project_folder_says_so(in_project, tmp_path):
    with workers.cluster(settings(workers=1)):
        workers.check_folder(str(in_project))
        with pytest.raises(UserError, match=r"does not see the project folder .*every node mounts"):
            workers.check_folder(str(tmp_path))
        shutil.copy(in_project / "params.yaml", tmp_path)  # as a node with a clone of its own has
        with pytest.raises(UserError, match=r"does not see the project folder"):
            workers.check_folder(str(tmp_path))
    assert not list((in_project / "data/.work").glob(".seen-*"))


def test_a_shard_that_nobody_wrote_is_never_published(tmp_path):
    shard = hidden.Shard(chunks=Path("part-00000.parquet"), out=tmp_path / "part-00000")
    with pytest.raises(UserError, match=r"1 of 1 shards are not there.*part-00000"):
        stage.check_all_done(tmp_path, [shard])
    shard.hidden.touch()
    shard.base.touch()
    stage.check_all_done(tmp_path, [shard])


# What follows kills whole stages from outside, under dvc.


@pytest.fixture
def tracked(copied):
    """The scored project as DVC knows it after `dvc repro`."""
    (copied / ".dvcignore").write_text("/data/.work\n")
    tiny.run(copied, "dvc", "init", "-q", "--no-scm")
    tiny.run(copied, "dvc", "config", "core.analytics", "false")
    stages = ("corpus", "backbone@tiny", "chunks@tiny", "hidden@tiny", "ttt@tiny-0")
    tiny.run(copied, "dvc", "commit", "-q", "-f", *stages, "scores@tiny-0")
    return copied


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
    (work,) = (project / "data/.work").glob(f"{stage}@*") or [project]
    return {
        path.relative_to(work): path.stat().st_mtime_ns
        for path in work.rglob(suffix if "*" in suffix else f"*{suffix}")
        if not path.name.startswith(".")
    }


def some_finished(project, stage, suffix, count):
    return any((project / "data/.work").glob(f"{stage}@*")) and (
        len(finished(project, stage, suffix)) >= count
    )


def published(stage, path):
    """Where a file of the work folder of `hidden` or `scores` ends up below data/."""
    if stage == "hidden":
        return Path("hidden/scale=tiny", path)
    return Path(path.parts[0], "scale=tiny/seed=0", *path.parts[1:])


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    ("stage", "suffix"),
    [("hidden@tiny", ".safetensors"), ("scores@tiny-0", "scores/*/*/*.parquet")],
)
def test_a_killed_driver_resumes_and_redoes_no_shard(tracked, stage, suffix, count):
    name = stage.partition("@")[0]
    set_workers(tracked, workers=count)
    before = folder_bytes(tracked / "data" / name)
    process = start_repro(tracked, stage)
    kill_when(process, lambda: some_finished(tracked, name, suffix, 2))
    kept = finished(tracked, name, suffix)
    assert not folder_bytes(tracked / "data" / name)
    tiny.run(tracked, "dvc", "repro", stage)
    assert folder_bytes(tracked / "data" / name) == before
    for path, when in kept.items():
        assert (tracked / "data" / published(name, path)).stat().st_mtime_ns == when


@pytest.mark.parametrize("count", [0, 2])
def test_a_killed_training_driver_resumes_to_the_same_bits(tracked, count):
    """The speed of each step is measured, so those of a checkpoint tell whether it was used."""
    folder = tracked / "data/ttt/scale=tiny/seed=0"
    set_workers(tracked, workers=count, steps=60)
    tiny.run(tracked, "dvc", "repro", "ttt@tiny-0")
    before = (folder / "layer.safetensors").read_bytes()
    process = start_repro(tracked, "ttt@tiny-0")
    kill_when(process, lambda: some_finished(tracked, "ttt", "checkpoint.safetensors", 1))
    assert not folder.exists()
    (work,) = (tracked / "data/.work").glob("ttt@*")
    with safe_open(work / "checkpoint.safetensors", framework="pt") as file:
        kept = json.loads(file.metadata()[shards.NOTES])["history"]
    assert 0 < len(kept) < 60
    tiny.run(tracked, "dvc", "repro", "ttt@tiny-0")
    assert (folder / "layer.safetensors").read_bytes() == before
    speeds = pl.read_parquet(folder / "history.parquet")["tokens_per_second"].to_list()
    assert speeds[: len(kept)] == [row["tokens_per_second"] for row in kept]


def test_killing_dvc_ends_its_stage(tracked):
    process = start_repro(tracked, "hidden@tiny")
    driver = driver_of(process)
    process.kill()
    process.wait()
    driver.wait(timeout=30)


def history(project):
    path = project / "data/ttt/scale=tiny/seed=0/history.parquet"
    return pl.read_parquet(path).select("ce", "recon", "grad_norm").to_numpy()


def start_stage(project, *args):
    command = [sys.executable, "-m", f"stages.{args[0]}", *args[1:]]
    return subprocess.Popen(
        command,
        cwd=project,
        env=tiny.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def ranks_of(process):
    """The processes that train, among those that `process` started."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RayTrainWorker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_two_ranks_train_like_one_and_survive_a_kill(copied):
    """Two ranks give the losses of one; a rank killed in the middle changes no bit."""
    one = history(copied)
    layer = copied / "data/ttt/scale=tiny/seed=0/layer.safetensors"
    set_workers(copied, workers=2)
    tiny.stage(copied, "ttt", "tiny", "0")
    assert abs(one - history(copied)).max() <= 1e-4
    set_workers(copied, workers=2, steps=150)
    tiny.stage(copied, "ttt", "tiny", "0")
    undisturbed = layer.read_bytes()
    shutil.rmtree(copied / "data/ttt")
    process = start_stage(copied, "ttt", "tiny", "0")
    while not some_finished(copied, "ttt", "checkpoint.safetensors", 1):
        assert process.poll() is None
        time.sleep(0.01)
    ranks_of(process)[-1].kill()
    assert process.wait(timeout=300) == 0
    assert layer.read_bytes() == undisturbed


def test_ctrl_c_in_training_is_told_and_training_goes_on(copied):
    set_workers(copied, workers=2, steps=150)
    shutil.rmtree(copied / "data/ttt")
    with (copied / "errors.txt").open("w") as errors:
        command = [sys.executable, "-m", "stages.ttt", "tiny", "0"]
        process = subprocess.Popen(command, cwd=copied, env=tiny.environment(), stderr=errors)
        while not some_finished(copied, "ttt", "checkpoint.safetensors", 1):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 1
    assert "interrupted; finished shards are kept" in (copied / "errors.txt").read_text()
    assert some_finished(copied, "ttt", "checkpoint.safetensors", 1)


def faulty_fit(log, rank, tell):
    with log.open("a") as file:
        file.write("tried\n")
    with shards.naming(["abc-0003"]):
        raise RuntimeError(f"rank {rank.index} has a fault")


def test_an_exception_of_a_rank_is_not_retried(in_project, tmp_path):
    fit, log = partial(faulty_fit, tmp_path / "log"), tmp_path / "log"
    with pytest.raises(UserError, match=r"rank \d of ttt failed") as caught:
        workers.train(fit, "faulty", settings(workers=1), lambda *_: None, batch=4)
    assert log.read_text() == "tried\n"
    assert "has a fault" in str(caught.value)
    assert "Traceback" in str(caught.value)
    assert "abc-0003" in str(caught.value)


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


@pytest.mark.parametrize("count", [0, 2])
def test_a_really_full_disk_keeps_finished_shards(copied, small_disk, count):
    set_workers(copied, workers=count)
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
    count = cores.here().cpus
    one = cores.split_cores(settings(workers="auto", threads=1))
    assert one == cores.Split(workers=count if count > 1 else 0, threads=1, gpus=0)
    assert cores.split_cores(settings(workers=3, threads=2)).workers == 3
    whole = cores.split_cores(settings(workers="auto", threads=count))
    assert whole == cores.Split(workers=0, threads=count, gpus=0)
    trial = cores.split_cores(settings(workers="auto", threads="auto"))
    assert max(1, trial.workers) * trial.threads == count


def test_a_containers_limit_counts(tmp_path):
    assert cores.quota(tmp_path) == math.inf
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    for limit, wanted in (("-1", math.inf), ("150000", 1.5)):
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{limit}\n")
        assert cores.quota(tmp_path) == wanted
    for limit, wanted in (("max", 1.5), ("400000", 4)):  # version 2 goes first
        (tmp_path / "cpu.max").write_text(f"{limit} 100000\n")
        assert cores.quota(tmp_path) == wanted


def test_auto_counts_the_clusters_gpus_not_this_machines():
    boxes = [cores.Node(1, 0), cores.Node(64, 8), cores.Node(64, 8)]
    auto = settings(workers="auto", threads="auto")
    assert cores.split_cores(auto, boxes) == cores.Split(workers=16, threads=1, gpus=1.0)
    halves = settings(workers="auto", threads=1, gpus_per_worker=0.5)
    split = cores.split_cores(halves, boxes)
    assert split.workers == 32
    assert cores.for_training(split, batch=64) == cores.Split(workers=16, threads=1, gpus=1.0)
    assert cores.for_training(split, batch=4).workers == 4
    thirds = settings(workers="auto", threads=1, gpus_per_worker=0.3)
    assert cores.for_training(cores.split_cores(thirds, boxes), batch=64).workers == 16
    fixed = cores.split_cores(settings(workers=4, threads=1), boxes)
    assert fixed == cores.Split(workers=4, threads=1, gpus=1.0)
    assert not workers.without_ray(settings(workers="auto", address="head:6379"))


def test_what_fits_no_single_node_is_refused():
    boxes = [cores.Node(4, 0), cores.Node(4, 0)]
    with pytest.raises(UserError, match=r"1 workers ask for 8 CPU.*8 CPU.*room for 0"):
        cores.check_room(boxes, cores.Split(workers=1, threads=8, gpus=0))


def test_publishing_drops_what_a_killed_worker_left(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "a").mkdir(parents=True)
    (work / "a/.part.1.tmp").write_text("half")
    (work / "a/part").write_text("whole")
    files.publish(work, out)
    assert folder_bytes(out) == {Path("a/part"): b"whole"}
