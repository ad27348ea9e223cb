"""The pool of Ray actors: the same bytes whoever did the work, and nothing lost when one dies."""

import importlib
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from disturb import (
    children_of,
    failing_start,
    finished,
    folder_bytes,
    meanwhile,
    place_name,
    published,
    set_workers,
    settings,
    slow_run,
    some_finished,
    started,
    wait_until,
    wanted_hidden,
    without_leftovers,
)
from tqdm import tqdm

from ponderttt import files, hidden, params, ray_pool, scores, shards, tables
from ponderttt.errors import UserError

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(("count", "stages"), [(1, ["scores"]), (2, ["hidden", "scores"])])
def test_every_byte_is_the_same_for_any_workers(copied, count, stages):
    """The undisturbed run is of this process alone; of one worker, see the tests below too."""
    set_workers(copied, workers=count)
    before = {name: folder_bytes(copied / "data" / name) for name in (*stages, "tokens")}
    for name in stages:
        shutil.rmtree(copied / "data" / name)
        tiny.stage(copied, name, "tiny", *(["0"] if name == "scores" else []))
    assert {name: folder_bytes(copied / "data" / name) for name in before} == before


def begun(log):
    """Who began each shard, by its name, in turn."""
    return {path.name: path.read_text().split() for path in log.glob("*")}


def kill_between_two_files(log, out, pairs):
    """Kill a worker that has written the first of the two files of its second shard, or a later
    one; `pairs` are the shards with one file."""

    def find():
        half = [place_name(path) for path in pairs(out)]
        by_name = begun(log)  # after the files, so that whoever wrote one stands in it
        pids = [by_name[name][-1] for name in half]
        return [pid for pid in pids if sum(pid in all_ for all_ in by_name.values()) >= 2]

    os.kill(int(wait_until(find)[0]), signal.SIGKILL)


def halves_of_hidden(out):
    bases = out.rglob("part-*.parquet")
    return [path for path in bases if not path.with_suffix(".safetensors").exists()]


def halves_of_scores(out):
    tokens = (out / "tokens").rglob("part-*.parquet")
    return [p for p in tokens if not (out / "scores" / p.relative_to(out / "tokens")).exists()]


@pytest.mark.parametrize(
    ("stage", "pairs"), [("hidden", halves_of_hidden), ("scores", halves_of_scores)]
)
def test_a_killed_actor_costs_nothing(in_project, tmp_path, stage, pairs):
    log, out = tmp_path / "log", in_project / "data/.work/log"
    wanted = folder_bytes(slow_run(stage, tmp_path / "calm", seconds=0, workers=0))
    with meanwhile(partial(kill_between_two_files, log, out, pairs)):
        slow_run(stage, log)
    assert without_leftovers(out) == wanted
    assert sorted(map(len, begun(log).values())) == [1] * (len(begun(log)) - 1) + [2]


@pytest.mark.parametrize(
    ("name", "seed", "suffix"),
    [("hidden", [], ".safetensors"), ("scores", ["0"], "scores/*/*/*.parquet")],
)
def test_a_stage_outlives_its_workers(copied, name, seed, suffix):
    set_workers(copied, workers=2)
    outs = [copied / "data" / out for out in (("scores", "tokens") if seed else (name,))]
    before = [folder_bytes(out) for out in outs]
    for out in outs:
        shutil.rmtree(out)
    command = [sys.executable, "-m", f"stages.{name}", "tiny", *seed]
    with started(*command, cwd=copied) as driver:

        def workers():
            found = children_of(driver, lambda line: "ray::_Worker" in " ".join(line))
            return found if len(found) == 2 else None

        def running():
            return driver.poll() is None

        victim = wait_until(workers, running)[0]
        wait_until(lambda: some_finished(copied, name, suffix, 2), running)
        driver.send_signal(signal.SIGSTOP)  # so that it cannot end meanwhile
        kept = finished(copied, name, suffix)
        victim.kill()
        driver.send_signal(signal.SIGCONT)
        assert driver.wait(timeout=300) == 0
    assert [folder_bytes(out) for out in outs] == before
    assert 2 <= len(kept) < len(list(outs[0].rglob("part-*.parquet")))
    for path, when in kept.items():
        assert (copied / "data" / published(name, path)).stat().st_mtime_ns == when


