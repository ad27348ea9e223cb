"""A training run on disk: layer, optimizer and history in one safetensors file, whole or absent."""

import json
from dataclasses import dataclass
from pathlib import Path

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
    save_tensors(folder / NAME, tensors, {"history": progress.history})


def resume(folder: Path, progress: Progress) -> None:
    """Bring `progress` to where the checkpoint in `folder` was, if there is one."""
    tensors, history = _read(folder / NAME)
    if history:
        progress.history.extend(history)
        _fill(progress, tensors)


def steps_done(folder: Path) -> int:
    """How far the checkpoint in `folder` is; 0 without one."""
    return len(_read(folder / NAME)[1])


def _read(path: Path) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    if not path.exists():
        return {}, []
    with files.reading(path, *DAMAGE), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()[NOTES])["history"]


def _fill(progress: Progress, tensors: dict[str, Tensor]) -> None:
    layer = {k.removeprefix("layer."): v for k, v in tensors.items() if k.startswith("layer.")}
    progress.layer.load_state_dict(layer)
    for name, parameter in progress.layer.named_parameters():
        progress.optimizer.state[parameter] = {
            moment: tensors[f"{moment}.{name}"].to("cpu" if moment == "step" else parameter.device)
            for moment in MOMENTS
        }
