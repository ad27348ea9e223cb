"""Where the numbers came from: commit, parameters, data, seeds and versions."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from ponderttt import files, stage, streams

PACKAGES = ("numpy", "scipy", "pyarrow", "torch", "transformers", "ray", "dvc")
LAYERS = Path("data/ttt")
WRITTEN = ("data", "metrics", "dvc.lock")


def collect(view: Any) -> dict[str, Any]:
    """What it takes to make the same numbers again. No clock: the same run, the same bytes."""
    sections = {name: stage.plain(section) for name, section in vars(view).items()}
    return {
        "commit": commit(),
        "dirty": dirty(),
        "params": files.digest(sections),
        "data": {streams.SCORES.as_posix(): scores_hash(view)},
        "layers": layers(view),
        "seeds": {
            "layers": list(view.run.seeds),
            "gate": view.gate.seed,
            "bootstrap": view.metrics.seed,
        },
        "python": platform.python_version(),
        "versions": versions(),
    }


def scores_hash(view: Any) -> str:
    """The hash of the streams that were read, and of no others that may lie beside them."""
    folders = [key.folder for key in streams.keys(view)]
    return files.digest([[f.as_posix(), files.folder_hash(streams.SCORES / f)] for f in folders])


def layers(view: Any) -> dict[str, dict[str, str]]:
    """Hashes of each trained layer and its backbone, for those that lie here."""
    found = {}
    for scale in view.run.scales:
        for seed in view.run.seeds:
            path = LAYERS / f"scale={scale}" / f"seed={seed}" / "config.json"
            if path.exists():
                facts = files.read_json(path)
                hashes = {name: facts[name] for name in ("backbone", "weights")}
                found[f"scale={scale}/seed={seed}"] = hashes
    return found


def commit() -> str | None:
    """The commit that is checked out; None outside a repository."""
    return git("rev-parse", "HEAD")


def dirty() -> bool | None:
    """Whether files differ from the commit; what the pipeline itself writes does not count."""
    if commit() is None:
        return None
    changed = git("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in WRITTEN))
    return None if changed is None else bool(changed)


def git(*words: str) -> str | None:
    """What git answers; None without git, or if it refuses."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """The installed versions of what the numbers depend on."""
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    return {name: metadata.version(name) for name in PACKAGES if name in installed}
