"""Near-duplicates against all pairs counted one by one; benchmark solutions word for word."""

import doctest
import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ponderttt import decontaminate, near
from ponderttt.errors import UserError

WORDS = [f"word{i}" for i in range(5000)]


def text(seed: int, length: int = 300) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def changed(original: str, count: int, seed: int = 0) -> str:
    """A copy with `count` words replaced, spread evenly."""
    words = original.split()
    step = len(words) // max(count, 1)
    for i in range(count):
        words[i * step] = f"changed{seed}x{i}"
    return " ".join(words)


def test_planted_pairs_are_found_and_unrelated_texts_kept() -> None:
    originals = [text(i) for i in range(200)]
    copies = [changed(original, 5, i) for i, original in enumerate(originals[:50])]
    kept = list(near.first_of_each(originals + copies, 0.7))
    assert kept == [True] * 200 + [False] * 50


def test_what_is_kept_and_dropped_agrees_with_all_pairs() -> None:
    texts = [changed(text(i % 12), (i * 7) % 40, i) for i in range(120)]
    sets = [near.shingles(t) for t in texts]
    kept: list[int] = []
    for i, flag in enumerate(near.first_of_each(texts, 0.7)):
        alike = any(near.overlap(sets[i], sets[j]) >= 0.7 for j in kept)
        assert flag == (not alike)
        kept += [i] if flag else []
    assert 12 < len(kept) < 120
    for i, j in itertools.combinations(kept, 2):
        assert near.overlap(sets[i], sets[j]) < 0.7


@settings(max_examples=30)
@given(st.integers(0, 60), st.sampled_from([0.5, 0.7, 0.85, 0.95]))
def test_the_threshold_is_exact(count: int, threshold: float) -> None:
    one, other = text(1), changed(text(1), count)
    alike = near.overlap(near.shingles(one), near.shingles(other)) >= threshold
    if not alike:
        assert list(near.first_of_each([one, other], threshold)) == [True, True]
    if count == 0:
        assert list(near.first_of_each([one, other], threshold)) == [True, False]


def test_pairs_between_two_lists() -> None:
    train = [text(i) for i in range(20)]
    test = [text(100), changed(train[7], 3), text(101)]
    assert list(near.between(train, test, 0.7)) == [(7, 1)]


def test_short_texts_and_order_of_shingles() -> None:
    assert near.shingles("a b c") == {"a b c"}
    assert near.shingles("") == {""}
    assert list(near.first_of_each(["a b c", "a, b(c)", "a b d"], 0.7)) == [True, False, True]


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(near).failed == 0


SOLUTION = "def add(first, second):\n    return first + second\n"


def benchmarks(tmp_path: Path, value: object) -> decontaminate.Benchmarks:
    (tmp_path / "solutions.json").write_text(json.dumps(value))
    return decontaminate.load(str(tmp_path / "solutions.json"))


@pytest.mark.parametrize(
    ("document", "found"),
    [
        (f"import os\n\n{SOLUTION}\nprint(1)\n", True),
        ("def add( first,second ):\n  return (first+second)", True),
        (SOLUTION.replace("add", "plus"), False),
        ("def add(first, second):\n    return first", False),
        ("", False),
    ],
)
def test_solutions(tmp_path: Path, document: str, found: bool) -> None:
    assert benchmarks(tmp_path, [SOLUTION, text(1)]).found_in(document) == found


def test_none_wanted_finds_none() -> None:
    assert not decontaminate.load("").found_in(SOLUTION)


def test_a_missing_file_is_never_a_silent_pass(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"corpus.decontaminate: .*nowhere.json is not a file"):
        decontaminate.load(str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1}, "must hold a JSON list"),
        ([], "must hold a JSON list"),
        ([SOLUTION, 3], "entry 1 is not a string"),
        ([SOLUTION, "return x"], "entry 1 has fewer than 5 words"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        benchmarks(tmp_path, value)
