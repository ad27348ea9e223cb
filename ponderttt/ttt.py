"""The TTT-Linear layer (Sun et al. 2024) on top of a frozen backbone.

Letters in the shape comments:

    B  batch rows      T  tokens          d  width of the model
    H  heads           e  d / H           N  B * H, the sequences of the inner loop
    m  mini-batch      n  mini-batches    f  e + 1, see `scan.py`

State goes in and comes out: a whole sequence equals its pieces with the state carried, when the
pieces are cut at multiples of the mini-batch. Rows of a batch never meet.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ponderttt import scan as inner
from ponderttt.scan import Batches, Rule

RateForm = Literal["paper", "official"]
Diagonal = Literal[0, -1]

PREFIX_TOKENS = 64  # how far `recon_prefix` looks
INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The shape of a layer and its fixed choices."""

    width: int
    heads: int
    mini_batch: int = 16
    base_lr: float = 1.0
    rate: RateForm = "paper"  # whether 1/(i+1) belongs to the token learned from, or to the reader
    diagonal: Diagonal = 0  # whether a token's output sees its own inner gradient (0) or not (-1)
    conv_width: int = 4
    rope_theta: float = 1e4
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse what no layer can be built from."""
        if self.heads < 1 or self.width < 1 or self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not {self.heads} heads of an even width")
        if self.mini_batch < 1 or self.conv_width < 1:
            raise ValueError("mini_batch and conv_width must be at least 1")
        if self.rate not in get_args(RateForm):
            raise ValueError(f"rate {self.rate!r} must be one of {get_args(RateForm)}")
        if self.diagonal not in get_args(Diagonal):
            raise ValueError(f"diagonal {self.diagonal!r} must be one of {get_args(Diagonal)}")

    @property
    def head_width(self) -> int:
        """Give the width of one head."""
        return self.width // self.heads


class State(NamedTuple):
    """What a layer carries from one piece of a sequence to the next."""

    weight: Tensor  # [B, H, e, e]
    bias: Tensor  # [B, H, 1, e]
    tail: Tensor  # [B, conv_width - 1, d]  the last projected tokens, for the convs to go on from


class Losses(NamedTuple):
    """Inner loss per token and head, mean square over the head width; 0 where masked."""

    before: Tensor  # [B, T, H]  at the state the token's mini-batch started with
    start: Tensor | None = None  # [B, T, H]  at the state that came in
    after: Tensor | None = None  # [B, T, H]  at the state after the step of its mini-batch


class Signals(NamedTuple):
    """One float64 per row, each a mean over the row's unmasked tokens and its heads.

    `grad_norm` is the root of the sum of squares, over all heads and all entries of W and b, of
    the gradient of the mean over unmasked tokens of sum_h 1/2 |error_h|^2.
    """

    recon: Tensor  # loss at the state that came in
    recon_step: Tensor  # loss at the start of each mini-batch
    recon_last: Tensor  # the same, only the last unmasked token of each mini-batch
    recon_prefix: Tensor  # like recon, only the first 64 tokens
    delta: Tensor  # recon_step minus the loss after each mini-batch's own step
    grad_norm: Tensor  # norm of the inner gradient at the state that came in, as said above
    out_norm: Tensor  # L2 norm of what the skip arm adds to h


class Scored(NamedTuple):
    """Both arms on the same tokens.

    `state` is that of the update arm. After a skip, go on from the weight and bias that came in,
    with the tail of `state`.
    """

    skip: Tensor  # [B, T, d]
    update: Tensor  # [B, T, d]
    state: State
    losses: Losses
    signals: Signals


class Tokens(NamedTuple):
    """A piece of a sequence as the inner loop sees it, padded to whole mini-batches."""

    batches: Batches
    rates: Tensor  # [B, H, n, m]  learned rate of each token; 0 where masked or padding
    valid: Tensor  # [B, n, m]  neither masked nor padding
    tail: Tensor  # [B, conv_width - 1, d]


class TTTLayer(nn.Module):
    """h goes to h + core(norm(h)); a new layer is the identity, as `out_proj` starts at zero.

    `mask` [B, T] is true for real tokens; padding comes last in a row. A padded row gives what
    the same row gives without its padding. The diagonal of the config may be overridden per call.
    """

    def __init__(self, config: LayerConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        d, heads, e = config.width, config.heads, config.head_width
        self.norm = nn.LayerNorm(d, eps=config.eps)
        self.q_proj, self.v_proj, self.gate_proj, self.out_proj = (
            # Their default start would draw from the global generator.
            nn.utils.skip_init(nn.Linear, d, d, bias=False)
            for _ in range(4)
        )
        # Both convs in one: [0] makes the queries, [1] the keys. The last tap is the token itself.
        self.conv_weight = nn.Parameter(torch.empty(2, config.conv_width, d))
        self.conv_bias = nn.Parameter(torch.zeros(2, d))
        self.rate_weight = nn.Parameter(torch.empty(heads, d))
        self.rate_bias = nn.Parameter(torch.zeros(heads))
        self.token_rate = nn.Parameter(torch.zeros(config.mini_batch))
        self.head_scale = nn.Parameter(torch.ones(heads, e))
        self.head_shift = nn.Parameter(torch.zeros(heads, e))
        self.weight = nn.Parameter(torch.empty(heads, e, e))
        self.bias = nn.Parameter(torch.zeros(heads, 1, e))
        self.post_norm = nn.LayerNorm(d, eps=config.eps)
        self._draw(generator)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        """Draw all that does not start at a constant, in a fixed order."""
        for projection in (self.q_proj, self.v_proj, self.gate_proj):
            projection.weight.normal_(std=INIT_STD, generator=generator)
        self.out_proj.weight.zero_()
        bound = self.config.conv_width**-0.5
        self.conv_weight.uniform_(-bound, bound, generator=generator)
        self.rate_weight.normal_(std=INIT_STD, generator=generator)
        self.weight.normal_(std=INIT_STD, generator=generator)

    def start(self, batch: int) -> State:
        """Give every row the learned first state."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        weight = self.weight.to(dtype).expand(batch, -1, -1, -1)
        bias = self.bias.to(dtype).expand(batch, -1, -1, -1)
        tail = weight.new_zeros(batch, self.config.conv_width - 1, self.config.width)
        return State(weight, bias, tail)

    def forward(
        self,
        h: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        update: bool = True,
        diagonal: Diagonal | None = None,
    ) -> tuple[Tensor, State, Losses]:
        """Run one arm: with `update` the fast weights learn while they read, else they stay."""
        x = self.norm(h)
        out, state, losses = self.core(x, state, mask=mask, update=update, diagonal=diagonal)
        return h + out, state, losses

    def core(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        update: bool = True,
        diagonal: Diagonal | None = None,
    ) -> tuple[Tensor, State, Losses]:
        """Run the layer without its input norm and residual; the arguments are as in `forward`."""
        state = self.start(len(x)) if state is None else state
        tokens, weight = self._tokens(x, state, mask), join_bias(state)
        with full_precision(x):
            if update:
                rule = self.rule(tokens, diagonal)
                z, loss, weight = inner.scan(tokens.batches, rule, weight, self.config.eps)
            else:
                z = inner.read(tokens.batches.queries, weight)
                read_keys = inner.read(tokens.batches.keys, weight)
                loss = inner.loss_of(read_keys, tokens.batches, self.config.eps)
        out = self.emit(z, tokens, self.gate(x))
        return out, split_bias(weight, tokens.tail), Losses(per_token(loss, tokens, x.shape[1]))

    def signals(
        self, h: Tensor, state: State | None = None, *, mask: Tensor | None = None
    ) -> Signals:
        """Give the signals a gate may decide on, one per row."""
        return self.score(h, state, mask=mask).signals

    @torch.no_grad()
    def score(
        self,
        h: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        diagonal: Diagonal | None = None,
    ) -> Scored:
        """Run both arms and find all signals, with one pass through the projections."""
        x = self.norm(h)
        state = self.start(len(x)) if state is None else state
        tokens, weight, gate = self._tokens(x, state, mask), join_bias(state), self.gate(x)
        batches, eps = tokens.batches, self.config.eps
        with full_precision(x):
            first = inner.whole_gradient(batches, weight, eps)
            z_skip = inner.read(batches.queries, weight)
            z, steps, last = inner.take_steps(batches, self.rule(tokens, diagonal), weight, eps)
            found = (
                inner.loss_before(steps),
                first.error.square().mean(dim=-1),
                inner.loss_after(batches, steps, last, eps),
            )
            total = inner.summed_gradient(batches.keys, first, tokens.valid)
        losses = Losses(*(per_token(loss, tokens, x.shape[1]) for loss in found))
        skip, update = self.emit(z_skip, tokens, gate), self.emit(z, tokens, gate)
        signals = summarise(losses, total, skip, tokens.valid)
        return Scored(h + skip, h + update, split_bias(last, tokens.tail), losses, signals)

    def _tokens(self, x: Tensor, state: State, mask: Tensor | None) -> Tokens:
        """Project, convolve, rotate and cut x [B, T, d]: all that needs no fast weights."""
        u, v = self.q_proj(x), self.v_proj(x)
        valid = find_valid(x, mask, self.config.mini_batch)
        with full_precision(x):
            dtype = state.weight.dtype
            # [B, conv_width - 1, d] and [B, T, d] -> [B, conv_width - 1 + T, d]
            line = torch.cat([state.tail, u.to(dtype)], dim=1)
            both = inner.causal_conv(line, self.conv_weight.to(dtype), self.conv_bias.to(dtype))
            turned = rotate(self._cut(both), self.config.rope_theta)
            # [2, B, n, m, H, f] -> [2, N, n, m, f]
            queries, keys = by_head(functional.pad(turned, (0, 1), value=1.0))
            # [B, n, m, H, e] -> [N, n, m, e]
            target = by_head(self._cut(v.to(dtype)) - self.head_shift.to(dtype)) - keys[..., :-1]
            scale = self.head_scale.to(dtype).repeat(len(x), 1).unsqueeze(1)
            # [B, T, d] x [d, H] -> [B, T, H]
            logits = x.to(dtype) @ self.rate_weight.to(dtype).mT + self.rate_bias.to(dtype)
            # [B, n, m, H] -> [B, H, n, m]
            rates = pad_tokens(logits.sigmoid(), self.config.mini_batch).movedim(-1, 1)
            rates = rates * valid.unsqueeze(1)
            tail = last_real(line, valid, self.config.conv_width - 1)
        return Tokens(Batches(keys, queries, target, scale), rates, valid, tail)

    def _cut(self, x: Tensor) -> Tensor:
        """Cut [..., T, d] into mini-batches and heads: [..., n, m, H, e]."""
        cut = pad_tokens(x, self.config.mini_batch)
        return cut.view(*cut.shape[:-1], self.config.heads, -1)

    def rule(self, tokens: Tokens, diagonal: Diagonal | None) -> Rule:
        """Turn the learned rates into what the mini-batches do to outputs and states.

        eta[i, j] is rows[i] * columns[j]; the end step uses the row of the last real token.
        """
        keys, queries = tokens.batches.keys, tokens.batches.queries
        size, dtype = self.config.mini_batch, keys.dtype
        columns = tokens.rates * (self.config.base_lr / self.config.head_width)
        place = torch.arange(1, size + 1, device=keys.device, dtype=dtype)
        rows = (1 / place + self.token_rate.to(dtype)).clamp(min=0)
        if self.config.rate == "paper":
            columns, rows = columns * rows, torch.ones_like(rows)
        last = rows[(tokens.valid.sum(dim=-1) - 1).clamp(min=0)]
        end = columns * last[:, None, :, None]
        seen = torch.ones(size, size, device=keys.device, dtype=dtype)
        seen = seen.tril(self.config.diagonal if diagonal is None else diagonal)
        # [N, n, m, f] x [N, n, f, m] -> [N, n, m, m]
        mix = (queries @ keys.mT) * (seen * rows[:, None]) * columns.flatten(0, 1).unsqueeze(-2)
        return Rule(mix, end.flatten(0, 1).unsqueeze(-1))

    def gate(self, x: Tensor) -> Tensor:
        """Find how much of each output channel passes: [B, T, d]."""
        return functional.gelu(self.gate_proj(x), approximate="tanh")

    def emit(self, z: Tensor, tokens: Tokens, gate: Tensor) -> Tensor:
        """Turn what the queries read, z [N, n, m, e], into the output [B, T, d]."""
        batches, heads = tokens.batches, self.config.heads
        with full_precision(z):
            scaled = inner.plain_norm(z, self.config.eps) * batches.scale.unsqueeze(1)
            y = (batches.queries[..., :-1] + scaled).unflatten(0, (-1, heads))
            # [B, H, n, m, e] -> [B, n m, H, e] -> [B, T, d]
            y = y.flatten(2, 3).transpose(1, 2) + self.head_shift.to(y.dtype)
            y = y.flatten(2)[:, : gate.shape[1]]
        out: Tensor = self.out_proj(self.post_norm(y.to(self.post_norm.weight.dtype)) * gate)
        return out


