"""Work spread over Ray, or done in this process: the only module that knows Ray.

Whoever does a shard writes it whole or not at all, so results do not depend on who did what.
A dead worker or node is the machine's fault and is retried; an exception of our own is not.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from ponderttt.cores import Node, Split, asked, check_room, for_training, here, room, split_cores
from ponderttt.errors import UserError
from ponderttt.params import Ray
from ponderttt.ranks import Rank, Tell
from ponderttt.shards import Done

Shard = TypeVar("Shard")
Work = Callable[[Shard], Done]

PROBE_SECONDS = 5.0
POLL_SECONDS = 0.5
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


def without_ray(params: Ray) -> Split | None:
    """The split, if this process is to do all the work itself."""
    if params.address and params.workers != 0:
        return None
    split = split_cores(params)
    return split if split.workers == 0 else None


def _follow(bar: "tqdm[Any]", results: Iterator[Done]) -> None:
    tokens = 0
    for done in results:
        tokens += done.tokens
        bar.update(done.chunks)
        bar.set_postfix(tok_s=f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f}")


@contextmanager
def cluster(params: Ray) -> Iterator[Split]:
    """Ray, started here or joined; fails at once if it cannot give what will be asked for."""
    import ray

    context = _connect(params)
    try:
        if context.dashboard_url:
            print(f"Ray dashboard: {context.dashboard_url}", file=sys.stderr)
        split = _split(params)
        check_room(nodes(), split)
        if params.address:
            check_folder(str(Path.cwd()))
        yield split
    finally:
        ray.shutdown()


def _connect(params: Ray) -> Any:
    import ray

    if params.address:
        probe(params.address)
        place: dict[str, Any] = {"address": params.address}
    else:
        check_room([here()], split_cores(params))
        cpus, gpus = here()
        place = {"address": "local", "num_cpus": cpus, "num_gpus": gpus, "include_dashboard": False}
    try:
        return ray.init(
            **place,
            logging_level=logging.INFO if params.verbose else logging.ERROR,
            log_to_driver=params.verbose,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd()), "POLARS_MAX_THREADS": "1"}},
        )
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        if not params.address:
            raise
        raise UserError(
            f"ray.address: something answers at {params.address}, but it does not let us in "
            f"({error}); if that cluster asks for a token, have its ~/.ray/auth_token here too and "
            "run `export RAY_AUTH_MODE=token` first (docs/cluster.md, step 3); else check that the "
            "address is of `ray start --head`, with the same version of Ray"
        ) from None


def _split(params: Ray) -> Split:
    return split_cores(params, nodes() if params.address else ())


def probe(address: str) -> None:
    """A dead address would otherwise be waited for in silence."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"ray.address: nothing answers at {address} ({error}); start the cluster with "
            "`ray start --head`, or set ray.address to an empty string"
        ) from None


def nodes() -> list[Node]:
    """What each living node of the cluster offers."""
    import ray

    offers = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(offer.get("CPU", 0), offer.get("GPU", 0)) for offer in offers]


