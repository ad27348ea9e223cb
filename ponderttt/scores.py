"""Every chunk on every arm with every signal: one row per chunk, from which all gates follow.

The skip and update arms start from the same state. With `ttt.state: document` that is the state
the update arm left after the document's chunk before; otherwise it is the learned first one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from ponderttt import backbone as backbones
from ponderttt import layers, losses, shards, tables
from ponderttt.backbone import Backbone
from ponderttt.hidden import check_finite, to_tensors
from ponderttt.params import Scores
from ponderttt.sampling import check_shard
from ponderttt.shards import Done
from ponderttt.ttt import Diagonal, State, TTTLayer

ARMS = ("base", "skip", "update")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of chunks, its hidden states, and where its rows go."""

    language: str
    variant: str
    chunks: Path
    hidden: Path
    work: Path

    @property
    def diagonal(self) -> Diagonal | None:
        """The strict variant overrides the layer's own diagonal."""
        return -1 if self.variant == "strict" else None

    def out(self, table: str) -> Path:
        """Where this shard's part of a table goes."""
        folder = self.work / table / f"language={self.language}" / f"variant={self.variant}"
        return folder / self.chunks.name

    @property
    def done(self) -> bool:
        """The scores are written last, so all is there when they are."""
        return self.out("scores").exists()


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """What a worker holds: the frozen head, the trained layer, and how to use them."""

    backbone: Backbone
    layer: TTTLayer
    tokenizer: Any
    params: Scores
    state: str
    max_logits_mb: int

    def run(self, shard: Shard) -> Done:
        """Write the tables of one shard; what it held."""
        rows = tables.read(shard.chunks, tables.CHUNKS)
        if not shard.done:  # else by a worker that died before it could say so
            self._write(shard, rows)
        return shards.held(rows)

    def _write(self, shard: Shard, rows: pa.Table) -> None:
        check_shard(shard.hidden, rows, self.backbone.card["weights"])
        with shards.naming(rows["chunk_id"].to_pylist()):
            columns, tokens = self._columns(shard, rows)
        base = tables.read(shard.hidden.with_suffix(".parquet"), tables.BASE)
        scores = score_table(base, columns)
        check_finite(shard.chunks, scores)
        kept = token_table(rows, tokens, self.params.token_chunks, self.tokenizer)
        if len(kept):
            tables.write(shard.out("tokens"), kept, tables.TOKENS)
        made_by = {"device": self.backbone.device.type}
        tables.write(shard.out("scores"), scores, tables.SCORES, made_by)

    def _columns(self, shard: Shard, rows: pa.Table) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Per-chunk columns [n] in float64, and per-token losses [n, T - 1] of each arm."""
        tokens, counts = to_tensors(rows)
        hidden, device = shards.read(shard.hidden), self.backbone.device
        found: list[tuple[list[int], dict[str, Tensor], dict[str, Tensor]]] = []
        for sequence in plan(rows["doc_id"].to_pylist(), self.params.batch, self.state):
            state: State | None = None
            for index in sequence:
                # Longer documents stand first, so those that go on are a prefix of the batch.
                state = state and State(*(part[: len(index)] for part in state))
                columns, nll, state = self._batch(
                    hidden[index].float().to(device),
                    tokens[index].to(device),
                    counts[index].to(device),
                    state,
                    shard.diagonal,
                )
                found.append((index, columns, nll))
        back = torch.tensor([i for index, _, _ in found for i in index]).argsort()
        merged = [
            {name: torch.cat([part[name].cpu() for part in parts])[back] for name in parts[0]}
            for parts in ([f[1] for f in found], [f[2] for f in found])
        ]
        return merged[0], merged[1]

    def _batch(
        self,
        hidden: Tensor,
        tokens: Tensor,
        counts: Tensor,
        state: State | None,
        diagonal: Diagonal | None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], State]:
        mask = losses.mask_of(counts, tokens.shape[1])
        scored = self.layer.score(hidden, state, mask=mask, diagonal=diagonal)
        skip, update = (
            losses.predict(
                self.backbone, arm, tokens, counts, max_logits_mb=self.max_logits_mb, other=other
            )
            for arm, other in ((scored.skip, hidden), (scored.update, None))
        )
        predicted = counts - 1
        columns = scored.signals._asdict() | {
            "nll_skip": losses.chunk_sums(skip.nll),
            "nll_update": losses.chunk_sums(update.nll),
            "entropy_skip": losses.chunk_sums(skip.entropy) / predicted,
            "gain_kl": losses.chunk_sums(skip.gain) / predicted,
        }
        nll = {"base": skip.other_nll, "skip": skip.nll, "update": update.nll}
        return columns, nll, scored.state


def made_on(finished: Sequence[Shard]) -> str:
    """The kind of device that an earlier run made scores on; empty if it finished none."""
    return str(tables.notes(finished[0].out("scores"))["device"]) if finished else ""


def start(
    model: Path, layer: Path, params: Scores, state: str, max_logits_mb: int, earlier: str = ""
) -> Callable[[Shard], Done]:
    """Load backbone and layer once and give the function that a worker maps over shards.

    `earlier` is the kind of device of the scores that are there: no table mixes two precisions.
    """
    device = backbones.best_device()
    backbones.check_device("scores", device, earlier)
    backbone = backbones.load(model, device)
    scorer = Scorer(
        backbone=backbone,
        layer=layers.load(layer, backbone.card["weights"]).to(backbone.device),
        tokenizer=backbones.tokenizer_of(model),
        params=params,
        state=state,
        max_logits_mb=max_logits_mb,
    )
    return scorer.run


def plan(documents: Sequence[str], batch: int, state: str) -> Iterator[list[list[int]]]:
    """Batches of rows; each list holds batches that must follow one another, state carried.

    >>> list(plan(["a", "a", "b"], 2, "chunk"))
    [[[0, 1]], [[2]]]
    >>> list(plan(["a", "a", "b"], 2, "document"))
    [[[0, 2], [1]]]
    """
    runs: dict[str, list[int]] = {}
    for row, document in enumerate(documents):
        runs.setdefault(document if state == "document" else str(row), []).append(row)
    ordered = sorted(runs.values(), key=len, reverse=True)
    for first in range(0, len(ordered), batch):
        group = ordered[first : first + batch]
        yield [[run[i] for run in group if len(run) > i] for i in range(len(group[0]))]


def score_table(base: pa.Table, columns: dict[str, Tensor]) -> pa.Table:
    """The base arm's table widened by what the layer's arms gave."""
    found = {name: value.double().numpy() for name, value in columns.items()}
    have = {name: base[name] for name in base.column_names} | found
    return pa.table({name: have[name] for name in tables.SCORES.names}).cast(tables.SCORES)


def token_table(rows: pa.Table, nll: dict[str, Tensor], chunks: int, tokenizer: Any) -> pa.Table:
    """Text and losses of every token of the first `chunks` chunks of the set."""
    kept = []
    for i, row in enumerate(rows.to_pylist()):
        if row["order"] >= chunks:
            continue
        count = row["n_tokens"]
        pieces = [tokenizer.decode([token]) for token in row["tokens"][:count]]
        kept.append(
            {name: row[name] for name in ("chunk_id", "order", "path")}
            | {"pieces": pieces}
            | {f"nll_{arm}": [None, *nll[arm][i, : count - 1].tolist()] for arm in ARMS}
        )
    return pa.Table.from_pylist(kept, schema=tables.TOKENS)


def list_shards(
    chunks: Path,
    hidden: Path,
    work: Path,
    languages: Sequence[str],
    shuffled: Sequence[str],
    params: Scores,
) -> list[Shard]:
    """Every file of every set and variant that is asked for."""
    sets = [(name, "plain", name) for name in languages if "plain" in params.variants]
    if "shuffled" in params.variants:
        sets += [(name, "shuffled", f"{name}-shuffled") for name in languages if name in shuffled]
    if "strict" in params.variants:
        sets += [(name, "strict", name) for name in languages if name in params.strict]
    return [
        Shard(
            language=language,
            variant=variant,
            chunks=path,
            hidden=hidden / path.parent.name / f"{path.stem}.safetensors",
            work=work,
        )
        for language, variant, name in sets
        for path in sorted((chunks / f"set={name}").glob("part-*.parquet"))
    ]
