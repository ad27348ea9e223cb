"""data/hidden/scale=S -> data/ttt/scale=S/seed=K"""

from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ponderttt import checkpoints, files, ray_cluster, ray_ranks, shards, stage
from ponderttt.backbone import CARD
from ponderttt.train import Job, sequences_per_step


def make(view: Any, scale: str, seed: str) -> None:
    """A TTT layer trained on the training set of one scale, from one seed."""
    ray_cluster.foresee(view.ray)
    model = Path(f"data/backbone/scale={scale}") / CARD
    card = files.read_json(model)
    key = [scale, seed, stage.plain(view.ttt), stage.plain(view.size), files.sha256(model)]
    key += [view.hidden.max_logits_mb]
    key += [shards.folder_hash(Path(f"data/hidden/scale={scale}/set=train"))]
    work = stage.work_folder(f"ttt@{scale}@{seed}", key)
    job = Job(
        scale=scale,
        seed=int(seed),
        params=view.ttt,
        size=view.size,
        max_logits_mb=view.hidden.max_logits_mb,
        work=work,
    )
    check = partial(job.data, card["weights"])  # a damaged shard is told before any rank starts
    done, share = checkpoints.steps_done(work), sequences_per_step(view.ttt, view.size)
    with tqdm(total=view.size.steps, initial=done, desc="ttt", unit="step") as bar:
        tell = partial(_show, bar)
        ray_ranks.train(job.fit, check, work.name, view.ray, tell, share)
    job.finish(card)
    stage.publish(work, made=Path(f"data/ttt/scale={scale}/seed={seed}"))


def _show(bar: "tqdm[Any]", step: int, row: dict[str, float]) -> None:
    bar.update(step - bar.n)
    bar.set_postfix(ce=f"{row['ce']:.3f}", tok_s=f"{row['tokens_per_second']:.0f}")


if __name__ == "__main__":
    stage.run(
        make,
        reads=["budget", "hidden.max_logits_mb", "ttt", "ray"],
        arguments=["scale", "seed"],
    )
