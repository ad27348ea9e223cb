"""Training the TTT layer on cached hidden states, with the UPDATE arm on; the backbone is frozen.

L = CE + beta * L_rec. Sums and counts of the whole global batch are divided last, so that the
result does not depend on how many ranks share the work. This module knows ranks, not Ray.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ponderttt import backbone as backbones
from ponderttt import checkpoints, layers, losses, shards, tables
from ponderttt.backbone import Backbone
from ponderttt.checkpoints import Progress
from ponderttt.errors import UserError
from ponderttt.params import Budget, Ttt
from ponderttt.ranks import PeerError, Rank, Tell
from ponderttt.sampling import TrainSet, positions, step_items
from ponderttt.ttt import LayerConfig, TTTLayer, build_layer

SET = "set=train"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything about a training run that does not change while it runs."""

    config: LayerConfig
    backbone: Backbone
    data: TrainSet
    params: Ttt
    size: Budget
    seed: int
    max_logits_mb: int
    rank: Rank = field(default_factory=Rank)

    def run(self, work: Path, tell: Tell = lambda *_: None) -> Progress:
        """Train to the last step, going on from the checkpoint in `work` if there is one."""
        progress = self._start()
        earlier = checkpoints.resume(work, progress)
        backbones.check_device("ttt", self.backbone.device.type, earlier)
        sequences = self.data.sequences(self.params.run_length)
        count = sequences_per_step(self.params, self.size)
        while progress.step < self.size.steps:
            items = step_items(len(sequences), count, progress.step, self.seed)
            chosen = [sequences[i] for i in items]
            with shards.naming([self.data.ids[r] for sequence in chosen for r in sequence]):
                row = self.step(progress, chosen)
            progress.history.append(row)
            tell(progress.step, row)
            due = progress.step % self.params.checkpoint_steps == 0
            if self.rank.index == 0 and (due or progress.step == self.size.steps):
                checkpoints.save(work, progress)
        return progress

    def _start(self) -> Progress:
        layer = build_layer(self.config, self.seed).to(self.backbone.device)
        return Progress(layer=layer, optimizer=make_optimizer(layer, self.params), history=[])

    def step(self, progress: Progress, chosen: Sequence[Sequence[int]]) -> dict[str, float]:
        """One optimizer step on the sequences chosen for all ranks; its row of the history."""
        began, layer = time.perf_counter(), progress.layer
        rows = [row for sequence in chosen for row in sequence]
        tokens = int(self.data.counts[rows].sum())
        predicted, inner = tokens - len(rows), tokens * self.config.heads
        progress.optimizer.zero_grad(set_to_none=False)
        ce, recon = self._loss_sums(
            layer, chosen[self.rank.index :: self.rank.world], progress.step
        )
        (ce / predicted + self.params.beta * recon / inner).backward()
        ce_sum, recon_sum = self._sum_over_ranks(progress, ce, recon)
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), self.params.clip or math.inf)
        row = {"ce": ce_sum / predicted, "recon": recon_sum / inner, "grad_norm": float(norm)}
        row["lr"] = learning_rate(progress.step, self.size.steps, self.params)
        check_finite(row, progress.step, [self.data.ids[r] for r in rows])
        for group in progress.optimizer.param_groups:
            group["lr"] = row["lr"]
        progress.optimizer.step()
        return row | {"tokens_per_second": tokens / (time.perf_counter() - began)}

    def _loss_sums(
        self, layer: TTTLayer, chosen: Sequence[Sequence[int]], step: int
    ) -> tuple[Tensor, Tensor]:
        """Summed CE and summed reconstruction loss; the state goes from chunk to chunk."""
        device = self.backbone.device
        # A rank without chunks still takes part, with a zero that every parameter has a share in.
        ce = recon = torch.stack([p.sum() * 0 for p in layer.parameters()]).sum()
        ordered, state = sorted(chosen, key=len, reverse=True), None
        for place in range(len(ordered[0]) if ordered else 0):
            rows = [sequence[place] for sequence in ordered if len(sequence) > place]
            batch = self.data.batch(rows, device)
            # Longer sequences stand first, so those that go on are a prefix of the batch.
            state = state and type(state)(*(part[: len(rows)] for part in state))
            mask = losses.mask_of(batch.counts, batch.tokens.shape[1])
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                out, state, inner = layer(batch.hidden, state, mask=mask)
            # The frozen head stays exact, as in `scores`.
            ce = ce + self._ce_sum(out.float(), batch.tokens, batch.counts, rows, step)
            recon = recon + inner.before.sum()
        return ce, recon

    def _ce_sum(
        self, out: Tensor, tokens: Tensor, counts: Tensor, rows: list[int], step: int
    ) -> Tensor:
        """Unbiased estimate of the summed CE from the positions drawn for this step."""
        picked, weights = [], []
        for i, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            drawn = positions(count, self.params.positions, self.seed, step, row)
            picked.append(drawn + i * tokens.shape[1])
            weights.append(np.full(len(drawn), (count - 1) / max(1, len(drawn))))
        index = torch.from_numpy(np.concatenate(picked)).to(out.device)
        weight = torch.from_numpy(np.concatenate(weights)).to(out)
        return losses.weighted_ce(
            self.backbone,
            out.flatten(0, 1)[index],
            tokens.flatten()[index + 1],
            weight,
            max_logits_mb=self.max_logits_mb,
        )

    def _sum_over_ranks(self, progress: Progress, ce: Tensor, recon: Tensor) -> tuple[float, float]:
        """Gradients and loss sums of all ranks, in one message; all must be at the same step."""
        grads = [p.grad for p in progress.layer.parameters() if p.grad is not None]
        step = ce.new_tensor(float(progress.step))
        sums = torch.stack([ce.detach(), recon.detach(), step])
        flat = torch.cat([*(g.flatten() for g in grads), sums])
        self.rank.reduce(flat)
        *parts, sums = flat.split([*(g.numel() for g in grads), len(sums)])
        if float(sums[2]) != progress.step * self.rank.world:
            raise PeerError(
                f"ttt: not all ranks are at step {progress.step}, as they read different "
                "checkpoints; put the project folder on storage that all nodes see alike"
            )
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
        return float(sums[0]), float(sums[1])


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run as plain values, so that any process can start its rank of it."""

    scale: str
    seed: int
    params: Ttt
    size: Budget
    max_logits_mb: int
    work: Path

    def folder(self, name: str) -> Path:
        """Where an artifact of this scale lies."""
        return Path(f"data/{name}/scale={self.scale}")

    def fit(self, rank: Rank, tell: Tell) -> None:
        """Load what one rank needs, train to the end, prove that the backbone did not move."""
        backbone = backbones.load(self.folder("backbone"), backbones.best_device())
        before = backbones.frozen_hashes(backbone)
        Trainer(
            config=layers.config_for(self.params, backbone.card),
            backbone=backbone,
            data=self.data(backbone.card["weights"], verify=False),  # the driver did
            params=self.params,
            size=self.size,
            seed=self.seed,
            max_logits_mb=self.max_logits_mb,
            rank=rank,
        ).run(self.work, tell)
        if backbones.frozen_hashes(backbone) != before:
            raise UserError(
                f"ttt: training moved the weights of {self.scale}: a fault of the program"
            )

    def data(self, backbone: str, *, verify: bool = True) -> TrainSet:
        """The training chunks, checked."""
        hidden, chunks = self.folder("hidden") / SET, self.folder("chunks") / SET
        return TrainSet(hidden, chunks, backbone, verify=verify)

    def finish(self, card: dict[str, Any]) -> None:
        """Turn the last checkpoint into the artifact, as `made` in the work folder."""
        layer = build_layer(layers.config_for(self.params, card), self.seed)
        progress = Progress(layer=layer, optimizer=make_optimizer(layer, self.params), history=[])
        checkpoints.resume(self.work, progress)
        if progress.step != self.size.steps:
            raise UserError(
                f"{self.work}: its checkpoint is of step {progress.step}, though the ranks did all "
                f"{self.size.steps}; put the project folder on storage that every node mounts at "
                "the same path, and run `dvc repro` again"
            )
        chunks = len(tables.read_folder(self.folder("chunks") / SET, tables.CHUNKS))
        facts = {"backbone": card["weights"], "seed": self.seed, "steps": progress.step}
        facts["chunks"] = chunks  # what there was, which may be less than was asked for
        made = self.work / "made"
        layers.save(made, layer, facts)
        rows = history_table(progress.history)
        tables.write(made / "history.parquet", rows, tables.HISTORY)


def sequences_per_step(params: Ttt, size: Budget) -> int:
    """How many runs of chunks a step takes: what the ranks share."""
    return max(1, size.batch // params.run_length)


def make_optimizer(layer: TTTLayer, params: Ttt) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [p for p in layer.parameters() if p.ndim >= 2]
    vectors = [p for p in layer.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": params.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=params.lr,
    )


def learning_rate(step: int, steps: int, params: Ttt) -> float:
    """Linear warm-up, then a cosine to zero."""
    warmup = max(1, round(params.warmup * steps))
    if step < warmup:
        return params.lr * (step + 1) / warmup
    return params.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def check_finite(row: dict[str, float], step: int, chunk_ids: Sequence[str]) -> None:
    """Stop before the optimizer touches the weights."""
    bad = [name for name, value in row.items() if not math.isfinite(value)]
    if bad:
        raise UserError(
            f"ttt: {', '.join(bad)} not finite at step {step}, chunks {', '.join(chunk_ids)}; "
            "lower ttt.lr or ttt.base_lr"
        )


def history_table(history: Sequence[dict[str, float]]) -> pa.Table:
    """The rows of all steps, numbered from 1."""
    rows = [{"step": number, **row} for number, row in enumerate(history, start=1)]
    return pa.Table.from_pylist(rows, schema=tables.HISTORY)
