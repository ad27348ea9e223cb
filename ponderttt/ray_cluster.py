"""Ray, started here or joined: what it offers, whether that is enough, whether nodes can work.

Only the ray_*.py files know Ray; a dead worker or node is the machine's fault and is retried, an
exception of our own is not.
"""

import importlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ponderttt.cores import Node, Split, asked, check_room, here, room, split_cores, without_ray
from ponderttt.errors import UserError
from ponderttt.files import told
from ponderttt.params import Ray

PROBE_SECONDS = 5.0
ANSWER_SECONDS = 120.0  # a node may have to start a process and load torch, from a slow disk
SIGN = "PONDERTTT_SIGN"  # where workers are told of a file that was just written here
BLIND = (
    "does not see the project folder {}; put it on storage that every node mounts at the same path"
)


@contextmanager
def cluster(params: Ray) -> Iterator[Split]:
    """Ray, started here or joined; fails at once if it cannot give what will be asked for."""
    import ray

    with _sign(params) as sign:
        context = _connect(params, sign)
        try:
            if context.dashboard_url:
                print(f"Ray dashboard: {context.dashboard_url}", file=sys.stderr)
            split = split_now(params)
            check_room(nodes(), split)
            _tell_of_idle_gpus(params, split)
            if sign:
                check_nodes(sign, split)
            yield split
        finally:
            ray.shutdown()


def foresee(params: Ray) -> None:
    """What can be told without Ray, a stage tells before it reads anything."""
    if without_ray(params):
        return
    if params.address:
        probe(params.address)
    else:
        check_room([here()], split_cores(params))


@contextmanager
def _sign(params: Ray) -> Iterator[Path | None]:
    """A file that workers on other nodes must see: a copy of the project is not the project."""
    if not params.address:
        yield None
        return
    sign = Path.cwd() / f"data/.work/.sign.{secrets.token_hex(8)}.tmp"
    with told(sign):
        sign.parent.mkdir(parents=True, exist_ok=True)
        sign.touch()
    try:
        yield sign
    finally:
        sign.unlink(missing_ok=True)


def _connect(params: Ray, sign: Path | None) -> Any:
    import ray

    foresee(params)
    if params.address:
        place: dict[str, Any] = {"address": params.address}
    else:
        cpus, gpus = here()
        place = {"address": "local", "num_cpus": cpus, "num_gpus": gpus, "include_dashboard": False}
    mine = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(Path.cwd()), *([mine] if mine else [])])
    variables = {"PYTHONPATH": path, "POLARS_MAX_THREADS": "1", SIGN: str(sign or "")}
    try:
        return ray.init(
            **place,
            logging_level=logging.INFO if params.verbose else logging.ERROR,
            log_to_driver=params.verbose,
            runtime_env={"env_vars": variables},
        )
    except (ConnectionError, RuntimeError, ray.exceptions.AuthenticationError) as error:
        if not params.address:
            raise
        raise UserError(
            f"ray.address: something answers at {params.address}, but it does not let us in "
            f"({error}); if that cluster asks for a token, have its ~/.ray/auth_token here too and "
            "run `export RAY_AUTH_MODE=token` first (docs/cluster.md, step 3); else check that the "
            "address is of `ray start --head`, that this machine is one of the cluster's, and that "
            "all have the same Python and the same Ray"
        ) from None


def split_now(params: Ray) -> Split:
    """The split for what the cluster has at this moment."""
    return split_cores(params, nodes() if params.address else ())


def split_left(params: Ray) -> Split:
    """The split for the nodes that still answer: for a while Ray counts a lost one as there."""
    _ask(lambda _cards: "")
    return split_now(params)


def probe(address: str) -> None:
    """A dead address would otherwise be waited for in silence."""
    host, _, port = address.rpartition(":")
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