def build_layer(config: LayerConfig, seed: int) -> TTTLayer:
    """Make a layer whose start depends on the seed alone, not on the global generator."""
    return TTTLayer(config, torch.Generator().manual_seed(seed))


def count_parameters(layer: nn.Module) -> int:
    """Count the trained numbers of a layer."""
    return sum(parameter.numel() for parameter in layer.parameters())


def full_precision(x: Tensor) -> torch.autocast:
    """Switch autocast off: the inner loss and its norms need more than 8 bits of mantissa."""
    return torch.autocast(x.device.type, enabled=False)


def find_valid(x: Tensor, mask: Tensor | None, size: int) -> Tensor:
    """Mark the real tokens [B, n, m] of x [B, T, d] cut into mini-batches."""
    if x.shape[1] == 0:
        raise ValueError("a sequence needs at least one token")
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if mask.shape != x.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool {list(x.shape[:2])}, got {list(mask.shape)}")
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("masked tokens must come last in their row")
    return pad_tokens(mask.unsqueeze(-1), size).squeeze(-1)


def pad_tokens(x: Tensor, size: int) -> Tensor:
    """Cut [..., T, c] into mini-batches [..., n, m, c], the last one filled up with zeros."""
    if missing := -x.shape[-2] % size:
        x = functional.pad(x, (0, 0, 0, missing))
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def by_head(x: Tensor) -> Tensor:
    """Bring heads next to rows: [..., B, n, m, H, c] to [..., N, n, m, c]."""
    return x.movedim(-2, -4).flatten(-5, -4)


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn the pairs of x [..., m, H, e] by angles that grow with the place in the mini-batch."""
    size, width = x.shape[-3], x.shape[-1]
    steps = torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / -width
    angles = torch.arange(size, device=x.device, dtype=torch.float64).outer(theta**steps)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    turn = torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)
    return torch.view_as_real(pairs * turn.unsqueeze(1)).flatten(-2)


def last_real(line: Tensor, valid: Tensor, count: int) -> Tensor:
    """Take the last `count` tokens of line [B, count + T, d] before each row's padding."""
    ends = valid.sum(dim=(1, 2))
    places = ends[:, None] + torch.arange(count, device=line.device)
    return line[torch.arange(len(line), device=line.device)[:, None], places]


