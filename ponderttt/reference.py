"""The TTT layer, one row and one token at a time: slow, obvious, there to test the fast form.

Every token has fast weights of its own, written down in full; the inner gradient comes from
autograd; a masked row is simply cut where its padding starts. Letters as in `ttt.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ponderttt.ttt import Diagonal, Losses, State, TTTLayer


def reference(
    layer: TTTLayer,
    h: Tensor,
    state: State | None = None,
    *,
    mask: Tensor | None = None,
    update: bool = True,
    diagonal: Diagonal | None = None,
) -> tuple[Tensor, State, Losses]:
    """Do what `layer(h, ...)` does; outputs and losses of masked tokens are h and 0."""
    state = layer.start(len(h)) if state is None else state
    outs, states, losses = [], [], []
    for row in range(len(h)):
        length = h.shape[1] if mask is None else int(mask[row].sum())
        alone = State(*(part[row] for part in state))
        reader = RowReader(layer, alone, update=update, diagonal=diagonal)
        out, loss = reader.run(h[row, :length])
        outs.append(torch.cat([out, h[row, length:]]))
        losses.append(functional.pad(loss, (0, 0, 0, h.shape[1] - length)))
        states.append(State(reader.weight, reader.bias, reader.tail))
    last = State(*(torch.stack(parts) for parts in zip(*states, strict=True)))
    return torch.stack(outs), last, Losses(torch.stack(losses))


class RowReader:
    """Reads one row of tokens and changes its fast weights."""

    def __init__(
        self, layer: TTTLayer, state: State, *, update: bool, diagonal: Diagonal | None
    ) -> None:
        self.layer, self.config = layer, layer.config
        self.weight, self.bias, self.tail = state
        self.update = update
        self.diagonal = self.config.diagonal if diagonal is None else diagonal

    def run(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Read h [T, d]: the outputs [T, d] and the losses [T, H]."""
        outs, losses = [], []
        for first in range(0, len(h), self.config.mini_batch):
            out, loss = self.mini_batch(h[first : first + self.config.mini_batch])
            outs += out
            losses += loss
        return torch.stack(outs), torch.stack(losses)

    def mini_batch(self, h: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Read at most m tokens, all of whose gradients are taken at the state before them."""
        weight, bias = self.weight, self.bias
        outs, losses, gradients = [], [], []
        for i in range(len(h)):
            x = self.layer.norm(h[i])
            query, key, value = self.token(x, i)
            error = self.head_norm(times(key, weight, bias)) - (value - key)
            inner_loss = error.square().sum() / 2
            gradients.append((self.learned_rate(x), *self.gradient(inner_loss, weight, bias)))
            losses.append(error.square().mean(dim=-1))
            visible = gradients if self.diagonal == 0 else gradients[:-1]
            read = times(query, *self.moved(weight, bias, visible, i))
            outs.append(h[i] + self.emit(x, query + self.head_norm(read)))
        self.weight, self.bias = self.moved(weight, bias, gradients, len(h) - 1)
        return outs, losses

    def gradient(self, loss: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        """Let autograd find the inner gradient, in a form that can be differentiated again."""
        return torch.autograd.grad(loss, (weight, bias), create_graph=True)

    def moved(
        self, weight: Tensor, bias: Tensor, gradients: list[tuple[Tensor, ...]], i: int
    ) -> tuple[Tensor, Tensor]:
        """Take the steps of the tokens in `gradients`, as token i of the mini-batch sees them."""
        if not self.update:
            return weight, bias
        for j, (learned, d_weight, d_bias) in enumerate(gradients):
            place = j if self.config.rate == "paper" else i
            token = (1 / (place + 1) + self.layer.token_rate[place]).clamp(min=0)
            eta = self.config.base_lr * token * learned / self.config.head_width
            weight = weight - eta * d_weight
            bias = bias - eta * d_bias
        return weight, bias

    def learned_rate(self, x: Tensor) -> Tensor:
        """Rate of one token: [H, 1, 1]."""
        # [H, d] x [d] -> [H]
        return torch.sigmoid(self.layer.rate_weight @ x + self.layer.rate_bias)[:, None, None]

    def token(self, x: Tensor, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [H, e] of x [d]; remembers the token for the convs to come."""
        layer, heads = self.layer, self.config.heads
        seen = torch.cat([self.tail, layer.q_proj(x)[None]])
        self.tail = seen[1:]
        query, key = (
            (layer.conv_bias[which] + (layer.conv_weight[which] * seen).sum(dim=0)).view(heads, -1)
            for which in (0, 1)
        )
        return self.turn(query, place), self.turn(key, place), layer.v_proj(x).view(heads, -1)

    def turn(self, x: Tensor, place: int) -> Tensor:
        """Rotate the pairs (0, 1), (2, 3), ... of x [H, e] by the place in the mini-batch."""
        width = x.shape[-1]
        out = []
        for first in range(0, width, 2):
            angle = torch.tensor(place * self.config.rope_theta ** (-first / width), dtype=x.dtype)
            a, b = x[:, first], x[:, first + 1]
            out += [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
        return torch.stack(out, dim=-1)

    def head_norm(self, z: Tensor) -> Tensor:
        """Normalise each head of z [H, e] and give it its own scale and shift."""
        centred = z - z.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        normed = centred / (variance + self.config.eps).sqrt()
        return normed * self.layer.head_scale + self.layer.head_shift

    def emit(self, x: Tensor, y: Tensor) -> Tensor:
        """Turn the heads' outputs y [H, e] into what is added to the token."""
        gate = functional.gelu(self.layer.gate_proj(x), approximate="tanh")
        out: Tensor = self.layer.out_proj(self.layer.post_norm(y.flatten()) * gate)
        return out


def times(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply the fast weights: x [H, e] with weight [H, e, e] and bias [H, 1, e]."""
    # [H, 1, e] x [H, e, e] + [H, 1, e] -> [H, 1, e]
    return (x.unsqueeze(1) @ weight + bias).squeeze(1)
