"""The score tables as streams: the chunks of one scale, seed, language and variant, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ponderttt import tables
from ponderttt.errors import UserError
from ponderttt.signals import LABEL_FREE, WITH_LABELS
from ponderttt.stats import Array, Codes, places

SCORES = Path("data/scores")
ARMS = ("base", "skip", "update")
REFERENCES = ("skip", "base")


class Key(NamedTuple):
    """Which stream."""

    scale: str
    seed: int
    language: str
    variant: str

    @property
    def folder(self) -> Path:
        """Its place below the score folder."""
        scale, seed, language, variant = self
        return Path(f"scale={scale}/seed={seed}/language={language}/variant={variant}")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Columns of one stream; NLLs are sums of nats over `n_predicted` tokens."""

    key: Key
    chunk_id: Sequence[str]
    documents: Sequence[str]
    repos: Sequence[str]
    order: npt.NDArray[np.int32]
    n_predicted: Array
    nll: dict[str, Array]
    signals: dict[str, Array]

    def __len__(self) -> int:
        return len(self.order)

    def gain(self, reference: str) -> Array:
        """Nats that UPDATE saves on each chunk against the reference arm."""
        return self.nll[reference] - self.nll["update"]

    def advantage(self, reference: str) -> Array:
        """The same per token: what the oracle sorts by."""
        return self.gain(reference) / self.n_predicted

    @cached_property
    def places(self) -> dict[str, Codes]:
        """Each chunk's place by every signal, and by the advantage over each reference."""
        by_signal = {name: places(values) for name, values in self.signals.items()}
        return by_signal | {f"oracle_{r}": places(self.advantage(r)) for r in REFERENCES}

    def clusters(self, kind: str) -> Sequence[str]:
        """What the bootstrap draws: documents or repositories."""
        return self.documents if kind == "document" else self.repos


def keys(params: Any) -> list[Key]:
    """The streams that params name, in a fixed order."""
    if "plain" not in params.scores.variants:
        raise UserError("params.yaml: scores.variants: must contain plain; all gates need it")
    return [
        Key(scale, seed, language, variant)
        for scale in params.run.scales
        for seed in params.run.seeds
        for variant, languages in variant_languages(params).items()
        for language in languages
    ]


def headline_language(params: Any) -> str:
    """The language trained on, if it is tested; else the first one."""
    tested: tuple[str, ...] = params.run.languages
    trained: str = params.corpus.train_language
    return trained if trained in tested else tested[0]


def variant_languages(params: Any) -> dict[str, tuple[str, ...]]:
    """The languages of each variant that was scored."""
    wanted = {
        "plain": params.run.languages,
        "shuffled": params.chunks.shuffled,
        "strict": params.scores.strict,
    }
    return {
        variant: tuple(name for name in params.run.languages if name in wanted[variant])
        for variant in params.scores.variants
    }


def read(key: Key, folder: Path = SCORES) -> Stream:
    """Read one stream and refuse what no statistic could be made from."""
    paths = sorted((folder / key.folder).glob("*.parquet"))
    if not paths:
        raise UserError(f"{folder / key.folder}: holds no scores; run `dvc repro scores`")
    parts = [tables.read(path, tables.SCORES) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        _check_numbers(path, part)
    rows = pa.concat_tables(parts).sort_by("order")
    order = rows["order"].to_numpy()
    if len(rows) == 0 or not np.array_equal(order, np.unique(order)):
        raise UserError(
            f"{folder / key.folder}: a chunk is there twice, or none is; run `dvc repro`"
        )
    return _to_stream(key, rows)


def _to_stream(key: Key, rows: pa.Table) -> Stream:
    count = _numbers(rows, "n_predicted")
    signals = {name: _numbers(rows, name) for name in LABEL_FREE}
    # The labelled ones are kept as sums; here they become means like all others.
    signals |= {name: _numbers(rows, f"nll_{name[3:]}") / count for name in WITH_LABELS}
    return Stream(
        key=key,
        chunk_id=rows["chunk_id"].to_pylist(),
        documents=rows["doc_id"].to_pylist(),
        repos=rows["repo"].to_pylist(),
        order=rows["order"].to_numpy(),
        n_predicted=count,
        nll={arm: _numbers(rows, f"nll_{arm}") for arm in ARMS},
        signals=signals,
    )


def _numbers(rows: pa.Table, name: str) -> Array:
    return np.asarray(rows[name].to_numpy(), dtype=np.float64)


def _check_numbers(path: Path, rows: pa.Table) -> None:
    """Stop at the first number that is not one, naming file, chunk and column."""
    for name in ("n_predicted", *(f"nll_{arm}" for arm in ARMS), *LABEL_FREE):
        values = _numbers(rows, name)
        bad = ~np.isfinite(values) if name != "n_predicted" else ~(values > 0)
        if bad.any():
            place = int(np.argmax(bad))
            chunk = rows["chunk_id"][place].as_py()
            raise UserError(
                f"{path}: {name} of chunk {chunk} is {values[place]}; "
                "delete the file and run `dvc repro`; if it stays, the trained layer is at fault"
            )
