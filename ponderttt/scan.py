"""The inner loop of the TTT layer: one gradient step of the fast weights per mini-batch.

Here are the parts whose way back is written by hand: the loop, and the convs before it.

Letters in the shape comments:

    N  sequences: batch rows times heads      n  mini-batches
    m  tokens in a mini-batch                 e  width of a head
    f  e + 1: a constant 1 at the end of every key and query makes the bias one more row of W

Nothing here knows about projections, positions or padding. What does not depend on the fast
weights is computed before, for all mini-batches at once; the loop holds only the rest.
"""

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Batches(NamedTuple):
    """The tokens of N sequences, cut into mini-batches."""

    keys: Tensor  # [N, n, m, f]
    queries: Tensor  # [N, n, m, f]
    target: Tensor  # [N, n, m, e]  what normed * scale is drawn to: v - k - shift
    scale: Tensor  # [N, 1, e]  of the norm inside the head


class Rule(NamedTuple):
    """How the tokens of a mini-batch change what they read, and the state after them."""

    mix: Tensor  # [N, n, m, m]  eta[i, j] (q_i . k_j + 1) where token i sees token j, else 0
    end: Tensor  # [N, n, m, 1]  eta of each token in the step that ends the mini-batch


class Step(NamedTuple):
    """The inner gradient of some tokens at one state, and all that led to it."""

    weight: Tensor  # [N, f, e]  the state
    z: Tensor  # [N, m, e]  k W + b
    normed: Tensor  # [N, m, e]  z after the norm, before scale and shift
    mean: Tensor  # [N, m, 1]
    rstd: Tensor  # [N, m, 1]  1 / sqrt(variance + eps)
    error: Tensor  # [N, m, e]  LN(z) - (v - k)
    grad: Tensor  # [N, m, e]  gradient of 1/2 |error|^2 with respect to z


def read(tokens: Tensor, weight: Tensor) -> Tensor:
    """Multiply all tokens [N, n, m, f] with one state [N, f, e]: [N, n, m, e]."""
    # [N, n m, f] x [N, f, e] -> [N, n m, e]
    return torch.bmm(tokens.flatten(1, 2), weight).view(*tokens.shape[:3], -1)


def plain_norm(z: Tensor, eps: float) -> Tensor:
    """Normalise the last axis, without scale and shift."""
    return torch.nn.functional.layer_norm(z, z.shape[-1:], eps=eps)


def loss_of(z: Tensor, batches: Batches, eps: float) -> Tensor:
    """Give the loss [N, n, m] of keys that read z [N, n, m, e]: mean square error over e."""
    scale = batches.scale.unsqueeze(1)
    return (plain_norm(z, eps) * scale - batches.target).square().mean(dim=-1)


