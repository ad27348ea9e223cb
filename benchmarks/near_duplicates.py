"""How long near-duplicate removal takes: 100,000 files of about 5 KB, one in fifty planted.

Files are lines of the standard library in random order, so that words are as common as in code.
2,000 more come from one template: any two share half of what they hold, and all are kept.
"""

import argparse
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from ponderttt import near

LINES = 140
TEMPLATE_LINES = 100  # of LINES: two files then share half of all that either holds
PLANTED_EVERY = 50


def code_lines() -> list[str]:
    """The different lines of the standard library's top modules."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = (line for path in paths for line in path.read_text(errors="replace").splitlines())
    return sorted({line for line in lines if len(line.strip()) > 8})


def texts(count: int, lines: list[str]) -> Iterator[str]:
    """Every fiftieth text is the one before it with three lines changed."""
    draw, text = random.Random(0), [""]
    for number in range(count):
        if number % PLANTED_EVERY == PLANTED_EVERY - 1:
            for _ in range(3):
                text[draw.randrange(len(text))] = draw.choice(lines)
        else:
            text = draw.choices(lines, k=LINES)
        yield "\n".join(text)


def templated(count: int, lines: list[str]) -> list[str]:
    """Files that begin alike and go on each in its own way."""
    draw = random.Random(1)
    begin = draw.choices(lines, k=TEMPLATE_LINES)
    ends = (draw.choices(lines, k=LINES - TEMPLATE_LINES) for _ in range(count))
    return ["\n".join(begin + end) for end in ends]


def timed(made: list[str]) -> tuple[list[bool], float]:
    """Which files are kept, and the seconds it took."""
    start = time.perf_counter()
    kept = list(tqdm(near.first_of_each(made, 0.7), total=len(made)))
    return kept, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--templated", type=int, default=2000)
    given = parser.parse_args()
    plain(given.files, code_lines())
    one_template(given.templated, code_lines())


def one_template(count: int, lines: list[str]) -> None:
    made = templated(count, lines)
    alike = near.overlap(near.shingles(made[0]), near.shingles(made[1]))
    kept, seconds = timed(made)
    print(f"from one template {count}, overlap {alike:.2f}, {seconds:.1f} s, kept {sum(kept)}")


def plain(count: int, lines: list[str]) -> None:
    made = list(texts(count, lines))
    kept, seconds = timed(made)
    found = sum(not kept[n] for n in range(PLANTED_EVERY - 1, count, PLANTED_EVERY))
    planted = count // PLANTED_EVERY
    mean = sum(map(len, made)) / count
    print(f"files {count}, mean length {mean:.0f}, {seconds:.1f} s, {count / seconds:.0f} files/s")
    print(f"planted {planted}, found {found}, dropped by mistake {kept.count(False) - found}")


if __name__ == "__main__":
    main()
