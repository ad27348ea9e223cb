"""The signals a gate may look at: what each one is, what it sees, and what it costs to know.

`sees` says how much a gate must wait for: `prefix` the first tokens of the chunk, `chunk` all of
its tokens, `update` the result of the update itself, `labels` the true next tokens. Only the
first two can save work; `update` comes too late for that and `labels` are known only afterwards.

Every signal reads tokens of the chunk that the decision is then applied to, from its first token
on. So with `chunk`, `update` or `labels` a gate's loss at a token depends on later tokens of its
chunk, through the one bit of the decision; the arms themselves never look ahead. `recon_prefix`
knows its bit after 64 tokens.

`needs` are the parts of the model that must run on every chunk before the gate can decide. What
the chosen arm then needs and has not run yet comes on top: see `cost.py`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from ponderttt.params import SignalName

Sees = Literal["prefix", "chunk", "update", "labels"]
Part = Literal["layer_skip", "layer_update", "head_base", "head_skip", "head_update"]

# What an arm's prediction takes, beside the backbone.
SKIP: tuple[Part, ...] = ("layer_skip", "head_skip")
UPDATE: tuple[Part, ...] = ("layer_update", "head_update")

WORDS: dict[Part, str] = {
    "layer_update": "update arm on every chunk",
    "head_base": "head on the base output",
    "head_skip": "head on the skip arm, even if UPDATE follows",
}


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One column of the score table, described."""

    name: str
    sees: Sees
    definition: str
    needs: tuple[Part, ...] = ("layer_skip",)
    uncounted: str = ""  # work inside the layer that no measured part holds

    @property
    def label_free(self) -> bool:
        """Whether it is known without the next tokens."""
        return self.sees != "labels"

    @property
    def cost(self) -> str:
        """In words, what it takes beyond the skip arm."""
        words = [WORDS[part] for part in self.needs if part in WORDS]
        if self.uncounted:
            words.append(f"{self.uncounted} (uncounted)")
        return "; ".join(words) or "none: the skip arm computes it"


SIGNALS = (
    Signal(
        name="recon",
        sees="chunk",
        definition="reconstruction loss, mean over all tokens, fast weights of the chunk's start",
    ),
    Signal(
        name="recon_step",
        sees="update",
        definition="reconstruction loss, mean over all tokens, weights of each mini-batch's start",
        needs=("layer_update",),
    ),
    Signal(
        name="recon_last",
        sees="update",
        definition="as recon_step, last position of each mini-batch only: the paper's code",
        needs=("layer_update",),
    ),
    Signal(
        name="recon_prefix",
        sees="prefix",
        definition="reconstruction loss, first 64 tokens, weights of the chunk's start",
    ),
    Signal(
        name="delta",
        sees="update",
        definition="reconstruction loss before the step minus after it",
        needs=("layer_update",),
        uncounted="another inner forward",
    ),
    Signal(
        name="entropy_base",
        sees="chunk",
        definition="entropy of the backbone's prediction, mean over tokens",
        needs=("head_base",),
    ),
    Signal(
        name="entropy_skip",
        sees="chunk",
        definition="entropy of the skip arm's prediction, mean over tokens",
        needs=("layer_skip", "head_skip"),
    ),
    Signal(
        name="gain_kl",
        sees="chunk",
        definition="KL(skip || base) per token: what the layer expects to win",
        needs=("layer_skip", "head_base", "head_skip"),
    ),
    Signal(
        name="out_norm",
        sees="chunk",
        definition="norm of what the layer adds in the skip arm, mean over tokens",
    ),
    Signal(
        name="grad_norm",
        sees="chunk",
        definition="norm of the inner loss's gradient at the chunk's first weights",
        uncounted="an inner backward",
    ),
    Signal(
        name="ce_skip",
        sees="labels",
        definition="cross-entropy of the skip arm, mean over tokens",
        needs=("layer_skip", "head_skip"),
        uncounted="the next tokens",
    ),
)

BY_NAME = {signal.name: signal for signal in SIGNALS}
LABEL_FREE: tuple[str, ...] = get_args(SignalName)
WITH_LABELS = tuple(signal.name for signal in SIGNALS if not signal.label_free)

# The paper's signal, to which every other one is compared.
PAPER = "recon"
