"""A TTT layer on disk: safetensors for the weights, JSON for what they mean."""

import dataclasses
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ponderttt import files
from ponderttt.errors import UserError
from ponderttt.params import Ttt
from ponderttt.shards import save_tensors
from ponderttt.ttt import LayerConfig, TTTLayer, build_layer

WEIGHTS = "layer.safetensors"
CONFIG = "config.json"


def config_for(params: Ttt, card: dict[str, Any]) -> LayerConfig:
    """The layer that fits a backbone; heads as the backbone has them unless told."""
    heads = card["heads"] if params.heads == "auto" else params.heads
    try:
        return LayerConfig(
            width=card["width"],
            heads=int(heads),
            mini_batch=params.mini_batch,
            base_lr=params.base_lr,
            rate=params.rate,
            diagonal=params.diagonal,
        )
    except ValueError as error:
        raise UserError(f"ttt.heads: {error}; set ttt.heads to a number that fits") from None


def save(folder: Path, layer: TTTLayer, facts: dict[str, Any]) -> None:
    """Write weights and config; `facts` say what the layer was trained on."""
    save_tensors(folder / WEIGHTS, layer.state_dict(), {})
    config = dataclasses.asdict(layer.config)
    files.write_json(
        folder / CONFIG, facts | {"layer": config, "weights": files.sha256(folder / WEIGHTS)}
    )


def load(folder: Path, backbone: str) -> TTTLayer:
    """The layer in `folder`, if it was trained on the backbone with this hash."""
    facts = files.read_json(folder / CONFIG)
    if facts["backbone"] != backbone:
        raise UserError(f"{folder}: trained on another backbone; run `dvc repro ttt`")
    if files.sha256(folder / WEIGHTS) != facts["weights"]:
        raise UserError(f"{folder / WEIGHTS}: damaged; delete it and run `dvc repro ttt`")
    layer = build_layer(LayerConfig(**facts["layer"]), seed=0)
    layer.load_state_dict(load_file(folder / WEIGHTS))
    return layer.eval()
