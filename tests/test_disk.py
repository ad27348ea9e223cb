"""A disk that is full or read-only: told in a sentence, nothing half-written, shards kept."""

import ctypes
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny
from disturb import STEPS, finished, folder_bytes, published, set_workers, trained

from ponderttt import checkpoints, files

pytestmark = pytest.mark.ray

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
FULL = "no space left on the disk; free some and run `dvc repro` again"
READ_ONLY = "the disk is read-only; mount it for writing"


def check_told(done, sentence):
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def test_a_full_disk_is_told_and_leaves_nothing_half_written(copied):
    shutil.rmtree(copied / "data/hidden")
    done = tiny.stage(copied, "hidden", "tiny", check=False, preexec_fn=limit_files)
    check_told(done, "cannot be written: the file is larger than this system allows")
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
    try:
        yield shutil.copytree(scored, place, dirs_exist_ok=True)
    finally:
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
    check_told(tiny.stage(on_disk, *arguments, check=False), FULL)
    assert not out.exists()
    kept = finished(on_disk, stage, suffix)
    assert kept
    leave(on_disk, 20_000)
    assert mount("-o", "remount,ro", on_disk)
    check_told(tiny.stage(on_disk, *arguments, check=False), READ_ONLY)
    assert finished(on_disk, stage, suffix) == kept
    assert mount("-o", "remount,rw", on_disk)
    tiny.stage(on_disk, *arguments)
    assert folder_bytes(out) == wanted
    for path, when in kept.items():
        assert (on_disk / "data" / published(stage, path)).stat().st_mtime_ns == when


def test_a_full_disk_in_training_keeps_the_checkpoint_before(on_disk, undisturbed):
    set_workers(on_disk, workers=2, steps=STEPS)
    shutil.rmtree(on_disk / "data/ttt")
    leave(on_disk, 120)  # one checkpoint, and not the next beside it
    check_told(tiny.stage(on_disk, "ttt", "tiny", "0", check=False), FULL)
    assert not list((on_disk / "data").rglob(".*.tmp"))
    assert not (on_disk / "data/ttt/scale=tiny/seed=0").exists()
    (work,) = (on_disk / "data/.work").glob("ttt@*-*")
    assert checkpoints.steps_done(work) == 2
    leave(on_disk, 20_000)
    tiny.stage(on_disk, "ttt", "tiny", "0")
    assert trained(on_disk).layer == undisturbed(2).layer


def without_overriding_rights():
    """So that a folder's rights bind root too."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


@pytest.mark.parametrize("count", [0, 2])
def test_a_read_only_output_folder_keeps_finished_shards(copied, count):
    set_workers(copied, workers=count)
    out = copied / "data/hidden"
    wanted = folder_bytes(out)
    shutil.rmtree(out / "scale=tiny")
    out.chmod(0o555)
    done = tiny.stage(copied, "hidden", "tiny", check=False, preexec_fn=without_overriding_rights)
    out.chmod(0o755)
    check_told(done, "hidden/scale=tiny: cannot be written: no permission to write there")
    assert not folder_bytes(out)
    kept = finished(copied, "hidden", ".safetensors")
    assert len(kept) == len(list(copied.glob("data/chunks/*/*/*.parquet")))
    tiny.stage(copied, "hidden", "tiny")
    assert folder_bytes(out) == wanted
    for path, when in kept.items():
        assert (copied / "data" / published("hidden", path)).stat().st_mtime_ns == when


def test_publishing_drops_what_a_killed_worker_left(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "a").mkdir(parents=True)
    (work / "a/.part.1.tmp").write_text("half")
    (work / "a/part").write_text("whole")
    files.publish(work, out)
    assert folder_bytes(out) == {Path("a/part"): b"whole"}
