"""Whether this machine can do the run in params.yaml: each check with what to do about it.

Nothing secret is printed: a token is present or absent, an address answers or does not.
"""

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import huggingface_hub
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from packaging.requirements import Requirement

from ponderttt import params, plan, ray_cluster, shapes
from ponderttt.cores import here, room, split_cores, without_ray
from ponderttt.errors import UserError
from ponderttt.params import Params
from ponderttt.stack import HTTP_ERROR

State = Literal["ok", "warn", "fail"]
OLDEST = (3, 11)
MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing looked at: `fail` stops a run, `warn` may slow or stop it later."""

    name: str
    state: State
    found: str
    remedy: str = ""


def show(*, as_json: bool) -> int:
    """Print all checks; exit code 1 if something essential is wrong."""
    checks = list(examine())
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        print("\n".join(line(check) for check in checks))
    return int(any(check.state == "fail" for check in checks))


def line(check: Check) -> str:
    """One check to read."""
    remedy = f"\n          -> {check.remedy}" if check.remedy else ""
    return f"{MARKS[check.state]}  {check.name}: {check.found}{remedy}"


def examine() -> Iterator[Check]:
    """All checks; those that need params come last, if the params are right."""
    yield python()
    yield from packages()
    yield pip()
    yield gpus()
    yield git()
    yield dvc()
    try:
        settings = params.load()
    except UserError as error:
        yield Check(name="params", state="fail", found=str(error), remedy="correct params.yaml")
        return
    yield Check(name="params", state="ok", found=f"budget {settings.budget}, all keys right")
    needs: tuple[Callable[[Params], Iterator[Check]], ...] = (resources, ray, hub)
    for look in needs:
        yield from look(settings)


def python() -> Check:
    """The version of Python."""
    new = sys.version_info >= OLDEST
    wanted = ".".join(map(str, OLDEST))
    return Check(
        name="python",
        state="ok" if new else "fail",
        found=platform.python_version(),
        remedy="" if new else f"use Python {wanted} or newer",
    )


def packages() -> Iterator[Check]:
    """What the project needs, in the versions that it needs."""
    try:
        lines = metadata.requires("ponderttt") or []
    except metadata.PackageNotFoundError:
        yield Check(
            name="packages",
            state="warn",
            found="ponderttt is not installed",
            remedy="run `make repro`, or `pip install -c constraints.txt -e .`",
        )
        return
    wanted = [Requirement(text) for text in lines if "extra ==" not in text]
    wrong = [problem for requirement in wanted if (problem := _mismatch(requirement))]
    names = ("torch", "transformers", "ray", "dvc", "polars", "pyarrow")
    have = ", ".join(f"{n} {metadata.version(n)}" for n in names if not _absent(n))
    yield Check(
        name="packages",
        state="fail" if wrong else "ok",
        found="; ".join(wrong) or have,
        remedy="run `pip install -c constraints.txt -e .`" if wrong else "",
    )


def _absent(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return True
    return False


def _mismatch(requirement: Requirement) -> str:
    if _absent(requirement.name):
        return f"{requirement.name} is missing"
    version = metadata.version(requirement.name)
    right = requirement.specifier.contains(version, prereleases=True)
    return "" if right else f"{requirement.name} {version} is not {requirement.specifier}"


def pip() -> Check:
    """Packages of the corpus and of some backbones come by pip."""
    code, said = output(sys.executable, "-m", "pip", "--version")
    return Check(
        name="pip",
        state="fail" if code else "ok",
        found="missing" if code else " ".join(said.split()[:2]),
        remedy="run `python -m ensurepip`" if code else "",
    )


def gpus() -> Check:
    """The GPUs that torch can use."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if names:
        return Check(name="gpus", state="ok", found=", ".join(names))
    if shutil.which("nvidia-smi"):
        return Check(
            name="gpus",
            state="warn",
            found="the machine has a driver, but torch sees no GPU",
            remedy="install the CUDA build of torch, and look at CUDA_VISIBLE_DEVICES",
        )
    cores = len(os.sched_getaffinity(0))
    return Check(name="gpus", state="ok", found=f"none; {cores} CPU cores")


def git() -> Check:
    """`dvc exp run` and the diffs need a repository with a commit."""
    remedy = "run `git init`, then `git add` and `git commit` the project"
    if not shutil.which("git"):
        return Check(name="git", state="fail", found="missing", remedy="install git")
    if output("git", "rev-parse", "--is-inside-work-tree")[0]:
        return Check(name="git", state="fail", found="not a repository", remedy=remedy)
    code, commit = output("git", "rev-parse", "--short", "HEAD")
    if code:
        return Check(name="git", state="fail", found="no commit yet", remedy=remedy)
    changed = len(output("git", "status", "--porcelain")[1].splitlines())
    return Check(name="git", state="ok", found=f"commit {commit}, {changed} changed files")


