"""How large a scale's backbone is, known without its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ponderttt import files
from ponderttt.params import Scale

TABLE = Path(__file__).with_name("shapes.json")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a causal language model that time, disk and memory follow from."""

    source: str  # where the sizes were read
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int | None
    parameters: int
    matrices: int  # entries of the body's matrices that every token is multiplied with
    mixing: int  # heads times their width, of all layers: what attention multiplies

    def body_flops(self, tokens: int) -> float:
        """Operations of one row of `tokens` through the body; attention looks back only."""
        return 2.0 * self.matrices * tokens + 2.0 * self.mixing * tokens**2

    @property
    def head_flops(self) -> float:
        """Operations of the logits of one position."""
        return 2.0 * self.width * self.vocabulary


def find(name: str, scale: Scale) -> Shape | None:
    """The shape of a scale from its own config, or from the table; None if neither is here."""
    found = config_of(name, scale)
    return shape_of(*found) if found else None


def config_of(name: str, scale: Scale) -> tuple[Any, str] | None:
    """A config and where it was read: the kept model, a folder or the hub's cache, the table."""
    kept = Path(f"data/backbone/scale={name}")
    if (kept / "config.json").exists():
        return AutoConfig.from_pretrained(kept, local_files_only=True), kept.as_posix()
    if scale.source == "hub" and (config := _local(scale.name)):
        return config, scale.name
    known = files.read_json(TABLE).get(scale.name or scale.packages[0].name)
    return (AutoConfig.for_model(**known), "table") if known else None


def _local(name: str) -> Any:
    """The config in a folder or in the hub's cache; None if it is in neither."""
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except OSError:
        return None


def shape_of(config: Any, source: str) -> Shape:
    """Sizes of the model that a config describes, which is built without memory to count them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads, width = text.num_attention_heads, text.hidden_size
    return Shape(
        source=source,
        layers=text.num_hidden_layers,
        width=width,
        heads=heads,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        context=getattr(text, "max_position_embeddings", None),
        parameters=sum(p.numel() for p in model.parameters()),
        matrices=_matrices(model.base_model),
        mixing=text.num_hidden_layers * heads * (getattr(text, "head_dim", None) or width // heads),
    )


def _matrices(body: torch.nn.Module) -> int:
    looked_up = [m for m in body.modules() if isinstance(m, torch.nn.Embedding)]
    total = sum(p.numel() for p in body.parameters() if p.ndim == 2)
    return total - sum(module.weight.numel() for module in looked_up)
