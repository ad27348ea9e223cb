"""Stages killed from outside, under DVC: what is finished is kept, and the rest is done."""

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
    repro,
    set_workers,
    some_finished,
    trained,
    wait_until,
)

pytestmark = pytest.mark.ray


@pytest.fixture
def tracked(copied):
    """The scored project as DVC knows it after `dvc repro`."""
    (copied / ".dvcignore").write_text("/data/.work\n")
    tiny.run(copied, "dvc", "init", "-q", "--no-scm")
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
    outs = ("scores", "tokens") if name == "scores" else (name,)
    before = [folder_bytes(tracked / "data" / out) for out in outs]
    with repro(tracked, stage) as process:
        kill_when(process, lambda: some_finished(tracked, name, suffix, 2))
    kept = finished(tracked, name, suffix)
    assert not any(folder_bytes(tracked / "data" / out) for out in outs)
    tiny.run(tracked, "dvc", "repro", stage)
    assert [folder_bytes(tracked / "data" / out) for out in outs] == before
    for path, when in kept.items():
        assert (tracked / "data" / published(name, path)).stat().st_mtime_ns == when


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_training_driver_resumes_to_the_same_bits(tracked, undisturbed, count):
    set_workers(tracked, workers=count, steps=STEPS)
    tiny.run(tracked, "dvc", "commit", "-q", "-f", "chunks@tiny", "hidden@tiny")  # as they are
    with repro(tracked, "ttt@tiny-0") as process:
        kill_when(process, lambda: some_finished(tracked, "ttt", "checkpoint.safetensors", 1))
    assert not (tracked / "data/ttt/scale=tiny/seed=0").exists()
    kept = checkpointed(tracked)
    assert 0 < len(kept) < STEPS
    tiny.run(tracked, "dvc", "repro", "ttt@tiny-0")
    assert trained(tracked).layer == undisturbed(count).layer
    assert trained(tracked).speeds[: len(kept)] == kept


def wait_for_a_shard(project, driver):
    wait_until(lambda: some_finished(project, "hidden", ".safetensors", 1), driver.is_running)


def test_ctrl_c_keeps_finished_shards(tracked):
    set_workers(tracked, workers=2)
    before = folder_bytes(tracked / "data/hidden")
    with repro(tracked, "hidden@tiny") as process:
        wait_for_a_shard(tracked, driver_of(process))
        press_ctrl_c(process)
        assert process.wait(timeout=60) != 0
    kept = finished(tracked, "hidden", ".safetensors")
    tiny.run(tracked, "dvc", "repro", "hidden@tiny")
    assert folder_bytes(tracked / "data/hidden") == before
    for path, when in kept.items():
        assert (tracked / "data" / published("hidden", path)).stat().st_mtime_ns == when


@pytest.mark.parametrize("when", ["in its imports", "in its work"])
def test_killing_dvc_ends_its_stage(tracked, when):
    with repro(tracked, "hidden@tiny") as process:
        driver = driver_of(process)
        if when == "in its imports":
            maps = Path(f"/proc/{driver.pid}/maps")
            wait_until(lambda: "libtorch" in maps.read_text(), lambda: process.poll() is None)
        else:
            wait_for_a_shard(tracked, driver)
        process.kill()
        process.wait()
        driver.wait(timeout=60)
    assert not (tracked / "data/hidden/scale=tiny").exists()


def test_a_second_run_beside_the_first_is_refused(tracked):
    with repro(tracked, "hidden@tiny") as process:
        driver = driver_of(process)
        wait_for_a_shard(tracked, driver)
        driver.suspend()
        try:
            second = tiny.stage(tracked, "hidden", "tiny", check=False)
        finally:
            driver.resume()
        assert second.returncode == 1
        assert "hidden@tiny.lock: another run of this stage is at work" in second.stderr
        assert process.wait(timeout=300) == 0
