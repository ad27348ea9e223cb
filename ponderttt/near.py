"""Near-duplicates: texts that share most of their runs of five words.

MinHash signatures in bands propose pairs; the exact overlap of their shingles decides. So a
pair below the threshold is never taken for one above it.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from rensa import RMinHash, RMinHashLSH

WORD = re.compile(r"\w+")
SHINGLE = 5
HASHES = 128
SEED = 42
OTHER_SEED = 4242  # of signatures that know nothing of the first ones
RECALL = 0.999  # of a pair right at the threshold
DOUBT = 4  # standard deviations by which a signature's estimate may be wrong


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


def hopeless(threshold: float) -> float:
    """The estimate below which no pair that reaches the threshold is to be expected.

    >>> round(hopeless(0.7), 2)
    0.54
    """
    return threshold - DOUBT * math.sqrt(threshold * (1 - threshold) / HASHES)


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

    def __init__(self, text: str, seed: int = SEED) -> None:
        self.text = text
        self.shingles = shingles(text)
        self.signature = RMinHash(HASHES, seed)
        self.signature.update(self.shingles)


class Index:
    """Texts added so far, asked whether another is much like one of them."""

    def __init__(self, threshold: float, count: int | None = None) -> None:
        self.threshold, self.hopeless = threshold, hopeless(threshold)
        self.texts: list[str] = []
        self.signatures: list[RMinHash] = []
        self.table = RMinHashLSH(threshold, HASHES, count or bands(threshold))
        # Made again when asked for: the shingles of all texts at once would fill the memory.
        self.shingles: Callable[[int], frozenset[str]] = lru_cache(maxsize=512)(
            lambda number: shingles(self.texts[number])
        )

    def find(self, sketch: Sketch) -> int | None:
        """The number of the first text like this one."""
        proposed: list[int] = sorted(set(self.table.query(sketch.signature)))
        return next(
            (
                number
                for number in proposed
                # Files from one template are all proposed to each other: the signatures are a
                # hundred times faster than the shingles.
                if sketch.signature.jaccard(self.signatures[number]) >= self.hopeless
                and overlap(sketch.shingles, self.shingles(number)) >= self.threshold
            ),
            None,
        )

    def add(self, sketch: Sketch) -> None:
        self.table.insert(len(self.texts), sketch.signature)
        self.texts.append(sketch.text)
        self.signatures.append(sketch.signature)


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
    """Pairs of numbers: a text of `some`, and a near-duplicate of it in `others`.

    Other hashes and twice the bands, so that it finds what `first_of_each` may have missed.
    """
    index = Index(threshold, min(HASHES, 2 * bands(threshold)))
    for text in some:
        index.add(Sketch(text, OTHER_SEED))
    for number, text in enumerate(others):
        found = index.find(Sketch(text, OTHER_SEED))
        if found is not None:
            yield found, number
