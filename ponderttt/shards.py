"""Hidden states on disk: one safetensors file per file of chunks, each with its own hash inside."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ponderttt import files
from ponderttt.errors import UserError

NAME = "hidden"
NOTES = "notes"
DAMAGE = (SafetensorError, KeyError, TypeError, ValueError)  # what a spoilt file raises


class Done(NamedTuple):
    """What a finished shard held."""

    chunks: int
    tokens: int


def held(rows: pa.Table) -> Done:
    """What these chunks are.

    >>> held(pa.table({"n_tokens": [512, 70]}))
    Done(chunks=2, tokens=582)
    """
    return Done(len(rows), sum(rows["n_tokens"].to_pylist()))


def write(path: Path, hidden: Tensor, notes: dict[str, Any]) -> None:
    """Write [n, T, d] with the hash of its bytes, whole or not at all."""
    save_tensors(path, {NAME: hidden}, notes | {"sha256": tensor_hash(hidden)})


def save_tensors(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Any tensors as safetensors, whole or not at all."""
    # The library writes several metadata keys in no fixed order: one key keeps the bytes the same.
    metadata = {NOTES: json.dumps(notes, sort_keys=True)}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # The library's own `save_file` leaves a file under a name of its own when it is killed.
    with files.atomic(path) as temporary:
        temporary.write_bytes(save(plain, metadata=metadata))


def read(path: Path) -> Tensor:
    """Read a whole shard; a damaged or half-written one is an error that names it."""
    with files.reading(path, *DAMAGE), safe_open(path, framework="pt") as file:
        written = json.loads(file.metadata()[NOTES])
        hidden: Tensor = file.get_tensor(NAME)
    if written.get("sha256") != tensor_hash(hidden):
        raise UserError(f"{path}: its hash does not fit; delete it and run `dvc repro`")
    return hidden


def notes(path: Path) -> dict[str, Any]:
    """What was written beside the tensor."""
    with files.reading(path, *DAMAGE), safe_open(path, framework="pt") as file:
        return dict(json.loads(file.metadata()[NOTES]))


def folder_hash(folder: Path) -> str:
    """The hash of all shards below `folder`, from the hashes they carry."""
    return files.digest(
        [
            [p.relative_to(folder).as_posix(), notes(p).get("sha256")]
            for p in sorted(folder.rglob("*.safetensors"))
        ]
    )


@contextmanager
def naming(chunk_ids: Sequence[str]) -> Iterator[None]:
    """Whatever goes wrong inside says which chunks it was about."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while working on chunks {', '.join(chunk_ids)}")
        raise


def ids_hash(chunk_ids: Sequence[str]) -> str:
    """The hash of the chunks in a shard and their order."""
    return files.digest(list(chunk_ids))


def tensor_hash(tensor: Tensor) -> str:
    """The hash of a tensor's bytes."""
    view = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(view.numpy().data).hexdigest()
