"""Ranks of one training run over Ray Train, or one rank in this process."""

import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ponderttt.cores import Split, check_room, for_training, without_ray
from ponderttt.errors import UserError
from ponderttt.params import Ray
from ponderttt.ranks import PeerError, Rank, Tell
from ponderttt.ray_cluster import (
    cluster,
    enter,
    gave_up,
    nodes,
    only_on,
    split_left,
    tell_of_wait,
)

POLL_SECONDS = 0.5
PEER_SECONDS = 600  # for ranks to meet, and for the slowest to have loaded its model


def train(
    fit: Callable[[Rank, Tell], None],
    check: Callable[[], object],
    name: str,
    params: Ray,
    tell: Tell,
    share: int,
) -> None:
    """Run a training function on every rank; it resumes from its own checkpoint when repeated.

    `check` looks at what the ranks will read, once for all of them; it may take minutes, so that
    what cannot be had is told before it. A step has `share` parts: no more ranks have work.
    """
    if alone := without_ray(params):
        torch.set_num_threads(alone.threads)
        check()
        fit(Rank(), tell)
        return
    # Else every report of a rank waits for a slow clock.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    with cluster(params) as first, _heard(tell) as mailbox:
        check()
        for tries in range(params.max_retries + 1):
            # A node may have gone with the last attempt: `auto` goes on with who is left.
            split = for_training(split_left(params) if tries else first, share)
            check_room(nodes(), split)
            tell_of_wait(split)
            if tries:
                words = f"ttt: a rank was lost or found no place; going on with {split.workers}"
                print(f"{words} (attempt {tries + 1})", file=sys.stderr)
            error = _fit(fit, name, split, mailbox)
            if error is None:
                return
            if tries == params.max_retries:
                network = "if on several nodes, see what docs/cluster.md says of their network"
                raise UserError(gave_up(f"training failed {tries + 1} times; {network}", error))


def _fit(
    fit: Callable[[Rank, Tell], None], name: str, split: Split, mailbox: Any
) -> Exception | None:
    """One attempt with Ray Train; an error of the machine is returned, one of ours is raised."""
    from ray.exceptions import RayActorError
    from ray.train import TrainingFailedError

    storage = Path("data/.work/ray").resolve()
    trainer = _trainer(fit, name, split, mailbox, storage)
    try:
        _interruptible(trainer.fit)
    except (TrainingFailedError, RayActorError) as error:
        failures = list(getattr(error, "worker_failures", {}).values())
        ours = [failure for failure in failures if isinstance(failure, UserError)]
        # A dead rank explains whatever the others met, and is worth another attempt.
        if ours and all(isinstance(f, UserError | PeerError) for f in failures):
            raise ours[0] from None
        return error
    finally:
        # The layer's own checkpoint is what counts; Ray's notes would resume a run of that name.
        shutil.rmtree(storage / name, ignore_errors=True)
    return None


def _interruptible(call: Callable[[], object]) -> None:
    """Call in a thread, so that Ctrl-C is ours: Ray Train's own answer waits for free places."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _trainer(
    fit: Callable[[Rank, Tell], None], name: str, split: Split, mailbox: Any, storage: Path
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    config = {"fit": fit, "root": str(Path.cwd()), "split": split, "mailbox": mailbox}
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
        torch_config=TorchConfig(timeout_s=PEER_SECONDS),
        scaling_config=ScalingConfig(
            num_workers=split.workers, use_gpu=split.gpus > 0, resources_per_worker=share
        ),
        run_config=RunConfig(
            name=name, storage_path=str(storage), failure_config=FailureConfig(**limits)
        ),
    )


def _rank_main(config: dict[str, Any]) -> None:
    """What Ray Train runs on every rank; an exception of ours leaves with its whole traceback."""
    from ray import train as ray_train

    context = ray_train.get_context()
    index, mailbox = context.get_world_rank(), config["mailbox"]

    def tell(step: int, row: dict[str, float]) -> None:
        if index == 0:
            mailbox.put.remote(step, row)

    try:
        enter(config["root"], config["split"])
        config["fit"](Rank(index=index, world=context.get_world_size(), reduce=_sum), tell)
    except (UserError, PeerError):
        raise
    except Exception:  # noqa: BLE001 - whatever it was, Ray would cut its traceback short
        raise UserError(f"rank {index} of ttt failed:\n{traceback.format_exc()}") from None


def _sum(tensor: Tensor) -> None:
    from torch import distributed

    _wait_for_gpu(tensor)  # what failed before the sum is no peer's fault
    try:
        distributed.all_reduce(tensor)
        _wait_for_gpu(tensor)  # there the sum only stands in line
    except RuntimeError as error:
        raise PeerError(str(error)) from None


def _wait_for_gpu(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


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
    here = only_on(ray.get_runtime_context().get_node_id())
    mailbox = make.options(scheduling_strategy=here).remote()
    ended = threading.Event()

    def listen() -> None:
        told, last = 0, False
        while not last:
            last = ended.wait(POLL_SECONDS)  # one more look after the end
            try:
                newest = ray.get(mailbox.newest.remote())
            except ray.exceptions.RayError:  # gone: training goes on unseen
                return
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
