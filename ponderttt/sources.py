"""Where documents come from: small classes behind one function."""

import dataclasses
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tqdm import tqdm

from ponderttt import archives, fetch, files
from ponderttt.errors import UserError
from ponderttt.params import Corpus

BYTES_PER_CHAR = 4  # the most that an encoding takes


@dataclass(frozen=True, kw_only=True)
class Document:
    """One source file as it was found; `problem` says why its content could not be had."""

    repo: str
    path: str
    language: str
    licence: str
    content: bytes
    encoding: str = "utf-8-sig"
    problem: str = ""


def decode(content: bytes, encoding: str) -> str | None:
    """The text of a content, if it is one."""
    try:
        text = content.decode(encoding)
        text.encode()  # some codecs let through half characters that no table can hold
    except (ValueError, LookupError):
        return None
    return text


class Source(Protocol):
    """What the corpus asks of a source."""

    def documents(self, languages: Sequence[str]) -> Generator[Document, None, None]:
        """All documents of these languages, always the same; the corpus puts them in order."""

    def notes(self, languages: Sequence[str]) -> dict[str, Any]:
        """What exactly was read, for the tables' metadata."""


def source(params: Corpus) -> Source:
    """The source that `params` names."""
    if params.source == "stack_v2":
        # Its libraries take seconds to load, and the other sources need none of them.
        from ponderttt.stack import StackV2  # noqa: PLC0415

        return StackV2(params)
    return Packages(params) if params.source == "packages" else Folder(params)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One entry of the list of packages."""

    package: str
    version: str
    kind: Literal["wheel", "sdist"]
    file: str
    sha256: str
    bytes: int
    licence: str
    languages: list[str]

    @property
    def pin(self) -> fetch.Pin:
        return fetch.Pin(
            name=self.package,
            version=self.version,
            file=self.file,
            sha256=self.sha256,
            kind=self.kind,
        )


class Packages:
    """Pinned registry packages; one package is one repository."""

    def __init__(self, params: Corpus) -> None:
        self.params = params
        self.listed = read_list(Path(params.packages))

    def documents(self, languages: Sequence[str]) -> Generator[Document, None, None]:
        chosen = self._chosen(languages)
        paths = fetch.fetch([entry.pin for entry in chosen])
        for entry in tqdm(chosen, desc="reading"):
            yield from self._read(entry, paths[entry.file], languages)

    def notes(self, languages: Sequence[str]) -> dict[str, Any]:
        return {"packages": [dataclasses.asdict(entry) for entry in self._chosen(languages)]}

    def _chosen(self, languages: Sequence[str]) -> list[Listed]:
        return [entry for entry in self.listed if set(entry.languages) & set(languages)]

    def _read(self, entry: Listed, path: Path, languages: Sequence[str]) -> Iterator[Document]:
        known = extensions(self.params, [name for name in entry.languages if name in languages])
        for name, content in archives.members(path, lambda n: _extension(n) in known):
            yield Document(
                repo=entry.package,
                path=_printable(name),
                language=known[_extension(name)],
                licence=entry.licence,
                content=content,
            )


class Folder:
    """A directory of source files; each first-level folder is one repository."""

    def __init__(self, params: Corpus) -> None:
        self.params = params
        self.folder = Path(params.folder)
        if not self.folder.is_dir():
            raise UserError(f"corpus.folder: {params.folder} is not a directory; name one that is")

    def documents(self, languages: Sequence[str]) -> Generator[Document, None, None]:
        known = extensions(self.params, languages)
        for path in tqdm(list(self._paths()), desc="reading"):
            if _extension(path.name) in known:
                yield self._read(path, known[_extension(path.name)])

    def notes(self, languages: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002 (of the protocol)
        return {"folder": self.params.folder}

    def _paths(self) -> Iterator[Path]:
        for parent, folders, names in os.walk(self.folder, onerror=_refuse):
            # Hidden folders hold a tool's own state, such as .git.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (Path(parent) / name for name in sorted(names))

    def _read(self, path: Path, language: str) -> Document:
        parts = path.relative_to(self.folder).parts
        repo = parts[0] if len(parts) > 1 else self.folder.resolve().name
        document = Document(
            repo=_printable(repo),
            path=_printable("/".join(parts)),
            language=language,
            licence="unknown",
            content=b"",
        )
        # A link may point anywhere; what it points to is read where it lies, or not at all.
        if path.is_symlink() or not path.is_file():
            return dataclasses.replace(document, problem="not a regular file")
        try:
            if path.stat().st_size > self.params.max_chars * BYTES_PER_CHAR:
                return dataclasses.replace(document, problem="too long")
            return dataclasses.replace(document, content=path.read_bytes())
        except OSError as error:
            _refuse(error)
            raise


def read_list(path: Path) -> list[Listed]:
    """The list of packages, every entry checked."""
    raw = files.read_json(path)
    if not isinstance(raw, list):
        raise UserError(f"{path}: must be a list of packages")
    return [_listed(path, entry) for entry in raw]


def _listed(path: Path, entry: Any) -> Listed:
    fields = {field.name for field in dataclasses.fields(Listed)}
    if not isinstance(entry, dict) or entry.keys() != fields:
        name = entry.get("package") if isinstance(entry, dict) else entry
        raise UserError(f"{path}: entry {name!r} must have exactly: {', '.join(sorted(fields))}")
    if entry["kind"] not in ("wheel", "sdist"):
        raise UserError(f"{path}: kind of {entry['package']!r} must be wheel or sdist")
    if Path(entry["file"]).name != entry["file"]:
        raise UserError(f"{path}: file of {entry['package']!r} must be a bare file name")
    return Listed(**entry)


def extensions(params: Corpus, languages: Sequence[str]) -> Mapping[str, str]:
    """Extension -> language."""
    return {end.lower(): name for name in languages for end in params.languages[name]}


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 (member names are no paths here)


def _printable(name: str) -> str:
    """A name as text, also where the disk or the archive holds bytes that are none."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _refuse(error: OSError) -> None:
    raise UserError(
        f"{error.filename}: cannot be read ({error.strerror}); mend its rights or move it away"
    ) from error
