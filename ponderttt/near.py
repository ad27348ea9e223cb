"""Near-duplicates: texts that share most of their runs of five words.

MinHash signatures in bands propose pairs; the exact overlap of their shingles decides. So a
pair below the threshold is never taken for one above it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from rensa import RMinHash, RMinHashLSH

WORD = re.compile(r"\w+")
SHINGLE = 5
HASHES = 128
SEED = 42
RECALL = 0.999  # of a pair right at the threshold


def shingles(text: str) -> frozenset[str]:
    """Every run of five words; of a shorter text, all its words as one."""
    words = WORD.findall(text)
    runs = range(max(1, len(words) - SHINGLE + 1))
    return frozenset(" ".join(words[i : i + SHINGLE]) for i in runs)


def overlap(one: frozenset[str], other: frozenset[str]) -> float:
    """The share of shingles that both have (Jaccard).

    >>> overlap(frozenset("abc"), frozenset("bcd"))
    0.5
    """
    both = len(one & other)
    return both / (len(one) + len(other) - both)


def bands(threshold: float) -> int:
    """The fewest bands that propose a pair at the threshold with probability RECALL.

    >>> bands(0.7), bands(0.5)
    (32, 64)
    """
    for count in (8, 16, 32, 64):
        if 1 - (1 - threshold ** (HASHES // count)) ** count >= RECALL:
            return count
    return HASHES


class Sketch:
    """A text's shingles and their MinHash signature."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.shingles = shingles(text)
        self.signature = RMinHash(HASHES, SEED)
        self.signature.update(self.shingles)


class Index:
    """Texts added so far, asked whether another is much like one of them."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.texts: list[str] = []
        self.table = RMinHashLSH(threshold, HASHES, bands(threshold))
        # Made again when asked for: the shingles of all texts at once would fill the memory.
        self.shingles: Callable[[int], frozenset[str]] = lru_cache(maxsize=512)(
            lambda number: shingles(self.texts[number])
        )

    def find(self, sketch: Sketch) -> int | None:
        """The number of the first text like this one."""
        proposed: list[int] = sorted(set(self.table.query(sketch.signature)))
        for number in proposed:
            if overlap(sketch.shingles, self.shingles(number)) >= self.threshold:
                return number
        return None

    def add(self, sketch: Sketch) -> None:
        self.table.insert(len(self.texts), sketch.signature)
        self.texts.append(sketch.text)


def first_of_each(texts: Iterable[str], threshold: float) -> Iterator[bool]:
    """For each text, whether no text kept before it is a near-duplicate."""
    index = Index(threshold)
    for sketch in map(Sketch, texts):
        first = index.find(sketch) is None
        if first:
            index.add(sketch)
        yield first


def between(
    some: Iterable[str], others: Iterable[str], threshold: float
) -> Iterator[tuple[int, int]]:
    """Pairs of numbers: a text of `some`, and a near-duplicate of it in `others`."""
    index = Index(threshold)
    for sketch in map(Sketch, some):
        index.add(sketch)
    for number, sketch in enumerate(map(Sketch, others)):
        found = index.find(sketch)
        if found is not None:
            yield found, number
