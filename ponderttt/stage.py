"""What every stage script does around its one function."""

import argparse
import ctypes
import dataclasses
import errno
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

from ponderttt import PARENT, files, params
from ponderttt.errors import UserError

PR_SET_PDEATHSIG = 1
KEY_LENGTH = 16  # of a work folder's hash
WORK = Path("data/.work")
LOCK_SECONDS = 10.0  # a killed run may take as long to end
SHAPING = ("numpy", "torch", "transformers")  # libraries whose versions may shape results

_locks: dict[Path, int] = {}  # open files of this process

# Modules that decide how work is done and never what comes out of it.
PLUMBING = {
    "ponderttt",
    "ponderttt.cores",
    "ponderttt.errors",
    "ponderttt.fields",
    "ponderttt.params",
    "ponderttt.ray_cluster",
    "ponderttt.ray_pool",
    "ponderttt.ray_ranks",
    "ponderttt.stage",
}


def run(make: Callable[..., None], reads: Sequence[str], arguments: Sequence[str] = ()) -> None:
    """Call `make(view, **arguments)`; the view holds only the sections that dvc.yaml lists.

    A section that a stage does not declare is not there, so that no result can depend on a
    parameter that DVC does not watch. Known errors end in one message and exit code 1.
    """
    _die_with_parent()
    parser = argparse.ArgumentParser(description=make.__doc__)
    for name in arguments:
        parser.add_argument(name)
    given = vars(parser.parse_args())
    try:
        make(view(params.load(), reads), **given)
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        known = files.disk_error(error, Path(error.filename or "data"))
        if known is error:
            raise
        sys.exit(f"error: {known}")
    except KeyboardInterrupt:
        sys.exit("interrupted; finished shards are kept, run `dvc repro` to go on")


def view(everything: params.Params, reads: Sequence[str]) -> Any:
    """Only the named sections or keys; `budget` stands for its chosen row, as `size`."""
    found = SimpleNamespace()
    for name in reads:
        section, _, key = name.partition(".")
        if name == "budget":
            found.size = everything.size
        elif key:
            part = getattr(found, section, SimpleNamespace())
            setattr(part, key, getattr(getattr(everything, section), key))
            setattr(found, section, part)
        else:
            setattr(found, name, getattr(everything, name))
    return found


def work_folder(name: str, inputs: Any) -> Path:
    """Where a stage keeps finished shards until all are there; keyed by all that shapes them.

    The key covers `inputs`, the source of every module loaded and the libraries that compute, so
    that shards of other parameters, data or code are never taken up. The folder is this process's
    alone until it ends.
    """
    sources = {
        module: files.sha256(Path(str(loaded.__file__)))
        for module, loaded in sorted(sys.modules.items())
        if module.startswith("ponderttt.") and module not in PLUMBING
    }
    versions = [metadata.version(library) for library in SHAPING]
    folder = WORK / f"{name}-{files.digest([inputs, sources, versions])[:KEY_LENGTH]}"
    folder.mkdir(parents=True, exist_ok=True)
    _lock(WORK / f"{name}.lock")
    if folder.stat().st_dev != WORK.parent.stat().st_dev:
        raise files.disk_error(OSError(errno.EXDEV, ""), WORK.parent)
    files.drop_half_written(folder)  # on a full disk it would be in the way for ever
    return folder


def _lock(path: Path) -> None:
    """Keep every other run of this stage out until this process ends."""
    if path.absolute() in _locks:
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    end = time.monotonic() + LOCK_SECONDS
    while not _locked(handle):
        if time.monotonic() > end:
            raise UserError(
                f"{path}: another run of this stage is at work in this folder; wait for it, or end "
                "it first"
            )
        time.sleep(0.1)
    _locks[path.absolute()] = handle


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def check_all_done(work: Path, shards: Sequence[Any]) -> None:
    """Nothing is published with a gap, whatever the workers said."""
    list(work.rglob("*"))  # a network's file system may still remember that a file was not there
    missing = [shard for shard in shards if not shard.done]
    if missing:
        raise UserError(
            f"{work}: {len(missing)} of {len(shards)} shards are not there, though workers wrote "
            f"them: {missing[0].chunks} is the first; put the project folder on storage that every "
            "node mounts at the same path"
        )


def publish(work: Path, out: Path | None = None, **parts: Path) -> None:
    """Move a finished work folder to `out`, or each of its `parts` to a place of its own.

    Work folders of other params are dropped before it: a stage killed after its work was moved
    has to begin anew.
    """
    for left in work.parent.glob(work.name[:-KEY_LENGTH] + "?" * KEY_LENGTH):
        if left != work:
            shutil.rmtree(left, ignore_errors=True)
    moves = {work: out} if out else {work / name: place for name, place in parts.items()}
    for made, place in moves.items():
        files.publish(made, place)
    shutil.rmtree(work, ignore_errors=True)


def progress(name: str, total: int, left: int) -> "tqdm[Any]":
    """One bar per stage: chunks and time left, with what an earlier run finished already in."""
    return tqdm(desc=name, total=total, initial=total - left, unit="chunk", smoothing=0.1)


def plain(section: Any) -> Any:
    """A section of a view, whole or in part, as plain values for hashing and for notes."""
    if isinstance(section, SimpleNamespace):
        return vars(section)
    return dataclasses.asdict(section)


def _die_with_parent() -> None:
    """End when dvc is killed, so that the next `dvc repro` never runs beside this one.

    The parent is dvc, and not a shell between the two: dvc.yaml's `exec` sees to that.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != PARENT:
            sys.exit("error: the process that started this stage has ended")
