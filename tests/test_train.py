import dataclasses
import shutil

import numpy as np
import pytest
import tiny
import torch

from ponderttt import backbone, checkpoints, layers, params, sampling, shards, tables, train
from ponderttt.errors import UserError

SETTINGS = params.parse(tiny.plain_params())


@pytest.fixture(scope="module")
def parts(scored):
    model = backbone.load(scored / "data/backbone/scale=tiny")
    data = sampling.TrainSet(
        scored / "data/hidden/scale=tiny/set=train",
        scored / "data/chunks/scale=tiny/set=train",
        model.card["weights"],
    )
    return model, data


def trainer(parts, steps=6, seed=0, rank=None, **changes):
    model, data = parts
    settings = dataclasses.replace(SETTINGS.ttt, **changes)
    return train.Trainer(
        config=layers.config_for(settings, model.card),
        backbone=model,
        data=data,
        params=settings,
        size=dataclasses.replace(SETTINGS.size, steps=steps),
        seed=seed,
        max_logits_mb=1,
        rank=rank or train.Rank(),
    )


def weights(progress):
    return {k: v.clone() for k, v in progress.layer.state_dict().items()}


def same(left, right):
    return all(torch.equal(left[k], right[k]) for k in left)


def test_training_lowers_the_loss_it_trains_on(parts, tmp_path):
    progress = trainer(parts, steps=40, lr=0.01, positions=0).run(tmp_path)
    losses = [row["ce"] for row in progress.history]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_the_backbone_does_not_move(parts, tmp_path):
    model, _ = parts
    before = backbone.weights_hash(model.model)
    trainer(parts).run(tmp_path)
    assert backbone.weights_hash(model.model) == before == model.card["weights"]
    assert all(p.grad is None for p in model.model.parameters())


def test_the_same_seed_gives_the_same_weights_and_another_others(parts, tmp_path):
    first = weights(trainer(parts).run(tmp_path / "a"))
    assert same(first, weights(trainer(parts).run(tmp_path / "b")))
    assert not same(first, weights(trainer(parts, seed=1).run(tmp_path / "c")))


class KilledError(Exception):
    pass


@pytest.mark.parametrize("state", ["chunk", "document"])
def test_a_killed_run_resumes_to_the_same_bits(parts, tmp_path, state):
    def kill_at_5(step, _):
        if step == 5:
            raise KilledError

    whole = trainer(parts, steps=8, state=state).run(tmp_path / "whole")
    with pytest.raises(KilledError):
        trainer(parts, steps=8, state=state).run(tmp_path / "cut", kill_at_5)
    steps = []
    again = trainer(parts, steps=8, state=state).run(tmp_path / "cut", lambda s, _: steps.append(s))
    assert steps == [5, 6, 7, 8]
    assert same(weights(whole), weights(again))
    assert [r["ce"] for r in whole.history] == [r["ce"] for r in again.history]


def test_two_ranks_make_the_gradient_of_one(parts):
    """Each rank's share, summed, is the whole; checked without any processes."""
    one = trainer(parts, positions=32)
    progress, chosen = one._start(), [[0], [1], [2], [3]]
    progress.layer.out_proj.weight.data.normal_(std=0.1)
    start, grads = weights(progress), []

    def gradient(rank):
        run = trainer(parts, positions=32, rank=rank)
        mine = run._start()
        mine.layer.load_state_dict(start)
        row = run.step(mine, chosen)
        return row, grads.pop()

    def keep(flat):
        grads.append(flat.clone())

    whole_row, whole = gradient(train.Rank(reduce=keep))
    shares = [gradient(train.Rank(index=i, world=2, reduce=keep))[1] for i in range(2)]
    torch.testing.assert_close(shares[0] + shares[1], whole, rtol=1e-4, atol=1e-5)
    assert np.isfinite(whole_row["ce"])


def test_document_state_trains_on_runs_of_chunks(parts, tmp_path):
    _, data = parts
    runs = data.sequences(2)
    documents = data.documents
    assert [row for run in runs for row in run] == list(range(len(data)))
    assert all(len({documents[r] for r in run}) == 1 for run in runs)
    assert any(len(run) == 2 for run in runs)
    progress = trainer(parts, state="document").run(tmp_path)
    assert not same(weights(progress), weights(trainer(parts).run(tmp_path / "chunk")))


