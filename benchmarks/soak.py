"""Kill a process of a stage at a random moment, again and again; count what was lost.

Each round runs `hidden` or `scores` of a tiny project on two Ray workers, kills its driver, one of
its workers or Ray's own node process, and runs the stage again if it failed. Half of the workers
die with a half-written file: a random moment would hardly ever find one, so small are they. Then
every file is compared with an undisturbed run's: `lost` if it is missing; `doubled` if it is one
too many, or its shard was finished before the kill and done again; `corrupt` if its bytes differ.
`given up` counts stages that a worker's death ended, `left` processes that outlive their round.
A round whose stage had published everything, or whose victim had ended by itself, kills `nobody`.
It reads /proc, so it wants Linux. Not part of `make bench`: `make soak COUNT=50 SECONDS=1800`.
Training is not in it: the tests kill its driver, ranks and node.
"""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import tiny

MARK = "PONDERTTT_SOAK"  # in the environment of all processes of a round
KINDS = ("driver", "worker", "node")
FAULTS = ("lost", "doubled", "corrupt", "given up", "left")
EARLY = 0.25  # share of the kills at any moment; the others fall between two finished shards
WRITING = 0.5  # share of the killed workers that die with a half-written file
PATIENCE = 30.0  # seconds to wait for a worker to write
GRACE = 20.0  # seconds in which the processes of a killed driver must end


@dataclass(frozen=True)
class Stage:
    """A stage that spreads shards over workers."""

    arguments: tuple[str, ...]
    places: dict[str, Path]  # a part of its work folder -> where that is published
    last: str  # the file of a shard that is written last

    def finished(self, folder: Path) -> dict[Path, int]:
        """When each finished shard was written, by its path below the work folder."""
        found = {}
        for work in (folder / "data/.work").glob(f"{self.arguments[0]}@*"):
            with contextlib.suppress(FileNotFoundError):  # published while this looks
                for path in work.rglob(self.last):
                    if not path.name.startswith("."):
                        found[path.relative_to(work)] = mtime(path)
        return found

    def published(self, folder: Path) -> dict[Path, Path]:
        """Every published file, by its path in the work folder that it came from."""
        return {
            Path(part) / path.relative_to(folder / place): path
            for part, place in self.places.items()
            for path in (folder / place).rglob("*")
            if path.is_file()
        }


STAGES = (
    Stage(("hidden", "tiny"), {"": Path("data/hidden/scale=tiny")}, "*.safetensors"),
    Stage(
        ("scores", "tiny", "0"),
        {name: Path(f"data/{name}/scale=tiny/seed=0") for name in ("scores", "tokens")},
        "scores/*/*/*.parquet",
    ),
)


@dataclass(frozen=True)
class Round:
    """One stage, disturbed once."""

    folder: Path
    stage: Stage
    number: int
    draw: random.Random

    def run(self, wanted: dict[Path, bytes], seconds: float) -> Counter[str]:
        """Who was killed and when, and what went wrong."""
        for place in self.stage.places.values():
            shutil.rmtree(self.folder / place)
        process = self._start()
        shards = sum(path.match(self.stage.last) for path in wanted)
        self._wait(process, shards, seconds)
        seen, finished = Counter[str](), dict[Path, int]()
        if chosen := self._choose(process):
            seen, finished = self._kill(*chosen)
        code = process.wait(timeout=600)
        seen["given up"] = int(code != 0 and seen["worker"] > 0)
        if code and self.stage.published(self.folder).keys() == wanted.keys():
            seen = Counter()  # it had only to return
        elif code:
            self._again()
        seen["middle"] = int(0 < len(finished) < shards)
        seen["nobody"] = int(not any(seen[kind] for kind in KINDS))
        return seen + self._faults(wanted, finished)

    def _start(self) -> subprocess.Popen[bytes]:
        name, *rest = self.stage.arguments
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"stages.{name}", *rest],
                cwd=self.folder,
                env=tiny.environment() | {MARK: mark(self.number)},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def _log(self) -> Path:
        return self.folder / "round.log"

    def _again(self) -> None:
        """Run the stage once more; it must come to its end."""
        if self._start().wait(timeout=600):
            words = self._log.read_text()[-3000:]
            raise RuntimeError(f"round {self.number}: {self.stage.arguments}: {words}")

    def _wait(self, process: subprocess.Popen[bytes], shards: int, seconds: float) -> None:
        if self.draw.random() < EARLY:
            time.sleep(self.draw.uniform(0, seconds))
            return
        some = self.draw.randrange(shards)
        while process.poll() is None and len(self.stage.finished(self.folder)) < some:
            time.sleep(0.002)
        time.sleep(self.draw.uniform(0, 0.02))

    def _choose(self, process: subprocess.Popen[bytes]) -> tuple[str, psutil.Process] | None:
        """Whom to kill, each kind of process being as likely; None if all have ended."""
        found: dict[str, list[psutil.Process]] = {}
        for living in marked(self.number):
            with contextlib.suppress(psutil.Error):
                found.setdefault(kind(living, process.pid), []).append(living)
        found.pop("", None)
        if process.poll() is not None or not found:
            return None
        chosen = self.draw.choice(sorted(found))
        return chosen, self.draw.choice(found[chosen])

    def _kill(self, name: str, victim: psutil.Process) -> tuple[Counter[str], dict[Path, int]]:
        """Kill it, if a worker perhaps while it writes; what was done, and finished before."""
        try:
            writing = name == "worker" and self.draw.random() < WRITING and self._caught(victim)
            finished = self.stage.finished(self.folder)
            if victim.status() == psutil.STATUS_ZOMBIE:
                return Counter(), {}
            victim.kill()
        except psutil.NoSuchProcess:
            return Counter(), {}
        return Counter({name: 1, "writing": int(writing)}), finished

    def _caught(self, worker: psutil.Process) -> bool:
        """Stop a worker while a file of its shard is half-written; False if it comes to none."""
        work, end = self.folder / "data/.work", time.monotonic() + PATIENCE
        while worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
            if half_written(worker, work):
                worker.suspend()
                if half_written(worker, work):  # still: it is not renamed yet
                    return True
                worker.resume()
            time.sleep(0.0005)
        return False

    def _faults(self, wanted: dict[Path, bytes], finished: dict[Path, int]) -> Counter[str]:
        found = self.stage.published(self.folder)
        again = [p for p in finished.keys() & found.keys() if mtime(found[p]) != finished[p]]
        end = time.monotonic() + GRACE
        while marked(self.number) and time.monotonic() < end:
            time.sleep(0.1)
        return Counter(
            lost=len(wanted.keys() - found.keys()),
            doubled=len(found.keys() - wanted.keys()) + len(again),
            corrupt=sum(found[p].read_bytes() != wanted[p] for p in wanted.keys() & found.keys()),
            left=len(marked(self.number)),
        )


