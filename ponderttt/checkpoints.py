"""A training run on disk: layer, optimizer and history in one safetensors file, whole or absent."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ponderttt import files
from ponderttt.shards import DAMAGE, NOTES, save_tensors
from ponderttt.ttt import TTTLayer

NAME = "checkpoint.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(kw_only=True)
class Progress:
    """All that changes while training; the number of rows in the history is the step."""

    layer: TTTLayer
    optimizer: torch.optim.AdamW
    history: list[dict[str, float]]

    @property
    def step(self) -> int:
        return len(self.history)


def save(folder: Path, progress: Progress) -> None:
    """Write everything in one rename."""
    tensors = {f"layer.{k}": v for k, v in progress.layer.state_dict().items()}
    for name, parameter in progress.layer.named_parameters():
        state = progress.optimizer.state[parameter]
        tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
    device = next(progress.layer.parameters()).device.type
    save_tensors(folder / NAME, tensors, {"history": progress.history, "device": device})


def resume(folder: Path, progress: Progress) -> str:
    """Bring `progress` to where the checkpoint in `folder` was; the kind of device it was made on.

    Without a checkpoint nothing happens, and the answer is empty.
    """
    tensors, notes = _read(folder)
    if notes:
        progress.history.extend(notes["history"])
        _fill(progress, tensors)
    return str(notes.get("device", ""))


def steps_done(folder: Path) -> int:
    """How far the checkpoint in `folder` is; 0 without one."""
    return len(_read(folder)[1].get("history", []))


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = folder / NAME
    # Listed, not asked for: a network's file system may remember that a file was not there.
    if path not in folder.glob("*"):
        return {}, {}
    with files.reading(path, *DAMAGE), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()[NOTES])


def _fill(progress: Progress, tensors: dict[str, Tensor]) -> None:
    layer = {k.removeprefix("layer."): v for k, v in tensors.items() if k.startswith("layer.")}
    progress.layer.load_state_dict(layer)
    for name, parameter in progress.layer.named_parameters():
        progress.optimizer.state[parameter] = {
            moment: tensors[f"{moment}.{name}"].to("cpu" if moment == "step" else parameter.device)
            for moment in MOMENTS
        }
