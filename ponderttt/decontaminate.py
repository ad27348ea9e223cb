"""Documents that hold a benchmark's solutions, found word for word."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from ponderttt import files
from ponderttt.errors import UserError
from ponderttt.near import SHINGLE, WORD


class Benchmarks:
    """Strings that must not be in the corpus, looked up by their first five words.

    Words alone are compared, so that indentation, quotes and brackets hide nothing.
    """

    def __init__(self, strings: list[str]) -> None:
        self.wanted: defaultdict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
        for string in strings:
            words = tuple(WORD.findall(string))
            self.wanted[words[:SHINGLE]].append(words)

    def notes(self) -> dict[str, Any]:
        """Whether anything was looked for, and what."""
        solutions = sorted(" ".join(words) for found in self.wanted.values() for words in found)
        if not solutions:
            return {"decontaminated": False}
        return {"decontaminated": True, "benchmarks": files.digest(solutions)}

    def found_in(self, text: str) -> bool:
        if not self.wanted:
            return False
        words = WORD.findall(text)
        starts = zip(*(words[i:] for i in range(SHINGLE)), strict=False)
        return any(
            tuple(words[place : place + len(solution)]) == solution
            for place, start in enumerate(starts)
            for solution in self.wanted.get(start, ())
        )


def load(path: str) -> Benchmarks:
    """Read a JSON list of strings; an empty one stands for no benchmarks at all."""
    if not Path(path).is_file():
        raise UserError(
            f"corpus.decontaminate: {path} is not a file; give a JSON list of strings, "
            "an empty one to keep benchmark solutions in"
        )
    strings = files.read_json(Path(path))
    if not isinstance(strings, list):
        raise UserError(f"corpus.decontaminate: {path} must hold a JSON list of strings")
    for number, string in enumerate(strings):
        _check(path, number, string)
    return Benchmarks(strings)


def _check(path: str, number: int, string: object) -> None:
    if not isinstance(string, str):
        raise UserError(f"corpus.decontaminate: {path}: entry {number} is not a string")
    if len(WORD.findall(string)) < SHINGLE:
        raise UserError(
            f"corpus.decontaminate: {path}: entry {number} has fewer than {SHINGLE} words and "
            "would match anywhere; give the task together with its solution"
        )
