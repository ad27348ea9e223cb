"""Near-duplicates against all pairs counted one by one; benchmark solutions word for word."""

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
    assert list(near.first_of_each([one, other], threshold)) == [True, not alike]
    assert list(near.between([one], [other], threshold)) == ([(0, 0)] if alike else [])


def test_pairs_between_two_lists() -> None:
    train = [text(i) for i in range(20)]
    test = [text(100), changed(train[7], 3), text(101)]
    assert list(near.between(train, test, 0.7)) == [(7, 1)]


def test_the_check_between_two_lists_does_not_repeat_the_removal() -> None:
    """Pairs right at the threshold, where a few escape any one choice of hashes."""
    pairs = [(text(i, 60), changed(text(i, 60), 2, i)) for i in range(400)]
    threshold = near.overlap(*map(near.shingles, pairs[0]))
    assert 0.6 < threshold < 0.9
    one, other = near.Sketch(pairs[0][0]), near.Sketch(pairs[0][0], near.OTHER_SEED)
    assert one.signature.digest() != other.signature.digest()
    train, test = [list(side) for side in zip(*pairs, strict=True)]
    found = {number for _, number in near.between(train, test, threshold)}
    exact = [near.overlap(*map(near.shingles, pair)) >= threshold for pair in pairs]
    assert found == {number for number, alike in enumerate(exact) if alike}


def templated(count: int) -> list[str]:
    """Files from one template: half of each is the same, the rest its own."""
    shared = text(1, 200)
    return [f"{shared} {text(1000 + i, 100)}" for i in range(count)]


def test_files_from_one_template_are_told_apart_by_their_signatures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts, exact = templated(150), []
    plain = near.overlap
    pairs = [plain(*map(near.shingles, pair)) for pair in itertools.combinations(texts[:20], 2)]
    assert 0.45 < min(pairs) <= max(pairs) < 0.55
    monkeypatch.setattr(near, "overlap", lambda a, b: exact.append(1) or plain(a, b))
    assert all(near.first_of_each(texts, 0.7))
    assert len(exact) < 0.01 * 150 * 149 / 2


def test_short_texts_and_order_of_shingles() -> None:
    assert near.shingles("a b c") == {"a b c"}
    assert near.shingles("") == {""}
    assert list(near.first_of_each(["a b c", "a, b(c)", "a b d"], 0.7)) == [True, False, True]


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


def test_an_empty_list_finds_none_and_says_so(tmp_path: Path) -> None:
    none, some = benchmarks(tmp_path, []), benchmarks(tmp_path, [SOLUTION])
    assert not none.found_in(SOLUTION)
    assert none.notes() == {"decontaminated": False}
    assert some.notes()["decontaminated"]
    assert some.notes() != benchmarks(tmp_path, [text(1)]).notes()


def test_a_missing_file_is_never_a_silent_pass(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"corpus.decontaminate: .*nowhere.json is not a file"):
        decontaminate.load(str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1}, "must hold a JSON list"),
        ([SOLUTION, 3], "entry 1 is not a string"),
        ([SOLUTION, "return x"], "entry 1 has fewer than 5 words"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        benchmarks(tmp_path, value)
