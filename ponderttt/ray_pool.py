"""Shards of work spread over Ray actors, or done in this process.

Whoever does a shard writes it whole or not at all, so results do not depend on who did what.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from ponderttt.cores import Split, check_room, without_ray
from ponderttt.errors import UserError
from ponderttt.params import Ray
from ponderttt.ray_cluster import cluster, enter, gave_up, nodes, tell_of_wait
from ponderttt.shards import Done

Shard = TypeVar("Shard")
Work = Callable[[Shard], Done]

PATIENCE = 10.0  # with nobody at work, how often to ask whether anybody still can be


def run(
    start: Callable[[], Work[Shard]], shards: Sequence[Shard], params: Ray, bar: "tqdm[Any]"
) -> None:
    """Do every shard. `start` runs once per worker and loads what its shards share."""
    if not shards:
        return
    if alone := without_ray(params):
        torch.set_num_threads(alone.threads)
        _follow(bar, map(start(), shards))
        return
    with cluster(params) as split:
        tell_of_wait(split)
        _follow(bar, _Pool(start, shards, params, split).results())


def _follow(bar: "tqdm[Any]", results: Iterator[Done]) -> None:
    tokens = 0
    for done in results:
        tokens += done.tokens
        bar.update(done.chunks)
        bar.set_postfix(tok_s=f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f}")


class _Worker:
    """What lives in an actor. It loads with its first shard, so that an exception of our own
    comes back as one, and a dead actor always means a dead machine."""

    def __init__(self, start: Callable[[], Work[Any]], root: str, split: Split) -> None:
        self._begin = (start, root, split)
        self._work: Work[Any] | None = None

    def here(self) -> None:
        """Answers as soon as the actor has a place to run."""

    def run(self, shard: Any) -> Done:
        try:
            if self._work is None:
                start, root, split = self._begin
                enter(root, split)
                self._work = start()
            return self._work(shard)
        except UserError:
            raise
        except Exception:  # noqa: BLE001 - as words: not every exception can be read back
            words = f"a worker failed on {shard}:\n{traceback.format_exc()}"
            raise UserError(words) from None


class _Pool:
    """Actors that take the next shard as they get free.

    Only an actor that has answered is given a shard: one that waits for a place after a node was
    lost holds up nobody, and the work ends when the shards are done, not the actors.
    """

    def __init__(
        self, start: Callable[[], Work[Shard]], shards: Sequence[Shard], params: Ray, split: Split
    ) -> None:
        self._start, self._params, self._split = start, params, split
        self._waiting = [(shard, 0) for shard in reversed(shards)]  # with the deaths so far
        self._idle: list[Any] = []
        self._coming: dict[Any, tuple[Any, int]] = {}  # answer -> actor, deaths before it
        self._jobs: dict[Any, tuple[Any, Any, int]] = {}  # result -> actor, shard, deaths
        self._told = False

    def results(self) -> Iterator[Done]:
        """What each shard held, as it is finished."""
        for _ in range(min(self._split.workers, len(self._waiting))):
            self._hire()
        while self._waiting or self._jobs:
            ready = self._next()
            if ready in self._coming:
                self._meet(ready)
            elif ready is not None:
                done = self._collect(ready)
                if done is not None:
                    yield done
            while self._waiting and self._idle:
                self._give(self._idle.pop())

    def _next(self) -> Any:
        """The next answer or result; None if there is none yet."""
        import ray

        found, _ = ray.wait([*self._jobs, *self._coming], num_returns=1, timeout=PATIENCE)
        if not found and not self._jobs:
            check_room(nodes(), replace(self._split, workers=1))
            if not self._told:
                tell_of_wait(self._split, waited=True)
                self._told = True
        return found[0] if found else None

    def _meet(self, answer: Any) -> None:
        import ray
        from ray.exceptions import RayTaskError

        actor, deaths = self._coming.pop(answer)
        try:
            ray.get(answer)
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", isinstance(error, RayTaskError)):
                raise UserError(f"ray: a worker could not be made: {error}") from None
            words = f"{deaths + 1} workers died one after the other before they began"
            if deaths < self._params.max_retries:
                self._hire(deaths + 1)
            elif self._coming or self._jobs or self._idle:
                print(f"ray: {words}; going on without them", file=sys.stderr)
            else:
                raise UserError(gave_up(words, error)) from None
        else:
            self._idle.append(actor)

    def _collect(self, result: Any) -> Done | None:
        import ray

        actor, shard, deaths = self._jobs.pop(result)
        try:
            done: Done = ray.get(result)
        except ray.exceptions.RayTaskError as error:
            raise getattr(error, "cause", error) from None
        except ray.exceptions.RayError as error:  # dead, lost with its node, or out of memory
            if deaths == self._params.max_retries:
                words = f"the worker of {shard} died {deaths + 1} times"
                raise UserError(gave_up(words, error)) from None
            self._waiting.append((shard, deaths + 1))
            self._hire()
            self._call_roll()
            return None
        self._idle.append(actor)
        return done

    def _call_roll(self) -> None:
        """Have the idle ones answer again: a lost node takes many, and none may cost a shard."""
        self._coming |= {actor.here.remote(): (actor, 0) for actor in self._idle}
        self._idle.clear()

    def _hire(self, deaths: int = 0) -> None:
        import ray

        make: Any = ray.remote(num_cpus=self._split.threads, num_gpus=self._split.gpus)(_Worker)
        actor = make.remote(self._start, str(Path.cwd()), self._split)
        self._coming[actor.here.remote()] = (actor, deaths)

    def _give(self, actor: Any) -> None:
        shard, deaths = self._waiting.pop()
        self._jobs[actor.run.remote(shard)] = (actor, shard, deaths)
