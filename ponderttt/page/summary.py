"""The words and numbers of the report's first screen, and its limits."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ponderttt.page import explorer
from ponderttt.page.cells import DASH, Cell, Kind, cell
from ponderttt.page.lookup import Place, Results, Row
from ponderttt.page.sheets import Run
from ponderttt.streams import ARMS, REFERENCES

TABLE = "seeds"  # the first screen shows means over all seeds
SOURCES = {
    "packages": "source files of pinned packages",
    "folder": "source files of a local folder",
    "stack_v2": "The Stack v2",
}


def lead(found: dict[str, Any], view: Any) -> str:
    """What was done, in a sentence."""
    cards = [layer["card"] for layer in found["layers"].values()]
    steps = sorted({card["steps"] for card in cards})
    chunks = sorted({card["chunks"] for card in cards})
    return (
        f"{', '.join(view.run.scales)} reads source code in chunks of {view.chunks.length} tokens. "
        f"A TTT layer, trained for {_listed(steps)} steps on {_listed(chunks)} "
        f"chunks of {view.corpus.train_language}, updates on a chunk if {view.gate.signal} is "
        f"above a threshold that steers towards {100 * view.gate.rate:.0f} % of the chunks; the "
        f"first {view.gate.calibration_chunks} (at most a quarter of a stream) calibrate it."
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def headline(results: Results, place: Place, run: Run, n: Row) -> str:
    """The main result in words, with what it rests on."""
    dense = results.find(TABLE, place, "improvement", policy="always", reference=run.reference)
    gap = results.find(TABLE, place, "below_random", policy=run.ours, reference=run.reference)
    seeds = "mean over seeds" if len(run.seeds) > 1 else "seed"
    saved = cell(dense, "percent")
    return (
        f"Held-out {place.language}, {n.get('n', 0)} chunks of {n.get('clusters', 0)} {run.units}, "
        f"{seeds} {_listed(run.seeds)}. UPDATE on every chunk saves {saved.text} % "
        f"{saved.interval} of {run.reference}'s loss. At its own rate the gate {verdict(gap)}."
    )


def verdict(gap: Row) -> str:
    """Whether the gate beats Random, by the paired interval of the difference.

    >>> verdict({"low": -0.1, "high": 0.2})
    'cannot be told from Random: the paired interval holds zero'
    """
    if gap["low"] is None:
        return "cannot be compared with Random: there are too few chunks for an interval"
    if gap["low"] > 0:
        return "beats Random: the paired interval lies above zero"
    if gap["high"] < 0:
        return "is worse than Random: the paired interval lies below zero"
    return "cannot be told from Random: the paired interval holds zero"


@dataclass(frozen=True)
class Tile:
    """A headline number with its definition and what stands beside it."""

    name: str
    cell: Cell
    unit: str
    definition: str
    other: str


@dataclass(frozen=True)
class Headline:
    """The numbers of the first screen, as cells."""

    results: Results
    place: Place
    run: Run

    def number(self, metric: str, kind: Kind, **about: str) -> Cell:
        """One number, as the mean over all seeds."""
        return cell(self.results.find(TABLE, self.place, metric, **about), kind)

    def tile(self, name: str, metric: str, kind: Kind, definition: str, **about: str) -> Tile:
        """A number against the headline's reference, and the same against the other one."""
        other = next(r for r in REFERENCES if r != self.run.reference)
        unit = " %" if kind == "percent" else ""
        first = self.number(metric, kind, reference=self.run.reference, **about)
        second = self.number(metric, kind, reference=other, **about)
        beside = f"Against {other}: {second.text}{unit} {second.interval}"
        return Tile(name, first, unit, definition, beside)

    def loss(self) -> Tile:
        """Loss with the gate, beside those of the arms."""
        arms = {arm: self.number("loss", "gap", policy=f"arm_{arm}").text for arm in ARMS}
        ours = self.number("loss", "gap", policy=self.run.ours, reference=self.run.reference)
        beside = f"base {arms['base']}, skip {arms['skip']}, UPDATE everywhere {arms['update']}"
        return Tile("Loss", ours, "", "nats per token with the gate", beside)

    def rate(self) -> Tile:
        """The rate that the gate came to."""
        first = self.number("rate", "percent", policy=self.run.ours)
        after = self.number("rate_after", "percent", policy=self.run.ours)
        beside = f"After calibration: {after.text} % {after.interval}"
        return Tile("Update rate", first, " %", "of all chunks, calibration included", beside)

    def tiles(self) -> list[Tile]:
        """All of them."""
        run = self.run
        blind = self.number("recovery", "percent", policy="random", reference=run.reference).text
        ours = {"policy": run.ours}
        won = "of what the oracle wins over"
        return [
            self.tile("Capture", "capture", "percent", f"{won} Random at the target rate", **ours),
            self.tile(
                "Capture at its own rate",
                "capture_matched",
                "percent",
                f"{won} Random with as many updates as the gate made",
                **ours,
            ),
            self.tile(
                "Recovery",
                "recovery",
                "percent",
                f"{won} no update at all; Random alone: {blind} %",
                **ours,
            ),
            self.loss(),
            self.rate(),
            self.tile(
                "Pearson r",
                "pearson",
                "r",
                f"{run.signal} and advantage, over chunks",
                signal=run.signal,
            ),
        ]


