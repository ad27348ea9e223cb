"""The paper's own figures, under the columns of the report's tables."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ponderttt import files
from ponderttt.paper import FIGURES

SIZES = {"small": "124M", "medium": "355M", "large": "774M", "xl": "1.5B"}
TRAINED = "python"


@dataclass(frozen=True)
class Stated:
    """One line of a table of the paper; `values` are named as the report's columns."""

    scale: str
    language: str
    values: dict[str, float]


Figures = dict[str, Any]


def stated(table: str) -> list[Stated]:
    """The paper's lines for one of the report's tables; none if it has no such table."""
    return TABLES[table](files.read_json(FIGURES)) if table in TABLES else []


def _entry(scale: str, language: str, values: dict[str, float | None]) -> Stated:
    known = {name: value for name, value in values.items() if value is not None}
    return Stated(f"{scale} ({SIZES[scale]})", language, known)


def _losses(loss: dict[str, float]) -> dict[str, float | None]:
    columns = {
        "reference": "skip",
        "random": "random",
        "gate": "ours",
        "oracle": "oracle",
        "all UPDATE": "update_1",
    }
    return {head: loss.get(name) for head, name in columns.items()}


def main(figures: Figures) -> list[Stated]:
    """Losses, recovery and rate on Python."""
    return [
        _entry(
            scale,
            TRAINED,
            {
                **_losses(loss[TRAINED]),
                "recovery %": figures["main_results"][scale]["recovery"],
                "rate %": figures["main_results"][scale]["actual_rate"],
                "nominal cost": figures["relative_flops"]["ponder_50"],
            },
        )
        for scale, loss in figures["loss_nats"].items()
    ]


def ood(figures: Figures) -> list[Stated]:
    """Losses on the other languages."""
    return [
        _entry(scale, language, _losses(loss))
        for scale, languages in figures["loss_nats"].items()
        for language, loss in languages.items()
        if language != TRAINED
    ]


def correlation(figures: Figures) -> list[Stated]:
    """Pearson's r, where it is stated."""
    return [
        _entry(scale, language, {"Pearson r": r})
        for scale, languages in figures["correlation_pearson"].items()
        for language, r in languages.items()
    ]


def accuracy(figures: Figures) -> list[Stated]:
    """Agreement with the oracle."""
    return [
        _entry(scale, TRAINED, {"random %": row["random"], "gate %": row["ours"]})
        for scale, row in figures["decision_accuracy"].items()
    ]


def random_vs_gate(figures: Figures) -> list[Stated]:
    """Losses of Random and the gate on Python."""
    return [
        _entry(scale, TRAINED, {"random": row[TRAINED]["random"], "gate": row[TRAINED]["ours"]})
        for scale, row in figures["loss_nats"].items()
    ]


def dense(figures: Figures) -> list[Stated]:
    """SKIP and UPDATE on every chunk."""
    return [
        _entry(scale, language, {"skip loss": loss["skip"], "update loss": loss["update_1"]})
        for scale, languages in figures["loss_nats"].items()
        for language, loss in languages.items()
    ]


def shuffled(figures: Figures) -> list[Stated]:
    """Losses on plain and shuffled input."""
    heads = {"skip": "reference", "ours": "gate"}
    kinds = {"normal": "plain", "shuffled": "shuffled"}
    return [
        _entry(
            scale,
            TRAINED,
            {f"{heads[a]} {kinds[k]}": row[k][a] for k in kinds for a in heads},
        )
        for scale, row in figures["shuffled"].items()
    ]


def diagonal(figures: Figures) -> list[Stated]:
    """Losses with and without the diagonal."""
    heads = {"skip": "reference", "ours": "gate"}
    kinds = {"k0": "plain", "k-1": "strict"}
    return [
        _entry(
            scale,
            TRAINED,
            {f"{heads[a]} {kinds[k]}": row[a][k] for k in kinds for a in heads},
        )
        for scale, row in figures["diagonal"].items()
    ]


def delta(figures: Figures) -> list[Stated]:
    """The delta signal; its capture is as stated, see the check of the paper."""
    row = figures["delta_signal_small"]
    values = {
        "Pearson r": row["pearson"],
        "Spearman": row["spearman"],
        "top share loss": row["loss"]["improvement_topk"],
        "top share capture %": row["stated_capture"]["topk"],
        "top share accuracy %": row["decision_accuracy"]["topk"],
        "threshold capture at own rate %": row["stated_capture"]["threshold"],
        "threshold accuracy %": row["decision_accuracy"]["threshold"],
        "top share overlap %": row["top50_overlap"],
    }
    return [_entry("small", TRAINED, values)]


def cost(figures: Figures) -> list[Stated]:
    """The nominal cost of each way to run, by metric; `language` holds its name."""
    names = {"skip": "never", "update_1": "always", "ponder_50": "gate at one half"}
    return [
        Stated("", name, {"cost_nominal": figures["relative_flops"][key]})
        for key, name in names.items()
    ]


TABLES: dict[str, Callable[[Figures], list[Stated]]] = {
    "main": main,
    "ood": ood,
    "correlation": correlation,
    "accuracy": accuracy,
    "random_vs_gate": random_vs_gate,
    "dense": dense,
    "shuffled": shuffled,
    "diagonal": diagonal,
    "delta": delta,
    "cost": cost,
}
