"""The paper checked against itself: what it states beside what its own figures give.

Published numbers are rounded. A recomputed number is given with the range that the rounding of
its inputs leaves; only what lies outside of it differs.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ponderttt import files
from ponderttt.rows import Row, tidy

FIGURES = Path(__file__).with_name("paper.json")
LOSS = 0.001  # the last digit of a printed loss
SHORT_LOSS = 0.01  # of Random's losses on other languages
SHARE = 0.001  # of a printed share, such as 89.2 %
PERCENT = 0.01
TRAINED = "python"


@dataclass(frozen=True)
class Printed:
    """A number as it is printed, and the size of its last digit."""

    value: float
    digit: float

    @property
    def ends(self) -> tuple[float, float]:
        """What it may have been before rounding."""
        return self.value - self.digit / 2, self.value + self.digit / 2


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number that the paper states, or implies, and what its other numbers give."""

    what: str
    scale: str
    language: str = TRAINED
    stated: Printed | None
    value: float
    low: float
    high: float
    at_least: bool = False  # the paper states a lower bound, not a value

    @property
    def agrees(self) -> bool | None:
        """Whether rounding explains the difference; None if nothing is stated."""
        if self.stated is None:
            return None
        low, high = self.stated.ends
        slack = 1e-9  # of binary fractions
        if self.at_least:
            return self.high >= low - slack
        return self.low <= high + slack and self.high >= low - slack


def recompute(formula: Callable[..., float], *inputs: Printed) -> tuple[float, float, float]:
    """The formula's value, and its range over all that the inputs may have been.

    >>> low = recompute(lambda a, b: a - b, Printed(2.0, 0.1), Printed(1.0, 0.1))
    >>> [round(number, 3) for number in low]
    [1.0, 0.9, 1.1]
    """
    corners = [formula(*corner) for corner in itertools.product(*(i.ends for i in inputs))]
    return formula(*(i.value for i in inputs)), min(corners), max(corners)


def check(
    what: str,
    scale: str,
    stated: Printed | None,
    formula: Callable[..., float],
    *inputs: Printed,
    language: str = TRAINED,
    at_least: bool = False,
) -> Check:
    """Put a stated number beside a formula of others."""
    value, low, high = recompute(formula, *inputs)
    return Check(
        what=what,
        scale=scale,
        language=language,
        stated=stated,
        value=value,
        low=low,
        high=high,
        at_least=at_least,
    )


def share_of_gain(start: float, reached: float, best: float) -> float:
    """Recovery if `start` is the reference, capture if it is Random."""
    return (start - reached) / (start - best)


def saved_share(before: float, after: float) -> float:
    """Relative reduction of a loss."""
    return (before - after) / before


def mean(first: float, second: float) -> float:
    """Random at rate one half: half of each arm, whichever chunks it takes."""
    return (first + second) / 2


def all_checks() -> list[Check]:
    """Every check, table by table."""
    figures = files.read_json(FIGURES)
    tables = (main_checks, random_checks, ood_checks, accuracy_checks, delta_checks, text_checks)
    return [found for table in tables for found in table(figures)]


def losses(figures: Any, scale: str, language: str = TRAINED) -> dict[str, Printed]:
    """The losses of one table line."""
    line = figures["loss_nats"][scale][language]
    short = {"random"} if language != TRAINED else set()
    return {k: Printed(v, SHORT_LOSS if k in short else LOSS) for k, v in line.items()}


def main_checks(figures: Any) -> Iterator[Check]:
    """Recovery, and the nominal cost at the stated rate."""
    for scale, line in figures["main_results"].items():
        loss, stated = losses(figures, scale), Printed(line["recovery"], SHARE)
        inputs = loss["skip"], loss["ours"], loss["oracle"]
        yield check("recovery of the gate", scale, stated, share_of_gain, *inputs)
        cost, rate = Printed(figures["relative_flops"]["ponder_50"], 0.1), line["actual_rate"]
        yield check("cost, 1 + 2 rate", scale, cost, lambda r: 1 + 2 * r, Printed(rate, SHARE))


def random_checks(figures: Any) -> Iterator[Check]:
    """What Random alone recovers, and what the gate wins over it."""
    lowest = Printed(figures["text"]["capture_over_random_at_least"], 0)
    for scale in figures["loss_nats"]:
        loss = losses(figures, scale)
        skip, random, ours, oracle = (loss[k] for k in ("skip", "random", "ours", "oracle"))
        yield check("recovery of Random alone", scale, None, share_of_gain, skip, random, oracle)
        # "recovers the majority of Oracle's gains over Random Skip"
        yield check(
            "capture of the gate, at least",
            scale,
            lowest,
            share_of_gain,
            random,
            ours,
            oracle,
            at_least=True,
        )
        yield check(
            "loss of Random, mean of both arms", scale, random, mean, skip, loss["update_1"]
        )


def ood_checks(figures: Any) -> Iterator[Check]:
    """Recovery, capture and Random's loss on the other languages."""
    for scale, languages in figures["loss_nats"].items():
        for language in languages:
            loss = losses(figures, scale, language)
            if language == TRAINED or "random" not in loss:
                continue
            skip, random, ours, oracle = (loss[k] for k in ("skip", "random", "ours", "oracle"))
            both = skip, loss["update_1"]
            for what, stated, formula, inputs in (
                ("recovery of the gate", None, share_of_gain, (skip, ours, oracle)),
                ("recovery of Random alone", None, share_of_gain, (skip, random, oracle)),
                ("capture of the gate", None, share_of_gain, (random, ours, oracle)),
                ("loss of Random, mean of both arms", random, mean, both),
            ):
                yield check(what, scale, stated, formula, *inputs, language=language)


