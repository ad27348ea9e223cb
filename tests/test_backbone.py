import hashlib
import json
import shutil
import sys
import zipfile

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, Gemma3Config

from ponderttt import backbone, files, hidden, losses, models, params, shards, tables
from ponderttt.errors import UserError

FAMILIES = list(tiny.configs())


def prepared(tmp_path, family):
    source = tiny.save_model(tmp_path / "source", family)
    models.prepare(params.Scale(source="hub", name=str(source)), tmp_path / "kept", tmp_path)
    return backbone.load(tmp_path / "kept")


def tokens_of(count=3, length=40):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, tiny.VOCABULARY, (count, length), generator=generator)


@pytest.mark.parametrize("family", FAMILIES)
def test_body_and_head_are_the_whole_model(tmp_path, family):
    model = prepared(tmp_path, family)
    tokens = tokens_of()
    with torch.inference_mode():
        whole = model.model(input_ids=model.with_bos(tokens)).logits[:, -40:]
    torch.testing.assert_close(model.logits(model.hidden(tokens)), whole)
    assert model.card["width"] == 32
    assert model.card["heads"] == 2
    assert model.card["vocabulary"] == tiny.VOCABULARY


def test_the_beginning_of_text_is_seen_where_the_tokenizer_adds_it(tmp_path):
    for family in FAMILIES:
        card = prepared(tmp_path / family, family).card
        assert card["bos"] == (0 if family == "gemma" else None), family
    gemma, tokens = backbone.load(tmp_path / "gemma/kept"), tokens_of()
    begun = torch.cat([torch.zeros(3, 1, dtype=torch.int64), tokens], dim=1)
    with torch.inference_mode():
        wanted = gemma.model.base_model(input_ids=begun).last_hidden_state[:, 1:]
        alone = gemma.model.base_model(input_ids=tokens).last_hidden_state
    torch.testing.assert_close(gemma.hidden(tokens), wanted)
    assert (gemma.hidden(tokens) - alone).abs().max() > 0.01


def test_a_model_that_also_sees_images_is_read_by_its_language_part(tmp_path):
    text = tiny.configs()["gemma"].to_dict()
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sight |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    tiny.with_bos().save_pretrained(tmp_path / "source")
    scale = params.Scale(source="hub", name=str(tmp_path / "source"))
    models.prepare(scale, tmp_path / "kept", tmp_path)
    card = backbone.load(tmp_path / "kept").card
    assert (card["width"], card["heads"], card["context"], card["bos"]) == (32, 2, 512, 0)


@pytest.mark.parametrize(("bos", "most"), [(None, 512), (0, 511)])
def test_a_chunk_longer_than_the_context_is_refused(bos, most):
    card = {"name": "tiny", "context": 512, "bos": bos}
    backbone.check_length(most, card)
    with pytest.raises(UserError, match=rf"chunks\.length: {most + 1} .* at most {most}"):
        backbone.check_length(most + 1, card)
    backbone.check_length(10**6, card | {"context": None})


def test_a_gpu_computes_in_bfloat16_and_a_cpu_does_not():
    assert backbone.compute_dtype("cuda") == torch.bfloat16
    assert backbone.compute_dtype("cpu") == torch.float32


def test_a_full_gpu_gets_smaller_batches(scored, tmp_path, monkeypatch):
    path = scored / "data/chunks/scale=tiny/set=python/part-00000.parquet"
    asked, real = [], backbone.Backbone.hidden

    def small(self, tokens):
        asked.append(len(tokens))
        if len(tokens) > 2:
            raise torch.cuda.OutOfMemoryError("full")
        return real(self, tokens)

    monkeypatch.setattr(backbone.Backbone, "hidden", small)
    work = hidden.start(
        scored / "data/backbone/scale=tiny",
        params.Hidden(batch=8, dtype="float32", max_logits_mb=1),
    )
    shard = hidden.Shard(chunks=path, out=tmp_path / "out")
    done = work(shard)
    assert asked[:4] == [8, 4, 2, 2]
    assert sum(asked[2:]) == done.chunks
    kept = shards.read(scored / "data/hidden/scale=tiny/set=python/part-00000.safetensors")
    torch.testing.assert_close(shards.read(shard.hidden), kept, rtol=1e-5, atol=1e-5)
    asked.clear()
    work(hidden.Shard(chunks=path, out=tmp_path / "other"))
    assert max(asked) == 2  # what fits is remembered


