"""How the cores and GPUs of some nodes are split into workers and their threads."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from ponderttt.errors import UserError
from ponderttt.params import Ray

CGROUP = Path("/sys/fs/cgroup")  # where Linux tells a container its limits
TRIAL_SECONDS = 0.5
GAIN = 1.1  # Ray must promise this much more than one process before it is started


class Node(NamedTuple):
    """What one machine offers."""

    cpus: float
    gpus: float


@dataclass(frozen=True, kw_only=True)
class Split:
    """What to start: `workers` of 0 is this process."""

    workers: int
    threads: int
    gpus: float  # of each worker


def here() -> Node:
    """This machine, or the share of it that this process may use."""
    cores = min(len(os.sched_getaffinity(0)), quota(CGROUP))
    # torch counts the cards of a driver that is too old for it, too.
    return Node(max(1, int(cores)), torch.cuda.device_count() if torch.cuda.is_available() else 0)


def quota(cgroup: Path) -> float:
    """CPUs that a container's limit leaves; no limit is infinite. Version 2, then version 1."""
    with contextlib.suppress(OSError, ValueError):  # "max 100000": no limit
        limit, period = (cgroup / "cpu.max").read_text().split()
        return int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):  # -1: no limit
        limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
        period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else math.inf
    return math.inf


def split_cores(params: Ray, cluster: Sequence[Node] = ()) -> Split:
    """The numbers in `params`, with `auto` filled in for a cluster, or else for this machine."""
    nodes = cluster or [here()]
    gpus = params.gpus_per_worker
    if any(node.gpus for node in nodes):
        gpus = gpus or 1.0  # a worker that asked for none would still find and share them all
    threads = _threads(params, gpus, alone=not cluster)
    if params.workers != "auto":
        return Split(workers=params.workers, threads=threads, gpus=gpus)
    workers = room(nodes, threads, gpus)
    if not cluster and workers == 1:
        workers = 0  # one worker alone would only add the cost of Ray
    elif workers == 0:
        workers = 1  # asked for, so that `check_room` says what is missing
    return Split(workers=workers, threads=threads, gpus=gpus)


def without_ray(params: Ray) -> Split | None:
    """The split, if this process is to do all the work itself."""
    if params.address and params.workers != 0:
        return None
    split = split_cores(params)
    return split if split.workers == 0 else None


def _threads(params: Ray, gpus: float, *, alone: bool) -> int:
    if params.threads != "auto":
        return params.threads
    if gpus or not alone:
        return 1  # a trial on this machine says nothing about others
    cores = int(here().cpus)
    if params.workers == "auto":
        return fastest_threads(cores)
    return max(1, cores // max(1, params.workers))


def room(nodes: Sequence[Node], threads: int, gpus: float) -> int:
    """How many workers fit; none is spread over two nodes, nor a share of a GPU over two GPUs.

    >>> room([Node(4, 0), Node(4, 0)], threads=3, gpus=0)
    2
    >>> room([Node(16, 2)], threads=1, gpus=0.6)
    2
    """
    return sum(int(min(node.cpus // threads, _cards(node.gpus, gpus))) for node in nodes)


def _cards(there: float, each: float) -> float:
    if each == 0:
        return math.inf
    return there // each if each >= 1 else int(there) * int(1 / each + 1e-9)


def check_room(nodes: Sequence[Node], split: Split) -> None:
    """Compare what will be asked for with what there is; nothing waits in silence."""
    fit = room(nodes, split.threads, split.gpus)
    if fit < split.workers:
        there = f"{sum(n.cpus for n in nodes):g} CPU, {sum(n.gpus for n in nodes):g} GPU"
        raise UserError(
            f"ray: {split.workers} workers ask for {asked(split)}; the cluster has {there} on "
            f"{len(nodes)} nodes, room for {fit}; lower ray.workers, ray.threads or "
            "ray.gpus_per_worker"
        )


def asked(split: Split) -> str:
    """What all workers ask for together, in words."""
    return f"{split.workers * split.threads} CPU, {split.workers * split.gpus:g} GPU"


def for_training(split: Split, share: int) -> Split:
    """Ranks of one training run: each needs a GPU of its own, and one of a step's parts."""
    if 0 < split.gpus < 1:
        whole = math.ceil(split.workers / _cards(1, split.gpus))
        split = replace(split, workers=whole, gpus=1.0)
    return replace(split, workers=min(split.workers, share))


@functools.cache
def fastest_threads(cores: int) -> int:
    """Threads per worker at which all cores together are fastest, by a short trial of each.

    One process with all cores needs no Ray, so more workers must be clearly faster.
    """
    speed = {threads: rate(threads, cores // threads) for threads in divisors(cores)}
    best = max(speed, key=lambda threads: speed[threads])
    return best if speed[best] > GAIN * speed[cores] else cores


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [i for i in range(1, number + 1) if number % i == 0]


def rate(threads: int, workers: int) -> float:
    """Rounds per second of all workers at once: they share memory, caches and perhaps cores."""
    before = torch.get_num_threads()
    with ThreadPoolExecutor(workers) as pool:
        total = sum(pool.map(_rounds, [threads] * workers))
    torch.set_num_threads(before)
    return total


def _rounds(threads: int) -> float:
    """Rounds per second of matrix products and small steps, as the stages do them."""
    torch.set_num_threads(threads)  # of the calling thread
    x, weight, small = torch.ones(1024, 576), torch.ones(576, 1536), torch.ones(32, 576)
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + TRIAL_SECONDS:
        torch.nn.functional.silu(x @ weight)
        for _ in range(8):
            small = torch.nn.functional.layer_norm(small, (576,))
        count += 1
    return count / (time.perf_counter() - began)