def check_folder(root: str) -> None:
    """Ask every node for a file just written here: a copy of the project is not the project."""
    import ray

    sign = Path("data/.work", f".seen-{secrets.token_hex(8)}")

    def look() -> str:  # travels by value, as it is no name of a module
        import socket

        return "" if (root / sign).exists() else socket.gethostname()

    ask: Any = ray.remote(num_cpus=0)(look)
    places = [_only_on(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
    sign.parent.mkdir(parents=True, exist_ok=True)
    sign.touch()
    try:
        answers = ray.get([ask.options(scheduling_strategy=place).remote() for place in places])
    finally:
        sign.unlink()
    if blind := [name for name in answers if name]:
        raise UserError(
            f"ray: node {', '.join(blind)} does not see the project folder {root}; "
            "put it on storage that every node mounts at the same path"
        )


def _only_on(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def tell_of_wait(split: Split, *, sure: bool = False) -> None:
    """Others' work on a shared cluster may hold what the nodes have: nobody waits in silence.

    What is free is known for all nodes together, so only who waited can be `sure` that no one of
    them has room.
    """
    import ray

    free = ray.available_resources()
    there = Node(free.get("CPU", 0), free.get("GPU", 0))
    if sure or room([there], split.threads, split.gpus) < split.workers:
        print(
            f"ray: {split.workers} workers ask for {asked(split)}; {there.cpus:g} CPU, "
            f"{there.gpus:g} GPU are free now, the rest is held by other work: "
            "who finds no place waits",
            file=sys.stderr,
        )


def enter(root: str, threads: int) -> None:
    """Make a worker's process like the driver's."""
    os.chdir(root)
    torch.set_num_threads(threads)


class _Worker:
    """What lives in an actor. It loads with its first shard, so that an exception of our own
    comes back as one, and a dead actor always means a dead machine."""

    def __init__(self, start: Callable[[], Work[Any]], root: str, threads: int) -> None:
        self._begin = (start, root, threads)
        self._work: Work[Any] | None = None

    def here(self) -> None:
        """Answers as soon as the actor has a place to run."""

    def run(self, shard: Any) -> Done:
        if self._work is None:
            start, root, threads = self._begin
            enter(root, threads)
            self._work = start()
        return self._work(shard)


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
                tell_of_wait(self._split, sure=True)
                self._told = True
        return found[0] if found else None

    def _meet(self, answer: Any) -> None:
        import ray

        actor, deaths = self._coming.pop(answer)
        try:
            ray.get(answer)
        except ray.exceptions.RayError as error:
            if deaths < self._params.max_retries:
                self._hire(deaths + 1)
            elif not (self._coming or self._jobs or self._idle):  # else the others go on
                words = f"{deaths + 1} workers died one after the other before they began"
                raise UserError(_gave_up(words, error)) from None
        else:
            self._idle.append(actor)

    def _collect(self, result: Any) -> Done | None:
        import ray

        actor, shard, deaths = self._jobs.pop(result)
        try:
            done: Done = ray.get(result)
        except ray.exceptions.RayTaskError as error:
            raise explained(error, shard) from None
        except ray.exceptions.RayError as error:  # dead, lost with its node, or out of memory
            if deaths == self._params.max_retries:
                words = f"the worker of {shard} died {deaths + 1} times"
                raise UserError(_gave_up(words, error)) from None
            self._waiting.append((shard, deaths + 1))
            self._hire()
            return None
        self._idle.append(actor)
        return done

    def _hire(self, deaths: int = 0) -> None:
        import ray

        make: Any = ray.remote(num_cpus=self._split.threads, num_gpus=self._split.gpus)(_Worker)
        actor = make.remote(self._start, str(Path.cwd()), self._split.threads)
        self._coming[actor.here.remote()] = (actor, deaths)

    def _give(self, actor: Any) -> None:
        shard, deaths = self._waiting.pop()
        self._jobs[actor.run.remote(shard)] = (actor, shard, deaths)


def _gave_up(what: str, error: Exception) -> str:
    return (
        f"ray: {what}; look for lack of memory, or raise ray.max_retries; finished shards and "
        f"checkpoints are kept\n{error}"
    )


def explained(error: Any, what: Any) -> Exception:
    """Our own message as it was; any other exception with the worker's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, UserError):
        return cause
    return UserError(f"a worker failed on {what}:\n{error}")


def train(
    fit: Callable[[Rank, Tell], None], name: str, params: Ray, tell: Tell, *, batch: int
) -> None:
    """Run a training function on every rank; it resumes from its own checkpoint when repeated."""
    if alone := without_ray(params):
        torch.set_num_threads(alone.threads)
        fit(Rank(), tell)
        return
    # Else every report of a rank waits for a slow clock.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    with cluster(params) as first, _heard(tell) as mailbox:
        for tries in range(params.max_retries + 1):
            # A node may have gone with the last attempt: `auto` goes on with who is left.
            split = for_training(_split(params) if tries else first, batch)
            check_room(nodes(), split)
            tell_of_wait(split)
            if tries:
                words = f"ttt: a rank was lost or found no place; going on with {split.workers}"
                print(words, file=sys.stderr)
            error = _fit(fit, name, split, mailbox)
            if error is None:
                return
            if tries == params.max_retries:
                raise UserError(_gave_up(f"training failed {tries + 1} times", error))


def _fit(
    fit: Callable[[Rank, Tell], None], name: str, split: Split, mailbox: Any
) -> Exception | None:
    """One attempt with Ray Train; an error of the machine is returned, one of ours is raised."""
    from ray.exceptions import RayActorError
    from ray.train import TrainingFailedError

    storage = Path("data/.work/ray").resolve()
    trainer = _trainer(fit, name, split, mailbox, storage)
    before = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit()
    except (TrainingFailedError, RayActorError) as error:
        failures = list(getattr(error, "worker_failures", {}).values())
        ours = [failure for failure in failures if isinstance(failure, UserError)]
        # A dead rank explains whatever the others met, and is worth another attempt.
        if ours and all(isinstance(f, UserError | PeerLostError) for f in failures):
            raise ours[0] from None
        return error
    except SystemExit:  # Ray Train's own answer to Ctrl-C
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)
        # The layer's own checkpoint is what counts; Ray's notes would resume a run of that name.
        shutil.rmtree(storage / name, ignore_errors=True)
    return None


def _trainer(
    fit: Callable[[Rank, Tell], None], name: str, split: Split, mailbox: Any, storage: Path
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config = {"fit": fit, "root": str(Path.cwd()), "threads": split.threads, "mailbox": mailbox}
    share = {"CPU": float(split.threads)} | ({"GPU": split.gpus} if split.gpus else {})
    # Ray's own retries have no end by default, and would wait in silence for a lost node.
    limits: dict[str, Any] = {
        "max_failures": 0,
        "controller_failure_limit": 0,
        "max_preemption_failures": 0,
    }
    return TorchTrainer(
        _rank_main,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=split.workers, use_gpu=split.gpus > 0, resources_per_worker=share
        ),
        run_config=RunConfig(
            name=name, storage_path=str(storage), failure_config=FailureConfig(**limits)
        ),
    )


class PeerLostError(Exception):
    """Another rank went away in the middle of a sum: the machine's fault."""


def _rank_main(config: dict[str, Any]) -> None:
    """What Ray Train runs on every rank; an exception of ours leaves with its whole traceback."""
    from ray import train as ray_train

    enter(config["root"], config["threads"])
    context = ray_train.get_context()
    index, mailbox = context.get_world_rank(), config["mailbox"]

    def tell(step: int, row: dict[str, float]) -> None:
        if index == 0:
            mailbox.put.remote(step, row)

    try:
        config["fit"](Rank(index=index, world=context.get_world_size(), reduce=_sum), tell)
    except (UserError, PeerLostError):
        raise
    except Exception:  # noqa: BLE001 - whatever it was, Ray would cut its traceback short
        raise UserError(f"rank {index} of ttt failed:\n{traceback.format_exc()}") from None


def _sum(tensor: Tensor) -> None:
    from torch import distributed

    try:
        distributed.all_reduce(tensor)
        if tensor.is_cuda:  # there it only stands in line: meet its failure here
            torch.cuda.synchronize(tensor.device)
    except RuntimeError as error:
        raise PeerLostError(str(error)) from None


class _Mailbox:
    """The newest step, kept where ranks and driver can reach it."""

    def __init__(self) -> None:
        self._newest: tuple[int, dict[str, float]] | None = None

    def put(self, step: int, row: dict[str, float]) -> None:
        self._newest = (step, row)

    def newest(self) -> tuple[int, dict[str, float]] | None:
        return self._newest


@contextmanager
def _heard(tell: Tell) -> Iterator[Any]:
    """A mailbox, on this node, whose newest step is told here a few times a second."""
    import ray

    make: Any = ray.remote(num_cpus=0)(_Mailbox)
    here = _only_on(ray.get_runtime_context().get_node_id())
    mailbox = make.options(scheduling_strategy=here).remote()
    ended = threading.Event()

    def listen() -> None:
        told, last = 0, False
        while not last:
            last = ended.wait(POLL_SECONDS)  # one more look after the end
            newest = ray.get(mailbox.newest.remote())
            if newest and newest[0] != told:
                told = newest[0]
                tell(*newest)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield mailbox
    finally:
        ended.set()
        listener.join()
