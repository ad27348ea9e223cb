"""GPT-2 as it is published: a bare body in safetensors, matrices stored as [in, out]."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu, layer_norm

from ponderttt import backbone, models, params
from ponderttt.errors import UserError

WIDTH, HEADS, LAYERS, CONTEXT = 32, 4, 2, 64


def published(folder, vocabulary=tiny.VOCABULARY):
    """Random tensors under the published names and shapes, with config and tokenizer."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {"wte.weight": some(vocabulary, WIDTH), "wpe.weight": some(CONTEXT, WIDTH)}
    tensors |= {"ln_f.weight": 1 + some(WIDTH), "ln_f.bias": some(WIDTH)}
    shapes = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
    shapes |= {"mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}
    for layer in range(LAYERS):
        name = f"h.{layer}"
        for norm in ("ln_1", "ln_2"):
            tensors[f"{name}.{norm}.weight"] = 1 + some(WIDTH)
            tensors[f"{name}.{norm}.bias"] = some(WIDTH)
        for part, shape in shapes.items():
            tensors[f"{name}.{part}.weight"] = some(*shape)
            tensors[f"{name}.{part}.bias"] = some(shape[1])
        # The causal mask was saved as a weight.
        tensors[f"{name}.attn.bias"] = torch.ones(CONTEXT, CONTEXT).tril()[None, None]
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": vocabulary}
    sizes |= {"n_ctx": CONTEXT, "n_positions": CONTEXT}
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes}
    config |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-05}
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    config |= {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    return tensors


def save_tokenizer(folder):
    """The published files: a vocabulary, its merges, and the length of the context."""
    model = json.loads(tiny.tokenizer().backend_tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": CONTEXT}))


def logits_by_hand(tensors, tokens):
    """GPT-2 (Radford et al. 2019), written out for one row of tokens [T]."""
    x = tensors["wte.weight"][tokens] + tensors["wpe.weight"][: len(tokens)]

    def norm(x, name):
        return layer_norm(x, (WIDTH,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    for name in (f"h.{layer}" for layer in range(LAYERS)):
        mask = tensors[f"{name}.attn.bias"][0, 0, : len(tokens), : len(tokens)].bool()
        qkv = linear(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        # [T, d] -> [H, T, e]
        q, k, v = (
            part.view(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for part in qkv.split(WIDTH, dim=1)
        )
        weights = (q @ k.transpose(1, 2) / (WIDTH // HEADS) ** 0.5).masked_fill(~mask, -torch.inf)
        mixed = (weights.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + linear(mixed, f"{name}.attn.c_proj")
        inner = gelu(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc"), approximate="tanh")
        x = x + linear(inner, f"{name}.mlp.c_proj")
    return norm(x, "ln_f") @ tensors["wte.weight"].T


def kept(tmp_path):
    scale = params.Scale(source="hub", name=str(tmp_path / "gpt2"))
    models.prepare(scale, tmp_path / "kept", tmp_path)
    return backbone.load(tmp_path / "kept")


def test_the_published_layout_gives_gpt2s_logits(tmp_path):
    tensors, model = published(tmp_path / "gpt2"), kept(tmp_path)
    tokens = torch.randint(0, tiny.VOCABULARY, (2, CONTEXT))
    found = model.logits(model.hidden(tokens))
    wanted = torch.stack([logits_by_hand(tensors, row) for row in tokens])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_every_published_tensor_arrives_and_the_head_is_tied(tmp_path):
    tensors, model = published(tmp_path / "gpt2"), kept(tmp_path)
    body = dict(model.model.base_model.named_parameters())
    wanted = {name for name in tensors if not name.endswith(".attn.bias")}
    assert body.keys() == wanted
    for name in wanted:
        assert torch.equal(body[name], tensors[name]), name
    assert model.model.get_output_embeddings().weight is body["wte.weight"]
    stored = load_file(tmp_path / "kept/model.safetensors")
    assert "lm_head.weight" not in stored
    assert stored["transformer.h.0.attn.c_attn.weight"].shape == (WIDTH, 3 * WIDTH)


def test_sizes_come_from_the_config(tmp_path):
    published(tmp_path / "gpt2")
    card = kept(tmp_path).card
    sizes = [card[name] for name in ("family", "width", "heads", "context", "vocabulary", "bos")]
    assert sizes == ["gpt2", WIDTH, HEADS, CONTEXT, tiny.VOCABULARY, None]


def test_the_published_tokenizer_files_are_read(tmp_path):
    published(tmp_path / "gpt2")
    kept(tmp_path)
    text = "def decode(self, s):\n    return None\n"
    found = backbone.tokenizer_of(tmp_path / "kept")(text)["input_ids"]
    assert found == tiny.tokenizer()(text)["input_ids"]


def test_a_tensor_that_is_missing_is_told(tmp_path):
    tensors = published(tmp_path / "gpt2")
    del tensors["h.1.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "gpt2/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"h\.1\.mlp\.c_fc\.weight"):
        kept(tmp_path)
