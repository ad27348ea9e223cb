"""The frozen backbone, once per chunk: hidden states, and the `base` arm's losses beside them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ponderttt import backbone as backbones
from ponderttt import losses, shards, tables
from ponderttt.backbone import Backbone
from ponderttt.errors import UserError
from ponderttt.params import Hidden
from ponderttt.shards import Done

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of chunks and where its results go."""

    chunks: Path
    out: Path  # without suffix

    @property
    def done(self) -> bool:
        """Whether both results are there; a present file is a complete file."""
        return self.hidden.exists() and self.base.exists()

    @property
    def hidden(self) -> Path:
        return self.out.with_suffix(".safetensors")

    @property
    def base(self) -> Path:
        return self.out.with_suffix(".parquet")


def list_shards(chunks: Path, out: Path) -> list[Shard]:
    """All files of chunks below one scale's folder, in order."""
    return [
        Shard(chunks=path, out=out / path.parent.name / path.stem)
        for path in sorted(chunks.glob("set=*/part-*.parquet"))
    ]


def made_on(finished: Sequence[Shard]) -> str:
    """The kind of device that an earlier run made shards on; empty if it finished none."""
    return str(shards.notes(finished[0].hidden)["device"]) if finished else ""


def start(folder: Path, params: Hidden, earlier: str = "") -> Callable[[Shard], Done]:
    """Load the backbone once and give the function that a worker maps over shards.

    `earlier` is the kind of device of the shards that are there: no set mixes two precisions.
    """
    device = backbones.best_device()
    backbones.check_device("hidden", device, earlier)
    backbone = backbones.load(folder, device)
    batches = Batches(params.batch)

    def work(shard: Shard) -> Done:
        rows = tables.read(shard.chunks, tables.CHUNKS)
        if not shard.done:  # else by a worker that died before it could say so
            with shards.naming(rows["chunk_id"].to_pylist()):
                run(shard, rows, backbone, params, batches)
        return shards.held(rows)

    return work


class Batches:
    """Calls on slices of rows, smaller ones from when the GPU's memory runs out."""

    def __init__(self, size: int) -> None:
        self.size = size

    def map(self, call: Callable[[slice], Result], rows: int) -> Iterator[Result]:
        """The results of `call` for all rows in order."""
        start = 0
        while start < rows:
            result = _unless_full(call, slice(start, start + self.size))
            if result is None:
                self._halve()
            else:
                yield result
                start += self.size

    def _halve(self) -> None:
        if self.size == 1:
            raise UserError(
                "hidden: one chunk does not fit the GPU's memory; lower hidden.max_logits_mb "
                "or ray.workers, or take a smaller model"
            )
        self.size //= 2
        torch.cuda.empty_cache()


def _unless_full(call: Callable[[slice], Result], part: slice) -> Result | None:
    """None if the GPU was full; what the failed call held is free again on return."""
    try:
        return call(part)
    except torch.cuda.OutOfMemoryError:
        return None


def run(
    shard: Shard, rows: pa.Table, backbone: Backbone, params: Hidden, batches: Batches | None = None
) -> None:
    """Write one shard's hidden states and base losses."""
    check_vocabulary(shard.chunks, rows, backbone)
    tokens, counts = to_tensors(rows)

    def forward(part: slice) -> tuple[Tensor, Tensor]:
        return base_arm(backbone, tokens[part], counts[part], params)

    batches = batches or Batches(params.batch)
    kept, sums = zip(*batches.map(forward, len(tokens)), strict=True)
    base = base_table(rows, torch.cat(sums, dim=1).numpy())
    check_finite(shard.chunks, base)
    origin = {"backbone": backbone.card["weights"], "device": backbone.device.type}
    tables.write(shard.base, base, tables.BASE, origin)
    ids = shards.ids_hash(rows["chunk_id"].to_pylist())
    shards.write(shard.hidden, torch.cat(kept), origin | {"chunk_ids": ids})


def base_arm(
    backbone: Backbone, tokens: Tensor, counts: Tensor, params: Hidden
) -> tuple[Tensor, Tensor]:
    """Hidden states [B, T, d] as they are stored, and sums [2, B] of NLL and entropy."""
    tokens, counts = tokens.to(backbone.device), counts.to(backbone.device)
    hidden = backbone.hidden(tokens).to(getattr(torch, params.dtype))
    # What is stored is what the arms start from, so the base arm reads the stored precision.
    found = losses.predict(
        backbone, hidden.float(), tokens, counts, max_logits_mb=params.max_logits_mb
    )
    sums = torch.stack([losses.chunk_sums(values) for values in (found.nll, found.entropy)])
    return hidden.cpu(), sums.cpu()


def to_tensors(rows: pa.Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [n, T] and real token counts [n]."""
    tokens = rows["tokens"].combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
    counts = rows["n_tokens"].to_numpy()
    return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(counts.astype(np.int64))


def base_table(rows: pa.Table, sums: np.ndarray) -> pa.Table:
    """Identity columns of the chunks with the base arm's sum of nats and mean entropy."""
    predicted = rows["n_tokens"].to_numpy() - 1
    columns = {name: rows[name] for name in rows.column_names if name in tables.BASE.names}
    columns |= {"n_predicted": predicted, "nll_base": sums[0], "entropy_base": sums[1] / predicted}
    return pa.table({name: columns[name] for name in tables.BASE.names}).cast(tables.BASE)


def check_vocabulary(path: Path, rows: pa.Table, backbone: Backbone) -> None:
    """Tokens of another tokenizer would be scored as if they meant something."""
    made_by = tables.notes(path).get("tokenizer")
    if made_by != backbone.card["tokenizer"]:
        raise UserError(
            f"{path}: made by another tokenizer than the backbone's; run `dvc repro chunks`"
        )
    largest = int(to_tensors(rows)[0].max())
    if largest >= backbone.vocabulary:
        raise UserError(
            f"{path}: token {largest} is not in the backbone's {backbone.vocabulary} words"
        )


def check_finite(path: Path, table: pa.Table) -> None:
    """Stop at the first value that is not a number, naming its chunk."""
    for name in table.column_names:
        if pa.types.is_floating(table[name].type):
            bad = ~np.isfinite(table[name].to_numpy())
            if bad.any():
                chunk = table["chunk_id"][int(bad.argmax())].as_py()
                raise UserError(
                    f"{path}: {name} of chunk {chunk} is not finite; the run was stopped"
                )