def facts(found: dict[str, Any], view: Any) -> list[tuple[str, str]]:
    """What was run, on what, with what."""
    origin, layers = found["origin"], found["layers"]
    sets = [
        f"{s.key.language} {len(s)} ({len(set(s.documents))}, {len(set(s.repos))})"
        for s, _ in found["read"]
        if s.key.scale == view.run.scales[0]
    ]
    seeds = origin["seeds"]
    cards = [layer["card"] for layer in layers.values()]
    return [
        ("Backbone", "; ".join(f"{s}, weights {_short(h)}" for s, h in _backbones(layers))),
        (
            "TTT layer",
            "; ".join(f"{c['steps']} steps, weights {_short(c['weights'])}" for c in cards),
        ),
        ("Data", SOURCES[view.corpus.source]),
        ("Test chunks (documents, repositories)", "; ".join(sets)),
        (
            "Seeds",
            f"layers {', '.join(map(str, seeds['layers']))}; gate {seeds['gate']}; "
            f"bootstrap {seeds['bootstrap']}",
        ),
        ("Intervals", f"{view.metrics.resamples} resamples of {found['run'].units}"),
        ("Commit", commit(origin)),
        ("Parameters", _short(origin["params"])),
        *((f"Hash of {name}", _short(h)) for name, h in sorted(origin["data"].items())),
        ("Machine", machine(origin)),
        ("Versions", ", ".join(f"{k} {v}" for k, v in sorted(origin["versions"].items()))),
    ]


def commit(origin: dict[str, Any]) -> str:
    """Which code made the numbers, and whether it was changed since its commit."""
    if not origin["commit"]:
        return f"{DASH} not in a repository"
    return _short(origin["commit"]) + (" with changes" if origin.get("dirty") else "")


def seed_note(run: Run) -> str:
    """Which seed the figures show, where there are several."""
    if len(run.seeds) == 1:
        return ""
    return f"Figures and folded tables show seed {run.seeds[0]}; Parquet has the others."


def _backbones(layers: dict[tuple[str, int], dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted({(scale, layer["card"]["backbone"]) for (scale, _), layer in layers.items()})


def _short(digest: str) -> str:
    return digest[:12]


def machine(origin: dict[str, Any]) -> str:
    """The kind of machine that made the page."""
    cores = f"{os.cpu_count()} cores"
    return f"{platform.system()} {platform.machine()}, {cores}, Python {origin['python']}"


def explorer_words(
    found: dict[str, Any], chosen: Sequence[explorer.Example], view: Any
) -> dict[str, Any]:
    """What the page says around the explorer."""
    wanted = view.report.examples * len(found["read"])
    text = f"{len(chosen)} chunks of the test sets as the model read them."
    if len(chosen) < wanted:
        text += f" {wanted} were asked for; the others were not kept, or do not fit on the page."
    reference = found["run"].reference
    return {
        "text": text,
        "languages": list(dict.fromkeys(e["language"] for e in chosen)),
        "references": sorted(REFERENCES, key=lambda r: r != reference),
    }


def limits(n: Row, run: Run, view: Any) -> list[str]:
    """What the reader should hold against these numbers."""
    return [
        f"{n.get('n', 0)} chunks of {n.get('clusters', 0)} {run.units} stand behind the headline. "
        f"Intervals over fewer than about fifty {run.units} are rough and tend to be too narrow.",
        "The backbone was trained on public code and may have seen files of the test sets, older "
        "ones above all. That lowers every arm's loss and leaves less for UPDATE to win.",
        "The oracle is greedy: it takes the chunks with the largest advantage, one by one. It is "
        "no strict bound where updates carry over from chunk to chunk.",
        f"Decisions are held fixed in the bootstrap, so intervals cover the choice of {run.units}, "
        f"not the training of the layer, which several seeds would show ({len(run.seeds)} here).",
        f"Capture and recovery at the target rate credit a gate for updating more often than "
        f"{100 * view.gate.rate:.0f} %; capture at its own rate does not.",
        "The paper's figures come from other models, data and code; they stand beside these for "
        "orientation, not as a target.",
    ]
