"""The corpus: source files cleaned, deduplicated, capped and split by repository."""

import contextlib
import dataclasses
import hashlib
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from ponderttt import clean, decontaminate, near, sources, stage, tables
from ponderttt.errors import UserError
from ponderttt.params import Corpus
from ponderttt.sources import Document, Source

OUT = Path("data/corpus")
CHARS_PER_CHUNK = 512 * 3.2
SHOWN = 5  # names listed in a message

Tally = Counter[tuple[str, str]]  # (language, reason) -> documents dropped


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the corpus table."""

    doc_id: str
    repo: str
    path: str
    language: str
    licence: str
    split: str
    text: str


def make(view: Any) -> None:
    """Real source files, cleaned and split by repository: one table per language."""
    languages = tuple(dict.fromkeys([*view.run.languages, view.corpus.train_language]))
    source = sources.source(view.corpus)
    rows, tally = build(source, view.corpus, languages)
    check_filled(rows, tally, view.run.languages, view.corpus.train_language)
    work = stage.work_folder("corpus", [stage.plain(view.corpus), languages])
    # An interrupted run may have left tables of other contents of a folder.
    shutil.rmtree(work)
    write(work, rows, tally, {name: notes(source, view.corpus, name) for name in languages})
    stage.publish(work, OUT)


def build(source: Source, params: Corpus, languages: Sequence[str]) -> tuple[list[Row], Tally]:
    """All rows that are kept, sorted by (split, repo, path), and what was dropped, by reason."""
    tally: Tally = Counter()
    rows = read(source, params, languages, tally)
    rows.sort(key=lambda row: (row.repo, row.path, row.doc_id))
    rows = assign(rows, params, tally)
    rows = unique(rows, tally)
    rows = without_near_duplicates(rows, params, tally)
    rows = capped(rows, params, tally)
    rows = without_near_leaks(rows, params, tally)
    return sorted(rows, key=lambda row: (row.split, row.repo, row.path, row.doc_id)), tally


def read(source: Source, params: Corpus, languages: Sequence[str], tally: Tally) -> list[Row]:
    """Documents that pass the filters, on no side yet."""
    rows, undecodable = [], []
    benchmarks = decontaminate.load(params.decontaminate)
    # Closed on an interrupt too, so that a source's threads end at once.
    with contextlib.closing(source.documents(languages)) as documents:
        for document in documents:
            text, problem = judged(document, params)
            if benchmarks.found_in(text):
                problem = "benchmark solution"
            if problem:
                tally[document.language, problem] += 1
            else:
                rows.append(_row(document, text))
            if problem == "undecodable":
                undecodable.append(f"{document.repo}: {document.path}")
    if undecodable and params.undecodable == "stop":
        raise UserError(_undecodable_message(undecodable))
    return rows


def judged(document: Document, params: Corpus) -> tuple[str, str]:
    """The text of a document as it is kept, and why it is not; one of them is empty."""
    problem = document.problem or clean.path_problem(document.path)
    if problem:
        return "", problem
    text = sources.decode(document.content, document.encoding)
    if text is None:
        return "", "undecodable"
    text, problem = clean.cleaned(text, params)
    return ("", problem) if problem else (text, "")


def _row(document: Document, text: str) -> Row:
    return Row(
        doc_id=hashlib.sha256(text.encode()).hexdigest(),
        repo=document.repo,
        path=document.path,
        language=document.language,
        licence=document.licence,
        split="",
        text=text,
    )


def _undecodable_message(names: Sequence[str]) -> str:
    shown = "\n".join(f"  {name}" for name in names[:SHOWN])
    more = f"\n  and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        f"corpus: {len(names)} source files are not UTF-8 text; convert them or move them away, "
        f"or set corpus.undecodable to drop:\n{shown}{more}"
    )


def assign(rows: Sequence[Row], params: Corpus, tally: Tally) -> list[Row]:
    """Give every row its repository's side; the training side keeps only its one language."""
    repos = {row.repo for row in rows if row.language == params.train_language}
    trained = repos - held_out(repos, params.test_share, params.seed)
    kept = []
    for row in rows:
        if row.repo in trained and row.language != params.train_language:
            tally[row.language, "in a training repository"] += 1
        else:
            side = "train" if row.repo in trained else "test"
            kept.append(dataclasses.replace(row, split=side))
    return kept


def held_out(repos: Iterable[str], share: float, seed: int) -> set[str]:
    """The repositories to test on: the first `share` in a seeded order, one at least on each side.

    The order comes from each name alone: neither the order of the input nor a further
    repository changes it for the others.
    """
    ordered = sorted(repos, key=lambda repo: place(seed, repo))
    # Rounded first: 0.1 * 30 is a little more than 3 in floating point.
    count = math.ceil(round(share * len(ordered), 9))
    return set(ordered[: min(max(count, 1), len(ordered) - 1)])


def place(seed: int, *names: str) -> str:
    """A sort key that shuffles names, the same for a seed everywhere."""
    return hashlib.sha256("\0".join([str(seed), *names]).encode()).hexdigest()