def test_not_a_number_stops_before_the_step(parts, tmp_path):
    run = trainer(parts)
    progress = run._start()
    progress.layer.norm.weight.data[0] = float("nan")
    before = {k: v.clone() for k, v in progress.layer.state_dict().items() if k != "norm.weight"}
    with pytest.raises(UserError, match=r"not finite at step 0, chunks \w+-\d{4}.*lower ttt\.lr"):
        run.step(progress, [[0], [1]])
    assert all(torch.equal(progress.layer.state_dict()[k], v) for k, v in before.items())


def test_a_damaged_checkpoint_is_named(parts, tmp_path):
    trainer(parts).run(tmp_path)
    path = tmp_path / checkpoints.NAME
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"checkpoint\.safetensors: damaged"):
        trainer(parts, steps=8).run(tmp_path)


def test_a_layer_that_is_not_trained_to_its_end_is_never_published(parts, tmp_path):
    job = train.Job(
        scale="tiny",
        seed=0,
        params=SETTINGS.ttt,
        size=dataclasses.replace(SETTINGS.size, steps=6),
        max_logits_mb=1,
        work=tmp_path,
    )
    for step in (0, 4):
        if step:
            trainer(parts, steps=step).run(tmp_path)
        with pytest.raises(UserError, match=f"checkpoint is of step {step}, though the ranks"):
            job.finish(parts[0].card)
    assert not (tmp_path / "made").exists()


def test_a_checkpoint_of_another_kind_of_device_is_refused(parts, tmp_path):
    trainer(parts, steps=2).run(tmp_path)
    tensors, notes = checkpoints._read(tmp_path)
    shards.save_tensors(tmp_path / checkpoints.NAME, tensors, notes | {"device": "cuda"})
    with pytest.raises(UserError, match=r"ttt: this run computes on cpu, .* made on cuda"):
        trainer(parts, steps=4).run(tmp_path)


def test_every_epoch_sees_every_chunk_once():
    seen = [i for step in range(5) for i in sampling.step_items(10, 4, step, 3)]
    assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(10))
    assert seen[:10] != seen[10:20]


def test_drawn_positions_estimate_the_whole_sum():
    values = np.arange(511.0)
    sums = []
    for step in range(2000):
        drawn = sampling.positions(512, 128, 0, step, 5)
        assert len(set(drawn)) == 128
        assert drawn.max() < 511
        sums.append(values[drawn].sum() * 511 / 128)
    assert np.mean(sums) == pytest.approx(values.sum(), rel=0.01)
    assert list(sampling.positions(5, 128, 0, 0, 0)) == [0, 1, 2, 3]


def test_the_rate_warms_up_and_falls_to_zero():
    rates = [train.learning_rate(s, 100, SETTINGS.ttt) for s in range(100)]
    assert max(rates) == pytest.approx(SETTINGS.ttt.lr)
    assert rates[0] < rates[4]
    assert rates[-1] < 0.01 * max(rates)


def test_hidden_states_of_other_chunks_or_backbones_are_refused(copied):
    hidden, chunks = (copied / f"data/{n}/scale=tiny/set=train" for n in ("hidden", "chunks"))
    with pytest.raises(UserError, match="made by another backbone"):
        sampling.TrainSet(hidden, chunks, "other")
    right = backbone.load(copied / "data/backbone/scale=tiny").card["weights"]
    shutil.copyfile(hidden / "part-00000.safetensors", hidden / "part-00001.safetensors")
    with pytest.raises(UserError, match="holds other chunks"):
        sampling.TrainSet(hidden, chunks, right)


def test_the_history_is_a_table(scored):
    path = scored / "data/ttt/scale=tiny/seed=0/history.parquet"
    history = tables.read(path, tables.HISTORY)
    assert history["step"].to_pylist() == [1, 2, 3, 4, 5, 6]


def test_heads_that_do_not_fit_are_told(parts):
    model, _ = parts
    settings = dataclasses.replace(SETTINGS.ttt, heads=5)
    with pytest.raises(UserError, match=r"ttt\.heads: width 32"):
        layers.config_for(settings, model.card)
