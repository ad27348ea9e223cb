"""The promises about scores, tested on the path that the pipeline takes."""

import dataclasses
import json

import numpy as np
import polars as pl
import pytest
import tiny
import torch

from ponderttt import backbone, layers, losses, params, scores, tables
from ponderttt.errors import UserError
from ponderttt.ttt import build_layer

SETTINGS = params.parse(tiny.plain_params())


@pytest.fixture(scope="module", params=list(tiny.configs()))
def scorer(request, tmp_path_factory):
    """A scorer on each family, with a layer whose every part does something."""
    from ponderttt import models

    folder = tmp_path_factory.mktemp(request.param)
    source = tiny.save_model(folder / "source", request.param)
    models.prepare(params.Scale(source="hub", name=str(source)), folder / "kept", folder)
    return make_scorer(backbone.load(folder / "kept"))


def make_scorer(model, state="chunk", batch=4, rate="paper"):
    settings = dataclasses.replace(SETTINGS.ttt, rate=rate)
    layer = build_layer(layers.config_for(settings, model.card), seed=1)
    torch.manual_seed(2)
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return scores.Scorer(
        backbone=model,
        layer=layer.eval(),
        tokenizer=tiny.tokenizer(),
        params=dataclasses.replace(SETTINGS.scores, batch=batch),
        state=state,
        max_logits_mb=1,
    )


def arms(scorer, tokens, diagonal=None):
    """Per-token losses of all three arms, from token ids: the whole path in one go."""
    counts = torch.full((len(tokens),), tokens.shape[1])
    hidden = scorer.backbone.hidden(tokens)
    _, nll, _ = scorer._batch(hidden, tokens, counts, None, diagonal)
    base = losses.predict(scorer.backbone, hidden, tokens, counts, max_logits_mb=1).nll
    assert torch.allclose(base, nll["base"], atol=1e-5)
    return nll


@pytest.mark.parametrize("diagonal", [0, -1])
def test_no_loss_depends_on_a_later_token(scorer, diagonal):
    length = 70
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, tiny.VOCABULARY, (1, length), generator=generator)
    before = arms(scorer, tokens, diagonal)
    for t in (0, 1, 14, 15, 16, 17, 31, 32, 50, 68):
        changed = tokens.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] * 7 + 5) % tiny.VOCABULARY
        after = arms(scorer, changed, diagonal)
        for arm in scores.ARMS:
            # Entry i is the loss of token i + 1: entries before t concern tokens up to t.
            kept = (before[arm][:, :t] - after[arm][:, :t]).abs()
            assert kept.max() <= 1e-6 if t else True, (arm, t)
            assert not torch.equal(before[arm][:, t:], after[arm][:, t:])


def test_the_arms_differ(scorer):
    generator = torch.Generator().manual_seed(4)
    nll = arms(scorer, torch.randint(1, tiny.VOCABULARY, (2, 64), generator=generator))
    assert not torch.allclose(nll["base"], nll["skip"], atol=1e-3)
    assert not torch.allclose(nll["skip"], nll["update"], atol=1e-3)


def shard_of(project, work, language="python", variant="plain", part=0):
    place = f"scale=tiny/set={language}/part-{part:05d}"
    return scores.Shard(
        language=language,
        variant=variant,
        chunks=project / f"data/chunks/{place}.parquet",
        hidden=project / f"data/hidden/{place}.safetensors",
        work=work,
    )


def scored_rows(project, work, **changes):
    model = backbone.load(project / "data/backbone/scale=tiny")
    shard = shard_of(project, work)
    make_scorer(model, **changes).run(shard)
    return tables.read(shard.out("scores"), tables.SCORES)


@pytest.mark.parametrize("state", ["chunk", "document"])
def test_scores_do_not_depend_on_the_batch_size(scored, tmp_path, state):
    one = scored_rows(scored, tmp_path / "1", batch=1, state=state)
    for batch in (3, 4, 16):
        other = scored_rows(scored, tmp_path / str(batch), batch=batch, state=state)
        for name in tables.SCORES.names:
            if name.startswith(("nll", "recon", "delta", "entropy", "gain", "out", "grad")):
                left, right = one[name].to_numpy(), other[name].to_numpy()
                np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5, err_msg=name)
            else:
                assert one[name].equals(other[name])


