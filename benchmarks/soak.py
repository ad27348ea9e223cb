"""Kill a worker or the driver at a random moment, again and again; count what was lost.

Each round runs the `hidden` stage of a tiny project, kills one process, runs the stage again if it
was the driver, and compares every shard with those of an undisturbed run. Not part of `make bench`:
`make soak COUNT=50 SECONDS=1800`.
"""

import argparse
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import tiny

from ponderttt import shards
from ponderttt.errors import UserError

STAGE = [sys.executable, "-m", "stages.hidden", "tiny"]


def prepare(folder: Path) -> None:
    """A tiny project with enough small shards to be disturbed, up to its chunks."""
    tiny.project(folder)
    raw = tiny.plain_params()
    raw["budgets"]["smoke"] |= {"train_chunks": 400, "test_chunks": 200}
    raw["chunks"] |= {"shard": 8}
    raw["ray"] |= {"workers": 2}
    tiny.write_params(folder, raw)
    for args in (("corpus",), ("backbone", "tiny"), ("chunks", "tiny")):
        tiny.stage(folder, *args)


def outcome(folder: Path) -> dict[str, bytes]:
    out = folder / "data/hidden"
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def targets(stage: psutil.Process) -> list[psutil.Process]:
    """The driver and the workers that it has by now."""
    found = [stage]
    for child in stage.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may end while it is looked at
            if "ray::_Worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def disturb(folder: Path, seconds: float, draw: random.Random) -> str:
    """Start the stage, kill one of its processes after a while; who it was."""
    process = subprocess.Popen(
        STAGE,
        cwd=folder,
        env=tiny.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(draw.uniform(0, seconds))
    killed = "nobody"
    if process.poll() is None:
        victim = draw.choice(targets(psutil.Process(process.pid)))
        killed = "driver" if victim.pid == process.pid else "worker"
        victim.kill()
    code = process.wait(timeout=600)
    if code != 0:
        tiny.run(folder, *STAGE)
    return killed


def faults(wanted: dict[str, bytes], found: dict[str, bytes], folder: Path) -> dict[str, int]:
    """Shards that are lost, too many, or not what they should be."""
    corrupt = 0
    for name in found.keys() & wanted.keys():
        try:
            if name.endswith(".safetensors"):
                shards.read(folder / "data/hidden" / name)
            corrupt += found[name] != wanted[name]
        except UserError:
            corrupt += 1
    lost, doubled = len(wanted.keys() - found.keys()), len(found.keys() - wanted.keys())
    return {"lost": lost, "doubled": doubled, "corrupt": corrupt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1800, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, total = random.Random(args.seed), {"lost": 0, "doubled": 0, "corrupt": 0}
    kills: dict[str, int] = {"driver": 0, "worker": 0, "nobody": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "project"
        prepare(folder)
        began = time.perf_counter()
        tiny.run(folder, *STAGE)
        length = time.perf_counter() - began
        wanted, rounds = outcome(folder), 0
        while rounds < args.count and time.perf_counter() - began < args.seconds:
            shutil.rmtree(folder / "data/hidden")
            kills[disturb(folder, length, draw)] += 1
            for kind, count in faults(wanted, outcome(folder), folder).items():
                total[kind] += count
            rounds += 1
            print(f"\r{rounds} rounds, killed {kills}, {total}", end="", flush=True)
    print(f"\n{rounds} rounds of {len(wanted)} files: {total}; killed {kills}")
    sys.exit(any(total.values()))


if __name__ == "__main__":
    main()
