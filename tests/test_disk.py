"""A disk that is full or read-only: told in a sentence, nothing half-written, shards kept."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from disturb import STEPS, finished, folder_bytes, published, set_workers, trained

from ponderttt import checkpoints, files

pytestmark = pytest.mark.ray


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


def mount(*args):
    return subprocess.run(["mount", *map(str, args)], check=False).returncode == 0


@pytest.fixture
def on_disk(scored, tmp_path):
    """The scored project on a file system of its own, where one may be mounted."""
    place = tmp_path / "project"
    place.mkdir()
    if shutil.which("mount") is None or not mount("-t", "tmpfs", "tmpfs", place):
        pytest.skip("no right to mount a file system")
    yield shutil.copytree(scored, place, dirs_exist_ok=True)
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def leave(place, kilobytes):
    """Make the file system so small that just this much is free."""
    now = os.statvfs(place)
    used = (now.f_blocks - now.f_bfree) * now.f_frsize
    assert mount("-o", f"remount,size={used // 1024 + kilobytes}k", place)


@pytest.mark.parametrize(
    ("stage", "suffix", "kilobytes", "count"),
    [("hidden", ".safetensors", 500, 2), ("scores", "scores/*/*/*.parquet", 80, 0)],
)
def test_a_full_disk_is_told_and_finished_shards_are_kept(on_disk, stage, suffix, kilobytes, count):
    arguments = {"hidden": ("hidden", "tiny"), "scores": ("scores", "tiny", "0")}[stage]
    set_workers(on_disk, workers=count)
    out = on_disk / "data" / stage
    wanted = folder_bytes(out)
    shutil.rmtree(out)
    leave(on_disk, kilobytes)
    check_told(on_disk, tiny.stage(on_disk, *arguments, check=False))
    assert not out.exists()
    kept = finished(on_disk, stage, suffix)
    assert kept
    leave(on_disk, 20_000)
    tiny.stage(on_disk, *arguments)
    assert folder_bytes(out) == wanted
    for path, when in kept.items():
        assert (on_disk / "data" / published(stage, path)).stat().st_mtime_ns == when


def test_a_full_disk_in_training_keeps_the_checkpoint_before(on_disk, undisturbed):
    set_workers(on_disk, workers=2, steps=STEPS)
    shutil.rmtree(on_disk / "data/ttt")
    leave(on_disk, 120)  # one checkpoint, and not the next beside it
    check_told(on_disk, tiny.stage(on_disk, "ttt", "tiny", "0", check=False))
    assert not (on_disk / "data/ttt/scale=tiny/seed=0").exists()
    (work,) = (on_disk / "data/.work").glob("ttt@*-*")
    assert checkpoints.steps_done(work) == 2
    leave(on_disk, 20_000)
    tiny.stage(on_disk, "ttt", "tiny", "0")
    assert trained(on_disk).layer == undisturbed(2).layer


def check_told(project, done):
    assert done.returncode == 1
    assert "no space left on the disk; free some and run `dvc repro` again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((project / "data").rglob(".*.tmp"))


def test_a_read_only_disk_is_told(on_disk):
    shutil.rmtree(on_disk / "data/hidden")
    assert mount("-o", "remount,ro", on_disk)
    done = tiny.stage(on_disk, "hidden", "tiny", check=False)
    assert done.returncode == 1
    assert "the disk is read-only; mount it for writing" in done.stderr


def test_publishing_drops_what_a_killed_worker_left(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "a").mkdir(parents=True)
    (work / "a/.part.1.tmp").write_text("half")
    (work / "a/part").write_text("whole")
    files.publish(work, out)
    assert folder_bytes(out) == {Path("a/part"): b"whole"}
