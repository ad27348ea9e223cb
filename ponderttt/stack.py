"""The Stack v2: ids of files from a data set, their contents from Software Heritage."""

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.errors
import pyarrow as pa
from tqdm import tqdm

from ponderttt import fetch, files, tables
from ponderttt.blobs import TRANSIENT, Blob, Store
from ponderttt.errors import UserError
from ponderttt.params import Corpus
from ponderttt.sources import BYTES_PER_CHAR, Document, decode

FOLDER = fetch.DOWNLOADS / "stack"
SHA1 = re.compile(r"[0-9a-f]{40}")
NEEDED = ("blob_id", "path", "repo_name", "language", "license_type", "src_encoding")
USEFUL = ("detected_licenses", "is_vendor", "is_generated", "length_bytes", "files")
# The hub's own errors derive from those of its HTTP library, whose name changes with its version.
HTTP_ERROR: type[Exception] = huggingface_hub.errors.HfHubHTTPError.__mro__[1]
# What a damaged file, a missing split or a missing part of the data set raise.
UNREADABLE = (OSError, ValueError, pa.ArrowException, datasets.exceptions.DatasetsError)
BUFFER = 10_000  # rows shuffled at a time
SURE = 500  # blobs after which the share of failures is taken seriously

NOTICE = (
    "The Stack v2: contents come from Software Heritage, which asks for an agreement before a "
    "bulk download; each file keeps its licence, and the data set's terms apply."
)
GATED = """corpus.stack.dataset: the hub does not let this machine read {dataset}:
  1. log in to the Hugging Face hub, open the page of {dataset} and accept its terms
  2. make an access token with read rights in your settings there
  3. run `hf auth login`, or set HF_TOKEN, and run again
Or name a local folder with its Parquet files."""
FOR_NOW = """corpus.stack: {count} blobs could not be had for now ({reasons}).
Run `dvc repro` again, it goes on where it was. If it happens again, check the network, or raise \
corpus.stack.attempts or timeout."""
UNREACHABLE = """corpus.stack.dataset: {dataset} cannot be read ({error}).
It needs a split `train`. Check the name, the network and its files, or name a local folder with \
its Parquet files."""

# Files of The Stack v2 as chosen; kept beside their contents, so that a fetch can go on.
IDS = pa.schema(
    [
        ("blob_id", pa.string()),  # SHA-1 of the content
        ("repo", pa.string()),
        ("path", pa.string()),
        ("language", pa.string()),
        ("licence", pa.string()),
        ("encoding", pa.string()),
        ("problem", pa.string()),  # why it is not fetched; empty if it is
    ]
)


