"""Whether any signal is better than the paper's, in words, from the rows of the signal table."""

from ponderttt.page.lookup import Place, Results, Row
from ponderttt.signals import LABEL_FREE, PAPER
from ponderttt.streams import REFERENCES

LEVEL = 0.05
JUDGED = {"capture_topk": "capture", "capture_ema": "online capture", "pearson": "Pearson r"}


def signal_verdicts(results: Results, places: list[Place], *, scales: bool) -> list[str]:
    """One sentence per run and reference, which names the scale if there are several."""
    return [
        f"{place.scale + ', ' if scales else ''}{place.language}, against {r}: "
        + verdict(differences(results, place, r))
        for place in places
        for r in REFERENCES
    ]


def differences(results: Results, place: Place, reference: str) -> dict[str, list[Row]]:
    """The rows that compare each signal with the paper's, by what they are judged by."""
    return {
        words: [
            results.find(
                "signals", place, f"{metric}_minus_{PAPER}", signal=name, reference=reference
            )
            for name in LABEL_FREE
            if name != PAPER
        ]
        for metric, words in JUDGED.items()
    }


def verdict(compared: dict[str, list[Row]]) -> str:
    """Which signals are better than the paper's after Holm's correction, and by what.

    >>> row = {"signal": "delta", "value": 0.2, "p_holm": 0.01}
    >>> verdict({"capture": [row], "Pearson r": [row | {"p_holm": 0.06}]})
    'better than recon after Holm: delta (capture).'
    """
    tested = {how: [row for row in rows if tested_row(row)] for how, rows in compared.items()}
    judged = [how for how, rows in tested.items() if rows]
    better: dict[str, list[str]] = {}
    for how in judged:
        for row in tested[how]:
            if row["value"] > 0 and row["p_holm"] < LEVEL:
                better.setdefault(row["signal"], []).append(how)
    if not judged:
        return f"no signal can be compared with {PAPER}."
    untested = [how for how in compared if how not in judged]
    gap = f" Not tested: {', '.join(untested)}." if untested else ""
    if not better:
        return f"no signal is better than {PAPER} after Holm.{gap}"
    found = "; ".join(f"{name} ({', '.join(by)})" for name, by in better.items())
    return f"better than {PAPER} after Holm: {found}.{gap}"


def tested_row(row: Row) -> bool:
    """Whether there was anything to test."""
    return row.get("p_holm") is not None
