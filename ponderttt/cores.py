"""How this machine's cores and GPUs are split into workers and their threads."""

import os
import time
from dataclasses import dataclass

import torch

from ponderttt.params import Ray

TRIAL_SECONDS = 0.5
GAIN = 1.1  # Ray must promise this much more than one process before it is started


@dataclass(frozen=True, kw_only=True)
class Split:
    """What to start: `workers` of 0 is this process."""

    workers: int
    threads: int
    gpus: float


def split_cores(params: Ray) -> Split:
    """The numbers in `params`, with `auto` filled in."""
    cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    if params.workers == "auto" and gpus:
        share = params.gpus_per_worker or 1.0
        threads = 1 if params.threads == "auto" else params.threads
        return Split(workers=max(1, int(gpus / share)), threads=threads, gpus=share)
    threads = _threads(params, cores)
    workers = params.workers
    if workers == "auto":
        # One worker alone would only add the cost of Ray.
        workers = cores // threads if cores // threads > 1 else 0
    return Split(workers=workers, threads=threads, gpus=params.gpus_per_worker)


def _threads(params: Ray, cores: int) -> int:
    if params.threads != "auto":
        return params.threads
    if params.workers == "auto":
        return fastest_threads(cores)
    return max(1, cores // max(1, params.workers))


def fastest_threads(cores: int) -> int:
    """Threads per worker at which all cores together are fastest, by a short trial of each.

    One process with all cores needs no Ray, so more workers must be clearly faster.
    """
    speed = {threads: rate(threads) * (cores // threads) for threads in divisors(cores)}
    best = max(speed, key=lambda threads: speed[threads])
    return best if speed[best] > GAIN * speed[cores] else cores


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [i for i in range(1, number + 1) if number % i == 0]


def rate(threads: int) -> float:
    """Rounds per second of matrix products and small steps, as the stages do them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x, weight, small = torch.ones(1024, 576), torch.ones(576, 1536), torch.ones(32, 576)
    count, end = 0, time.perf_counter() + TRIAL_SECONDS
    while time.perf_counter() < end:
        torch.nn.functional.silu(x @ weight)
        for _ in range(8):
            small = torch.nn.functional.layer_norm(small, (576,))
        count += 1
    torch.set_num_threads(before)
    return count / TRIAL_SECONDS
