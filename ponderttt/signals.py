"""The signals a gate may look at: what each one is, what it sees, and what it costs to know.

`sees` says how much a gate must wait for: `prefix` the first tokens of the chunk, `chunk` all of
its tokens, `update` the result of the update itself, `labels` the true next tokens. Only the
first two can save work; `update` comes too late for that and `labels` are known only afterwards.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from ponderttt.params import SignalName

Sees = Literal["prefix", "chunk", "update", "labels"]


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One column of the score table, described."""

    name: str
    sees: Sees
    cost: str  # beyond the skip arm that is run in any case
    definition: str

    @property
    def label_free(self) -> bool:
        """Whether it is known without the next tokens."""
        return self.sees != "labels"


NOTHING = "none: the skip arm computes it"

SIGNALS = (
    Signal(
        name="recon",
        sees="chunk",
        cost="one inner forward of the keys",
        definition="reconstruction loss, mean over all tokens, fast weights of the chunk's start",
    ),
    Signal(
        name="recon_step",
        sees="update",
        cost="the inner updates of the whole chunk",
        definition="reconstruction loss, mean over all tokens, weights of each mini-batch's start",
    ),
    Signal(
        name="recon_last",
        sees="update",
        cost="the inner updates of the whole chunk",
        definition="as recon_step, last position of each mini-batch only: the paper's code",
    ),
    Signal(
        name="recon_prefix",
        sees="prefix",
        cost="one inner forward of the first 64 keys",
        definition="reconstruction loss, first 64 tokens, weights of the chunk's start",
    ),
    Signal(
        name="delta",
        sees="update",
        cost="the inner updates of the whole chunk, and another inner forward",
        definition="reconstruction loss before the step minus after it",
    ),
    Signal(
        name="entropy_base",
        sees="chunk",
        cost="the head on the backbone's own output",
        definition="entropy of the backbone's prediction, mean over tokens",
    ),
    Signal(
        name="entropy_skip",
        sees="chunk",
        cost=NOTHING,
        definition="entropy of the skip arm's prediction, mean over tokens",
    ),
    Signal(
        name="gain_kl",
        sees="chunk",
        cost="the head on the backbone's own output",
        definition="KL(skip || base) per token: what the layer expects to win",
    ),
    Signal(
        name="out_norm",
        sees="chunk",
        cost="none: the layer's output before the head",
        definition="norm of what the layer adds in the skip arm, mean over tokens",
    ),
    Signal(
        name="grad_norm",
        sees="chunk",
        cost="one inner forward and backward of the keys",
        definition="norm of the inner loss's gradient at the chunk's first weights",
    ),
    Signal(
        name="ce_skip",
        sees="labels",
        cost="the next tokens",
        definition="cross-entropy of the skip arm, mean over tokens",
    ),
)

BY_NAME = {signal.name: signal for signal in SIGNALS}
LABEL_FREE: tuple[str, ...] = get_args(SignalName)
WITH_LABELS = tuple(signal.name for signal in SIGNALS if not signal.label_free)

# The paper's signal, to which every other one is compared.
PAPER = "recon"
