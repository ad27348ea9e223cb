"""Files that are whole or absent: written aside, flushed, renamed; tensors carry their own hash."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ponderttt.errors import UserError

BLOCK = 1 << 20


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` if the block ends well, and vanishes if it does not."""
    # Not the process id: two nodes on one storage may both have a process of that number.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise disk_error(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """A full or read-only disk inside becomes a sentence, whichever library met it."""
    try:
        yield
    except Exception as error:
        raise disk_error(error, path) from error


def disk_error(error: Exception, path: Path) -> Exception:
    """A full or read-only disk as a sentence; any other error as it is."""
    remedies = {
        errno.ENOSPC: "no space left on the disk; free some and run `dvc repro` again, it resumes",
        errno.EDQUOT: "the disk quota is used up; free some and run `dvc repro` again, it resumes",
        errno.EFBIG: "the file is larger than this system allows (ulimit -f)",
        errno.EROFS: "the disk is read-only; mount it for writing",
        errno.EACCES: "no permission to write there; mend the folder's rights",
        errno.EPERM: "no permission to write there; mend the folder's rights",
        errno.EXDEV: "it is on another disk than data/.work, and finished work is moved from there "
        "in one rename; keep all of data on one disk",
    }
    remedy = remedies.get(_code(error))
    return UserError(f"{path}: cannot be written: {remedy}") if remedy else error


def _code(error: Exception) -> int:
    """The system's number of an error; libraries in Rust only write it into their message."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    written = re.search(r"\(os error (\d+)\)", str(error))
    return int(written[1]) if written else 0


def write_json(path: Path, value: Any) -> None:
    """Write `value` sorted and indented, so that the same value is the same bytes."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; a missing or damaged file is an error that names it."""
    with reading(path, ValueError):
        return json.loads(path.read_text())


@contextlib.contextmanager
def reading(path: Path, *damage: type[Exception]) -> Iterator[None]:
    """A missing or damaged file is an error that names it; `damage` is what its reader raises."""
    known: tuple[type[Exception], ...] = (OSError, *damage)
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: not found; run `dvc repro`") from None
    except known as error:
        raise UserError(f"{path}: damaged ({error}); delete it and run `dvc repro`") from None


def sha256(path: Path) -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """The hash of a plain value, through sorted JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def folder_hash(folder: Path) -> str:
    """The hash of every file's name and bytes below `folder`."""
    names = sorted(p for p in folder.rglob("*") if p.is_file())
    return digest([[p.relative_to(folder).as_posix(), sha256(p)] for p in names])


def publish(work: Path, out: Path) -> None:
    """Move a finished work folder to its final place, in one rename."""
    with told(out):
        if out.exists():
            shutil.rmtree(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        work.replace(out)
        # After the move: a worker that outlives its killed driver finds the folder gone.
        drop_half_written(out)
        _sync_folder(out.parent)


def drop_half_written(folder: Path) -> None:
    """Remove what workers left that were killed while they wrote."""
    for left in folder.rglob(".*.tmp"):
        left.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