class StackV2:
    """Files of The Stack v2; the data set says which repository each belongs to."""

    def __init__(self, params: Corpus) -> None:
        self.params, self.settings = params, params.stack
        self.left_out = _read_names(self.settings.opt_out)

    def documents(self, languages: Sequence[str]) -> Generator[Document, None, None]:
        tqdm.write(NOTICE, file=sys.stderr)
        with fetch.locked(FOLDER):
            for entries in self._listed(languages):
                yield from (_document(entry) for entry in entries if entry["problem"])
                yield from self._fetched([entry for entry in entries if not entry["problem"]])

    def notes(self, languages: Sequence[str]) -> dict[str, Any]:
        wanted = {name: self.settings.names[name] for name in languages}
        return {
            "dataset": self.settings.dataset,
            "revision": self.revision,
            "names": wanted,
            "licences": list(self.settings.licences),
            "opt_out": files.sha256(Path(self.settings.opt_out)),
        }

    @cached_property
    def revision(self) -> str:
        """The exact state of the data set: a commit, or the hash of a local folder."""
        folder = Path(self.settings.dataset)
        if folder.is_dir():
            return files.folder_hash(folder)
        if SHA1.fullmatch(self.settings.revision):
            return self.settings.revision
        with _explained(self.settings.dataset):
            return str(
                huggingface_hub.HfApi()
                .dataset_info(self.settings.dataset, revision=self.settings.revision)
                .sha
            )

    def _fetched(self, entries: Sequence[Mapping[str, str]]) -> Iterator[Document]:
        """Documents with their contents; stops when too many cannot be had."""
        store = Store(self.settings, FOLDER / "blobs", self.params.max_chars * BYTES_PER_CHAR)
        failed: Counter[str] = Counter()
        for count, (entry, blob) in enumerate(_settled(store, entries), start=1):
            if blob.problem and blob.problem != "too long":
                failed[blob.problem] += 1
            # Blobs come in a fixed order, so that this stops at the same one every time.
            if count >= min(SURE, len(entries)):
                self._check_share(failed, count)
            yield _document(entry, blob)

    def _check_share(self, failed: Counter[str], count: int) -> None:
        if failed.total() > self.params.max_missing * count:
            raise UserError(
                f"corpus.max_missing: {failed.total()} of {count} blobs could not be had "
                f"({_listing(failed)}); check bucket, region, endpoint and signed in "
                "corpus.stack, or allow more. What was fetched is kept"
            )

    def _listed(self, languages: Sequence[str]) -> Iterator[list[dict[str, str]]]:
        """The chosen files, from the disk if they were chosen before."""
        with _explained(self.settings.dataset):
            configs = datasets.get_dataset_config_names(self.settings.dataset, **self._at())
        for config, group in _groups(configs, languages, self.settings.names):
            path = FOLDER / f"ids-{self._key(group)}.parquet"
            if not path.is_file():
                with _explained(self.settings.dataset):
                    entries = self._choose(self._rows(config), group)
                table = pa.Table.from_pylist(entries, IDS)
                tables.write(path, table, IDS)
            yield tables.read(path, IDS).to_pylist()

    def _key(self, languages: Sequence[str]) -> str:
        """All that decides which files are chosen."""
        parts = [self.settings.dataset, self.revision, self.params.seed, self.settings.licences]
        parts += [[(name, self.settings.names[name], self._quota(name)) for name in languages]]
        parts += [sorted(self.left_out), self.params.min_chars, self.params.max_chars]
        return files.digest([*parts, files.sha256(Path(__file__))])[:16]

    def _quota(self, language: str) -> int:
        training = language == self.params.train_language
        return self.settings.train_files if training else self.settings.test_files

    def _at(self) -> dict[str, str]:
        """The revision as an argument; a local folder has none."""
        return {} if Path(self.settings.dataset).is_dir() else {"revision": self.revision}

    def _rows(self, config: str | None) -> Iterable[Mapping[str, Any]]:
        stream = datasets.load_dataset(
            self.settings.dataset, config, split="train", streaming=True, **self._at()
        )
        if stream.column_names:
            known = [name for name in stream.column_names if name in NEEDED + USEFUL]
            stream = stream.select_columns(known)
        shuffled: Iterable[Mapping[str, Any]] = stream.shuffle(
            seed=self.params.seed, buffer_size=BUFFER
        )
        return shuffled

    def _choose(
        self, rows: Iterable[Mapping[str, Any]], languages: Sequence[str]
    ) -> list[dict[str, str]]:
        """Files of `languages` in the order of the stream until each has enough."""
        ours = {self.settings.names[name]: name for name in languages}
        left = {name: self._quota(name) for name in languages}
        entries, seen = [], set()
        with tqdm(total=sum(left.values()), desc="ids") as bar:
            for file in (file for row in rows for file in self._files(row)):
                language = ours.get(file["language"], "")
                if not left.get(language):
                    continue
                problem = "duplicate" if file["blob_id"] in seen else self._problem(file)
                entries.append(_entry(file, language, problem))
                if not problem:
                    seen.add(file["blob_id"])
                    left[language] -= 1
                    bar.update()
                if not any(left.values()):
                    break
        return entries

    def _files(self, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """A row is a file, or a repository with a list of them."""
        found = row.get("files", [row])
        if found is None:
            raise UserError(
                f"corpus.stack.dataset: {self.settings.dataset}: the row of "
                f"{row.get('repo_name')!r} has no list of files; take the row out"
            )
        for file in found:
            merged = {"repo_name": row.get("repo_name"), **file}
            missing = [name for name in NEEDED if name not in merged]
            if missing:
                raise UserError(
                    f"corpus.stack.dataset: {self.settings.dataset} has no column {missing[0]}; "
                    "use The Stack v2 or a data set with its columns"
                )
            yield merged

    def _problem(self, file: Mapping[str, Any]) -> str:
        """Why a file is not fetched, to tell from its metadata; empty if it is."""
        size = file.get("length_bytes")
        repo = str(file["repo_name"]).lower()
        reasons = {
            "licence": file["license_type"] not in self.settings.licences,
            "opted out": bool({repo, repo.partition("/")[0]} & self.left_out),
            "vendored": bool(file.get("is_vendor")),
            "generated": bool(file.get("is_generated")),
            "too short": size is not None and size < self.params.min_chars,
            "too long": size is not None and size > self.params.max_chars * BYTES_PER_CHAR,
            "bad id": not SHA1.fullmatch(str(file["blob_id"])),
        }
        return next((reason for reason, applies in reasons.items() if applies), "")


def _groups(
    configs: Sequence[str], languages: Sequence[str], names: Mapping[str, str]
) -> list[tuple[str | None, list[str]]]:
    """What to read: a part of the data set for each language, or one part for all."""
    if all(names[language] in configs for language in languages):
        return [(names[language], [language]) for language in languages]
    return [(None, list(languages))]


def _entry(file: Mapping[str, Any], language: str, problem: str) -> dict[str, str]:
    licences = ", ".join(sorted(file.get("detected_licenses") or []))
    return {
        "blob_id": str(file["blob_id"]),
        "repo": str(file["repo_name"]),
        "path": str(file["path"]).lstrip("/"),
        "language": language,
        "licence": licences or str(file["license_type"]),
        "encoding": str(file["src_encoding"] or "UTF-8"),
        "problem": problem,
    }


def _document(entry: Mapping[str, str], blob: Blob | None = None) -> Document:
    blob = blob or Blob(b"", entry["problem"])
    # A byte order mark is no part of the text.
    encoding = "utf-8-sig" if entry["encoding"].lower() == "utf-8" else entry["encoding"]
    wrong = not blob.problem and decode(blob.content, encoding) is None
    problem = "wrong encoding" if wrong else blob.problem
    return Document(
        repo=entry["repo"],
        path=entry["path"],
        language=entry["language"],
        licence=entry["licence"],
        content=b"" if problem else blob.content,
        encoding=encoding,
        problem=problem,
    )


def _settled(
    store: Store, entries: Sequence[Mapping[str, str]]
) -> Iterator[tuple[Mapping[str, str], Blob]]:
    """Each entry with its blob, or with a reason that will not pass.

    What fails for another reason is tried once more at the end, and stops the run if it fails
    again: which files a corpus holds must not depend on a server's bad moment.
    """
    waiting, left = [], Counter[str]()
    for entry, blob in _in_order(store, entries):
        if blob.problem in TRANSIENT:
            waiting.append(entry)
        else:
            yield entry, blob
    for entry, blob in _in_order(store, waiting):
        if blob.problem in TRANSIENT:
            left[blob.problem] += 1
        else:
            yield entry, blob
    if left:
        raise UserError(FOR_NOW.format(count=left.total(), reasons=_listing(left)))


def _in_order(
    store: Store, entries: Sequence[Mapping[str, str]]
) -> Iterator[tuple[Mapping[str, str], Blob]]:
    with contextlib.closing(store.blobs([entry["blob_id"] for entry in entries])) as blobs:
        bar = tqdm(blobs, "blobs", len(entries), disable=not entries)
        yield from zip(entries, bar, strict=True)


def _listing(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))


def _read_names(path: str) -> set[str]:
    """Repositories and owners to leave out, whatever their case; `#` begins a comment."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"corpus.stack.opt_out: {path}: {reason}; mend it") from None
    return {name.lower() for line in lines for name in line.partition("#")[0].split()}


@contextlib.contextmanager
def _explained(dataset: str) -> Iterator[None]:
    """The hub's refusals as steps to take; addresses in its messages may be signed."""
    try:
        yield
    except (*UNREADABLE, HTTP_ERROR) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403) or "gated" in str(error).lower():
            raise UserError(GATED.format(dataset=dataset)) from None
        reason = fetch.without_addresses(f"{type(error).__name__}: {error}".splitlines()[0])
        raise UserError(UNREACHABLE.format(dataset=dataset, error=reason)) from None
