"""Ray, started here or joined: what it offers, whether that is enough, who sees the folder.

Only the ray_*.py files know Ray; a dead worker or node is the machine's fault and is retried, an
exception of our own is not.
"""

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ponderttt.cores import Node, Split, asked, check_room, here, room, split_cores
from ponderttt.errors import UserError
from ponderttt.params import Ray

PROBE_SECONDS = 5.0
ANSWER_SECONDS = 60.0  # a node may have to start a process, from a slow disk


@contextmanager
def cluster(params: Ray) -> Iterator[Split]:
    """Ray, started here or joined; fails at once if it cannot give what will be asked for."""
    import ray

    context = _connect(params)
    try:
        if context.dashboard_url:
            print(f"Ray dashboard: {context.dashboard_url}", file=sys.stderr)
        split = split_now(params)
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


def check_folder(root: str) -> None:
    """Ask every node for a file just written here: a copy of the project is not the project."""
    sign = Path("data/.work", f".seen-{secrets.token_hex(8)}")
    sign.parent.mkdir(parents=True, exist_ok=True)
    sign.touch()
    try:
        blind = _blind_nodes(Path(root, sign))
    finally:
        sign.unlink()
    if blind:
        raise UserError(
            f"ray: node {', '.join(blind)} does not see the project folder {root}; "
            "put it on storage that every node mounts at the same path"
        )


def _blind_nodes(sign: Path) -> list[str]:
    """The living nodes that do not see a file, or do not answer."""
    import ray

    def look() -> bool:  # travels by value, as it is no name of a module
        try:
            return sign.exists()
        except OSError:  # it may not even look there
            return False

    ask: Any = ray.remote(num_cpus=0)(look)
    hosts = {n["NodeID"]: n["NodeManagerHostname"] for n in ray.nodes() if n["Alive"]}
    answers = {
        ask.options(scheduling_strategy=only_on(node)).remote(): host
        for node, host in hosts.items()
    }
    found, late = ray.wait(list(answers), num_returns=len(answers), timeout=ANSWER_SECONDS)
    blind = [answers[answer] for answer in found if not _sees(answer)]
    return blind + [f"{answers[x]} (no answer in {ANSWER_SECONDS:g} seconds)" for x in late]


def _sees(answer: Any) -> bool:
    """What a node says; one that has just gone is no hindrance, as it will get no work either."""
    import ray

    try:
        return bool(ray.get(answer))
    except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
        raise UserError(f"ray: a node cannot run the project's Python: {error}") from None
    except ray.exceptions.RayError:
        return True


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


def enter(root: str, threads: int) -> None:
    """Make a worker's process like the driver's."""
    os.chdir(root)
    torch.set_num_threads(threads)


def gave_up(what: str, error: Exception) -> str:
    """The last word after all retries."""
    return (
        f"ray: {what}; look for lack of memory or of free places, or raise ray.max_retries; "
        f"finished shards and checkpoints are kept\n{error}"
    )