def test_a_gpu_too_small_for_one_chunk_is_told():
    def full(_part):
        raise torch.cuda.OutOfMemoryError("full")

    with pytest.raises(UserError, match=r"one chunk does not fit.*lower hidden\.max_logits_mb"):
        list(hidden.Batches(4).map(full, 8))


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_a_full_softmax(tmp_path, family):
    model, tokens, counts = prepared(tmp_path, family), tokens_of(), torch.tensor([40, 17, 2])
    states, other = model.hidden(tokens), torch.randn(3, 40, 32)
    # One megabyte holds few rows of logits, so that slices end inside chunks.
    found = losses.predict(model, states, tokens, counts, max_logits_mb=1, other=other)
    log_p = model.logits(states)[:, :-1].double().log_softmax(-1)
    log_q = model.logits(other)[:, :-1].double().log_softmax(-1)
    real = losses.mask_of(counts, 40)[:, 1:]
    nll = -log_p.gather(2, tokens[:, 1:, None]).squeeze(2) * real
    kl = (log_p.exp() * (log_p - log_q)).sum(-1) * real
    entropy = -(log_p.exp() * log_p).sum(-1) * real
    for mine, wanted in ((found.nll, nll), (found.gain, kl), (found.entropy, entropy)):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-5)


def test_weighted_ce_has_the_gradient_of_the_plain_one(tmp_path):
    model = prepared(tmp_path, "llama")
    states = torch.randn(50, 32, requires_grad=True)
    targets, weights = torch.randint(0, tiny.VOCABULARY, (50,)), torch.rand(50)
    total = losses.weighted_ce(model, states, targets, weights, max_logits_mb=1) * 3
    (grad,) = torch.autograd.grad(total, states)
    plain = torch.nn.functional.cross_entropy(model.logits(states), targets, reduction="none")
    (wanted,) = torch.autograd.grad(3 * (plain * weights).sum(), states)
    torch.testing.assert_close(total, 3 * (plain * weights).sum())
    torch.testing.assert_close(grad, wanted)


def test_the_body_takes_no_gradient_and_no_dropout(tmp_path):
    model = prepared(tmp_path, "gpt2")
    assert not model.model.training
    assert not any(p.requires_grad for p in model.model.parameters())
    assert torch.equal(model.hidden(tokens_of()), model.hidden(tokens_of()))


def test_moved_weights_are_noticed(tmp_path):
    prepared(tmp_path, "llama")
    card = json.loads((tmp_path / "kept/backbone.json").read_text())
    card["weights"] = "0" * 64
    (tmp_path / "kept/backbone.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match="the weights are not those that were fetched"):
        backbone.load(tmp_path / "kept")


def test_a_missing_model_is_named_with_a_remedy(tmp_path):
    scale = params.Scale(source="hub", name=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"nowhere.*cannot be loaded.*Give a folder with config"):
        models.prepare(scale, tmp_path / "kept", tmp_path)


def test_truncated_weights_are_named_with_a_remedy(tmp_path):
    prepared(tmp_path, "llama")
    for name in ("source", "kept"):
        path = tmp_path / name / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"kept: the model cannot be read .*dvc repro -f backbone"):
        backbone.load(tmp_path / "kept")
    scale = params.Scale(source="hub", name=str(tmp_path / "source"))
    with pytest.raises(UserError, match=r"source' cannot be loaded: .*Give a folder"):
        models.prepare(scale, tmp_path / "again", tmp_path)


