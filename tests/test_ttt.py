"""The fast layer against its token-by-token reference, and the promises it makes."""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ponderttt import scan
from ponderttt.reference import reference
from ponderttt.scan import Batches, Rule
from ponderttt.ttt import (
    LayerConfig,
    Losses,
    Signals,
    State,
    TTTLayer,
    build_layer,
    count_parameters,
)

WIDTH, HEADS = 8, 2
FORMS = list(product(("paper", "official"), (0, -1)))
every_form = pytest.mark.parametrize(("rate", "diagonal"), FORMS)

Run = Callable[..., tuple[Tensor, State, Losses]]


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def trained(rate: str = "paper", diagonal: int = 0, **changes: Any) -> TTTLayer:
    """Make a float64 layer with no parameter left at its start; one token factor is clipped."""
    settings = {"width": WIDTH, "heads": HEADS, "rate": rate, "diagonal": diagonal} | changes
    layer = build_layer(LayerConfig(**settings), seed=0).double()
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.add_(0.2 * random(*parameter.shape, seed=seed))
        layer.token_rate[layer.config.mini_batch // 3] = -2.0
    return layer


def some_state(rows: int) -> State:
    e = WIDTH // HEADS
    shapes = (rows, HEADS, e, e), (rows, HEADS, 1, e), (rows, 3, WIDTH)
    return State(*(0.3 * random(*shape, seed=seed) for seed, shape in enumerate(shapes)))


def lengths_mask(lengths: list[int], size: int) -> Tensor:
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference over largest value; 0 for two zeros."""
    gap, size = (a - b).abs().max(), b.abs().max()
    return float((gap / size if size > 0 else gap).detach())


def everything(
    run: Run, layer: TTTLayer, h: Tensor, state: State, **options: Any
) -> dict[str, Tensor]:
    """Collect outputs, losses, last state, and the gradients of a mix of them."""
    h = h.clone().requires_grad_()
    state = State(*(part.clone().requires_grad_() for part in state))
    out, last, losses = run(h, state, **options)
    mask = options.get("mask")
    out = out if mask is None else out * mask.unsqueeze(-1)
    results = {"out": out, "before": losses.before, **last._asdict()}
    loss = sum((r * random(*r.shape, seed=i)).sum() for i, r in enumerate(results.values()))
    wanted = {"h": h, **{f"state.{k}": v for k, v in state._asdict().items()}}
    wanted |= dict(layer.named_parameters())
    found = torch.autograd.grad(
        loss, list(wanted.values()), allow_unused=True, materialize_grads=True
    )
    return results | {f"d {name}": grad for name, grad in zip(wanted, found, strict=True)}


def assert_like_reference(
    layer: TTTLayer, h: Tensor, state: State, tolerance: float, **options: Any
) -> None:
    ours = everything(layer, layer, h, state, **options)
    slow = everything(lambda *a, **k: reference(layer, *a, **k), layer, h, state, **options)
    gaps = {name: distance(ours[name], slow[name]) for name in slow}
    assert max(gaps.values()) < tolerance, gaps


@every_form
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_equals_the_reference(rate: str, diagonal: int, length: int) -> None:
    layer = trained(rate, diagonal)
    assert_like_reference(layer, random(2, length, WIDTH), some_state(2), 1e-9)


@every_form
def test_equals_the_reference_under_a_mask(rate: str, diagonal: int) -> None:
    mask = lengths_mask([40, 33, 18, 2], 40)
    layer = trained(rate, diagonal)
    assert_like_reference(layer, random(4, 40, WIDTH), some_state(4), 1e-9, mask=mask)


@every_form
@pytest.mark.parametrize("length", [511, 512])
def test_equals_the_reference_on_a_whole_chunk(rate: str, diagonal: int, length: int) -> None:
    layer = trained(rate, diagonal, base_lr=0.3)
    assert_like_reference(layer, random(1, length, WIDTH), some_state(1), 1e-9)


@every_form
def test_skip_arm_equals_the_reference(rate: str, diagonal: int) -> None:
    layer, mask = trained(rate, diagonal), lengths_mask([21, 17], 21)
    h, state = random(2, 21, WIDTH), some_state(2)
    assert_like_reference(layer, h, state, 1e-9, update=False, mask=mask)
    _, last, _ = layer(h, state, update=False)
    assert torch.equal(last.weight, state.weight)
    assert torch.equal(last.bias, state.bias)


@every_form
def test_float32_is_close_to_the_reference(rate: str, diagonal: int) -> None:
    layer, h, state = trained(rate, diagonal, base_lr=0.3), random(2, 40, WIDTH), some_state(2)
    slow = everything(lambda *a, **k: reference(layer, *a, **k), layer, h, state)
    ours = everything(layer.float(), layer, h.float(), State(*(part.float() for part in state)))
    for name, value in slow.items():
        assert distance(ours[name].double(), value) < (3e-5 if name.startswith("d ") else 1e-5), (
            name
        )


def test_other_sizes_equal_the_reference() -> None:
    layer = trained(mini_batch=5, conv_width=2, base_lr=0.7)
    state = some_state(2)
    state = state._replace(tail=state.tail[:, :1])
    assert_like_reference(layer, random(2, 13, WIDTH), state, 1e-9)


def test_scan_passes_gradcheck() -> None:
    n, m, e = 2, 3, 4
    shapes = [(2, n, m, e + 1), (2, n, m, e + 1), (2, n, m, e), (2, 1, e), (2, n, m, m)]
    shapes += [(2, n, m, 1), (2, e + 1, e)]
    tensors = [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return scan.scan(Batches(*tensors[:4]), Rule(*tensors[4:6]), tensors[6], 1e-6)

    assert torch.autograd.gradcheck(run, tensors)


def test_conv_passes_gradcheck() -> None:
    tensors = [random(2, 7, 3), random(2, 4, 3), random(2, 3)]
    assert torch.autograd.gradcheck(scan.causal_conv, [t.requires_grad_() for t in tensors])


@every_form
@pytest.mark.parametrize("update", [True, False])
def test_no_token_sees_a_later_one(rate: str, diagonal: int, *, update: bool) -> None:
    layer, h = trained(rate, diagonal), random(1, 50, WIDTH)
    out, _, losses = layer(h, update=update)
    for t in (0, 7, 15, 16, 30, 48):
        changed = h.clone()
        changed[:, t + 1 :] += random(1, 49 - t, WIDTH, seed=1)
        other, _, other_losses = layer(changed, update=update)
        assert torch.equal(out[:, : t + 1], other[:, : t + 1])
        assert torch.equal(losses.before[:, : t + 1], other_losses.before[:, : t + 1])
        assert not torch.equal(out[:, t + 1], other[:, t + 1])


def test_strict_output_does_not_see_its_own_gradient() -> None:
    """The value of a token enters through its inner gradient alone, so move only that."""
    h, ninth = random(1, 16, WIDTH), (torch.arange(16) == 9)[:, None]
    for diagonal in (0, -1):
        layer = trained(diagonal=diagonal)
        before = layer(h)[0]
        layer.v_proj.register_forward_hook(lambda _module, _inputs, value: value + ninth)
        moved = (layer(h)[0] != before).any(dim=-1)[0]
        assert moved.tolist() == [
            place > 9 or (place == 9 and diagonal == 0) for place in range(16)
        ]


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 7), max_size=7),
    length=st.integers(113, 128),
    form=st.sampled_from(FORMS),
)
def test_pieces_equal_the_whole(cuts: set[int], length: int, form: tuple[str, int]) -> None:
    layer, h, state = trained(*form), random(2, length, WIDTH), some_state(2)
    mask = lengths_mask([length, length - 30], length)
    with torch.no_grad():
        out, last, losses = layer(h, state, mask=mask)
        pieces = []
        edges = [0, *(16 * cut for cut in sorted(cuts)), length]
        for first, end in pairwise(edges):
            *piece, state = _piece(layer, h[:, first:end], state, mask[:, first:end])
            pieces.append(piece)
    outs, befores = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
    real = mask.unsqueeze(-1)
    assert distance(outs * real, out * real) < 1e-10
    assert distance(befores, losses.before) < 1e-10
    assert all(distance(a, b) < 1e-10 for a, b in zip(state, last, strict=True))


def _piece(layer: TTTLayer, h: Tensor, state: State, mask: Tensor) -> tuple[Tensor, Tensor, State]:
    out, state, losses = layer(h, state, mask=mask)
    return out, losses.before, state


@every_form
@pytest.mark.parametrize("length", [1, 15, 16, 17, 30])
def test_padding_changes_nothing(rate: str, diagonal: int, length: int) -> None:
    layer, h, state = trained(rate, diagonal), random(2, 50, WIDTH), some_state(2)
    with torch.no_grad():
        out, last, losses = layer(h[:, :length], state)
        mask = lengths_mask([length, length], 50)
        padded, padded_last, padded_losses = layer(h, state, mask=mask)
        scored, padded_scored = layer.score(h[:, :length], state), layer.score(h, state, mask=mask)
    assert distance(padded[:, :length], out) < 1e-12
    assert distance(padded_losses.before[:, :length], losses.before) < 1e-12
    assert not padded_losses.before[:, length:].any()
    assert all(distance(a, b) < 1e-12 for a, b in zip(padded_last, last, strict=True))
    pairs = zip(padded_scored.signals, scored.signals, strict=True)
    assert all(distance(a, b) < 1e-12 for a, b in pairs)


def test_score_is_both_arms() -> None:
    layer, h, state = trained("official"), random(3, 40, WIDTH), some_state(3)
    mask = lengths_mask([40, 20, 5], 40)
    with torch.no_grad():
        scored = layer.score(h, state, mask=mask, diagonal=-1)
        skip, _, start = layer(h, state, mask=mask, update=False)
        update, last, before = layer(h, state, mask=mask, diagonal=-1)
    assert scored.losses.start is not None
    found = (scored.skip, scored.update, scored.losses.start, scored.losses.before, *scored.state)
    expected = (skip, update, start.before, before.before, *last)
    assert all(distance(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))


def slow_signals(layer: TTTLayer, h: Tensor, state: State) -> Signals:
    """Find the signals of one unpadded row by their definitions, with the reference layer."""
    m, tokens = layer.config.mini_batch, h.shape[1]
    weight, bias = (part.clone().requires_grad_() for part in (state.weight, state.bias))
    skip, _, start = reference(layer, h, State(weight, bias, state.tail), update=False)
    # The reported loss is a mean over e; the inner loss is half a sum.
    inner_loss = start.before.sum() * layer.config.head_width / 2 / tokens
    gradient = torch.autograd.grad(inner_loss, (weight, bias))
    befores, afters = [], []
    for first in range(0, tokens, m):
        piece = h[:, first : first + m]
        _, after, losses = reference(layer, piece, state)
        _, _, again = reference(layer, piece, after._replace(tail=state.tail), update=False)
        befores.append(losses.before.detach())
        afters.append(again.before.detach())
        state = State(*(part.detach().requires_grad_() for part in after))
    before = torch.cat(befores, dim=1).mean()
    return Signals(
        recon=start.before.mean(),
        recon_step=before,
        recon_last=torch.stack([loss[:, -1] for loss in befores]).mean(),
        recon_prefix=start.before[:, :64].mean(),
        delta=before - torch.cat(afters, dim=1).mean(),
        grad_norm=sum(part.square().sum() for part in gradient) ** 0.5,
        out_norm=(skip - h).norm(dim=-1).mean(),
    )


@pytest.mark.parametrize("rate", ["paper", "official"])
def test_signals_are_what_they_say(rate: str) -> None:
    layer, lengths = trained(rate, base_lr=0.5), [90, 72, 21]
    h, state = random(3, 90, WIDTH), some_state(3)
    found = layer.signals(h, state, mask=lengths_mask(lengths, 90))
    for row, length in enumerate(lengths):
        alone = State(*(part[row : row + 1].requires_grad_() for part in state))
        expected = slow_signals(layer, h[row : row + 1, :length], alone)
        for name, value in expected._asdict().items():
            assert distance(getattr(found, name)[row], value) < 1e-9, name


def test_rows_do_not_depend_on_their_batch() -> None:
    layer, h = trained().float(), random(6, 70, WIDTH).float()
    mask = lengths_mask([70, 64, 33, 70, 16, 1], 70)
    together = layer.score(h, mask=mask)
    for row in range(6):
        one = slice(row, row + 1)
        alone = layer.score(h[one], mask=mask[one])
        assert distance(alone.skip, together.skip[one]) < 1e-5
        assert distance(alone.update, together.update[one]) < 1e-5
        pairs = zip(alone.signals, together.signals, strict=True)
        assert all(distance(a, b[one]) < 1e-5 for a, b in pairs)
        assert all(signal.dtype == torch.float64 for signal in alone.signals)


def test_a_new_layer_is_the_identity_and_learns() -> None:
    layer, h = build_layer(LayerConfig(width=WIDTH, heads=HEADS), seed=3), random(2, 20, WIDTH)
    h = h.float()
    for update in (True, False):
        assert torch.equal(layer(h, update=update)[0], h)
    out, _, losses = layer(h)
    (out.square().sum() + losses.before.mean()).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in gradients.values())
    assert gradients["out_proj.weight"].any()
    assert gradients["weight"].any()


def test_the_start_depends_on_the_seed_alone() -> None:
    config = LayerConfig(width=WIDTH, heads=HEADS)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first, again, other = (build_layer(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["weight"], other["weight"])
    d, e = WIDTH, WIDTH // HEADS
    counted = 4 * d * d + 4 * d + 2 * 5 * d + HEADS * (d + 1) + 16 + 2 * d + HEADS * e * (e + 1)
    assert count_parameters(build_layer(config, seed=1)) == counted


@pytest.mark.parametrize("update", [True, False])
def test_inner_loss_stays_float32_under_autocast(*, update: bool) -> None:
    layer, h = trained(base_lr=0.3).float(), random(2, 40, WIDTH).float()
    exact, _, exact_losses = layer(h, update=update)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state, losses = layer(h, update=update)
        (out.float().sum() + losses.before.sum()).backward()
    assert {part.dtype for part in (*state, losses.before)} == {torch.float32}
    # Only the projections may have been rounded.
    assert 0 < distance(out, exact) < 0.1
    assert 0 < distance(losses.before.mean(), exact_losses.before.mean()) < 0.02
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "wrong",
    [{"heads": 3}, {"width": 6}, {"mini_batch": 0}, {"rate": "other"}, {"diagonal": 1}],
)
def test_config_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LayerConfig(**{"width": WIDTH, "heads": HEADS} | wrong)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 4, dtype=torch.bool), "mask must be bool"),
        (torch.ones(2, 5), "mask must be bool"),
        (torch.tensor([[True] * 5, [False, True, True, True, True]]), "must come last"),
    ],
)
def test_mask_refuses(mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained()(random(2, 5, WIDTH), mask=mask)
    with pytest.raises(ValueError, match="at least one token"):
        trained()(random(2, 0, WIDTH))
