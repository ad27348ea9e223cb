"""What Ray costs and what it brings on the `hidden` work, in one run on the same shards.

Needs data/backbone and data/chunks of the first scale (`dvc repro chunks`).
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from ponderttt import files, hidden, params, ray_pool, ray_ranks, tables
from ponderttt.shards import Done

TARGETS = {"shards": 8.0, "training": 30.0, "one_worker": 1.1, "two_workers": 1.6}
IDLE_SECONDS = 3.0


class Clock(tqdm):
    """A bar that notes when each shard was finished."""

    def __init__(self) -> None:
        super().__init__(disable=True)
        self.times = [time.perf_counter()]

    def update(self, n: float | None = 1) -> bool | None:
        self.times.append(time.perf_counter())
        return super().update(n)

    @property
    def format_dict(self):
        return {"elapsed": 1.0}


def small_shards(scale: str, count: int, size: int, work: Path) -> list[hidden.Shard]:
    """Files of `size` chunks each, all of the same full length."""
    found = sorted(Path(f"data/chunks/scale={scale}/set=train").glob("part-*.parquet"))
    notes = tables.notes(found[0])
    rows = pa.concat_tables([tables.read(path, tables.CHUNKS) for path in found])
    shards = []
    for number in range(count):
        path = work / f"chunks-{number:02d}.parquet"
        tables.write(path, rows.slice(number * size, size), tables.CHUNKS, notes)
        shards.append(hidden.Shard(chunks=path, out=work / f"out-{number:02d}"))
    return shards


def timed(start, shards, settings: params.Ray) -> dict[str, float]:
    """Seconds until the first shard of each worker was done, and per shard after that."""
    clock = Clock()
    ray_pool.run(start, shards, settings, clock)
    first = max(1, settings.workers)
    rate = (clock.times[-1] - clock.times[first]) / (len(shards) - first)
    return {"seconds_per_shard": rate, "total": clock.times[-1] - clock.times[0]}


def results_hash(shards) -> str:
    """One hash of all that the workers wrote."""
    return files.digest([files.sha256(path) for s in shards for path in (s.hidden, s.base)])


def idle():
    """Work of a known length, so that every worker comes before the first is free again."""

    def sleep(_) -> Done:
        time.sleep(IDLE_SECONDS)
        return Done(0, 0)

    return sleep


def idle_fit(rank, tell) -> None:
    """Training that ends before its first step."""


def start_seconds(settings: params.Ray) -> dict[str, float]:
    """Ray up, every worker answering, and down again, with nothing to do in between."""
    began = time.perf_counter()
    ray_pool.run(idle, range(settings.workers), settings, Clock())
    middle = time.perf_counter()
    ray_ranks.train(idle_fit, "idle", settings, lambda *_: None, settings.workers)
    return {"shards": middle - began - IDLE_SECONDS, "training": time.perf_counter() - middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = params.load()
    scale = settings.run.scales[0]
    begin = partial(hidden.start, Path(f"data/backbone/scale={scale}").resolve(), settings.hidden)
    # First of all, so that loading Ray itself is counted.
    start = start_seconds(dataclasses.replace(settings.ray, workers=2, threads=1))
    found, hashes = {}, set()
    for count in (0, 1, 2):
        ray = dataclasses.replace(settings.ray, workers=count, threads=1)
        with tempfile.TemporaryDirectory() as name:
            shards = small_shards(scale, args.shards, args.size, Path(name))
            found[count] = timed(begin, shards, ray)
            hashes.add(results_hash(shards))
    result = {
        "start_seconds": start,
        "one_worker_over_in_process": found[1]["seconds_per_shard"] / found[0]["seconds_per_shard"],
        "two_workers_over_one": found[1]["seconds_per_shard"] / found[2]["seconds_per_shard"],
        "same_bytes": len(hashes) == 1,
        "seconds": found,
        "targets": TARGETS,
    }
    print(json.dumps(result) if args.json else words(result))
    sys.exit(not result["same_bytes"])


def words(result) -> str:
    """Each figure beside its target."""
    start, aim = result["start_seconds"], result["targets"]
    bytes_are = "the same" if result["same_bytes"] else "DIFFERENT"
    return (
        f"Ray starts and ends in {start['shards']:.1f} s for shards (at most {aim['shards']:g}), "
        f"{start['training']:.1f} s for training (at most {aim['training']:g})\n"
        f"one worker: {result['one_worker_over_in_process']:.2f} x the time in process "
        f"(at most {aim['one_worker']:g})\n"
        f"two workers: {result['two_workers_over_one']:.2f} x the throughput of one "
        f"(at least {aim['two_workers']:g})\n"
        f"hidden states and base losses of 0, 1 and 2 workers: {bytes_are} bytes"
    )


if __name__ == "__main__":
    main()
