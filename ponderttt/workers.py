"""Work spread over Ray, or done in this process: the only module that knows Ray.

Whoever does a shard writes it whole or not at all, so results do not depend on who did what.
A dead worker or node is the machine's fault and is retried; an exception of our own is not.
"""

import logging
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from ponderttt.cores import Split, split_cores
from ponderttt.errors import UserError
from ponderttt.params import Ray
from ponderttt.ranks import Rank, Tell
from ponderttt.shards import Done

Shard = TypeVar("Shard")
PROBE_SECONDS = 5.0
POLL_SECONDS = 0.5


Work = Callable[[Shard], Done]


def run(
    start: Callable[[], Work[Shard]], shards: Sequence[Shard], params: Ray, bar: "tqdm[Any]"
) -> None:
    """Do every shard. `start` runs once per worker and loads what its shards share."""
    if not shards:
        return
    split = split_cores(params)
    if split.workers == 0:
        torch.set_num_threads(split.threads)
        work = start()
        _follow(bar, map(work, shards))
        return
    with cluster(params, split):
        _follow(bar, _Pool(start, shards, params, split).results())


def _follow(bar: "tqdm[Any]", results: Iterator[Done]) -> None:
    tokens = 0
    for done in results:
        tokens += done.tokens
        bar.update(done.chunks)
        bar.set_postfix(tok_s=f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f}")


@contextmanager
def cluster(params: Ray, split: Split) -> Iterator[None]:
    """Ray, started here or joined; fails at once if it cannot give what will be asked for."""
    import ray

    if params.address:
        probe(params.address)
    context = ray.init(
        address=params.address or "local",
        logging_level=logging.INFO if params.verbose else logging.ERROR,
        log_to_driver=params.verbose,
        include_dashboard=None if params.address else False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd()), "POLARS_MAX_THREADS": "1"}},
    )
    try:
        if context.dashboard_url:
            print(f"Ray dashboard: {context.dashboard_url}", file=sys.stderr)
        check_resources(ray.cluster_resources(), split)
        yield
    finally:
        ray.shutdown()


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


def check_resources(available: dict[str, float], split: Split) -> None:
    """Compare what will be asked for with what there is; nothing waits in silence."""
    asked = {"CPU": split.workers * split.threads, "GPU": split.workers * split.gpus}
    if any(count > available.get(name, 0) for name, count in asked.items()):
        wanted = ", ".join(f"{count:g} {name}" for name, count in asked.items())
        there = ", ".join(f"{available.get(name, 0):g} {name}" for name in asked)
        raise UserError(
            f"ray: {split.workers} workers ask for {wanted}; the cluster has {there}; "
            "lower ray.workers, ray.threads or ray.gpus_per_worker"
        )


def enter(root: str, threads: int) -> None:
    """Make a worker's process like the driver's."""
    if not Path(root, "params.yaml").exists():
        raise UserError(
            f"ray: node {socket.gethostname()} does not see the project folder {root}; "
            "put it on storage that every node mounts at the same path"
        )
    os.chdir(root)
    torch.set_num_threads(threads)


class _Worker:
    """What lives in an actor. It starts with its first shard, so that an exception of our own
    comes back as one, and a dead actor always means a dead machine."""

    def __init__(self, start: Callable[[], Work[Any]], root: str, threads: int) -> None:
        self._begin = (start, root, threads)
        self._work: Work[Any] | None = None

    def run(self, shard: Any) -> Done:
        if self._work is None:
            start, root, threads = self._begin
            enter(root, threads)
            self._work = start()
        return self._work(shard)