def accuracy_checks(figures: Any) -> Iterator[Check]:
    """Whatever Random's rate, it decides as an oracle of one half on half of the chunks."""
    for scale, line in figures["decision_accuracy"].items():
        stated = Printed(line["random"], SHARE)
        yield check("accuracy of Random", scale, stated, lambda: 0.5)


def delta_checks(figures: Any) -> Iterator[Check]:
    """The appendix on the change of the reconstruction loss."""
    delta, text = figures["delta_signal_small"], figures["text"]
    names = ("random", "improvement_topk", "oracle", "update_1")
    random, topk, oracle, dense = (Printed(delta["loss"][name], LOSS) for name in names)
    capture, versus = delta["stated_capture"]["topk"], text["delta_vs_random"]
    for what, stated, formula, inputs in (
        ("delta: capture of top-k", Printed(capture, SHARE), share_of_gain, (random, topk, oracle)),
        ("delta: top-k below Random", Printed(versus["topk"], SHARE), saved_share, (random, topk)),
        (
            "delta: oracle below Random",
            Printed(versus["oracle"], SHARE),
            saved_share,
            (random, oracle),
        ),
        (
            "delta: top-k above UPDATE_1, nats",
            Printed(text["delta_nats_to_update_1"], 0.01),
            np.subtract,
            (topk, dense),
        ),
        (
            "delta: accuracy of top-k, from its overlap",
            Printed(delta["decision_accuracy"]["topk"], PERCENT),
            float,
            (Printed(delta["top50_overlap"], SHARE),),
        ),
    ):
        yield check(what, "small", stated, formula, *inputs)


def text_checks(figures: Any) -> Iterator[Check]:
    """Numbers of the running text against the tables."""
    text, small = figures["text"], losses(figures, "small")
    large = losses(figures, "large")["update_1"]
    yield check(
        "loss of UPDATE_1 in the text",
        "large",
        Printed(text["update_1_large_python"], LOSS),
        float,
        large,
    )
    yield check(
        "perplexity of SKIP", "small", Printed(text["ppl_small_skip"], 0.1), np.exp, small["skip"]
    )
    for kind, line in figures["shuffled"]["small"].items():
        stated = Printed(text["shuffled_improvement"][kind], SHARE)
        inputs = Printed(line["skip"], LOSS), Printed(line["ours"], LOSS)
        yield check(f"improvement on {kind} input", "small", stated, saved_share, *inputs)
    java = losses(figures, "xl", "java")
    stated = Printed(text["lower_loss_than_random_xl_java"], PERCENT)
    inputs = java["random"], java["ours"]
    yield check("gate below Random", "xl", stated, saved_share, *inputs, language="java")
    for name, pick in (("lowest", min), ("highest", max)):
        stated = Printed(text["lower_loss_than_random"][name], PERCENT)
        pairs = {s: losses(figures, s) for s in figures["loss_nats"]}
        scale = pick(
            pairs, key=lambda s: saved_share(pairs[s]["random"].value, pairs[s]["ours"].value)
        )
        inputs = pairs[scale]["random"], pairs[scale]["ours"]
        yield check("gate below Random", scale, stated, saved_share, *inputs)
    yield _correlation(figures)
    yield _chunks(figures)


def _correlation(figures: Any) -> Check:
    """The lowest correlation of the text against that of the table."""
    stated = Printed(figures["text"]["lowest_correlation"], PERCENT)
    found = figures["correlation_pearson"]
    scale = min(found, key=lambda s: found[s][TRAINED])
    return check(
        "lowest correlation", scale, stated, float, Printed(found[scale][TRAINED], PERCENT)
    )


def _chunks(figures: Any) -> Check:
    """Chunks seen in training: steps times sequences times chunks per sequence."""
    h = figures["hyperparameters"]
    sizes = (h["gradient_steps"], h["batch_size"], h["sequence_length"] / h["chunk_size"])
    inputs = [Printed(size, 0) for size in sizes]
    stated = Printed(h["train_chunks"], 0)
    return check("training chunks", "all", stated, lambda *size: float(np.prod(size)), *inputs)


def rows() -> list[Row]:
    """The checks as result rows; `differs_by` only where rounding cannot explain it."""
    return [row for found in all_checks() for row in _rows(found)]


def _rows(found: Check) -> Iterator[Row]:
    empty: Row = dict.fromkeys(("seed", "variant", "signal", "reference", "rate", "p", "p_holm"))
    empty |= dict.fromkeys(("low", "high", "plain_low", "plain_high", "n", "clusters", "reason"))
    line = empty | {"table": "paper", "scale": found.scale, "language": found.language}
    line["policy"] = found.what
    if found.stated is not None:
        yield line | {"metric": "stated", "value": tidy(found.stated.value)}
    ends = {"low": tidy(found.low), "high": tidy(found.high)}
    reason = "the range is what the rounding of the printed inputs leaves"
    yield line | ends | {"metric": "recomputed", "value": tidy(found.value), "reason": reason}
    if found.stated is not None and not found.agrees:
        yield line | {"metric": "differs_by", "value": tidy(found.value - found.stated.value)}
