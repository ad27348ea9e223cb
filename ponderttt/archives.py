"""Zip and tar archives, read member by member and never extracted.

The whole list of members is judged before any content is handed out: one hostile member
refuses the archive.
"""

import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ponderttt.errors import UserError

# What a damaged archive raises, depending on where the damage is.
DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    UnicodeDecodeError,  # a member's name
    NotImplementedError,  # a zip version this Python does not read
    OSError,  # "not a gzipped file", a failed checksum
)
# What packages use; the others of zip can only be unpacked whole, however long they are.
COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes in bytes after decompression, beyond which an archive is refused."""

    member: int = 64 << 20
    total: int = 1 << 30
    members: int = 100_000


@dataclass(frozen=True)
class Member:
    """What an archive says of one entry; `oddity` tells why nobody should read it."""

    name: str
    size: int
    oddity: str


def members(
    path: Path, wanted: Callable[[str], bool], limits: Limits | None = None
) -> Iterator[tuple[str, bytes]]:
    """Name and content of each regular file that is `wanted`, in the archive's order."""
    read = _read_zip if path.suffix in {".zip", ".whl"} else _read_tar
    if not path.is_file():
        raise UserError(f"{path}: not found; run `dvc repro`")
    try:
        yield from read(path, wanted, limits or Limits())
    except DAMAGE as error:
        raise UserError(
            f"{path}: damaged or truncated ({error}); delete it and run again"
        ) from None


def _read_zip(
    path: Path, wanted: Callable[[str], bool], limits: Limits
) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        _judge(path, (_zip_member(entry) for entry in entries), limits)
        for entry in entries:
            if not entry.is_dir() and wanted(entry.filename):
                yield entry.filename, _unzipped(archive, entry)


def _read_tar(
    path: Path, wanted: Callable[[str], bool], limits: Limits
) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        _judge(path, (_tar_member(entry) for entry in archive), limits)
        _read_to_end(archive, limits)
        for entry in archive:
            if entry.isreg() and wanted(entry.name):
                yield entry.name, _content(archive, entry)


def _unzipped(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """A member's content, read no further than one byte beyond the size that was judged."""
    with archive.open(entry) as file:
        content = file.read(entry.file_size + 1)
    if len(content) != entry.file_size:
        raise EOFError(f"{entry.filename} has not the {entry.file_size} bytes that it claims")
    return content


def _read_to_end(archive: tarfile.TarFile, limits: Limits) -> None:
    """The checksum of the compression stands behind the last member, and little else does."""
    left = limits.member
    while archive.fileobj and (block := archive.fileobj.read(BLOCK)):
        left -= len(block)
        if left < 0:
            raise tarfile.ReadError("it goes on after its last member")


def _content(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(entry)
    content = file.read() if file else b""
    if len(content) != entry.size:
        raise EOFError(f"{entry.name} ends early")
    return content


def _zip_member(entry: zipfile.ZipInfo) -> Member:
    # The original name: zipfile cuts `filename` at a NUL byte.
    kind = stat.S_IFMT(entry.external_attr >> 16)
    oddity = ""
    if entry.flag_bits & 1:
        oddity = "is encrypted"
    elif entry.compress_type not in COMPRESSIONS:
        oddity = "is compressed in an unusual way"
    elif kind == stat.S_IFLNK:
        oddity = "is a link"
    elif kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        oddity = "is a device"
    return Member(entry.orig_filename, entry.file_size, oddity)


def _tar_member(entry: tarfile.TarInfo) -> Member:
    oddity = ""
    if entry.issym() or entry.islnk():
        oddity = "is a link"
    elif not (entry.isreg() or entry.isdir()):
        oddity = "is a device"
    return Member(entry.name, entry.size, oddity)


def _judge(path: Path, entries: Iterable[Member], limits: Limits) -> None:
    """Stop at the first entry that has no place in a package of source files."""
    total = 0
    for count, entry in enumerate(entries, start=1):
        total += entry.size
        problem = entry.oddity or _name_problem(entry.name)
        if entry.size > limits.member:
            problem = f"has {entry.size} bytes, more than {limits.member}"
        elif total > limits.total:
            problem = f"brings the archive to more than {limits.total} bytes"
        elif count > limits.members:
            problem = f"is one of more than {limits.members} members"
        if problem:
            raise UserError(
                f"{path}: refused: member {entry.name!r} {problem}; "
                "use a version of the package without it"
            )


def _name_problem(name: str) -> str:
    parts = re.split(r"[/\\]", name)
    if parts[0] == "" or re.match(r"[A-Za-z]:", name):
        return "has an absolute path"
    if ".." in parts:
        return "leads out of its folder"
    if "\0" in name:
        return "has a NUL byte in its name"
    return ""
