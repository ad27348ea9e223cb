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
import subprocess
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


def pool_seconds(settings: params.Ray) -> tuple[float, float]:
    """From nothing until all workers work, and from their end until all is down again."""
    clock, began = Clock(), time.perf_counter()
    ray_pool.run(idle, range(settings.workers), settings, clock)
    return clock.times[-1] - IDLE_SECONDS - began, time.perf_counter() - clock.times[-1]


def train_seconds(settings: params.Ray) -> tuple[float, float]:
    """From nothing until the ranks' first step, and from there until all is down again."""
    heard, began = [], time.perf_counter()
    told, work = lambda *_: heard.append(time.perf_counter()), settings.workers
    ray_ranks.train(idle_fit, list, "idle", settings, told, work)
    return heard[0] - began, time.perf_counter() - heard[0]


STARTS = {"shards": pool_seconds, "training": train_seconds}


def start_seconds() -> dict[str, list[float]]:
    """Start and end of each kind, in a process of its own that has not loaded Ray yet."""
    return {
        name: json.loads(
            subprocess.run(
                [sys.executable, __file__, "--start", name], check=True, stdout=subprocess.PIPE
            ).stdout
        )
        for name in STARTS
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
    parser.add_argument("--start", choices=STARTS, help="only time a start and its end")
    args = parser.parse_args()
    settings = params.load()
    if args.start:
        two = dataclasses.replace(settings.ray, workers=2, threads=1)
        print(json.dumps(STARTS[args.start](two)))
        return
    folder = Path(f"data/backbone/scale={settings.run.scales[0]}").resolve()
    start = start_seconds()
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
    aim = result["targets"]
    one, two = result["one_worker_over_in_process"], result["two_workers_over_one"]
    bytes_are = "the same" if result["same_bytes"] else "DIFFERENT"
    return "\n".join(
        [
            *(
                f"Ray for {name}: starts in {up:.1f} s{most(up, aim[name])}, ends in {down:.1f} s"
                for name, (up, down) in result["start_seconds"].items()
            ),
            f"one worker: {one:.2f} x the time in process" + most(one, aim["one_worker"]),
            f"two workers: {two:.2f} x the throughput of one" + least(two, aim["two_workers"]),
            f"two processes without Ray: {result['two_processes_over_one']:.2f} x that of one",
            f"hidden states and base losses of all of them: {bytes_are} bytes",
        ]
    )


def most(value: float, target: float) -> str:
    """A target, and whether it was missed."""
    return f" (at most {target:g}{'' if value <= target else ': NOT MET'})"


def least(value: float, target: float) -> str:
    """A target, and whether it was missed."""
    return f" (at least {target:g}{'' if value >= target else ': NOT MET'})"


if __name__ == "__main__":
    main()
