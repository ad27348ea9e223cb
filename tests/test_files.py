import json

import pyarrow as pa
import pytest
import torch

from ponderttt import files, result_tables, shards, stage, tables
from ponderttt.errors import UserError


def write_half(path):
    with files.atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "value.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError):
        write_half(path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_no_space_is_told_with_a_remedy(tmp_path):
    with (
        pytest.raises(UserError, match="no space left on the disk; free some"),
        files.atomic(tmp_path / "value"),
    ):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_number_in_a_message_is_a_full_disk_too(tmp_path):
    """Libraries in Rust tell the system's number in words alone."""
    with pytest.raises(UserError, match="no space left on the disk"), files.told(tmp_path):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="another"), files.told(tmp_path):
        raise RuntimeError("another fault (os error 5)")


def test_nan_is_no_json(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "value.json", float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "value.json").write_text('{"a":')
    with pytest.raises(UserError, match=r"value\.json: damaged"):
        files.read_json(tmp_path / "value.json")


def table(path, rows=50):
    columns = {name: list(range(rows)) for name in tables.HISTORY.names}
    tables.write(path, pa.table(columns), tables.HISTORY, {"why": ["test", 1]})


def test_a_table_comes_back_with_its_notes(tmp_path):
    table(tmp_path / "t.parquet")
    assert tables.read(tmp_path / "t.parquet", tables.HISTORY)["step"].to_pylist()[-1] == 49
    assert tables.notes(tmp_path / "t.parquet") == {"why": ["test", 1]}
    assert tables.count(tmp_path / "t.parquet") == 50


@pytest.mark.parametrize("spoil", ["flip", "cut", "foreign"])
def test_a_spoiled_table_is_named(tmp_path, spoil):
    path = tmp_path / "t.parquet"
    table(path)
    content = bytearray(path.read_bytes())
    if spoil == "flip":
        content[60] ^= 0xFF
    elif spoil == "cut":
        content = content[: len(content) // 2]
    path.write_bytes(content)
    schema = result_tables.GATE if spoil == "foreign" else tables.HISTORY
    with pytest.raises(UserError, match=r"t\.parquet: (damaged|its columns)"):
        tables.read(path, schema)


@pytest.mark.parametrize("read", [tables.notes, tables.count])
def test_a_cut_or_missing_table_is_named_when_its_footer_is_read(tmp_path, read):
    path = tmp_path / "t.parquet"
    with pytest.raises(UserError, match=r"t\.parquet: not found; run `dvc repro`"):
        read(path)
    table(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"t\.parquet: damaged .*delete it and run `dvc repro`"):
        read(path)


def test_a_cut_shard_is_named_when_its_notes_are_read(tmp_path):
    path = tmp_path / "part-00000.safetensors"
    shards.write(path, torch.randn(2, 8, 4), {"backbone": "abc"})
    path.write_bytes(path.read_bytes()[:-20])
    for read, place in ((shards.notes, path), (shards.folder_hash, tmp_path)):
        with pytest.raises(UserError, match=r"part-00000\.safetensors: damaged .*dvc repro"):
            read(place)


@pytest.mark.parametrize("spoil", ["flip", "cut"])
def test_a_spoiled_shard_is_named(tmp_path, spoil):
    path = tmp_path / "part-00000.safetensors"
    hidden = torch.randn(2, 8, 4)
    shards.write(path, hidden, {"backbone": "abc"})
    assert torch.equal(shards.read(path), hidden)
    content = bytearray(path.read_bytes())
    if spoil == "flip":
        content[-3] ^= 1
    path.write_bytes(content if spoil == "flip" else content[:-5])
    with pytest.raises(UserError, match=r"part-00000\.safetensors: (damaged|its hash)"):
        shards.read(path)


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(UserError, match="not found; run `dvc repro`"):
        shards.read(tmp_path / "part-00000.safetensors")


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    """As two nodes may, whose processes have the same number."""
    path = tmp_path / "file"
    with files.atomic(path) as first:
        first.write_text("first")
        with files.atomic(path) as second:
            second.write_text("second")
        assert first.read_text() == "first"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_work_folder_taken_up_again_holds_nothing_half_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = stage.work_folder("hidden@tiny", [1])
    (work / "set=train").mkdir()
    (work / "set=train/.part.0.tmp").write_text("half")
    (work / "set=train/part").write_text("whole")
    assert stage.work_folder("hidden@tiny", [1]) == work
    assert [p.name for p in work.rglob("*") if p.is_file()] == ["part"]