def half_written(worker: psutil.Process, work: Path) -> bool:
    """Whether a worker has a file below `work` open that has not got its name yet."""
    # psutil's own list of open files takes longer than most of these writes.
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{worker.pid}/fd").iterdir():
            file = handle.readlink()
            if file.suffix == ".tmp" and file.is_relative_to(work.resolve()):
                return True
    return False


def mtime(path: Path) -> int:
    """When a file was written, in nanoseconds."""
    return path.stat().st_mtime_ns


def mark(number: int | str) -> str:
    """What all processes of a round of this soak carry; that of "" stands in all rounds'."""
    return f"{os.getpid()}.{number}"


def marked(number: int | str = "") -> list[psutil.Process]:
    """Every living process that was started in a round, whoever its parent is by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            carried = process.environ().get(MARK, "")
            if carried == mark(number) or (number == "" and carried.startswith(mark(""))):
                found.append(process)
    return found


def kind(process: psutil.Process, driver: int) -> str:
    """What a process is to the stage; empty for those of Ray that do no work."""
    if process.pid == driver:
        return "driver"
    if process.name().startswith("ray::_Worker"):
        return "worker"
    return "node" if process.name() == "raylet" else ""


def prepare(folder: Path) -> None:
    """A tiny project with enough small shards to be disturbed, undisturbed up to its scores."""
    tiny.project(folder)
    raw = tiny.plain_params()
    raw["budgets"]["smoke"] |= {"train_chunks": 400, "test_chunks": 200}
    raw["chunks"] |= {"shard": 8}
    tiny.write_params(folder, raw)
    before = (("corpus",), ("backbone", "tiny"), ("chunks", "tiny"), ("hidden", "tiny"))
    for arguments in (*before, ("ttt", "tiny", "0"), ("scores", "tiny", "0")):
        tiny.stage(folder, *arguments)
    raw["ray"] |= {"workers": 2}
    tiny.write_params(folder, raw)


def soak(folder: Path, count: int, seconds: float, seed: int) -> Counter[str]:
    """Rounds, by stage in turn, until `count` kills or the end of time; all that was counted."""
    draw, began = random.Random(seed), time.monotonic()
    total: Counter[str] = Counter()
    wanted = [
        {p: path.read_bytes() for p, path in stage.published(folder).items()} for stage in STAGES
    ]
    length = 10.0  # of a stage, nearly all of it Ray's start
    for number in itertools.count():
        if total["rounds"] - total["nobody"] == count or time.monotonic() - began > seconds:
            break
        which = number % len(STAGES)
        start = time.monotonic()
        seen = Round(folder, STAGES[which], number, draw).run(wanted[which], length)
        if seen["nobody"]:
            length = time.monotonic() - start
        total.update(seen, rounds=1, files=len(wanted[which]))
        print(f"\r{summary(total)}", end="", flush=True)
    print()
    return total


def summary(total: Counter[str]) -> str:
    """The figures of all rounds so far."""
    kills = ", ".join(f"{kind} {total[kind]}" for kind in (*KINDS, "nobody"))
    faults = ", ".join(f"{total[fault]} {fault}" for fault in FAULTS)
    return (
        f"{total['rounds']} rounds, {total['files']} files; killed: {kills} "
        f"({total['middle']} between finished shards, {total['writing']} in a write): {faults}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1800, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        try:
            total = soak(Path(name), args.count, args.seconds, args.seed)
        finally:
            for process in marked():
                process.kill()
    kills = total["rounds"] - total["nobody"]
    if kills < args.count:
        print(f"only {kills} of {args.count} kills in {args.seconds:g} seconds")
    sys.exit(kills < args.count or any(total[fault] for fault in FAULTS))


if __name__ == "__main__":
    main()
