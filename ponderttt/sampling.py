"""Which chunks and which positions a training step sees: from the seed and the step alone.

Nothing is remembered between steps, so a resumed run goes on exactly where it was, and every
rank knows the whole global batch without asking the others.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from ponderttt import shards, tables
from ponderttt.errors import UserError
from ponderttt.hidden import to_tensors

SOON = 5.0  # seconds after which people want to see what takes so long
READERS = 4  # files hashed at once, each held in memory meanwhile


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Chunks of one step: `hidden` [n, T, d], `tokens` [n, T], real tokens per chunk [n]."""

    hidden: Tensor
    tokens: Tensor
    counts: Tensor


class TrainSet:
    """Cached hidden states of the training chunks, read row by row through memory maps.

    `verify` reads every byte once to check its hash: one process does so for all ranks.
    """

    def __init__(self, hidden: Path, chunks: Path, backbone: str, *, verify: bool = True) -> None:
        paths = sorted(chunks.glob("part-*.parquet"))
        if not paths:
            raise UserError(f"{chunks}: holds no chunks; run `dvc repro chunks`")
        parts = [tables.read(path, tables.CHUNKS) for path in paths]
        rows = pa.concat_tables(parts)
        tokens, self.counts = to_tensors(rows)
        self.tokens = tokens.int()  # every rank holds all of them
        self.ids: list[str] = rows["chunk_id"].to_pylist()
        self.documents: list[str] = rows["doc_id"].to_pylist()
        states = [hidden / f"{path.stem}.safetensors" for path in paths]
        if verify:
            check_hashes(states)
        self._slices = []
        for shard, part in zip(states, parts, strict=True):
            check_shard(shard, part, backbone)
            file = safe_open(shard, framework="pt").__enter__()
            self._slices += [(file, i) for i in range(len(part))]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Sequence[int], device: torch.device) -> Batch:
        """The chunks of these rows."""
        states = [self._slices[r][0].get_slice(shards.NAME)[self._slices[r][1]] for r in rows]
        index = torch.tensor(rows)
        return Batch(
            hidden=torch.stack(states).float().to(device),
            tokens=self.tokens[index].long().to(device),
            counts=self.counts[index].to(device),
        )

    def sequences(self, length: int) -> list[list[int]]:
        """Rows in runs of up to `length` consecutive chunks of one document."""
        runs: list[list[int]] = []
        for row, document in enumerate(self.documents):
            if runs and len(runs[-1]) < length and self.documents[runs[-1][-1]] == document:
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs


def check_hashes(paths: Sequence[Path]) -> None:
    """Read every byte once, a few files at a time: at the paper's size that is minutes."""
    with ThreadPoolExecutor(READERS) as pool:
        checks = pool.map(_check_hash, paths)
        for _ in tqdm(
            checks, "checking hidden states", len(paths), unit="shard", delay=SOON, leave=False
        ):
            pass


def _check_hash(path: Path) -> None:
    shards.read(path)


def check_shard(path: Path, chunks: pa.Table, backbone: str) -> None:
    """A shard must be of these chunks and of this backbone."""
    notes = shards.notes(path)
    if notes.get("backbone") != backbone:
        raise UserError(f"{path}: made by another backbone; run `dvc repro hidden`")
    if notes.get("chunk_ids") != shards.ids_hash(chunks["chunk_id"].to_pylist()):
        raise UserError(f"{path}: holds other chunks than data/chunks; run `dvc repro hidden`")


def step_items(count: int, batch: int, step: int, seed: int) -> list[int]:
    """The `batch` items of a step: each epoch is a new permutation, none is left out.

    >>> sorted(step_items(4, 2, 0, 7) + step_items(4, 2, 1, 7))
    [0, 1, 2, 3]
    """
    chosen = []
    for place in range(step * batch, (step + 1) * batch):
        epoch, offset = divmod(place, count)
        chosen.append(int(_permutation(count, epoch, seed)[offset]))
    return chosen


@lru_cache(maxsize=2)
def _permutation(count: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def positions(count: int, wanted: int, seed: int, step: int, row: int) -> np.ndarray:
    """The positions of a chunk whose CE is taken: all that predict, or a draw of `wanted`."""
    predicted = count - 1
    if wanted == 0 or wanted >= predicted:
        return np.arange(predicted)
    generator = np.random.default_rng([seed, step, row])
    return np.sort(generator.choice(predicted, wanted, replace=False))
