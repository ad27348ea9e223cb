"""What hidden states predict; logits are made in slices, never all at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from ponderttt.backbone import Backbone

BYTES = 4  # logits are float32


class Predicted(NamedTuple):
    """Per token: [B, T - 1], zero where the next token is padding."""

    nll: Tensor  # nats of the next token
    entropy: Tensor  # of the prediction
    gain: Tensor  # KL to the other arm's prediction; zero if there is none
    other_nll: Tensor  # nats of the next token by the other arm; zero if there is none


def mask_of(counts: Tensor, length: int) -> Tensor:
    """[B] real tokens per row to [B, T], true where real."""
    return torch.arange(length, device=counts.device) < counts[:, None]


@torch.inference_mode()
def predict(
    backbone: Backbone,
    hidden: Tensor,
    tokens: Tensor,
    counts: Tensor,
    *,
    max_logits_mb: int,
    other: Tensor | None = None,
) -> Predicted:
    """NLL, entropy and KL(hidden's || other's) of every prediction in [B, T, d]."""
    rows, length = tokens.shape
    states, targets = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    others = None if other is None else other[:, :-1].flatten(0, 1)
    real = mask_of(counts, length)[:, 1:]
    chosen = real.flatten().nonzero().squeeze(1)
    found = torch.zeros(4, rows * (length - 1), device=hidden.device)
    size = slice_size(backbone.vocabulary, max_logits_mb)
    for part in chosen.split(size):
        against = None if others is None else others[part]
        found[:, part] = _slice(backbone, states[part], targets[part], against)
    return Predicted(*found.view(4, rows, length - 1))


def slice_size(vocabulary: int, max_logits_mb: int) -> int:
    """How many positions' logits fit; three tensors of that shape live at once."""
    return max(1, max_logits_mb * 2**20 // (3 * BYTES * vocabulary))


def _slice(backbone: Backbone, states: Tensor, targets: Tensor, other: Tensor | None) -> Tensor:
    """[4, n] of NLL, entropy, KL and the other's NLL for n positions."""
    z, target = backbone.logits(states), targets[:, None]
    total = z.logsumexp(dim=-1)
    p = (z - total[:, None]).exp_()
    nll = total - z.gather(1, target).squeeze(1)
    entropy = total - torch.linalg.vecdot(p, z)
    if other is None:
        return torch.stack([nll, entropy, torch.zeros_like(nll), torch.zeros_like(nll)])
    y = backbone.logits(other)
    other_total = y.logsumexp(dim=-1)
    other_nll = other_total - y.gather(1, target).squeeze(1)
    # The two arms' logits are close: their difference first keeps the digits of a small KL.
    gain = torch.linalg.vecdot(p, z.sub_(y)) + other_total - total
    return torch.stack([nll, entropy, gain, other_nll])


def chunk_sums(values: Tensor) -> Tensor:
    """[B, T - 1] to float64 [B]."""
    return values.double().sum(dim=1)


def weighted_ce(
    backbone: Backbone, states: Tensor, targets: Tensor, weights: Tensor, *, max_logits_mb: int
) -> Tensor:
    """Sum of weight * NLL of [n, d] states, differentiable in the states alone."""
    total: Tensor = _WeightedCe.apply(
        states, targets, weights, backbone, slice_size(backbone.vocabulary, max_logits_mb)
    )
    return total


class _WeightedCe(torch.autograd.Function):
    """Takes the gradient in the forward pass, so that no logits outlive their slice."""

    @staticmethod
    def forward(ctx, states, targets, weights, backbone, size):  # type: ignore[no-untyped-def]
        grad, total = torch.empty_like(states), states.new_zeros(())
        for part in torch.arange(len(states), device=states.device).split(size):
            with torch.enable_grad():
                some = states[part].detach().requires_grad_()
                nll = torch.nn.functional.cross_entropy(
                    backbone.logits(some), targets[part], reduction="none"
                )
                value = (nll * weights[part]).sum()
            (grad[part],) = torch.autograd.grad(value, some)
            total += value.detach()
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        (grad,) = ctx.saved_tensors
        return grad * upstream, None, None, None, None
