"""Documents to rows of `chunks.length` tokens, in the order in which the gates will meet them.

Documents come in a seeded order that depends on their content alone; chunks keep their order
inside a document. A file of chunks never ends inside a document.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ponderttt import tables
from ponderttt.errors import UserError
from ponderttt.params import Chunks

TOKENISE = 64  # documents per call of the tokenizer

Row = dict[str, Any]


def make_set(documents: pa.Table, tokenizer: Any, params: Chunks, count: int) -> list[Row]:
    """The first `count` chunks of the documents in their seeded order."""
    ordered = sorted(documents.to_pylist(), key=lambda d: _place(params.seed, d["doc_id"]))
    pack = _by_document if params.pack == "document" else _concatenated
    rows: list[Row] = []
    for row in pack(_tokenised(ordered, tokenizer), params, tokenizer.eos_token_id):
        rows.append(row | {"order": len(rows)})
        if len(rows) == count:
            break
    return [_padded(row, params.length, tokenizer.eos_token_id) for row in rows]


def shuffle(rows: Sequence[Row], seed: int) -> list[Row]:
    """The same chunks with their real tokens permuted, each by a seed of its own."""
    return [_shuffled(row, seed) for row in rows]


def split_into_shards(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Runs of whole documents, each of at least `size` chunks but the last."""
    shards: list[list[Row]] = []
    for row in rows:
        ended = not shards or (
            len(shards[-1]) >= size and shards[-1][-1]["doc_id"] != row["doc_id"]
        )
        if ended:
            shards.append([])
        shards[-1].append(row)
    return shards


def write_set(folder: Path, rows: Sequence[Row], size: int, notes: dict[str, Any]) -> None:
    """One file per shard; the notes say which tokenizer made the tokens."""
    for number, shard in enumerate(split_into_shards(rows, size)):
        table = pa.Table.from_pylist(shard, schema=tables.CHUNKS)
        tables.write(folder / f"part-{number:05d}.parquet", table, tables.CHUNKS, notes)


def check_apart(sets: dict[str, Sequence[Row]]) -> None:
    """Stop if a document or a repository is in `train` and in any other set."""
    for key in ("doc_id", "repo"):
        trained = {row[key] for row in sets["train"]}
        for name, rows in sets.items():
            both = trained & {row[key] for row in rows} if name != "train" else set()
            if both:
                raise UserError(
                    f"chunks: {key} {sorted(both)[0]} is in train and in {name}; "
                    "the corpus leaks, delete data/corpus and run `dvc repro`"
                )


def shortfall(rows: Sequence[Row], wanted: int) -> dict[str, int]:
    """For the notes: how many chunks were asked for, where there are fewer."""
    return {"wanted": wanted} if len(rows) < wanted else {}


def check_count(name: str, rows: Sequence[Row], wanted: int) -> None:
    """No chunk at all is an error; fewer than asked for is said aloud."""
    if not rows:
        raise UserError(
            f"chunks: set {name} is empty; give corpus more files of that language, "
            "or take it out of run.languages"
        )
    if len(rows) < wanted:
        print(f"chunks: {name} has {len(rows)} of the {wanted} chunks asked for", file=sys.stderr)


def _tokenised(documents: Sequence[Row], tokenizer: Any) -> Iterator[tuple[Row, list[int]]]:
    for start in range(0, len(documents), TOKENISE):
        group = documents[start : start + TOKENISE]
        encoded = tokenizer([d["text"] for d in group], add_special_tokens=False, verbose=False)
        yield from zip(group, encoded["input_ids"], strict=True)


def _by_document(
    documents: Iterable[tuple[Row, list[int]]], params: Chunks, _end: int
) -> Iterator[Row]:
    """Windows of one document; a tail of at least `min_tokens` is kept."""
    for document, tokens in documents:
        last = min(len(tokens), params.max_per_document * params.length)
        for position, start in enumerate(range(0, last, params.length)):
            window = tokens[start : start + params.length]
            if len(window) >= params.min_tokens:
                yield _row(document, position, window)


def _concatenated(
    documents: Iterable[tuple[Row, list[int]]], params: Chunks, end: int
) -> Iterator[Row]:
    """Windows of all documents of one side end to end; a row is named after where it starts."""
    stream: list[int] = []
    owners: list[Row] = []
    position: dict[str, int] = {}
    for document, tokens in documents:
        stream += [*tokens, end]
        owners += [document] * (len(tokens) + 1)
        while len(stream) >= params.length:
            doc_id = owners[0]["doc_id"]
            position[doc_id] = position.get(doc_id, -1) + 1
            yield _row(owners[0], position[doc_id], stream[: params.length])
            del stream[: params.length], owners[: params.length]


def _row(document: Row, position: int, tokens: Sequence[int]) -> Row:
    return {
        "chunk_id": f"{document['doc_id'][:16]}-{position:04d}",
        "doc_id": document["doc_id"],
        "repo": document["repo"],
        "path": document["path"],
        "position": position,
        "n_tokens": len(tokens),
        "tokens": list(tokens),
        "token_hash": _token_hash(tokens),
    }


def _padded(row: Row, length: int, end: int) -> Row:
    return row | {"tokens": row["tokens"] + [end] * (length - row["n_tokens"])}


def _shuffled(row: Row, seed: int) -> Row:
    count = row["n_tokens"]
    generator = np.random.default_rng([seed, int(row["token_hash"], 16)])
    tokens = generator.permutation(row["tokens"][:count]).tolist()
    return row | {"tokens": tokens + row["tokens"][count:], "token_hash": _token_hash(tokens)}


def _token_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()[:16]


def _place(seed: int, doc_id: str) -> str:
    return hashlib.sha256(f"{seed}:{doc_id}".encode()).hexdigest()
