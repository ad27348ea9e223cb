"""Small real things: a tokenizer trained on the spot, random models of real families, a project."""

import copy
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).parent.parent
STDLIB = Path(sysconfig.get_paths()["stdlib"])
VOCABULARY = 300
REPOS = ("json", "logging", "email", "importlib", "unittest", "asyncio")
END = "<|endoftext|>"


def configs() -> dict[str, Any]:
    """The three families, each as small as it goes."""
    size = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "initializer_range": 0.2}
    llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    llama |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    end = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
    return {
        "llama": LlamaConfig(**size, **llama, **end, tie_word_embeddings=True),
        "gpt2": GPT2Config(vocab_size=VOCABULARY, initializer_range=0.2, **gpt2, **end),
        "gemma": Gemma3TextConfig(**size, **llama, **end, pad_token_id=0, sliding_window=64),
    }


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred words, trained on the standard library."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([(STDLIB / "json/decoder.py").read_text()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=END)


def save_model(folder: Path, family: str = "llama") -> Path:
    """A random model of a family with the tokenizer, as transformers keeps them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs()[family], dtype=torch.float32)
    model.save_pretrained(folder)
    (with_bos() if family == "gemma" else tokenizer()).save_pretrained(folder)
    return folder


def with_bos() -> PreTrainedTokenizerFast:
    """The tokenizer, putting its end-of-text token before every text, as Gemma's does."""
    made = copy.deepcopy(tokenizer())
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, made.bos_token_id)]
    )
    return made


def save_sources(folder: Path) -> Path:
    """Real Python in six repositories, and a repository of JavaScript."""
    for name in REPOS:
        for path in sorted((STDLIB / name).glob("*.py")):
            target = folder / name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for number in range(12):
        body = "\n".join(
            f"export function part{number}_{i}(value) {{ return value * {i} + {number}; }}"
            for i in range(30)
        )
        target = folder / "scripts" / f"module{number}.js"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(body)
    return folder


def plain_params() -> dict[str, Any]:
    """The project's own params, cut down to a size for tests."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["budget"] = "smoke"
    raw["budgets"]["smoke"] = {"train_chunks": 24, "test_chunks": 40, "steps": 6, "batch": 4}
    raw["run"] = {"scales": ["tiny"], "seeds": [0], "languages": ["python", "javascript"]}
    raw["scales"] = {"tiny": {"source": "hub", "name": "models/tiny"}}
    raw["corpus"] |= {"source": "folder", "folder": "sources", "min_letters": 0.2}
    raw["chunks"] |= {"length": 96, "min_tokens": 17, "shard": 8}
    raw["ttt"] |= {"checkpoint_steps": 2, "positions": 32}
    raw["scores"] |= {"token_chunks": 3}
    raw["metrics"] |= {"resamples": 50}
    raw["ray"] |= {"workers": 0}
    return raw


def write_params(folder: Path, raw: dict[str, Any]) -> None:
    (folder / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))


def project(folder: Path) -> Path:
    """A copy of the code with tiny params, sources and model, as a user would have it."""
    for name in ("stages", "ponderttt"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
    save_sources(folder / "sources")
    save_model(folder / "models/tiny")
    write_params(folder, plain_params())
    return folder


def environment() -> dict[str, str]:
    """Stages and dvc find this Python; nothing goes to the network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(
    folder: Path, *command: str, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A command in the project folder, with its output as text.

    It goes through files: a process that outlives the command may hold a pipe open for ever.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(),
            stdout=out,
            stderr=err,
            text=True,
            check=False,
            timeout=600,
            **options,
        )
        for file in (out, err):
            file.seek(0)
        done.stdout, done.stderr = out.read(), err.read()
    if check and done.returncode:
        raise AssertionError(f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done


def stage(
    folder: Path, name: str, *args: str, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """One stage script, without dvc."""
    return run(folder, sys.executable, "-m", f"stages.{name}", *args, check=check, **options)
