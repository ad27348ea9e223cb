"""A small project with made-up scores, as the report stage finds it."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import synthetic

from ponderttt import gate, metrics, params, stage, tables
from ponderttt.streams import ARMS, Key, keys, read

ROOT = Path(__file__).parents[1]
READS = ("run", "corpus", "chunks", "scores", "gate", "metrics", "report")
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"'`&lt;",
    "\u202eabc\u2066",
    "\x00\x07\x1b\x7f",
    "日本語 🎉",
    "\r\n\t",
    " " * 130,
    "\u2028\ufeff",
]


def small_view(**report: Any) -> SimpleNamespace:
    """Params of the smallest run that has everything: two languages, all variants."""
    view = stage.view(params.load(ROOT / "params.yaml"), READS)
    view.run = dataclasses.replace(view.run, languages=("python", "go"))
    view.metrics = dataclasses.replace(view.metrics, resamples=60)
    view.gate = dataclasses.replace(view.gate, random_seeds=5)
    view.report = dataclasses.replace(view.report, **{"examples": 12, **report})
    return view


def write_tokens(folder: Path, key: Key, chunks: int, length: int = 0) -> None:
    """Tokens of the first chunks of a stream, at least `length` each, hostile ones among them."""
    stream = read(key)
    rng = np.random.default_rng(3)
    rows = []
    for i in range(chunks):
        pieces = ["def", " f", "(", "x", "):", "\n    ", "return", " x", "\n", *HOSTILE]
        pieces += pieces[:9] * max(0, -(-(length - len(pieces)) // 9))
        columns = {
            f"nll_{arm}": [None, *rng.gamma(1.0, 2.0, len(pieces) - 1).tolist()] for arm in ARMS
        }
        about = {
            "chunk_id": stream.chunk_id[i],
            "order": i,
            "path": f"<b>{key.language}</b>/{i}.py",
        }
        rows.append({**about, "pieces": pieces, **columns})
    table = pa.Table.from_pylist(rows, schema=tables.TOKENS)
    tables.write(folder / key.folder / "part-00000.parquet", table, tables.TOKENS)


def write_layer(folder: Path) -> None:
    """A card and a history as the training stage writes them."""
    steps = np.arange(1, 31)
    history = {
        "step": steps,
        "ce": 2 + 1 / steps,
        "recon": 1 / steps,
        "grad_norm": 1 / steps,
        "lr": 0.001 / steps,
        "tokens_per_second": np.full(30, 4000.0),
    }
    table = pa.table(history).cast(tables.HISTORY)
    tables.write(folder / "history.parquet", table, tables.HISTORY)
    card = {"backbone": "b" * 64, "weights": "c" * 64, "steps": 30, "chunks": 77}
    (folder / "config.json").write_text(json.dumps(card))


def build(view: SimpleNamespace, chunks: int = 48) -> None:
    """Everything that the report reads, in the current folder."""
    synthetic.write_all(Path("data/scores"), view, chunks)
    write_rest(view, chunks)
    gate.make(view)
    metrics.make(view)


def write_rest(view: SimpleNamespace, chunks: int, length: int = 0) -> None:
    """What the report reads beside the scores and what is made of them."""
    for key in keys(view):
        write_tokens(Path("data/tokens"), key, chunks, length)
    for scale in view.run.scales:
        for seed in view.run.seeds:
            write_layer(Path(f"data/ttt/scale={scale}/seed={seed}"))


def read_tokens(address: str, language: str) -> list[dict[str, Any]]:
    """The token rows behind a page of the first scale and seed."""
    view = small_view()
    key = Key(view.run.scales[0], view.run.seeds[0], language, "plain")
    folder = Path(address.removeprefix("file://")).parents[1] / "data/tokens" / key.folder
    return tables.read_folder(folder, tables.TOKENS).to_pylist()