def test_document_state_is_the_layer_run_over_the_whole_document(scored, tmp_path):
    rows = scored_rows(scored, tmp_path, state="document").to_pandas()
    model = backbone.load(scored / "data/backbone/scale=tiny")
    scorer = make_scorer(model)
    document = rows[rows.position == 1].doc_id.iloc[0]
    places = rows.index[rows.doc_id == document].tolist()
    from ponderttt import hidden as hiddens
    from ponderttt import shards

    shard = shard_of(scored, tmp_path)
    states = shards.read(shard.hidden)
    tokens, counts = hiddens.to_tensors(tables.read(shard.chunks, tables.CHUNKS))
    whole = states[places].flatten(0, 1)[None]
    mask = losses.mask_of(counts[places], tokens.shape[1]).flatten()[None]
    out, _, _ = scorer.layer(whole, mask=mask)
    pieces = out.view(len(places), tokens.shape[1], -1)
    nll = losses.predict(model, pieces, tokens[places], counts[places], max_logits_mb=1).nll
    np.testing.assert_allclose(nll.sum(1).numpy(), rows.nll_update[places], rtol=1e-5)


def test_strict_is_the_other_diagonal(scored, tmp_path):
    model = backbone.load(scored / "data/backbone/scale=tiny")
    found = {}
    for variant in ("plain", "strict"):
        shard = shard_of(scored, tmp_path, variant=variant)
        make_scorer(model).run(shard)
        found[variant] = tables.read(shard.out("scores"), tables.SCORES)
    assert found["plain"]["nll_skip"].equals(found["strict"]["nll_skip"])
    assert not found["plain"]["nll_update"].equals(found["strict"]["nll_update"])


def test_one_scan_reads_all_scores_with_their_keys(scored):
    rows = pl.scan_parquet(scored / "data/scores").collect()
    assert {"scale", "seed", "language", "variant"} <= set(rows.columns)
    sets = rows.select("language", "variant").unique().sort("language", "variant").rows()
    assert sets == [
        ("javascript", "plain"),
        ("python", "plain"),
        ("python", "shuffled"),
        ("python", "strict"),
    ]
    assert not rows.select("scale", "seed", "language", "variant", "chunk_id").is_duplicated().any()
    chunks = pl.scan_parquet(scored / "data/chunks").collect()
    python = rows.filter(language="python", variant="plain")
    assert len(python) == len(chunks.filter(set="python"))
    numbers = rows.select(pl.selectors.float())
    assert numbers.select(pl.all().is_finite().all()).row(0) == (True,) * numbers.width


def test_token_losses_add_up_to_the_scores(scored):
    tokens = pl.scan_parquet(scored / "data/tokens").collect()
    rows = pl.scan_parquet(scored / "data/scores").collect()
    keys = ["scale", "seed", "language", "variant", "chunk_id"]
    joined = tokens.join(rows, on=keys, suffix="_sum")
    assert len(joined) == len(tokens) == 12
    for arm in scores.ARMS:
        total = joined[f"nll_{arm}"].list.sum().to_numpy()
        np.testing.assert_allclose(total, joined[f"nll_{arm}_sum"].to_numpy(), rtol=1e-4)
    text = "".join(tokens.filter(language="javascript")["pieces"][0])
    assert "export function" in text


def test_a_not_finite_score_stops_and_names_its_chunk(scored, tmp_path):
    model = backbone.load(scored / "data/backbone/scale=tiny")
    scorer = make_scorer(model)
    scorer.layer.out_proj.weight.data[0, 0] = float("inf")
    shard = shard_of(scored, tmp_path)
    with pytest.raises(UserError, match=r"of chunk \w+-\d{4} is not finite"):
        scorer.run(shard)
    assert not shard.done


def test_a_layer_of_another_backbone_is_refused(copied):
    folder = copied / "data/ttt/scale=tiny/seed=0"
    config = json.loads((folder / layers.CONFIG).read_text())
    with pytest.raises(UserError, match="trained on another backbone"):
        layers.load(folder, "other")
    weights = folder / layers.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match=r"layer\.safetensors: damaged"):
        layers.load(folder, config["backbone"])
