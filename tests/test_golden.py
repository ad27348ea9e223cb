"""The layer against tensors computed by two public implementations of TTT-Linear.

`golden/official_*` is the official layer as a whole, in `rate: official`. `golden/paper_*` is the
code of *When to Ponder*, whose convs and scale differ from ours on purpose: its inner loop starts
from its own queries, keys, values and rates (`mid.*`), which are ours in `rate: paper`. Both have
the parameters, inputs and output weights of `golden/inputs.npz`; the loss is sum(out * R).
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ponderttt import scan
from ponderttt.scan import Batches
from ponderttt.ttt import LayerConfig, Tokens, TTTLayer, build_layer, join_bias

FOLDER = Path(__file__).parent / "golden"

# float64 leaves only the rounding of the golden tensors, and so finds even a wrong eps.
TOLERANCES = {torch.float32: (1e-5, 3e-5), torch.float64: (3e-6, 3e-6)}
both_precisions = pytest.mark.parametrize("dtype", TOLERANCES)

NAMES = {
    "q_proj.weight": "q_proj.weight",
    "v_proj.weight": "v_proj.weight",
    "g_proj.weight": "gate_proj.weight",
    "o_proj.weight": "out_proj.weight",
    "learnable_ttt_lr_weight": "rate_weight",
    "learnable_ttt_lr_bias": "rate_bias",
    "learnable_token_idx": "token_rate",
    "ttt_norm_weight": "head_scale",
    "ttt_norm_bias": "head_shift",
    "post_norm.weight": "post_norm.weight",
    "post_norm.bias": "post_norm.bias",
    "W1": "weight",
    "b1": "bias",
}


def load(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]).to(dtype) for key in arrays.files}


def distance(ours: Tensor, golden: Tensor) -> float:
    """Largest difference over largest value."""
    ours = ours.detach().reshape(golden.shape)
    return float((ours - golden).abs().max() / golden.abs().max())


def as_ours(golden: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Rename parameters or gradients; the two convs become one tensor, taps first."""
    found = {ours: golden[prefix + theirs] for theirs, ours in NAMES.items()}
    convs = [golden[f"{prefix}conv_{which}.weight"].squeeze(1).T for which in "qk"]
    found["conv_weight"] = torch.stack(convs)
    found["conv_bias"] = torch.stack([golden[f"{prefix}conv_{which}.bias"] for which in "qk"])
    return found


def golden_layer(config: LayerConfig, dtype: torch.dtype) -> TTTLayer:
    layer = build_layer(config, seed=0).to(dtype)
    with torch.no_grad():
        for name, value in as_ours(load("inputs", dtype), "param.").items():
            parameter = layer.get_parameter(name)
            parameter.copy_(value.reshape(parameter.shape))
    # The references have no norm in front.
    layer.norm = nn.Identity()
    return layer


