"""What Ray costs and what it brings on the `hidden` work, in one run on the same shards.

Every way of working is timed in turn, some rounds long, and the medians are compared. Two processes
without Ray show what the machine itself gives: they share its memory and caches as two workers do.
Needs data/backbone and data/chunks of the first scale (`dvc repro chunks`).
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from ponderttt import files, hidden, params, ray_pool, ray_ranks, tables
from ponderttt.shards import Done

TARGETS = {"shards": 8.0, "training": 30.0, "one_worker": 1.1, "two_workers": 1.6}
IDLE_SECONDS = 3.0
# Names of the ways of working, and their Ray workers.
WAYS = {"in process": 0, "one worker": 1, "two workers": 2, "two processes": None}


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


def timed(start, shards, settings: params.Ray) -> float:
    """Seconds per shard after the first of each worker, which loads the model too."""
    clock = Clock()
    ray_pool.run(start, shards, settings, clock)
    first = max(1, settings.workers)
    return (clock.times[-1] - clock.times[first]) / (len(shards) - first)


def results_hash(shards) -> str:
    """One hash of all that the workers wrote."""
    return files.digest([files.sha256(path) for s in shards for path in (s.hidden, s.base)])


def plain_process(begin, shards) -> float:
    """Seconds per shard of one process without Ray, on one thread."""
    alone = dataclasses.replace(params.load().ray, workers=0, threads=1)
    return timed(begin, shards, alone)


def two_processes(begin, shards) -> float:
    """Seconds per shard of two processes without Ray, each with half of the shards."""
    half = len(shards) // 2
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(plain_process, begin, part) for part in (shards[:half], shards[half:])]
        return statistics.mean(task.result() for task in tasks) / 2


def idle():
    """Work of a known length, so that every worker comes before the first is free again."""

    def sleep(_) -> Done:
        time.sleep(IDLE_SECONDS)
        return Done(0, 0)

    return sleep


def idle_fit(_, tell) -> None:
    """Training that ends with its first step."""
    tell(1, {})


def start_seconds(settings: params.Ray) -> dict[str, float]:
    """From nothing until all workers work, and from their end until all is down again."""
    clock, began = Clock(), time.perf_counter()
    ray_pool.run(idle, range(settings.workers), settings, clock)
    ended, heard = time.perf_counter(), []
    ray_ranks.train(
        idle_fit,
        "idle",
        settings,
        lambda *_: heard.append(time.perf_counter()),
        settings.workers,
    )
    return {
        "shards": clock.times[-1] - IDLE_SECONDS - began,
        "shards_end": ended - clock.times[-1],
        "training": heard[0] - ended,
        "training_end": time.perf_counter() - heard[0],
    }


def measure(begin, settings: params.Ray, args: argparse.Namespace) -> tuple[dict, int]:
    """Median seconds per shard of each way of working, and how many different results they had."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    hashes = set()
    for _ in range(args.rounds):
        for name, count in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                shards = small_shards(settings.run.scales[0], args.shards, args.size, Path(folder))
                if count is None:
                    found[name].append(two_processes(begin, shards))
                else:
                    ray = dataclasses.replace(settings.ray, workers=count, threads=1)
                    found[name].append(timed(begin, shards, ray))
                hashes.add(results_hash(shards))
    return {name: statistics.median(rates) for name, rates in found.items()}, len(hashes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = params.load()
    folder = Path(f"data/backbone/scale={settings.run.scales[0]}").resolve()
    # First of all, so that loading Ray itself is counted.
    start = start_seconds(dataclasses.replace(settings.ray, workers=2, threads=1))
    seconds, results = measure(partial(hidden.start, folder, settings.hidden), settings, args)
    result = {
        "start_seconds": start,
        "one_worker_over_in_process": seconds["one worker"] / seconds["in process"],
        "two_workers_over_one": seconds["one worker"] / seconds["two workers"],
        "two_processes_over_one": seconds["in process"] / seconds["two processes"],
        "same_bytes": results == 1,
        "seconds_per_shard": seconds,
        "targets": TARGETS,
    }
    print(json.dumps(result) if args.json else words(result))
    sys.exit(not result["same_bytes"])


def words(result) -> str:
    """Each figure beside its target."""
    start, aim = result["start_seconds"], result["targets"]
    bytes_are = "the same" if result["same_bytes"] else "DIFFERENT"
    return (
        f"Ray starts in {start['shards']:.1f} s for shards (at most {aim['shards']:g}), "
        f"{start['training']:.1f} s for training (at most {aim['training']:g}); "
        f"ends in {start['shards_end']:.1f} and {start['training_end']:.1f} s\n"
        f"one worker: {result['one_worker_over_in_process']:.2f} x the time in process "
        f"(at most {aim['one_worker']:g})\n"
        f"two workers: {result['two_workers_over_one']:.2f} x the throughput of one "
        f"(at least {aim['two_workers']:g}); two processes without Ray: "
        f"{result['two_processes_over_one']:.2f} x that of one\n"
        f"hidden states and base losses of all of them: {bytes_are} bytes"
    )


if __name__ == "__main__":
    main()
