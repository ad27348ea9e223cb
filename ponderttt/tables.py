"""Arrow schemas of every table, declared once; checked when written and when read.

Parquet files carry page checksums, so that a damaged file is an error and never a number.
Sums are sums of nats over predicted tokens; `n_predicted` counts them; divide last.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ponderttt.errors import UserError
from ponderttt.files import atomic, reading

DAMAGE = pa.ArrowException  # what a spoilt file raises

CORPUS = pa.schema(
    [
        ("doc_id", pa.string()),  # sha256 of the cleaned text
        ("repo", pa.string()),
        ("path", pa.string()),
        ("language", pa.string()),
        ("licence", pa.string()),
        ("split", pa.string()),  # train | test
        ("text", pa.string()),
    ]
)

CHUNKS = pa.schema(
    [
        ("chunk_id", pa.string()),
        ("doc_id", pa.string()),
        ("repo", pa.string()),
        ("path", pa.string()),
        ("order", pa.int32()),  # place in the stream of its set
        ("position", pa.int32()),  # place in its document
        ("n_tokens", pa.int32()),  # the rest of `tokens` is padding
        ("tokens", pa.list_(pa.int32())),  # always `chunks.length` long
        ("token_hash", pa.string()),
    ]
)

IDENTITY = [
    ("chunk_id", pa.string()),
    ("doc_id", pa.string()),
    ("repo", pa.string()),
    ("order", pa.int32()),
    ("position", pa.int32()),
    ("n_tokens", pa.int32()),
    ("n_predicted", pa.int32()),
]

BASE = pa.schema([*IDENTITY, ("nll_base", pa.float64()), ("entropy_base", pa.float64())])

SCORES = pa.schema(
    [
        *IDENTITY,
        ("nll_base", pa.float64()),  # sums of nats over n_predicted tokens
        ("nll_skip", pa.float64()),
        ("nll_update", pa.float64()),
        ("recon", pa.float64()),  # signals: one number per chunk, means over its tokens
        ("recon_step", pa.float64()),
        ("recon_last", pa.float64()),
        ("recon_prefix", pa.float64()),
        ("delta", pa.float64()),
        ("entropy_base", pa.float64()),
        ("entropy_skip", pa.float64()),
        ("gain_kl", pa.float64()),
        ("out_norm", pa.float64()),
        ("grad_norm", pa.float64()),
    ]
)

# Per-token losses of a sample of chunks, for reading them beside the code. Lists have one entry
# per real token; nothing predicts the first, so its losses are null.
TOKENS = pa.schema(
    [
        ("chunk_id", pa.string()),
        ("order", pa.int32()),
        ("path", pa.string()),
        ("pieces", pa.list_(pa.string())),
        ("nll_base", pa.list_(pa.float32())),
        ("nll_skip", pa.list_(pa.float32())),
        ("nll_update", pa.list_(pa.float32())),
    ]
)

HISTORY = pa.schema(
    [
        ("step", pa.int32()),
        ("ce", pa.float64()),  # mean CE of the sampled positions, UPDATE arm
        ("recon", pa.float64()),
        ("grad_norm", pa.float64()),  # before clipping
        ("lr", pa.float64()),
        ("tokens_per_second", pa.float64()),
    ]
)


def write(
    path: Path, rows: pa.Table, schema: pa.Schema, notes: Mapping[str, Any] | None = None
) -> None:
    """Write `rows` as `schema`, whole or not at all; `notes` become the file's metadata."""
    table = rows.select(schema.names).cast(schema)
    metadata = {k: json.dumps(v, sort_keys=True) for k, v in (notes or {}).items()}
    with atomic(path) as temporary:
        pq.write_table(
            table.replace_schema_metadata(metadata),
            temporary,
            compression="zstd",
            write_page_checksum=True,
        )


def read(path: Path, schema: pa.Schema) -> pa.Table:
    """Read one file; a missing, damaged or foreign one is an error that names it."""
    with reading(path, DAMAGE), pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read()
    if not table.schema.equals(schema):
        raise UserError(f"{path}: its columns are not those of this version; run `dvc repro`")
    return table


def notes(path: Path) -> dict[str, Any]:
    """The metadata that `write` stored."""
    with reading(path, DAMAGE):
        metadata = pq.read_metadata(path).metadata or {}
    return {k.decode(): json.loads(v) for k, v in metadata.items() if not k.startswith(b"ARROW")}


def count(path: Path) -> int:
    """How many rows a file has, from its footer."""
    with reading(path, DAMAGE):
        return int(pq.read_metadata(path).num_rows)


def read_folder(folder: Path, schema: pa.Schema) -> pa.Table:
    """All Parquet files right in `folder`, in the order of their names."""
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise UserError(f"{folder}: holds no table; run `dvc repro`")
    return pa.concat_tables([read(path, schema) for path in paths])