class _Pool:
    """Actors that take the next shard as they get free."""

    def __init__(
        self, start: Callable[[], Work[Shard]], shards: Sequence[Shard], params: Ray, split: Split
    ) -> None:
        self._start, self._params, self._split = start, params, split
        self._waiting = [(shard, 0) for shard in reversed(shards)]  # with the tries so far
        self._busy: dict[Any, tuple[Any, Any, int]] = {}

    def results(self) -> Iterator[Done]:
        """What each shard held, as it is finished."""
        import ray

        for _ in range(min(self._split.workers, len(self._waiting))):
            self._give(self._new())
        while self._busy:
            (ready,), _ = ray.wait(list(self._busy), num_returns=1)
            actor, shard, tries = self._busy.pop(ready)
            try:
                done = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                raise explained(error, shard) from None
            except ray.exceptions.RayActorError as error:
                if tries == self._params.max_retries:
                    raise UserError(_gave_up(shard, tries + 1, error)) from None
                self._waiting.append((shard, tries + 1))
                actor = self._new()
            else:
                yield done
            self._give(actor)

    def _new(self) -> Any:
        import ray

        remote = ray.remote(num_cpus=self._split.threads, num_gpus=self._split.gpus)(_Worker)
        return remote.remote(self._start, str(Path.cwd()), self._split.threads)

    def _give(self, actor: Any) -> None:
        if self._waiting:
            shard, tries = self._waiting.pop()
            self._busy[actor.run.remote(shard)] = (actor, shard, tries)


def _gave_up(shard: Any, tries: int, error: Exception) -> str:
    return (
        f"ray: the worker of {shard} died {tries} times ({type(error).__name__}); "
        "look for lack of memory, or raise ray.max_retries; finished shards are kept"
    )


def explained(error: Any, what: Any) -> Exception:
    """Our own message as it was; any other exception with the worker's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, UserError):
        return cause
    return UserError(f"a worker failed on {what}:\n{error}")


def train(fit: Callable[[Rank, Tell], None], name: str, params: Ray, tell: Tell) -> None:
    """Run a training function on every rank; it resumes from its own checkpoint when repeated."""
    split = split_cores(params)
    if split.workers == 0:
        torch.set_num_threads(split.threads)
        fit(Rank(), tell)
        return
    # Else every report of a rank waits for a slow clock.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    with cluster(params, split), _heard(tell) as mailbox:
        for tries in range(params.max_retries + 1):
            error = _fit(fit, name, split, mailbox)
            if error is None:
                return
            if tries == params.max_retries:
                raise UserError(_gave_up(name, tries + 1, error))


def _fit(
    fit: Callable[[Rank, Tell], None], name: str, split: Split, mailbox: Any
) -> Exception | None:
    """One attempt with Ray Train; an error of the machine is returned, one of ours is raised."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    storage = Path("data/.work/ray").resolve()
    trainer = TorchTrainer(
        _rank_main,
        train_loop_config={
            "fit": fit,
            "root": str(Path.cwd()),
            "threads": split.threads,
            "mailbox": mailbox,
        },
        scaling_config=ScalingConfig(
            num_workers=split.workers,
            use_gpu=split.gpus > 0,
            resources_per_worker={"CPU": split.threads}
            | ({"GPU": split.gpus} if split.gpus else {}),
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=0),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - Ray Train's errors have no common type
        return _machine_fault(error)
    finally:
        # The layer's own checkpoint is what counts; Ray's notes would resume a run of that name.
        shutil.rmtree(storage / name, ignore_errors=True)
    return None


def _machine_fault(error: Exception) -> Exception:
    """The error if a process or node died; raises what one of our own ranks raised."""
    failures = list(getattr(error, "worker_failures", {}).values())
    for failure in failures:
        cause = getattr(failure, "cause", failure)
        if isinstance(cause, UserError):
            raise cause
    return error


def _rank_main(config: dict[str, Any]) -> None:
    """What Ray Train runs on every rank."""
    from ray import train as ray_train
    from torch import distributed

    enter(config["root"], config["threads"])
    context = ray_train.get_context()
    index, mailbox = context.get_world_rank(), config["mailbox"]

    def tell(step: int, row: dict[str, float]) -> None:
        if index == 0:
            mailbox.put.remote(step, row)

    rank = Rank(index=index, world=context.get_world_size(), reduce=distributed.all_reduce)
    config["fit"](rank, tell)


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
    """A mailbox whose newest step is told here a few times a second."""
    import ray

    mailbox: Any = ray.remote(num_cpus=0)(_Mailbox).remote()
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