def check_nodes(sign: Path, split: Split) -> None:
    """Ask every node whether it sees the folder, can load the project, and can use its GPUs."""
    blind, with_gpus = BLIND.format(Path.cwd()), split.gpus > 0

    # Both travel by value, as they are no names of a module: the project may be out of sight.
    def see(_cards: float) -> str:
        try:
            return "" if sign.exists() else blind
        except OSError:  # it may not even look there
            return blind

    def load(cards: float) -> str:
        importlib.import_module("ponderttt.scores")  # and with it all that workers load
        if with_gpus and cards and not torch.cuda.is_available():
            return (
                f"has a GPU that its torch ({torch.__version__}) cannot use; install the build "
                "for its driver, or start that node with `ray start --num-gpus=0`"
            )
        return ""

    _ask(see)
    _ask(load)


def _ask(question: Callable[[float], str]) -> None:
    """Put a question to every living node, with its number of GPUs; any complaint is an error."""
    import ray

    task: Any = ray.remote(num_cpus=0)(question)
    answers = {
        task.options(scheduling_strategy=only_on(node["NodeID"])).remote(
            node["Resources"].get("GPU", 0)
        ): node["NodeManagerHostname"]
        for node in ray.nodes()
        if node["Alive"]
    }
    found, late = ray.wait(list(answers), num_returns=len(answers), timeout=ANSWER_SECONDS)
    complaints: dict[str, list[str]] = {}
    for answer in found:
        complaints.setdefault(_complaint(answer), []).append(answers[answer])
    for answer in late:
        words = f"gave no answer in {ANSWER_SECONDS:g} seconds; see `ray status`"
        complaints.setdefault(words, []).append(answers[answer])
    complaints.pop("", None)
    if complaints:
        lines = [f"ray: node {', '.join(hosts)} {words}" for words, hosts in complaints.items()]
        raise UserError("\n".join(lines))


def _complaint(answer: Any) -> str:
    """What a node says; one that has just gone is no hindrance, as it will get no work either."""
    import ray

    try:
        return str(ray.get(answer))
    except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
        return f"cannot run the project's Python: {error}"
    except ray.exceptions.RayError:
        return ""


def only_on(node: str) -> Any:
    """A scheduling strategy: that node or none."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def tell_of_wait(split: Split, *, waited: bool = False) -> None:
    """Others' work on a shared cluster may hold what the nodes have: nobody waits in silence.

    What is free is known for all nodes together: that none has room is told after some waiting.
    """
    import ray

    free = ray.available_resources()
    there = Node(free.get("CPU", 0), free.get("GPU", 0))
    if waited or room([there], split.threads, split.gpus) < split.workers:
        why = "no worker has begun yet" if waited else "the rest is held by other work"
        print(
            f"ray: {split.workers} workers ask for {asked(split)}; {there.cpus:g} CPU, "
            f"{there.gpus:g} GPU are free now, {why}: who finds no place waits",
            file=sys.stderr,
        )


def _tell_of_idle_gpus(params: Ray, split: Split) -> None:
    used, there = split.workers * split.gpus, sum(node.gpus for node in nodes())
    if params.workers == "auto" and used < there:
        print(
            f"ray: {used:g} of {there:g} GPUs will be used, as each worker takes {split.gpus:g} "
            f"GPU and {split.threads} CPU (ray.threads) of one node",
            file=sys.stderr,
        )


def enter(root: str, split: Split) -> None:
    """Make a worker's process like the driver's, on a node that may have joined since.

    Ray's word decides where it computes: what torch finds by itself may be another's GPU, and a
    CPU that stands in for a GPU would mix two precisions.
    """
    sign = os.environ.get(SIGN)
    if sign and not Path(sign).exists():
        raise UserError(f"ray: node {socket.gethostname()} {BLIND.format(root)}")
    os.chdir(root)
    torch.set_num_threads(split.threads)
    if not split.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise UserError(
            f"ray: node {socket.gethostname()} gave a worker a GPU that its torch "
            f"({torch.__version__}) cannot use; install the build for its driver"
        )


def gave_up(what: str, error: Exception) -> str:
    """The last word after all retries."""
    return (
        f"ray: {what}; look for lack of memory or of free places, or raise ray.max_retries; "
        f"finished shards and checkpoints are kept\n{error}"
    )
