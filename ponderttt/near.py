"""Near-duplicates: texts that share most of their runs of five words.

MinHash signatures in bands propose pairs; the exact overlap of their shingles decides. So a
pair below the threshold is never taken for one above it. In between, the signatures' own estimates
settle the hopeless pairs: files from one template are all proposed to each other, and shingles are
made a thousand times slower than signatures are compared.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property, lru_cache

from rensa import RMinHash, RMinHashLSH

WORD = re.compile(r"\w+")
SHINGLE = 5
HASHES = 128
MANY = 1024  # hashes of the second, closer estimate
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


def hopeless(threshold: float, hashes: int) -> float:
    """The estimate below which no pair that reaches the threshold is to be expected.

    >>> round(hopeless(0.7, HASHES), 2), round(hopeless(0.7, MANY), 2)
    (0.54, 0.64)
    """
    return threshold - DOUBT * math.sqrt(threshold * (1 - threshold) / hashes)


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
        self.text, self.seed = text, seed
        self.shingles = shingles(text)
        self.signature = _signature(self.shingles, HASHES, seed)

    @cached_property
    def closer(self) -> RMinHash:
        """A longer signature, for the few texts that need one."""
        return _signature(self.shingles, MANY, self.seed)


def _signature(found: frozenset[str], hashes: int, seed: int) -> RMinHash:
    made = RMinHash(hashes, seed)
    made.update(found)
    return made


class Index:
    """Texts added so far, asked whether another is much like one of them."""

    def __init__(self, threshold: float, count: int | None = None, seed: int = SEED) -> None:
        self.threshold, self.seed = threshold, seed
        self.hopeless = {hashes: hopeless(threshold, hashes) for hashes in (HASHES, MANY)}
        self.texts: list[str] = []
        self.signatures: list[RMinHash] = []
        self.table = RMinHashLSH(threshold, HASHES, count or bands(threshold))
        # Made again when asked for: the shingles of all texts at once would fill the memory.
        self.shingles: Callable[[int], frozenset[str]] = lru_cache(maxsize=512)(
            lambda number: shingles(self.texts[number])
        )
        self.closer: Callable[[int], RMinHash] = cache(
            lambda number: _signature(self.shingles(number), MANY, seed)
        )

    def sketch(self, text: str) -> Sketch:
        return Sketch(text, self.seed)

    def find(self, sketch: Sketch) -> int | None:
        """The number of the first text like this one."""
        proposed: list[int] = sorted(set(self.table.query(sketch.signature)))
        return next((number for number in proposed if self._alike(sketch, number)), None)

    def _alike(self, sketch: Sketch, number: int) -> bool:
        """The cheap looks first; only the exact one may say yes."""
        return (
            sketch.signature.jaccard(self.signatures[number]) >= self.hopeless[HASHES]
            and sketch.closer.jaccard(self.closer(number)) >= self.hopeless[MANY]
            and overlap(sketch.shingles, self.shingles(number)) >= self.threshold
        )

    def add(self, sketch: Sketch) -> None:
        self.table.insert(len(self.texts), sketch.signature)
        self.texts.append(sketch.text)
        self.signatures.append(sketch.signature)


def first_of_each(texts: Iterable[str], threshold: float) -> Iterator[bool]:
    """For each text, whether no text kept before it is a near-duplicate."""
    index = Index(threshold)
    for sketch in map(index.sketch, texts):
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
    index = Index(threshold, min(HASHES, 2 * bands(threshold)), OTHER_SEED)
    for sketch in map(index.sketch, some):
        index.add(sketch)
    for number, sketch in enumerate(map(index.sketch, others)):
        found = index.find(sketch)
        if found is not None:
            yield found, number
