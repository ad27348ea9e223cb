"""data/corpus + data/backbone -> data/chunks/scale=S"""

import shutil
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from ponderttt import backbone, chunks, files, stage, tables


def make(view: Any, scale: str) -> None:
    """512-token rows of every set for one scale's tokenizer."""
    sources = Path("data/corpus")
    languages = {view.corpus.train_language, *view.run.languages}
    corpus = {n: tables.read_folder(sources / f"language={n}", tables.CORPUS) for n in languages}
    folder = Path(f"data/backbone/scale={scale}")
    card = files.read_json(folder / backbone.CARD)
    backbone.check_length(view.chunks.length, card)
    tokenizer = backbone.tokenizer_of(folder)
    wanted = {"train": (view.corpus.train_language, "train", view.size.train_chunks)}
    wanted |= {name: (name, "test", view.size.test_chunks) for name in view.run.languages}
    sets, short = {}, {}
    for name, (language, split, count) in wanted.items():
        documents = corpus[language].filter(pc.equal(corpus[language]["split"], split))
        sets[name] = chunks.make_set(documents, tokenizer, view.chunks, count)
        chunks.check_count(name, sets[name], count)
        short[name] = chunks.shortfall(sets[name], count)
    for name in view.chunks.shuffled:
        if name in sets:
            sets[f"{name}-shuffled"] = chunks.shuffle(sets[name], view.chunks.seed)
            short[f"{name}-shuffled"] = short[name]
    chunks.check_apart(sets)
    notes = {"tokenizer": card["tokenizer"], "vocabulary": card["vocabulary"]}
    work = stage.work_folder("chunks", [scale, stage.plain(view.chunks)])
    shutil.rmtree(work)
    for name, rows in sets.items():
        chunks.write_set(work / f"set={name}", rows, view.chunks.shard, notes | short[name])
    stage.publish(work, Path(f"data/chunks/scale={scale}"))


if __name__ == "__main__":
    stage.run(
        make,
        reads=["budget", "run.languages", "corpus.train_language", "chunks"],
        arguments=["scale"],
    )
