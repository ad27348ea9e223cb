import hashlib
import itertools
import sys

import numpy as np
import pyarrow as pa
import pytest
import tiny

from ponderttt import chunks, files, params, tables
from ponderttt.errors import UserError


def settings(**changes):
    raw = tiny.plain_params()
    raw["chunks"] |= changes
    return params.parse(raw).chunks


def documents(count=20, repo="r"):
    rows = []
    for i in range(count):
        text = f"value_{i} = {i}\n" * (5 + 7 * i)
        doc_id = hashlib.sha256(text.encode()).hexdigest()
        row = {"doc_id": doc_id, "repo": repo, "path": f"{i}.py", "language": "python"}
        rows.append(row | {"licence": "MIT", "split": "test", "text": text})
    return pa.Table.from_pylist(rows, schema=tables.CORPUS)


def make(count=1000, table=None, **changes):
    table = documents() if table is None else table
    return chunks.make_set(table, tiny.tokenizer(), settings(**changes), count)


def test_windows_cover_the_document_and_short_tails_go():
    rows = make(max_per_document=10**6)
    texts = {d["doc_id"]: d["text"] for d in documents().to_pylist()}
    for doc_id, text in texts.items():
        tokens = tiny.tokenizer()(text)["input_ids"]
        mine = [r for r in rows if r["doc_id"] == doc_id]
        joined = [t for r in mine for t in r["tokens"][: r["n_tokens"]]]
        left = len(tokens) - len(joined)
        assert joined == tokens[: len(joined)]
        assert left < 17
        assert [r["position"] for r in mine] == list(range(len(mine)))


def test_rows_are_padded_and_counted():
    rows = make()
    end = tiny.tokenizer().eos_token_id
    assert {len(r["tokens"]) for r in rows} == {96}
    tail = next(r for r in rows if r["n_tokens"] < 96)
    assert set(tail["tokens"][tail["n_tokens"] :]) == {end}
    assert [r["order"] for r in rows] == list(range(len(rows)))


def test_order_depends_on_the_seed_and_not_on_the_input():
    backwards = documents().take(list(range(19, -1, -1)))
    assert make() == make(table=backwards)
    assert [r["doc_id"] for r in make()] != [r["doc_id"] for r in make(seed=7)]


def test_the_cap_per_document_holds():
    rows = make(max_per_document=2)
    assert max(r["position"] for r in rows) == 1


def test_concat_joins_documents_with_the_end_of_text():
    rows = make(pack="concat")
    end = tiny.tokenizer().eos_token_id
    assert all(r["n_tokens"] == 96 for r in rows)
    total = sum(len(i) + 1 for i in tiny.tokenizer()(documents()["text"].to_pylist())["input_ids"])
    assert len(rows) == total // 96
    assert sum(t == end for r in rows for t in r["tokens"]) in (19, 20)
    assert len({r["chunk_id"] for r in rows}) == len(rows)


def test_shuffled_chunks_hold_the_same_tokens():
    rows = make()
    for row, mixed in zip(rows, chunks.shuffle(rows, 42), strict=True):
        count = row["n_tokens"]
        assert sorted(row["tokens"][:count]) == sorted(mixed["tokens"][:count])
        assert row["tokens"][count:] == mixed["tokens"][count:]
        assert row["chunk_id"] == mixed["chunk_id"]
        assert row["token_hash"] != mixed["token_hash"]
    assert chunks.shuffle(rows, 42) == chunks.shuffle(rows, 42)


def test_a_shard_never_ends_inside_a_document():
    rows = make(max_per_document=10**6)
    shards = chunks.split_into_shards(rows, 5)
    assert [r for shard in shards for r in shard] == rows
    for left, right in itertools.pairwise(shards):
        assert left[-1]["doc_id"] != right[0]["doc_id"]
        assert len(left) >= 5


def test_files_say_which_tokenizer_made_them(tmp_path):
    rows = make()
    chunks.write_set(tmp_path, rows, 8, {"tokenizer": "abc"})
    table = tables.read_folder(tmp_path, tables.CHUNKS)
    assert np.array_equal(table["order"].to_numpy(), np.arange(len(rows)))
    assert tables.notes(tmp_path / "part-00000.parquet") == {"tokenizer": "abc"}


@pytest.mark.parametrize("key", ["doc_id", "repo"])
def test_a_leak_between_train_and_test_stops(key):
    train = [{"doc_id": "a", "repo": "x"}]
    test = [{"doc_id": "b", "repo": "y"}]
    chunks.check_apart({"train": train, "python": test})
    test[0][key] = train[0][key]
    with pytest.raises(UserError, match=f"{key} . is in train and in python"):
        chunks.check_apart({"train": train, "python": test})


def test_a_set_that_is_short_says_so_in_its_notes():
    assert chunks.shortfall([{}] * 3, 5) == {"wanted": 5}
    assert chunks.shortfall([{}] * 5, 5) == {}


def test_a_full_disk_leaves_no_half_a_set(copied):
    out = copied / "data/chunks/scale=tiny"
    before = files.folder_hash(out)
    # Files of at most 3 KB: a set's first file is longer.
    command = f"ulimit -f 3; exec '{sys.executable}' -m stages.chunks tiny"
    done = tiny.run(copied, "bash", "-c", command, check=False)
    assert done.returncode == 1
    assert "cannot be written: the file is larger than this system allows" in done.stderr
    assert "Traceback" not in done.stderr
    assert files.folder_hash(out) == before
    tiny.stage(copied, "chunks", "tiny")
    assert files.folder_hash(out) == before
    assert list((copied / "data/.work").glob("chunks-*")) == []


def test_an_empty_set_is_named():
    with pytest.raises(UserError, match="set go is empty"):
        chunks.check_count("go", [], 5)
