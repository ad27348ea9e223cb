"""Stages killed from outside, under DVC: what is finished is kept, and the rest is done."""

import time
from pathlib import Path

import pytest
import tiny
from disturb import (
    STEPS,
    checkpointed,
    driver_of,
    finished,
    folder_bytes,
    kill_when,
    press_ctrl_c,
    published,
    set_workers,
    some_finished,
    start_repro,
    trained,
)

pytestmark = pytest.mark.ray


@pytest.fixture
def tracked(copied):
    """The scored project as DVC knows it after `dvc repro`."""
    (copied / ".dvcignore").write_text("/data/.work\n")
    tiny.run(copied, "dvc", "init", "-q", "--no-scm")
    tiny.run(copied, "dvc", "config", "core.analytics", "false")
    stages = ("corpus", "backbone@tiny", "chunks@tiny", "hidden@tiny", "ttt@tiny-0")
    tiny.run(copied, "dvc", "commit", "-q", "-f", *stages, "scores@tiny-0")
    return copied


@pytest.mark.parametrize(
    ("stage", "suffix", "count"),
    [
        ("hidden@tiny", ".safetensors", 0),
        ("hidden@tiny", ".safetensors", 2),
        ("scores@tiny-0", "scores/*/*/*.parquet", 2),
    ],
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


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_training_driver_resumes_to_the_same_bits(tracked, undisturbed, count):
    set_workers(tracked, workers=count, steps=STEPS)
    tiny.run(tracked, "dvc", "commit", "-q", "-f", "chunks@tiny", "hidden@tiny")  # as they are
    process = start_repro(tracked, "ttt@tiny-0")
    kill_when(process, lambda: some_finished(tracked, "ttt", "checkpoint.safetensors", 1))
    assert not (tracked / "data/ttt/scale=tiny/seed=0").exists()
    kept = checkpointed(tracked)
    assert 0 < len(kept) < STEPS
    tiny.run(tracked, "dvc", "repro", "ttt@tiny-0")
    assert trained(tracked).layer == undisturbed(count).layer
    assert trained(tracked).speeds[: len(kept)] == kept


def wait_for_a_shard(project, driver):
    while not some_finished(project, "hidden", ".safetensors", 1):
        assert driver.is_running()
        time.sleep(0.005)


def test_ctrl_c_keeps_finished_shards(tracked):
    set_workers(tracked, workers=2)
    before = folder_bytes(tracked / "data/hidden")
    process = start_repro(tracked, "hidden@tiny")
    driver = driver_of(process)
    wait_for_a_shard(tracked, driver)
    press_ctrl_c(process)
    assert process.wait(timeout=60) != 0
    kept = finished(tracked, "hidden", ".safetensors")
    tiny.run(tracked, "dvc", "repro", "hidden@tiny")
    assert folder_bytes(tracked / "data/hidden") == before
    for path, when in kept.items():
        assert (tracked / "data" / published("hidden", path)).stat().st_mtime_ns == when


@pytest.mark.parametrize("when", ["in its imports", "in its work"])
def test_killing_dvc_ends_its_stage(tracked, when):
    process = start_repro(tracked, "hidden@tiny")
    driver = driver_of(process)
    if when == "in its imports":
        while "libtorch" not in Path(f"/proc/{driver.pid}/maps").read_text():
            time.sleep(0.005)
    else:
        wait_for_a_shard(tracked, driver)
    process.kill()
    process.wait()
    driver.wait(timeout=60)
    assert not (tracked / "data/hidden/scale=tiny").exists()


def test_a_second_run_beside_the_first_is_refused(tracked):
    process = start_repro(tracked, "hidden@tiny")
    driver = driver_of(process)
    wait_for_a_shard(tracked, driver)
    driver.suspend()
    second = tiny.stage(tracked, "hidden", "tiny", check=False)
    driver.resume()
    assert second.returncode == 1
    assert "hidden@tiny.lock: another run of this stage is at work" in second.stderr
    assert process.wait(timeout=300) == 0
