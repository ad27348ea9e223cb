"""Archives are real files, made on the spot; hostile ones are refused as a whole."""

import gzip
import io
import random
import stat
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from ponderttt import archives
from ponderttt.archives import Limits
from ponderttt.errors import UserError

GOOD = {"pkg/a.py": b"a = 1\n", "pkg/sub/b.py": b"b = 2\n", "pkg/data.bin": b"\x00\xff"}


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


def make_tar(path: Path, members: dict[str, bytes], *odd: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for entry in odd:
            archive.addfile(entry)
    return path


def make(path: Path, members: dict[str, bytes]) -> Path:
    return (make_zip if path.suffix == ".whl" else make_tar)(path, members)


def read(path: Path, limits: Limits | None = None) -> dict[str, bytes]:
    return dict(archives.members(path, lambda name: name.endswith(".py"), limits))


@pytest.fixture(params=["a.whl", "a.tar.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


def test_wanted_members_in_order(path: Path) -> None:
    found = list(archives.members(make(path, GOOD), lambda name: name.endswith(".py")))
    assert found == [("pkg/a.py", b"a = 1\n"), ("pkg/sub/b.py", b"b = 2\n")]


def test_folders_are_no_members(tmp_path: Path) -> None:
    assert read(make_zip(tmp_path / "a.zip", {"odd.py/": b"", **GOOD})).keys() == {
        "pkg/a.py",
        "pkg/sub/b.py",
    }
    folder = tarfile.TarInfo("odd.py")
    folder.type = tarfile.DIRTYPE
    assert "odd.py" not in read(make_tar(tmp_path / "a.tar.gz", GOOD, folder))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../evil.py", "leads out"),
        ("pkg/../../evil.py", "leads out"),
        ("pkg\\..\\..\\evil.py", "leads out"),
        ("/etc/evil.py", "absolute"),
        ("\\evil.py", "absolute"),
        ("C:/evil.py", "absolute"),
    ],
)
def test_paths_out_of_the_archive(path: Path, name: str, reason: str) -> None:
    make(path, {**GOOD, name: b"boom = 1\n"})
    with pytest.raises(UserError, match=reason) as error:
        read(path)
    assert str(path) in str(error.value)


def test_a_hostile_member_at_the_end_gives_no_content_at_all(path: Path) -> None:
    make(path, {**GOOD, "../evil.txt": b""})
    with pytest.raises(UserError):
        next(archives.members(path, lambda name: name.endswith(".py")))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_in_a_tar(tmp_path: Path, kind: bytes) -> None:
    link = tarfile.TarInfo("pkg/link.py")
    link.type, link.linkname = kind, "/etc/passwd"
    with pytest.raises(UserError, match="is a link"):
        read(make_tar(tmp_path / "a.tar.gz", GOOD, link))


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_in_a_tar(tmp_path: Path, kind: bytes) -> None:
    device = tarfile.TarInfo("pkg/device.py")
    device.type = kind
    with pytest.raises(UserError, match="is a device"):
        read(make_tar(tmp_path / "a.tar.gz", GOOD, device))


@pytest.mark.parametrize(
    ("mode", "reason"), [(stat.S_IFLNK, "is a link"), (stat.S_IFCHR, "is a device")]
)
def test_links_and_devices_in_a_zip(tmp_path: Path, mode: int, reason: str) -> None:
    entry = zipfile.ZipInfo("pkg/link.py")
    entry.external_attr = (mode | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(UserError, match=reason):
        read(tmp_path / "a.whl")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_unusual_compression(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w", method) as archive:
        archive.writestr("a.py", b"a = 1\n")
    with pytest.raises(UserError, match=r"'a\.py' is compressed in an unusual way"):
        read(tmp_path / "a.whl")


@pytest.mark.parametrize("claimed", [10, 5 << 20])
def test_a_member_that_lies_about_its_size(tmp_path: Path, claimed: int) -> None:
    """It is not unpacked beyond what it claims, and not taken for whole."""
    path = make_zip(tmp_path / "a.whl", {"a.py": b"\0" * (200 << 20)})
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = claimed.to_bytes(4, "little")
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError, match="damaged or truncated"):
        read(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 32 << 20


def test_a_tar_that_goes_on_after_its_end(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar.gz", GOOD)
    with path.open("ab") as file:
        file.write(gzip.compress(b"\0" * (8 << 20)))
    with pytest.raises(UserError, match=r"damaged or truncated .it goes on"):
        read(path, Limits(member=4 << 20))
    assert read(path)


def test_a_damaged_xz(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for number in range(20):
            entry = tarfile.TarInfo(f"m{number}.py")
            entry.size = 5000
            archive.addfile(entry, io.BytesIO(random.Random(number).randbytes(5000)))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged or truncated"):
        read(path)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.whl", {"naïve.py": b"a = 1\n"})
    path.write_bytes(path.read_bytes().replace("ï".encode(), b"\xff\xfe"))
    with pytest.raises(UserError, match="damaged or truncated"):
        read(path)


def with_directory_byte(path: Path, offset: int, value: int) -> Path:
    """A zip of one member with this bit or number in the member's entry of the directory."""
    content = bytearray(make_zip(path, {"a.py": b"a = 1\n"}).read_bytes())
    content[content.index(b"PK\x01\x02") + offset] |= value
    path.write_bytes(content)
    return path


def test_an_encrypted_member(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is encrypted"):
        read(with_directory_byte(tmp_path / "a.zip", 8, 1))


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [(6, 99, "zip file version"), (8, 0x20, "patched data"), (8, 0x40, "strong encryption")],
)
def test_a_zip_that_python_does_not_read(
    tmp_path: Path, offset: int, value: int, reason: str
) -> None:
    with pytest.raises(UserError, match=f"damaged or truncated .*{reason}"):
        read(with_directory_byte(tmp_path / "a.zip", offset, value))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(member=999), "'big.py' has 1000 bytes"),
        (Limits(total=1500), "brings the archive to more than 1500 bytes"),
        (Limits(members=1), "more than 1 members"),
    ],
)
def test_too_much(path: Path, limits: Limits, reason: str) -> None:
    make(path, {"big.py": b"x" * 1000, "more.txt": b"x" * 600})
    with pytest.raises(UserError, match=reason):
        read(path, limits)
    assert read(path).keys() == {"big.py"}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_truncated(path: Path, share: float) -> None:
    make(path, {f"m{i}.py": bytes(range(256)) * i for i in range(40)})
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match="damaged or truncated") as error:
        read(path)
    assert str(path) in str(error.value)


def test_a_flipped_byte_of_content(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"a.py": bytes(range(256))})
    content = bytearray(path.read_bytes())
    content[60] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged or truncated"):
        read(path)


def test_not_an_archive_or_not_there(path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        read(path)
    path.write_bytes(b"<html>sign in first</html>" * 40)
    with pytest.raises(UserError, match="damaged or truncated"):
        read(path)
