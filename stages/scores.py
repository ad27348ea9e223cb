"""data/hidden + data/ttt -> data/scores/scale=S/seed=K and data/tokens/scale=S/seed=K"""

from functools import partial
from pathlib import Path
from typing import Any

from ponderttt import files, layers, ray_cluster, ray_pool, scores, shards, stage, tables
from ponderttt.backbone import CARD


def make(view: Any, scale: str, seed: str) -> None:
    """One row per chunk with the losses of all arms and all signals."""
    ray_cluster.foresee(view.ray)
    folders = {n: Path(f"data/{n}/scale={scale}") for n in ("backbone", "chunks", "hidden")}
    layer = Path(f"data/ttt/scale={scale}/seed={seed}")
    key = [
        scale,
        seed,
        stage.plain(view.scores),
        view.run.languages,
        view.chunks.shuffled,
        view.ttt.state,
    ]
    key += [view.hidden.max_logits_mb, files.folder_hash(folders["chunks"])]
    key += [files.sha256(folders["backbone"] / CARD), files.sha256(layer / layers.WEIGHTS)]
    key += [shards.folder_hash(folders["hidden"])]
    work = stage.work_folder(f"scores@{scale}@{seed}", key)
    everything = scores.list_shards(
        folders["chunks"],
        folders["hidden"],
        work,
        view.run.languages,
        view.chunks.shuffled,
        view.scores,
    )
    todo = [shard for shard in everything if not shard.done]
    earlier = scores.made_on([shard for shard in everything if shard.done])
    counts = {shard: tables.count(shard.chunks) for shard in everything}
    begin = partial(
        scores.start,
        folders["backbone"],
        layer,
        view.scores,
        view.ttt.state,
        view.hidden.max_logits_mb,
        earlier,
    )
    with stage.progress("scores", sum(counts.values()), sum(counts[s] for s in todo)) as bar:
        ray_pool.run(begin, todo, view.ray, bar)
    stage.check_all_done(work, everything)
    # Whether a shard is done is asked of its scores: they go first, so that a kill between the
    # two has all of it done again, never tokens forgotten.
    places = {name: Path(f"data/{name}/scale={scale}/seed={seed}") for name in ("scores", "tokens")}
    for name in places:
        (work / name).mkdir(exist_ok=True)
    stage.publish(work, **places)


if __name__ == "__main__":
    stage.run(
        make,
        reads=[
            "run.languages",
            "chunks.shuffled",
            "hidden.max_logits_mb",
            "ttt.state",
            "scores",
            "ray",
        ],
        arguments=["scale", "seed"],
    )