def inputs(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    golden = load("inputs", dtype)
    return golden["in.x"][:, :length], golden["in.R"][:, :length]


def at_ends(loss: Tensor, size: int = 16) -> Tensor:
    """Take the last token of each mini-batch from [B, T, H]: [B, H, n]."""
    places = [min(first + size, loss.shape[1]) - 1 for first in range(0, loss.shape[1], size)]
    return loss[:, places].transpose(1, 2)


def official(**changes: float) -> LayerConfig:
    return LayerConfig(width=64, heads=4, rate="official", **changes)  # type: ignore[arg-type]


@both_precisions
@pytest.mark.parametrize(
    ("case", "base_lr"),
    [("s64", 1.0), ("s128", 1.0), ("s70", 1.0), ("s75", 1.0), ("baselr0.3_s64", 0.3)],
)
def test_official_layer(case: str, base_lr: float, dtype: torch.dtype) -> None:
    golden = load(f"official_{case}", dtype)
    layer = golden_layer(official(base_lr=base_lr), dtype)
    x, weights = inputs(golden["out"].shape[1], dtype)
    x.requires_grad_()
    forward, backward = TOLERANCES[dtype]

    out, state, losses = layer.core(x)
    assert distance(out, golden["out"]) < forward
    assert distance(state.weight, golden["final.W1"]) < forward
    assert distance(state.bias, golden["final.b1"]) < forward
    assert distance(at_ends(losses.before), golden["stat_bh.loss_step0"]) < forward

    (out * weights).sum().backward()
    assert x.grad is not None
    assert distance(x.grad, golden["grad.x"]) < backward
    for name, gradient in as_ours(golden, "grad.").items():
        found = layer.get_parameter(name).grad
        assert found is not None, name
        assert distance(found, gradient) < backward, name


@both_precisions
@pytest.mark.parametrize("case", ["s64", "s70", "s75"])
def test_official_losses_in_scoring(case: str, dtype: torch.dtype) -> None:
    golden = load(f"official_{case}", dtype)
    scored = golden_layer(official(), dtype).score(inputs(golden["out"].shape[1], dtype)[0])
    forward, _ = TOLERANCES[dtype]

    names = {"start": "init", "before": "step0", "after": "step1"}
    for ours, theirs in names.items():
        loss = at_ends(getattr(scored.losses, ours))
        assert distance(loss, golden[f"stat_bh.loss_{theirs}"]) < forward, ours
    expected = golden["stat_bh.loss_step0"].double().mean(dim=(1, 2))
    assert distance(scored.signals.recon_last, expected) < forward


def test_a_wrong_eps_would_be_found() -> None:
    golden = load("official_s64", torch.float64)
    layer = golden_layer(official(eps=1e-5), torch.float64)
    out, _, _ = layer.core(inputs(64, torch.float64)[0])
    assert distance(out, golden["out"]) > 2 * TOLERANCES[torch.float64][0]


def paper_layer(dtype: torch.dtype) -> TTTLayer:
    """Make a layer whose learned rate is the whole rate: token factor 1 and base rate e."""
    layer = golden_layer(LayerConfig(width=64, heads=4, base_lr=16.0, eps=1e-5), dtype)
    with torch.no_grad():
        layer.token_rate.copy_(1 - 1 / torch.arange(1, 17))
    return layer


def paper_tokens(layer: TTTLayer, factor: Tensor) -> Tokens:
    """Put the paper code's own queries, keys, values and rates where ours would be."""
    mid = load("paper_base_s64", factor.dtype)
    queries, keys, values = (mid[f"mid.{name}"].flatten(0, 1) for name in ("XQ", "XK", "XV"))
    rows = len(mid["mid.eta"])
    shift, scale = (
        parameter.repeat(rows, 1).unsqueeze(1) for parameter in (layer.head_shift, layer.head_scale)
    )
    ones = torch.ones_like(queries[..., :1])
    batches = Batches(
        torch.cat([keys, ones], dim=-1),
        torch.cat([queries, ones], dim=-1),
        values - keys - shift.unsqueeze(1),
        scale,
    )
    valid = torch.ones(rows, 4, 16, dtype=torch.bool)
    return Tokens(batches, mid["mid.eta"].squeeze(-1) * factor, valid, layer.start(rows).tail)


PAPER_CASES = {
    "base_s64": torch.ones(16),
    "causal-1_s64": torch.ones(16),
    "decay0.3_s64": torch.exp(0.3 * (torch.arange(16, dtype=torch.float64) - 15)),
    "baselr0.1_s64": torch.tensor(0.1, dtype=torch.float64),
    "gate0_s64": torch.zeros(16),
}


@both_precisions
@pytest.mark.parametrize("case", PAPER_CASES)
def test_paper_inner_loop(case: str, dtype: torch.dtype) -> None:
    golden = load(f"paper_{case}", dtype)
    layer = paper_layer(dtype)
    tokens = paper_tokens(layer, PAPER_CASES[case].to(dtype))
    x, weights = inputs(64, dtype)
    forward, backward = TOLERANCES[dtype]

    first, rule = join_bias(layer.start(2)), layer.rule(tokens, -1 if "causal-1" in case else 0)
    z, loss, last = scan.scan(tokens.batches, rule, first, eps=1e-5)
    last = last.view(2, 4, 17, 16)
    assert distance(last[:, :, :16], golden["final.W1"]) < forward
    assert distance(last[:, :, 16:], golden["final.b1"]) < forward
    assert distance(loss[..., -1], golden["stat_bh.loss_step0"].flatten(0, 1)) < forward
    out = layer.emit(z, tokens, layer.gate(x))
    assert distance(out, golden["out"]) < forward

    (out * weights).sum().backward()
    names = {"W1": "weight", "b1": "bias", "ttt_norm.scale": "head_scale"}
    for theirs, ours in (names | {"ttt_norm.bias": "head_shift"}).items():
        found = layer.get_parameter(ours).grad
        assert found is not None, ours
        assert distance(found, golden[f"grad.{theirs}"]) < backward, ours


@both_precisions
def test_paper_losses_and_normed_output(dtype: torch.dtype) -> None:
    golden = load("paper_base_s64", dtype)
    layer = paper_layer(dtype)
    tokens = paper_tokens(layer, torch.ones(16, dtype=dtype))
    forward, _ = TOLERANCES[dtype]
    with torch.no_grad():
        first = join_bias(layer.start(2))
        batches = tokens.batches
        z, steps, last = scan.take_steps(batches, layer.rule(tokens, 0), first, 1e-5)
        normed = scan.plain_norm(z, 1e-5).view_as(golden["mid.Z"])
        scaled = normed * layer.head_scale[:, None, None] + layer.head_shift[:, None, None]
        after = scan.loss_after(batches, steps, last, 1e-5)
        start = scan.loss_of(scan.read(batches.keys, first), batches, 1e-5)
    assert distance(golden["mid.XQ"] + scaled, golden["mid.Z"]) < forward
    assert distance(after[..., -1], golden["stat_bh.loss_step1"].flatten(0, 1)) < forward
    assert distance(start[..., -1], golden["stat_bh.loss_init"].flatten(0, 1)) < forward
