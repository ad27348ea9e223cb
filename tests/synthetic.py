"""Score tables with known truth: clustered documents and signals of planted correlation."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ponderttt import result_tables, tables
from ponderttt.signals import LABEL_FREE
from ponderttt.streams import Key, keys


def scores(
    chunks: int, *, seed: int, correlation: float = 0.6, name: str = "doc", per_document: int = 4
) -> pa.Table:
    """Chunks of documents whose gains and signals share a document effect.

    `recon` has the planted linear correlation with the advantage over `skip`; `gain_kl` a higher
    one; every other signal is noise.
    """
    rng = np.random.default_rng(seed)
    document = np.arange(chunks) // per_document
    shared = rng.normal(size=document.max() + 1)[document]
    z = 0.7 * shared + np.sqrt(1 - 0.49) * rng.normal(size=chunks)
    tokens = np.where(rng.random(chunks) < 0.2, rng.integers(64, 512, chunks), 512)
    count = tokens - 1
    advantage = 0.02 + 0.03 * z
    update = 2 + 0.3 * shared + 0.1 * rng.normal(size=chunks)
    base = update + advantage + 0.05 + 0.02 * rng.normal(size=chunks)
    columns: dict[str, Any] = {
        "chunk_id": [f"{name}-{i}" for i in range(chunks)],
        "doc_id": [f"{name}-{i}" for i in document],
        "repo": [f"repo-{i // 8}" for i in document],
        "order": np.arange(chunks, dtype=np.int32),
        "position": (np.arange(chunks) % per_document).astype(np.int32),
        "n_tokens": tokens.astype(np.int32),
        "n_predicted": count.astype(np.int32),
        "nll_base": base * count,
        "nll_skip": (update + advantage) * count,
        "nll_update": update * count,
    }
    for signal in LABEL_FREE:
        r = {"recon": correlation, "gain_kl": 0.95}.get(signal, 0.0)
        columns[signal] = 1 + 0.2 * (r * z + np.sqrt(1 - r * r) * rng.normal(size=chunks))
    return pa.table(columns).cast(tables.SCORES)


def write(folder: Path, key: Key, rows: pa.Table, shard: int = 100_000) -> None:
    """Write rows as the score stage would, in shards."""
    for number, start in enumerate(range(0, len(rows), shard)):
        path = folder / key.folder / f"part-{number:05d}.parquet"
        tables.write(path, rows.slice(start, shard), tables.SCORES)


def write_all(
    folder: Path, params: Any, chunks: int, correlation: float = 0.6, strict: float = 0.0
) -> None:
    """Scores for every stream that params name; variants share their documents.

    `strict` is what the strict mask costs UPDATE, in nats per token.
    """
    for key in keys(params):
        write_cost(folder.parent / "cost", key)
        seed = params.run.languages.index(key.language) + 100 * key.seed
        rows = scores(chunks, seed=seed, correlation=correlation, name=key.language)
        if key.variant == "strict":
            place = rows.schema.get_field_index("nll_update")
            dearer = rows["nll_update"].to_numpy() + strict * rows["n_predicted"].to_numpy()
            rows = rows.set_column(place, "nll_update", pa.array(dearer))
        write(folder, key, rows)


def write_cost(folder: Path, key: Key) -> None:
    """What a chunk costs on a machine that does 100 operations per second."""
    flops = {"backbone": 1000, "layer_skip": 100, "layer_update": 150, "head": 400}
    lines = [
        {"part": n, "flops": f, "seconds": f / 100, "rounds": 1, "threads": 1, "device": "cpu"}
        for n, f in flops.items()
    ]
    path = folder / f"scale={key.scale}" / f"seed={key.seed}" / "part-00000.parquet"
    tables.write(path, pa.Table.from_pylist(lines, schema=result_tables.COST), result_tables.COST)
