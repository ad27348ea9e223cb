"""Real pip, on a folder of packages made on the spot; once on the registry itself."""

import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from ponderttt import fetch as fetching
from ponderttt import sources
from ponderttt.errors import UserError
from ponderttt.fetch import Pin, fetch

# A build backend that leaves a trace when its code runs.
BACKEND = """
import os, pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    pathlib.Path(os.environ["TRACE"]).write_text("ran")
    info = pathlib.Path(folder, "tiny_sdist-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny-sdist\\nVersion: 1.0\\n")
    return info.name
def build_wheel(*args): raise RuntimeError("only metadata is wanted")
build_sdist = build_wheel
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only source of packages."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    return folder


def pin(path: Path, name: str, kind: str = "wheel") -> Pin:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Pin(name=name, version="1.0", file=path.name, sha256=digest, kind=kind)


def make_wheel(registry: Path, name: str) -> Pin:
    path, info = registry / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "x = 1\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return pin(path, name)


def make_sdist(registry: Path) -> Pin:
    path = registry / "tiny_sdist-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"backend.py": BACKEND, "pyproject.toml": PYPROJECT}.items():
            entry = tarfile.TarInfo(f"tiny_sdist-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return pin(path, "tiny-sdist", "sdist")


def other_hash(right: Pin) -> Pin:
    return Pin(**{**vars(right), "sha256": "0" * 64})


def left_over(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.name != ".lock"}


def test_wheels_and_sdists(registry: Path, tmp_path: Path) -> None:
    pins = [make_wheel(registry, "alpha"), make_sdist(registry), make_wheel(registry, "beta")]
    found = fetch(pins, tmp_path / "cache")
    assert list(found) == [p.file for p in pins]
    for p in pins:
        assert found[p.file].read_bytes() == (registry / p.file).read_bytes()
    assert left_over(tmp_path / "cache") == set(found)


def test_a_right_file_is_kept_and_a_damaged_one_fetched_again(
    registry: Path, tmp_path: Path
) -> None:
    kept, damaged = make_wheel(registry, "alpha"), make_wheel(registry, "beta")
    found = fetch([kept, damaged], tmp_path / "cache")
    (registry / kept.file).unlink()  # so that fetching it again would fail
    found[damaged.file].write_bytes(b"half")
    fetch([kept, damaged], tmp_path / "cache")
    assert found[damaged.file].read_bytes() == (registry / damaged.file).read_bytes()


def test_a_wrong_hash_names_the_package_and_leaves_nothing(registry: Path, tmp_path: Path) -> None:
    pins = [make_wheel(registry, "alpha"), other_hash(make_wheel(registry, "beta"))]
    with pytest.raises(
        UserError, match=r"beta==1.0: beta-1.0-.* does not have the pinned"
    ) as error:
        fetch(pins, tmp_path / "cache")
    assert "alpha" not in str(error.value)
    assert left_over(tmp_path / "cache") == set()


def test_code_of_an_sdist_with_a_wrong_hash_never_runs(registry: Path, tmp_path: Path) -> None:
    right = make_sdist(registry)
    with pytest.raises(UserError, match=r"tiny-sdist==1.0: .* does not have the pinned"):
        fetch([other_hash(right)], tmp_path / "cache")
    assert not (tmp_path / "trace").exists()
    fetch([right], tmp_path / "cache")
    assert (tmp_path / "trace").exists()  # so the trace would have shown it


def test_a_missing_package_is_named(registry: Path, tmp_path: Path) -> None:
    missing = Pin(name="nosuch", version="1.0", file="x.whl", sha256="0" * 64, kind="wheel")
    with pytest.raises(UserError, match=r"nosuch==1.0: cannot be fetched; check the network"):
        fetch([make_wheel(registry, "alpha"), missing], tmp_path / "cache")


def test_another_file_than_the_pinned(registry: Path, tmp_path: Path) -> None:
    right = make_wheel(registry, "alpha")
    odd = Pin(**{**vars(right), "file": "alpha-1.0-py2-none-any.whl"})
    with pytest.raises(UserError, match=r"alpha==1.0: pip fetched alpha-1.0-py3-none-any.whl, not"):
        fetch([odd], tmp_path / "cache")


def test_addresses_and_passwords_are_not_shown(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://person:hunter2@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    missing = Pin(name="nosuch", version="1.0", file="x.whl", sha256="0" * 64, kind="wheel")
    with pytest.raises(UserError) as error:
        fetch([missing], tmp_path / "cache")
    for secret in ("person", "hunter2", "127.0.0.1", "://", str(registry)):
        assert secret not in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        "Max retries exceeded with url: /planted/simple/nosuch/ (Caused by x)",
        "GET '/planted/simple' failed",
        "https://me:planted@host/simple: 401",
        "401 for token hf_planted0123",
        "see /home/planted/x.whl",
        "HTTPSConnectionPool(host='planted.example', port=443)",
    ],
)
def test_what_may_hold_a_token_is_hidden(line: str) -> None:
    assert "planted" not in fetching.without_addresses(line)


@pytest.mark.parametrize(
    "line",
    [
        "data/.downloads: full",
        "./data/x.whl is not a wheel",
        "openai-community/gpt2 is gated",
        "a / b",
    ],
)
def test_what_helps_stays(line: str) -> None:
    assert fetching.without_addresses(line) == line


def test_no_place_to_write(registry: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cache: cannot hold downloads \(File exists\)"):
        fetch([make_wheel(registry, "alpha")], tmp_path / "cache")


@pytest.mark.network
def test_the_registry_itself(tmp_path: Path) -> None:
    listed = sources.read_list(Path("ponderttt/packages.json"))
    smallest = min((entry for entry in listed if entry.kind == "wheel"), key=lambda e: e.bytes)
    try:
        found = fetch([smallest.pin], tmp_path)
    except UserError as error:
        if "cannot be fetched" not in str(error):
            raise
        pytest.skip(f"the registry cannot be reached: {error}")
    assert found[smallest.file].stat().st_size == smallest.bytes
