"""data/chunks/scale=S + data/backbone/scale=S -> data/hidden/scale=S"""

from functools import partial
from pathlib import Path
from typing import Any

from ponderttt import files, hidden, ray_cluster, ray_pool, stage, tables
from ponderttt.backbone import CARD


def make(view: Any, scale: str) -> None:
    """Hidden states and base losses of every chunk of one scale; the backbone runs once."""
    ray_cluster.foresee(view.ray)
    chunks, model = Path(f"data/chunks/scale={scale}"), Path(f"data/backbone/scale={scale}")
    key = [scale, stage.plain(view.hidden), files.folder_hash(chunks), files.sha256(model / CARD)]
    work = stage.work_folder(f"hidden@{scale}", key)
    shards = hidden.list_shards(chunks, work)
    todo = [shard for shard in shards if not shard.done]
    earlier = hidden.made_on([shard for shard in shards if shard.done])
    counts = {shard: tables.count(shard.chunks) for shard in shards}
    left = sum(counts[shard] for shard in todo)
    with stage.progress("hidden", sum(counts.values()), left) as bar:
        ray_pool.run(partial(hidden.start, model, view.hidden, earlier), todo, view.ray, bar)
    stage.check_all_done(work, shards)
    stage.publish(work, Path(f"data/hidden/scale={scale}"))


if __name__ == "__main__":
    stage.run(make, reads=["hidden", "ray"], arguments=["scale"])
