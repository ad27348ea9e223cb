"""Pinned registry files, fetched with pip into a cache folder and checked by hash.

Which registry is asked, and with whose rights, is pip's own configuration. A wheel is only
downloaded. For an sdist pip asks the package's build backend for its metadata, which runs code
of that package in pip's own build environment; the hash is checked before that.
"""

import contextlib
import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from ponderttt import files
from ponderttt.errors import UserError

DOWNLOADS = Path("data/.downloads")

# Wheels for any interpreter and platform, so that every machine gets the same files.
WHEEL_FLAGS = [
    "--only-binary=:all:",
    *("--implementation", "py"),
    *("--abi", "none"),
    *("--platform", "any"),
    *("--python-version", "3.12"),
]

QUIET = ["--no-input", "--disable-pip-version-check", "--no-color", "--progress-bar", "off"]

# The hash decides whether a file is right, not an environment that may not even build it.
SDIST_FLAGS = ["--ignore-requires-python", "--no-binary"]


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One file of a registry: its package and version, its name and its hash."""

    name: str
    version: str
    file: str
    sha256: str
    kind: Literal["wheel", "sdist"]

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def fetch(pins: Sequence[Pin], folder: Path = DOWNLOADS) -> dict[str, Path]:
    """Have every pinned file in `folder`, with its right hash; file name -> path.

    A right file that is already there is kept, a wrong one is fetched again.
    """
    with locked(folder):
        missing = [pin for pin in pins if not _is_right(folder / pin.file, pin)]
        with tqdm(total=len(missing), desc="packages", disable=not missing) as bar:
            for group in _groups(missing):
                _download(group, folder, bar)
    return {pin.file: folder / pin.file for pin in pins}


def _groups(pins: Sequence[Pin]) -> list[list[Pin]]:
    """All wheels in one pip call; sdists one at a time, their flags name the package."""
    wheels = [pin for pin in pins if pin.kind == "wheel"]
    return ([wheels] if wheels else []) + [[pin] for pin in pins if pin.kind == "sdist"]


def _is_right(path: Path, pin: Pin) -> bool:
    return path.is_file() and files.sha256(path) == pin.sha256


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One fetch at a time in a folder, so that two stages do not fetch one file twice."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{folder}: cannot hold downloads ({error.strerror}); mend it") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(pins: Sequence[Pin], folder: Path, bar: "tqdm[Any]") -> None:
    """Fetch into a folder aside; move in what has the right hash."""
    part = folder / ".part"
    # A killed fetch leaves its folder behind; the lock says that nobody else uses it.
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        _run_pip(pins, part, bar)
        for pin in pins:
            _keep(part / pin.file, folder / pin.file, pin)
    except OSError as error:
        raise files.disk_error(error, folder) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _keep(found: Path, path: Path, pin: Pin) -> None:
    if not found.is_file():
        names = sorted(p.name for p in found.parent.iterdir() if p.name != "pins.txt")
        raise UserError(f"{pin}: pip fetched {', '.join(names)}, not {pin.file}; correct the pin")
    if not _is_right(found, pin):
        raise UserError(_wrong_hash(pin))
    found.replace(path)


def _wrong_hash(pin: Pin) -> str:
    return (
        f"{pin}: {pin.file} does not have the pinned sha256 {pin.sha256}; "
        "the registry's file was changed or damaged: try again, then check the pin"
    )


def _run_pip(pins: Sequence[Pin], part: Path, bar: "tqdm[Any]") -> None:
    requirements = part / "pins.txt"
    requirements.write_text("".join(f"{pin} --hash=sha256:{pin.sha256}\n" for pin in pins))
    flags = WHEEL_FLAGS if pins[0].kind == "wheel" else [*SDIST_FLAGS, pins[0].name]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", *QUIET]
    command += [*flags, "-d", str(part), "-r", str(requirements)]
    output, code = _follow(command, bar)
    if code != 0:
        raise UserError(_explain(output, pins))


def _follow(command: Sequence[str], bar: "tqdm[Any]") -> tuple[list[str], int]:
    """Run pip; the bar goes on with every package it takes up. Its output and exit code."""
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith(("Collecting ", "Processing ")):
                bar.set_postfix_str(Path(line.split()[1]).name)
                bar.update()
    return lines, process.returncode


def _explain(output: Sequence[str], pins: Sequence[Pin]) -> str:
    """Pip's failure as one message: which package, what to do, what pip said."""
    text = "\n".join(output)
    if "No module named pip" in text:
        return "pip is missing from this Python; run `python -m ensurepip`"
    mismatch = text.partition("DO NOT MATCH THE HASHES")[2].lower()
    wrong = [pin for pin in pins if str(pin).lower() in mismatch]
    if wrong:
        return "\n".join(map(_wrong_hash, wrong))
    errors = [line for line in output if "error" in line.lower()] or output[-8:]
    said = "\n".join(f"  {without_addresses(line)}" for line in errors)
    named = [pin for pin in pins if pin.name.lower() in said.lower()] or pins
    return (
        f"{', '.join(map(str, named))}: cannot be fetched; check the network and "
        f"`python -m pip config list`, or put the file into {DOWNLOADS} by hand. "
        f"pip said:\n{said}"
    )


def without_addresses(line: str) -> str:
    """Addresses, and paths on a server, may carry the password or token of a private one.

    >>> without_addresses("data/x: no https://me:secret@host/simple, retried /token/simple/")
    'data/x: no <address> retried <path>'
    """
    line = re.sub(r"[a-z+]+://\S+", "<address>", line, flags=re.IGNORECASE)
    # From the root or a quote on; a path below the project's folder is of use and stays.
    line = re.sub(r"(?<![\w.<>~*/-])/[^\s'\")]+", "<path>", line)
    line = re.sub(r"\bhf_\w+", "<token>", line)
    return re.sub(r"(host(?:name)?[='\" ]+)[\w.:-]+", r"\1<host>", line, flags=re.IGNORECASE)