def test_a_damaged_tokenizer_is_named_with_a_remedy(tmp_path):
    prepared(tmp_path, "llama")
    (tmp_path / "kept/tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match="kept: the tokenizer cannot be read"):
        backbone.tokenizer_of(tmp_path / "kept")


def test_code_of_a_model_is_never_run(tmp_path):
    source = tiny.save_model(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(UserError, match="cannot be loaded"):
        models.prepare(params.Scale(source="hub", name=str(source)), tmp_path / "kept", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_address_in_the_hubs_answer_is_not_shown(tmp_path, monkeypatch):
    def refuse(*_args, **_more):
        raise OSError("403 for https://cdn.example/x?Signature=planted, /planted/resolve")

    monkeypatch.setattr(models.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(UserError, match="model 'a/b' cannot be loaded: 403 for") as caught:
        models.prepare(params.Scale(source="hub", name="a/b"), tmp_path / "kept", tmp_path)
    assert "planted" not in str(caught.value)


def test_a_full_disk_is_told_and_leaves_the_old_backbone(copied):
    before = files.folder_hash(copied / "data/backbone")
    # The weights are longer than 20 KB, the config is not.
    command = f"ulimit -f 20; exec '{sys.executable}' -m stages.backbone tiny"
    done = tiny.run(copied, "bash", "-c", command, check=False)
    assert done.returncode == 1
    assert "cannot be written: the file is larger than this system allows" in done.stderr
    assert "Traceback" not in done.stderr
    assert files.folder_hash(copied / "data/backbone") == before


@pytest.mark.parametrize(
    ("path", "stage"),
    [
        ("data/chunks/scale=tiny/set=python/part-00000.parquet", ("hidden", "tiny")),
        ("data/hidden/scale=tiny/set=train/part-00000.safetensors", ("ttt", "tiny", "0")),
        ("data/hidden/scale=tiny/set=python/part-00000.safetensors", ("scores", "tiny", "0")),
        ("data/corpus/language=python/part-00000.parquet", ("chunks", "tiny")),
        ("data/backbone/scale=tiny/model.safetensors", ("hidden", "tiny")),
    ],
)
def test_a_stage_names_a_truncated_file_and_the_remedy(copied, path, stage):
    content = (copied / path).read_bytes()
    (copied / path).write_bytes(content[: len(content) // 2])
    done = tiny.stage(copied, *stage, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    named = path if "backbone" not in path else "data/backbone/scale=tiny"
    assert f"error: {named}: " in done.stderr
    assert "dvc repro" in done.stderr


def test_pickled_weights_are_refused(tmp_path):
    source = tiny.save_model(tmp_path / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be loaded"):
        models.prepare(params.Scale(source="hub", name=str(source)), tmp_path / "kept", tmp_path)


def wheel_scale(folder, parts, whole, member="m.gguf"):
    """A scale whose model lies in parts in wheels that were already downloaded."""
    packages = []
    for number, part in enumerate(parts):
        path = folder / f"w{number}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("m.gguf", part)
        pin = {"name": f"w{number}", "version": "1", "file": path.name, "member": member}
        packages.append(params.Package(**pin, sha256=hashlib.sha256(path.read_bytes()).hexdigest()))
    digest = hashlib.sha256(whole).hexdigest()
    return params.Scale(source="wheel", packages=tuple(packages), sha256=digest)


def test_a_joined_file_with_another_hash_is_refused(tmp_path):
    scale = wheel_scale(tmp_path, [b"one", b"two"], b"other")
    with pytest.raises(UserError, match="w0: the GGUF file has sha256"):
        models.prepare(scale, tmp_path / "kept", tmp_path)


def test_a_missing_member_is_named(tmp_path):
    scale = wheel_scale(tmp_path, [b"one"], b"one", member="other.gguf")
    with pytest.raises(UserError, match=r"has no member other\.gguf"):
        models.prepare(scale, tmp_path / "kept", tmp_path)


def test_tokens_of_another_tokenizer_are_refused(scored, tmp_path):
    scale = scored / "data/backbone/scale=tiny"
    folder = shutil.copytree(scale, tmp_path / "backbone")
    card = json.loads((folder / "backbone.json").read_text())
    card["tokenizer"] = "0" * 64
    (folder / "backbone.json").write_text(json.dumps(card))
    path = scored / "data/chunks/scale=tiny/set=python/part-00000.parquet"
    work = hidden.start(folder, params.parse(tiny.plain_params()).hidden)
    with pytest.raises(UserError, match="made by another tokenizer"):
        work(hidden.Shard(chunks=path, out=tmp_path / "out"))


def test_tokens_outside_the_vocabulary_are_refused(scored):
    path = scored / "data/chunks/scale=tiny/set=python/part-00000.parquet"
    rows = tables.read(path, tables.CHUNKS)
    model = backbone.load(scored / "data/backbone/scale=tiny")
    small = backbone.Backbone(model=model.model, card=model.card | {"vocabulary": 10})
    with pytest.raises(UserError, match="is not in the backbone's 10 words"):
        hidden.check_vocabulary(path, rows, small)


def test_base_losses_are_the_models_own(scored):
    model = backbone.load(scored / "data/backbone/scale=tiny")
    rows = tables.read(
        scored / "data/chunks/scale=tiny/set=python/part-00000.parquet", tables.CHUNKS
    )
    base = tables.read(scored / "data/hidden/scale=tiny/set=python/part-00000.parquet", tables.BASE)
    tokens, counts = hidden.to_tensors(rows)
    kept = shards.read(scored / "data/hidden/scale=tiny/set=python/part-00000.safetensors")
    torch.testing.assert_close(kept, model.hidden(tokens), rtol=1e-5, atol=1e-5)
    for i in range(len(rows)):
        count = int(counts[i])
        with torch.inference_mode():
            labels = tokens[i : i + 1, :count]
            mean = model.model(input_ids=labels, labels=labels).loss
        assert base["n_predicted"][i].as_py() == count - 1
        assert base["nll_base"][i].as_py() == pytest.approx(float(mean) * (count - 1), rel=1e-5)


def test_a_body_in_bfloat16_keeps_its_head_in_float32(scored, monkeypatch):
    """As on a GPU: states of two arms that differ in their last digits keep their difference."""
    folder = scored / "data/backbone/scale=tiny"
    whole = backbone.load(folder)
    monkeypatch.setattr(backbone, "compute_dtype", lambda _: torch.bfloat16)
    half = backbone.load(folder)
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert len(backbone.frozen_hashes(half)) == 2
    for name, angles in whole.model.named_buffers():  # of rotary positions
        assert torch.equal(half.model.get_buffer(name), angles)
    assert any("inv_freq" in name for name, _ in half.model.named_buffers())
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(half.logits(states), whole.logits(states))
    tokens = tokens_of()
    assert not torch.equal(half.hidden(tokens).float(), whole.hidden(tokens))
    torch.testing.assert_close(
        half.hidden(tokens).float(), whole.hidden(tokens), rtol=0.2, atol=0.2
    )
