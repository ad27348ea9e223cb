"""data/hidden/scale=S -> data/ttt/scale=S/seed=K"""

from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ponderttt import checkpoints, files, shards, stage, workers
from ponderttt.backbone import CARD
from ponderttt.train import Job


def make(view: Any, scale: str, seed: str) -> None:
    """A TTT layer trained on the training set of one scale, from one seed."""
    card = files.read_json(Path(f"data/backbone/scale={scale}") / CARD)
    key = [scale, seed, stage.plain(view.ttt), stage.plain(view.size), card["weights"]]
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
    job.data(card["weights"])  # a damaged shard is told before any process is started
    done, batch = checkpoints.steps_done(work), view.size.batch
    with tqdm(total=view.size.steps, initial=done, desc="ttt", unit="step") as bar:
        tell = partial(_show, bar)
        workers.train(job.fit, work.name, view.ray, tell, batch=batch)
    job.finish(Path(f"data/ttt/scale={scale}/seed={seed}"), card)
    stage.forget(work)


def _show(bar: "tqdm[Any]", step: int, row: dict[str, float]) -> None:
    bar.update(step - bar.n)
    bar.set_postfix(ce=f"{row['ce']:.3f}", tok_s=f"{row['tokens_per_second']:.0f}")


if __name__ == "__main__":
    stage.run(
        make,
        reads=["budget", "hidden.max_logits_mb", "ttt", "ray"],
        arguments=["scale", "seed"],
    )