def join_bias(state: State) -> Tensor:
    """Append the bias to the weight as its last row: [N, f, e]."""
    return torch.cat([state.weight, state.bias], dim=2).flatten(0, 1)


def split_bias(weight: Tensor, tail: Tensor) -> State:
    """Undo `join_bias`."""
    rows = weight.unflatten(0, (len(tail), -1))
    return State(rows[:, :, :-1], rows[:, :, -1:], tail)


def per_token(loss: Tensor, tokens: Tokens, length: int) -> Tensor:
    """Bring a loss from the inner loop's order, N sequences of n m tokens, to [B, T, H]."""
    rows, n, m = tokens.valid.shape
    loss = loss.reshape(rows, -1, n * m) * tokens.valid.view(rows, 1, n * m)
    return loss[:, :, :length].transpose(1, 2)


def row_mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of values [B, T] over the chosen tokens of each row, float64 [B]; 0 if none is."""
    return (values.double() * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)


def summarise(losses: Losses, total: Tensor, added: Tensor, valid: Tensor) -> Signals:
    """Reduce losses [B, T, H], summed gradient [N, f, e] and skip output [B, T, d] per row."""
    before, start, after = (loss.double().mean(dim=-1) for loss in losses if loss is not None)
    last = valid & ~functional.pad(valid[:, :, 1:], (0, 1))
    real, last = (chosen.flatten(1)[:, : added.shape[1]] for chosen in (valid, last))
    prefix = real & (torch.arange(added.shape[1], device=real.device) < PREFIX_TOKENS)
    step = row_mean(before, real)
    length = torch.linalg.vector_norm(total.double().reshape(len(real), -1), dim=1)
    return Signals(
        recon=row_mean(start, real),
        recon_step=step,
        recon_last=row_mean(before, last),
        recon_prefix=row_mean(start, prefix),
        delta=step - row_mean(after, real),
        grad_norm=length / real.sum(dim=1).clamp(min=1),
        out_norm=row_mean(torch.linalg.vector_norm(added, dim=-1), real),
    )