def unique(rows: Iterable[Row], tally: Tally) -> list[Row]:
    """One row for each content: the first. So no content is on both sides."""
    kept: dict[str, Row] = {}
    for row in rows:
        if row.doc_id in kept:
            tally[row.language, "duplicate"] += 1
        else:
            kept[row.doc_id] = row
    return list(kept.values())


def without_near_duplicates(rows: Sequence[Row], params: Corpus, tally: Tally) -> list[Row]:
    """The first row of all that are much alike, on whichever side."""
    if not params.near_duplicates:
        return list(rows)
    kept = []
    texts = [row.text for row in rows]
    firsts = near.first_of_each(texts, params.near_duplicates)
    for row, first in zip(rows, tqdm(firsts, "near-duplicates", len(rows)), strict=True):
        if first:
            kept.append(row)
        else:
            tally[row.language, "near-duplicate"] += 1
    return kept


def capped(rows: Iterable[Row], params: Corpus, tally: Tally) -> list[Row]:
    """Rows of each repository, in a seeded order, up to the first that does not fit any more."""
    limit = params.repo_chunks * CHARS_PER_CHUNK
    seen: Counter[str] = Counter()
    kept = []
    for row in sorted(rows, key=lambda row: place(params.seed, row.repo, row.path, row.doc_id)):
        first = row.repo not in seen  # a repository is never left empty
        seen[row.repo] += len(row.text)
        if first or seen[row.repo] <= limit:
            kept.append(row)
        else:
            tally[row.language, "over the repository's cap"] += 1
    return kept


def without_near_leaks(rows: Sequence[Row], params: Corpus, tally: Tally) -> list[Row]:
    """No test row that is much like a training row, by other hashes than those of the removal."""
    if not params.near_duplicates:
        return list(rows)
    train = [row.text for row in rows if row.split == "train"]
    test = [row for row in rows if row.split == "test"]
    texts = tqdm([row.text for row in test], "leaks")
    found = near.between(train, texts, params.near_duplicates)
    leaks = {test[number].doc_id for _, number in found}
    for row in test:
        if row.doc_id in leaks:
            tally[row.language, "near-duplicate of training"] += 1
    return [row for row in rows if row.doc_id not in leaks]


def check_filled(
    rows: Iterable[Row], tally: Tally, tested: Sequence[str], train_language: str
) -> None:
    """Every tested language has a test document, the training language a training document."""
    there = {(row.language, row.split) for row in rows}
    for language in tested:
        if (language, "test") not in there:
            raise UserError(_empty_message("run.languages", language, "test", tally))
    if (train_language, "train") not in there:
        raise UserError(_empty_message("corpus.train_language", train_language, "train", tally))


def _empty_message(key: str, language: str, side: str, tally: Tally) -> str:
    reasons = {reason: n for (name, reason), n in sorted(tally.items()) if name == language}
    dropped = ", ".join(f"{reason} {n}" for reason, n in reasons.items()) or "none found at all"
    return (
        f"{key}: no {side} document of {language!r} is left (dropped: {dropped}); add "
        f"repositories that hold some, loosen the filters in corpus, or remove the language"
    )


def check_leak(table: pa.Table) -> None:
    """Stop if a content or a repository is in both train and test."""
    for column in ("doc_id", "repo"):
        sides: defaultdict[str, set[str]] = defaultdict(set)
        for name, side in zip(table[column].to_pylist(), table["split"].to_pylist(), strict=True):
            sides[name].add(side)
        both = sorted(name for name, found in sides.items() if len(found) > 1)
        if both:
            raise UserError(
                f"data/corpus: {column} {both[0]!r} is in train and in test ({len(both)} such); "
                "delete data/corpus and run `dvc repro`"
            )


def notes(source: Source, params: Corpus, language: str) -> dict[str, Any]:
    """Where the documents of a language come from."""
    against = decontaminate.load(params.decontaminate).notes()
    return {"source": params.source, **against, **source.notes([language])}


def write(
    folder: Path, rows: Sequence[Row], tally: Tally, origins: Mapping[str, dict[str, Any]]
) -> None:
    """One file per language below `folder`, after the check for leaks over all of them."""
    table = pa.Table.from_pylist([dataclasses.asdict(row) for row in rows], tables.CORPUS)
    check_leak(table)
    for language, origin in origins.items():
        chosen = [i for i, row in enumerate(rows) if row.language == language]
        dropped = {reason: n for (name, reason), n in tally.items() if name == language}
        tables.write(
            folder / f"language={language}" / "part-00000.parquet",
            table.take(pa.array(chosen, pa.int64())),
            tables.CORPUS,
            origin | {"dropped": dropped, "kept": _kept(rows[i] for i in chosen)},
        )


def _kept(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, int]]]:
    """Documents and characters of each repository, by side."""
    kept: dict[str, dict[str, dict[str, int]]] = {"train": {}, "test": {}}
    for row in rows:
        counts = kept[row.split].setdefault(row.repo, {"documents": 0, "characters": 0})
        counts["documents"] += 1
        counts["characters"] += len(row.text)
    return kept