def dvc() -> Check:
    """The pipeline must be readable where the command is run."""
    if not Path(".dvc").is_dir():
        remedy = "go to the folder with dvc.yaml, or run `dvc init`"
        return Check(name="dvc", state="fail", found="no .dvc folder here", remedy=remedy)
    code, stages = output(sys.executable, "-m", "dvc", "stage", "list", "--name-only")
    if code:
        return Check(
            name="dvc",
            state="fail",
            found="dvc.yaml cannot be read",
            remedy="run `dvc stage list` for the reason",
        )
    lock = "with" if Path("dvc.lock").exists() else "without"
    found = f"{len(stages.splitlines())} stages, {lock} results of an earlier run"
    return Check(name="dvc", state="ok", found=found)


def resources(settings: Params) -> Iterator[Check]:
    """Disk and memory against what the run will take."""
    found = {name: shapes.find(name, settings.scales[name]) for name in settings.run.scales}
    planned = plan.make(settings, found, split_cores(settings.ray))
    free, there = shutil.disk_usage(".").free, artifacts()
    short = planned.disk - there > free
    yield Check(
        name="disk",
        state="fail" if short else "ok",
        found=f"{free / plan.GB:.1f} GB free, the run takes {planned.disk / plan.GB:.1f} GB, of "
        f"which {there / plan.GB:.1f} are there",
        remedy="free space, lower the budget, or set hidden.dtype to bfloat16" if short else "",
    )
    if planned.unknown:
        yield Check(
            name="sizes",
            state="warn",
            found=f"not known yet: {', '.join(planned.unknown)}",
            remedy="the needs above leave them out; run `dvc repro backbone` first",
        )
    yield memory(planned)


def artifacts() -> int:
    """Bytes of what earlier runs left in data/; a new run takes their place."""
    names = (p for p in Path("data").glob("[!.]*/**/*") if p.is_file())
    return sum(path.stat().st_size for path in names)


def memory(planned: plan.Plan) -> Check:
    """All workers at once must fit."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    each = max((max(scale.memory.values()) for scale in planned.scales), default=0.0)
    needed = each * max(1, planned.split.workers)
    short = needed > there
    return Check(
        name="memory",
        state="warn" if short else "ok",
        found=f"{there / plan.GB:.1f} GB, the workers take {needed / plan.GB:.1f} GB",
        remedy="lower ray.workers, hidden.batch or hidden.max_logits_mb" if short else "",
    )


def ray(settings: Params) -> Iterator[Check]:
    """Ray, if the run uses it."""
    address = settings.ray.address
    if without_ray(settings.ray):
        yield Check(name="ray", state="ok", found="not used: one process does all the work")
        return
    if address:
        try:
            ray_cluster.probe(address)
        except UserError:
            remedy = "start the cluster with `ray start --head`, or empty ray.address"
            yield Check(name="ray", state="fail", found="no cluster answers", remedy=remedy)
        else:
            yield Check(name="ray", state="ok", found="a cluster answers at ray.address")
        return
    split, node = split_cores(settings.ray), here()
    short = room([node], split.threads, split.gpus) < split.workers
    yield Check(
        name="ray",
        state="fail" if short else "ok",
        found=f"{split.workers} workers of {split.threads} threads on {node.cpus:g} cores",
        remedy="lower ray.workers or ray.threads" if short else "",
    )


def hub(settings: Params) -> Iterator[Check]:
    """Access to what the run takes from the Hugging Face hub."""
    token = "present" if huggingface_hub.get_token() else "absent"
    models = [name for name in settings.run.scales if _from_hub(name, settings)]
    data = settings.corpus.stack.dataset if settings.corpus.source == "stack_v2" else ""
    if data and Path(data).is_dir():
        data = ""
    if not models and not data:
        yield Check(name="hub", state="ok", found=f"not needed; token {token}")
    for name in models:
        yield reach(settings.scales[name].name, "model", token)
    if data:
        yield reach(data, "dataset", token)


def _from_hub(name: str, settings: Params) -> bool:
    """Whether a scale's model must still be fetched from the hub."""
    scale = settings.scales[name]
    kept = Path(f"data/backbone/scale={name}/config.json").exists()
    return scale.source == "hub" and not kept and not Path(scale.name).is_dir()


def reach(name: str, kind: Literal["model", "dataset"], token: str) -> Check:
    """Ask the hub whether this user may read a repository."""
    label = f"hub {name}"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        remedy = "unset HF_HUB_OFFLINE, or name a local folder in params.yaml"
        return Check(name=label, state="fail", found="HF_HUB_OFFLINE is set", remedy=remedy)
    try:
        huggingface_hub.auth_check(name, repo_type=kind)
    except GatedRepoError:
        remedy = "accept the terms on its page of the hub, then run `hf auth login`"
        found = f"gated, and not open to you; token {token}"
    except RepositoryNotFoundError:
        remedy = "correct the name in params.yaml, or run `hf auth login` if it is private"
        found = f"not there for you; token {token}"
    except (HTTP_ERROR, OSError) as error:
        remedy = "check the network, or name a local folder in params.yaml"
        found = f"no answer ({type(error).__name__}); token {token}"
    else:
        return Check(name=label, state="ok", found=f"may be read; token {token}")
    return Check(name=label, state="fail", found=found, remedy=remedy)


def output(*command: str) -> tuple[int, str]:
    """Exit code and output of a command; what it says of its errors is not shown."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()