def half_start(folder, settings, log, suffix):
    """The real work, by a worker that dies once with half of a file on the disk."""
    work, sync = hidden.start(folder, settings), os.fsync

    def half(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if suffix in path.name and not log.exists():
            log.write_text(str(path))
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(handle)

    os.fsync = half  # in the worker's process
    return work


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors"])
def test_half_a_file_is_never_read_nor_published(in_project, tmp_path, suffix):
    log, out = tmp_path / "log", Path("data/.work/half")
    todo = hidden.list_shards(Path("data/chunks/scale=tiny"), out)
    chosen = params.parse(tiny.plain_params()).hidden
    start = partial(half_start, Path("data/backbone/scale=tiny"), chosen, log, suffix)
    with tqdm(disable=True) as bar:
        ray_pool.run(start, todo, settings(workers=1), bar)
    assert Path(log.read_text()).exists()
    files.publish(out, Path("data/published"))
    assert folder_bytes(Path("data/published")) == wanted_hidden(in_project)


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
        ray_pool.run(start, todo, settings(workers=1), bar)
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
        ray_pool.run(suicide, ["one"], settings(workers=1, max_retries=1), bar)


def test_workers_that_die_before_they_begin_are_given_up(in_project, monkeypatch):
    from ray import cloudpickle

    def die(_):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(ray_pool._Worker, "here", die)
    cloudpickle.register_pickle_by_value(ray_pool)
    try:
        words = "2 workers died one after the other before they began"
        with tqdm(disable=True) as bar, pytest.raises(UserError, match=words):
            ray_pool.run(failing_start, ["one"], settings(workers=1, max_retries=1), bar)
    finally:
        cloudpickle.unregister_pickle_by_value(ray_pool)


def staying_start():
    """Two shards at once; the long one is done at once when it is begun again."""

    def stay(log):
        begun = len(log.read_text().split()) if log.exists() else 0
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        while not all((log.parent / name).exists() for name in ("quick", "long")):
            time.sleep(0.02)
        if log.name == "long" and not begun:
            time.sleep(300)
        return shards.Done(1, 1)

    return stay


def test_the_death_of_idle_workers_costs_no_shard_its_retries(in_project, tmp_path):
    """A lost node takes busy and idle workers at once."""
    logs = [tmp_path / name for name in ("quick", "long")]

    with tqdm() as bar:

        def kill_both():
            wait_until(lambda: bar.n == 1)  # the quick one is idle
            for log in logs:
                os.kill(int(log.read_text()), signal.SIGKILL)

        with meanwhile(kill_both):
            ray_pool.run(staying_start, logs, settings(workers=2, max_retries=1), bar)
        assert bar.n == 2
    assert [len(log.read_text().split()) for log in logs] == [1, 2]


def burst():
    raise ModuleNotFoundError("no such module here")


class Unreadable:
    """Its worker cannot read it back, as on a node that lacks a module."""

    def __init__(self, log):
        self.log = log

    def __reduce__(self):
        return burst, ()


def test_a_worker_that_cannot_be_made_is_not_taken_for_a_dead_machine(in_project):
    words = r"(?s)a worker could not be made: .*no such module here"
    with tqdm(disable=True) as bar, pytest.raises(UserError, match=words):
        ray_pool.run(partial(failing_start, Unreadable(1)), ["one"], settings(workers=1), bar)


class OddError(Exception):
    """It can be sent, but not read back: pickle calls it with its one argument."""

    def __init__(self, path, reason):
        super().__init__(f"{path}: {reason}")


def odd_start():
    def fail(log):
        with log.open("a") as file:
            file.write("tried\n")
        raise OddError("a file", "of our own making")

    return fail


def test_an_exception_that_cannot_be_read_back_is_not_taken_for_a_death(in_project, tmp_path):
    with tqdm(disable=True) as bar, pytest.raises(UserError, match="a file: of our own making"):
        ray_pool.run(odd_start, [tmp_path / "log"], settings(workers=1), bar)
    assert (tmp_path / "log").read_text() == "tried\n"


def test_no_set_mixes_shards_of_two_kinds_of_device(in_project):
    chunks, out = Path("data/chunks/scale=tiny"), Path("data/hidden/scale=tiny")
    assert hidden.made_on([]) == ""
    earlier = hidden.made_on(hidden.list_shards(chunks, out))
    assert earlier == "cpu"
    model, chosen = Path("data/backbone/scale=tiny"), params.parse(tiny.plain_params()).hidden
    assert hidden.start(model, chosen, earlier)
    with pytest.raises(UserError, match=r"hidden: this run computes on cpu, .* made on cuda"):
        hidden.start(model, chosen, "cuda")


def test_our_own_exception_is_not_retried_and_comes_with_its_traceback(in_project):
    with tqdm(disable=True) as bar, pytest.raises(UserError) as caught:
        ray_pool.run(failing_start, ["shard 7", "shard 8"], settings(workers=1), bar)
    message = str(caught.value)
    assert "a worker failed on shard 7" in message
    assert "ZeroDivisionError" in message
    assert "of our own making" in message


def test_a_failure_names_its_chunks(in_project):
    def break_in():
        with shards.naming(["abc-0001", "abc-0002"]):
            raise RuntimeError("broken")

    with tqdm(disable=True) as bar, pytest.raises(UserError, match="chunks abc-0001, abc-0002"):
        ray_pool.run(break_in, ["one"], settings(workers=1), bar)


def test_no_scores_mix_two_kinds_of_device(in_project):
    chunks, kept = Path("data/chunks/scale=tiny"), Path("data/hidden/scale=tiny")
    chosen = params.parse(tiny.plain_params())
    found = scores.list_shards(chunks, kept, Path("made"), ["python"], [], chosen.scores)
    Path("made").mkdir()
    shutil.copytree("data/scores/scale=tiny/seed=0", "made/scores")
    assert scores.made_on([]) == ""
    assert scores.made_on([shard for shard in found if shard.done]) == "cpu"
    model, layer = Path("data/backbone/scale=tiny"), Path("data/ttt/scale=tiny/seed=0")
    with pytest.raises(UserError, match=r"scores: this run computes on cpu, .* made on cuda"):
        scores.start(model, layer, chosen.scores, "chunk", 64, "cuda")


@pytest.mark.parametrize("name", ["hidden", "scores"])
def test_a_shard_that_nobody_wrote_is_never_published(in_project, monkeypatch, name):
    shutil.rmtree(f"data/{name}")
    script, seed = importlib.import_module(f"stages.{name}"), ["0"] if name == "scores" else []
    monkeypatch.setattr(ray_pool, "run", lambda *_: None)
    with pytest.raises(UserError, match=r"(\d+) of \1 shards are not there.*part-00000"):
        script.make(params.load(), "tiny", *seed)
    assert not Path(f"data/{name}").exists()


def telling_start():
    def tell(path):
        path.write_text(f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}")
        return shards.Done(1, 512)

    return tell


def test_a_worker_computes_with_its_share_of_threads(in_project, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # what torch would take by itself
    paths = [tmp_path / name for name in ("a", "b", "c")]
    with tqdm(disable=True) as bar:
        ray_pool.run(telling_start, paths, settings(workers=1, threads=2), bar)
    assert {path.read_text() for path in paths} == {"2 3"}


@pytest.mark.parametrize("verbose", [False, True])
def test_people_see_one_bar_and_ray_only_if_they_ask(copied, verbose):
    set_workers(copied, workers=2, verbose=verbose)
    shutil.rmtree(copied / "data/hidden")
    told = tiny.stage(copied, "hidden", "tiny").stderr
    lines = [line.strip() for line in told.replace("\r", "\n").splitlines() if line.strip()]
    assert any(" 144/144 " in line and "tok_s=" in line for line in lines)
    assert ("Started a local Ray instance" in told) == verbose
    ours = ("hidden: ", "ray: 2 workers ask for")  # the latter where workers start slowly
    assert verbose or all(line.startswith(ours) for line in lines)
