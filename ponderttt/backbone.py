"""The frozen language model, split into body and head.

The body gives hidden states (after the final norm); the head turns hidden states into logits.
The TTT layer sits between the two, so both must be had apart for any causal model.
"""

import copy
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ponderttt import files
from ponderttt.errors import UserError

CARD = "backbone.json"


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A causal language model in eval mode whose weights take no gradient."""

    model: Any
    card: dict[str, Any]
    exact_head: Any = None  # in float32 where the body is not: arms differ by less than its steps

    @property
    def width(self) -> int:
        return int(self.card["width"])

    @property
    def vocabulary(self) -> int:
        return int(self.card["vocabulary"])

    @property
    def bos(self) -> int | None:
        """The token that the model was trained to see first, if its tokenizer adds one."""
        bos: int | None = self.card["bos"]
        return bos

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        """[B, T] token ids to [B, T, d] hidden states; each row starts at position 0.

        A beginning-of-text token is seen by the model alone: its state is dropped.
        """
        out = self.model.base_model(input_ids=self.with_bos(tokens), use_cache=False)
        states: Tensor = out.last_hidden_state
        return states[:, states.shape[1] - tokens.shape[1] :]

    def with_bos(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, 1 + T] for a model that wants a beginning-of-text token."""
        return (
            tokens if self.bos is None else torch.nn.functional.pad(tokens, (1, 0), value=self.bos)
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] hidden states to [..., V] logits, with what the model does after its head."""
        head = self.exact_head or self.model.get_output_embeddings()
        logits: Tensor = head(hidden.to(head.weight.dtype)).float()
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits


def best_device() -> str:
    """The GPU this process was given, if any.

    The variable is asked too: CUDA heeds it only when it is first used, which may be long ago.
    """
    hidden_away = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return "cuda" if torch.cuda.is_available() and not hidden_away else "cpu"


def check_device(stage: str, device: str, earlier: str) -> None:
    """What a stopped run finished on a CPU is never mixed with a GPU's: precisions differ."""
    if earlier not in ("", device):
        raise UserError(
            f"{stage}: this run computes on {device}, but what it finished earlier was made on "
            f"{earlier}, in another precision; give it {earlier} again (section `ray`), or "
            f"delete data/.work/{stage}@* to begin anew"
        )


def load(folder: Path, device: str = "cpu") -> Backbone:
    """The model kept by the `backbone` stage; its weights must still be those of the card.

    On a GPU its body computes in bfloat16, made from the checked float32 weights, and its head
    in float32.
    """
    card = files.read_json(folder / CARD)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{folder}: the model cannot be read ({error}); run `dvc repro -f backbone`"
        ) from None
    model = model.eval().requires_grad_(False)
    if weights_hash(model) != card["weights"]:
        raise UserError(
            f"{folder}: the weights are not those that were fetched; run `dvc repro -f backbone`"
        )
    return place(model, card, device)


def place(model: Any, card: dict[str, Any], device: str) -> Backbone:
    """A float32 model as it computes on a device."""
    exact = None
    if compute_dtype(device) != torch.float32:
        exact = copy.deepcopy(model.get_output_embeddings()).to(device)
    for parameter in model.parameters():
        # Not the buffers: angles of rotary positions rounded to bfloat16 are off by half a radian.
        parameter.data = parameter.data.to(compute_dtype(device))
    return Backbone(model=model.to(device), card=card, exact_head=exact)


def compute_dtype(device: str) -> torch.dtype:
    """Half the memory and many times the speed on a GPU; slower than float32 on a CPU."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def check_length(length: int, card: dict[str, Any]) -> None:
    """A chunk, and the beginning-of-text token before it, must fit the model's context."""
    context = card["context"]
    room = context and context - (card["bos"] is not None)
    if context and length > room:
        raise UserError(
            f"chunks.length: {length} tokens do not fit the context of {card['name']}; "
            f"at most {room}"
        )


def bos_of(tokenizer: Any) -> int | None:
    """The token that a tokenizer puts before a text unasked: Gemma's does, GPT-2's does not."""
    first = tokenizer("a")["input_ids"][0]
    added = first != tokenizer("a", add_special_tokens=False)["input_ids"][0]
    return int(first) if added else None


def tokenizer_of(folder: Path) -> Any:
    """The fast tokenizer kept by `prepare`."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises no narrower one
        raise UserError(
            f"{folder}: the tokenizer cannot be read ({error}); run `dvc repro -f backbone`"
        ) from error


def frozen_hashes(backbone: Backbone) -> list[str]:
    """The hashes of all that computes, to prove that training moved nothing."""
    parts = (backbone.model, backbone.exact_head)
    return [weights_hash(part) for part in parts if part is not None]


def weights_hash(model: torch.nn.Module) -> str:
    """The hash of every parameter's name, shape and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        total.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()