def norm_backward(grad: Tensor, z: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Pull a gradient back through `plain_norm`.

    That is rstd * (grad - mean(grad) - normed * mean(grad * normed)), in one fused call.
    """
    backward = torch.ops.aten.native_layer_norm_backward
    out: Tensor = backward(grad, z, z.shape[-1:], mean, rstd, None, None, [True, False, False])[0]
    return out


def inner_gradient(keys: Tensor, target: Tensor, scale: Tensor, weight: Tensor, eps: float) -> Step:
    """Take the inner gradient of tokens [N, m, ...] at one state."""
    # [N, m, f] x [N, f, e] -> [N, m, e]
    z = torch.bmm(keys, weight)
    normed, mean, rstd = torch.native_layer_norm(z, z.shape[-1:], None, None, eps)
    error = torch.addcmul(-target, normed, scale)
    grad = norm_backward(error * scale, z, mean, rstd)
    return Step(weight, z, normed, mean, rstd, error, grad)


def whole_gradient(batches: Batches, weight: Tensor, eps: float) -> Step:
    """Take the inner gradient of all tokens [N, n m, ...] at one state."""
    keys, target = batches.keys.flatten(1, 2), batches.target.flatten(1, 2)
    return inner_gradient(keys, target, batches.scale, weight, eps)


def summed_gradient(keys: Tensor, step: Step, valid: Tensor) -> Tensor:
    """Sum the gradient with respect to the state over the valid [B, n, m] tokens: [N, f, e]."""
    heads = len(keys) // len(valid)
    real = valid.flatten(1).repeat_interleave(heads, dim=0).unsqueeze(-1)
    # [N, f, n m] x [N, n m, e] -> [N, f, e]
    return torch.bmm(keys.flatten(1, 2).mT, step.grad * real)


def empty_by_step(like: Tensor) -> Tensor:
    """Make room for [N, n, ...] as [n, N, ...]: bmm is only fast into contiguous memory."""
    return like.new_empty(like.shape[1], like.shape[0], *like.shape[2:])


def take_steps(
    batches: Batches, rule: Rule, weight: Tensor, eps: float
) -> tuple[Tensor, list[Step], Tensor]:
    """Run all mini-batches: the outputs [N, n, m, e], the steps, and the state at the end."""
    keys, queries, target, scale = batches
    outputs, steps = empty_by_step(target), []
    for i in range(keys.shape[1]):
        step = inner_gradient(keys[:, i], target[:, i], scale, weight, eps)
        # [N, m, f] x [N, f, e] - [N, m, m] x [N, m, e] -> [N, m, e]
        torch.bmm(queries[:, i], weight, out=outputs[i])
        outputs[i].baddbmm_(rule.mix[:, i], step.grad, alpha=-1)
        # [N, f, e] - [N, f, m] x [N, m, e] -> [N, f, e]
        weight = torch.baddbmm(weight, keys[:, i].mT, rule.end[:, i] * step.grad, alpha=-1)
        steps.append(step)
    return outputs.transpose(0, 1), steps, weight


def loss_before(steps: list[Step]) -> Tensor:
    """Give the loss [N, n, m] of every token at the state its mini-batch started with."""
    return torch.stack([step.error.square().mean(dim=-1) for step in steps], dim=1)


def loss_after(batches: Batches, steps: list[Step], last: Tensor, eps: float) -> Tensor:
    """Give the loss [N, n, m] of every token at the state after the step of its mini-batch."""
    states = [step.weight for step in steps[1:]] + [last]
    # [N, m, f] x [N, f, e] -> [N, m, e]
    z = [torch.bmm(batches.keys[:, i], state) for i, state in enumerate(states)]
    return loss_of(torch.stack(z, dim=1), batches, eps)


def scan(batches: Batches, rule: Rule, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Read every mini-batch and learn from it, differentiably.

    Returns the outputs before their norm [N, n, m, e], the loss of every token at the state its
    mini-batch started with [N, n, m], and the state at the end [N, f, e].
    """
    outputs, losses, last = _Scan.apply(*batches, *rule, weight, eps)
    return outputs, losses, last


class _Scan(torch.autograd.Function):
    """`take_steps` with its way back written out: autograd's own would be several times slower."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        keys, queries, target, scale, mix, end, weight, eps = inputs
        batches, rule = Batches(keys, queries, target, scale), Rule(mix, end)
        outputs, steps, last = take_steps(batches, rule, weight, eps)
        flat = [tensor for step in steps for tensor in step]
        ctx.save_for_backward(*batches, *rule, *flat)
        return outputs, loss_before(steps), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        keys, queries, target, scale, mix, end, *flat = ctx.saved_tensors
        batches, rule = Batches(keys, queries, target, scale), Rule(mix, end)
        size = len(Step._fields)
        steps = [Step(*flat[at : at + size]) for at in range(0, len(flat), size)]
        # The caller may run backward inside an autocast region of its own.
        with torch.autocast(keys.device.type, enabled=False):
            return *scan_backward(batches, rule, steps, grads), None


def scan_backward(
    batches: Batches, rule: Rule, steps: list[Step], grads: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Walk the mini-batches from last to first; `d_` marks a gradient of the training loss.

    From the gradients of what `scan` returns to those of the fields of `batches` and `rule`, in
    order, and of the first state.
    """
    keys, queries, target, scale = batches
    d_outputs, d_losses, d_weight = grads
    d_keys, d_queries, d_target, d_mix, d_end = (
        empty_by_step(tensor) for tensor in (keys, queries, target, *rule)
    )
    d_scale = torch.zeros_like(scale)
    for i in reversed(range(len(steps))):
        step, d_out, eta = steps[i], d_outputs[:, i], rule.end[:, i]
        # [N, m, f] x [N, f, e] -> [N, m, e]: what the end step asks of each token's gradient
        pull = torch.bmm(keys[:, i], d_weight)
        d_end[i] = -(step.grad * pull).sum(dim=-1, keepdim=True)
        # -[N, m, e] - [N, m, m] x [N, m, e] -> [N, m, e]
        d_grad = torch.baddbmm(eta * pull, rule.mix[:, i].mT, d_out, beta=-1, alpha=-1)
        # [N, m, e] x [N, e, m] -> [N, m, m]
        d_mix[i] = -torch.bmm(d_out, step.grad.mT)
        d_z, d_error, d_step_scale = gradient_backward(step, scale, d_grad, d_losses[:, i])
        d_scale += d_step_scale
        d_target[i] = -d_error
        # [N, m, e] x [N, e, f] -> [N, m, f]; keys act through z and through the end step
        torch.bmm(d_out, step.weight.mT, out=d_queries[i])
        torch.bmm(d_z, step.weight.mT, out=d_keys[i])
        d_keys[i].baddbmm_(eta * step.grad, d_weight.mT, alpha=-1)
        # [N, f, e] + [N, f, m] x [N, m, e] -> [N, f, e], for keys and for queries
        d_weight = torch.baddbmm(d_weight, keys[:, i].mT, d_z)
        d_weight.baddbmm_(queries[:, i].mT, d_out)
    d_keys, d_queries, d_target, d_mix, d_end = (
        tensor.transpose(0, 1) for tensor in (d_keys, d_queries, d_target, d_mix, d_end)
    )
    return d_keys, d_queries, d_target, d_scale, d_mix, d_end, d_weight


def gradient_backward(
    step: Step, scale: Tensor, d_grad: Tensor, d_loss: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Go back through `inner_gradient`: from d_grad and d_loss to d_z, d_error, d_scale.

    With s = error * scale and along = mean(s * normed), the gradient there was
    rstd * (s - mean(s) - normed * along). It is linear in s by a symmetric map, so d_s is the
    same map of d_grad; normed and rstd bring in z once more.
    """
    _, z, normed, mean, rstd, error, grad = step
    d_s = norm_backward(d_grad, z, mean, rstd)
    d_error = torch.addcmul(d_s * scale, error, d_loss.unsqueeze(-1), value=2 / z.shape[-1])
    d_scale = torch.addcmul(d_s * error, d_error, normed).sum(dim=1, keepdim=True)
    s = error * scale
    along = (s * normed).mean(dim=-1, keepdim=True)
    d_along = (d_grad * normed).mean(dim=-1, keepdim=True)
    d_normed = d_error * scale
    d_normed.addcmul_(d_grad, rstd * along, value=-1).addcmul_(s, rstd * d_along, value=-1)
    d_z = norm_backward(d_normed, z, mean, rstd)
    d_z.addcmul_(normed, rstd * (d_grad * grad).mean(dim=-1, keepdim=True), value=-1)
    return d_z, d_error, d_scale


def causal_conv(line: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run two depthwise convs [2, w, d] over one line of tokens [B, w - 1 + T, d]: [2, B, T, d].

    A token sees itself (the last tap) and the w - 1 tokens before it.
    """
    out: Tensor = _CausalConv.apply(line, weight, bias)
    return out


class _CausalConv(torch.autograd.Function):
    """Sums of shifted products: the library's depthwise conv is slow on the way back."""

    @staticmethod
    def forward(ctx: Any, line: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(line, weight)
        length = line.shape[1] - weight.shape[1] + 1
        out = bias[:, None, None].repeat(1, len(line), length, 1)
        for tap, which in product(range(weight.shape[1]), (0, 1)):
            out[which].addcmul_(line[:, tap : tap + length], weight[which, tap])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        line, weight = ctx.saved_tensors
        d_line, d_weight = torch.zeros_like(line), torch.empty_like(weight)
        length = d_out.shape[2]
        products = torch.empty_like(d_out[0])
        for tap, which in product(range(weight.shape[1]), (0, 1)):
            d_line[:, tap : tap + length].addcmul_(d_out[which], weight[which, tap])
            torch.mul(d_out[which], line[:, tap : tap + length], out=products)
            torch.sum(products, dim=(0, 1), out=d_weight[which, tap])
        return d_line, d_weight, d_out.sum(dim=(1, 2))
