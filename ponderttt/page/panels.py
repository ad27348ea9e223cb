"""The report's figures in groups: a panel per language, with a key and a caption."""

from typing import Any

from markupsafe import Markup

from ponderttt.page import figures
from ponderttt.page.lookup import Place, Results
from ponderttt.page.sheets import Run
from ponderttt.page.svg import HEIGHT, WIDTH
from ponderttt.signals import BY_NAME, LABEL_FREE
from ponderttt.streams import REFERENCES

Group = dict[str, Any]
LARGE = (560, 350)

POLICY_KEY = (("k-random dash", "Random"), ("k-ours", "gate"), ("k-oracle", "oracle"))
DECISION_KEY = (("k-ours dot", "UPDATE"), ("k-skip dot", "SKIP"))


def group(panels: list[tuple[str, str]], key: Any, caption: str) -> Group:
    """Drawings side by side; those without data are left out."""
    drawn = [{"title": title, "svg": Markup(svg)} for title, svg in panels if svg]  # noqa: S704
    return {"panels": drawn, "key": key, "caption": caption}


def draw(found: dict[str, Any], view: Any) -> dict[str, Group]:
    """Every figure of the page."""
    results, run, read = found["results"], found["run"], found["read"]
    over_seeds = Place(run.scales[0], None, run.language)
    return {
        "summary": loss_group(results, run, [over_seeds], view, LARGE),
        "loss": loss_group(results, run, first_seed(run, results.places("curve")), view),
        "capture": capture_group(results, run),
        "forest": forest_group(results, run),
        "scatter": scatter_group(results, run, read),
        "threshold": threshold_group(run, read),
        "rate": rate_group(run, read, view),
        "signals": signals_group(results, run),
        "history": history_group(found["layers"]),
    }


def first_seed(run: Run, places: list[Place]) -> list[Place]:
    """Figures show the first seed; tables have the others."""
    return [place for place in places if place.seed == run.seeds[0]]


def title(run: Run, scale: str, language: str) -> str:
    """The name of a panel: the scale only where there are several."""
    return language if len(run.scales) == 1 else f"{language}, {scale}"


def loss_group(
    results: Results,
    run: Run,
    places: list[Place],
    view: Any,
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> Group:
    """Loss against update rate."""
    panels = [
        (
            f"{title(run, p.scale, p.language)}, against {run.reference}",
            figures.loss_against_rate(results, p, run.ours, run.reference, view.gate.rate, size),
        )
        for p in places
    ]
    caption = (
        "Loss at update rates from 0 (none) to 1 (every chunk). Gate: target rates 0.1 to 0.9, at "
        f"the rate it came to. The bar stands at the rate it came to for target {view.gate.rate:g} "
        "(dotted): paired 95 % interval of the gate's distance from Random at that rate."
    )
    return group(panels, POLICY_KEY, caption)


def capture_group(results: Results, run: Run) -> Group:
    """Capture against the target rate, every signal."""
    panels = [
        (
            f"{title(run, p.scale, p.language)}: best is "
            + figures.best_signal(results, p, run.reference),
            figures.capture_against_rate(results, p, run.signal, run.reference),
        )
        for p in first_seed(run, results.places("curve"))
    ]
    key = (("k-ours", run.signal), ("k-best", "best on average"), ("k-random", "other signals"))
    caption = "Online gates on every label-free signal. 0 is Random, 1 the oracle."
    return group(panels, key, caption)


def forest_group(results: Results, run: Run) -> Group:
    """Capture and recovery of the gate per language, both references."""
    panels = []
    for metric, name in (("capture_matched", "capture at its own rate"), ("recovery", "recovery")):
        rows = [
            (
                f"{title(run, p.scale, p.language)}, {r}",
                "ours" if r == run.reference else "other",
                results.find("all", p, metric, policy=run.ours, reference=r),
            )
            for p in first_seed(run, results.places("correlation"))
            for r in REFERENCES
        ]
        panels.append((name.capitalize(), figures.forest(rows, name)))
    key = (("k-ours", f"against {run.reference}"), ("k-random", "against the other reference"))
    caption = (
        f"Whole lines: 95 % intervals over {run.units}; dashed: if chunks were independent. "
        "0 is Random (capture) or no update (recovery), 1 the oracle. What goes further is cut, "
        "with an arrow."
    )
    return group(panels, key, caption)


def scatter_group(results: Results, run: Run, read: Any) -> Group:
    """Signal against advantage."""
    panels = []
    for stream, traces in read:
        key = stream.key
        place = Place(key.scale, key.seed, key.language)
        about = {"signal": run.signal, "reference": run.reference}
        r = results.find("correlation", place, "pearson", **about)
        svg = figures.signal_against_advantage(
            stream, traces[run.ours], run.signal, run.reference, r
        )
        panels.append((f"{title(run, key.scale, key.language)}: {figures.r_words(r)}", svg))
    caption = (
        "One point per chunk (shades where there are many), a least-squares line, Pearson's r."
    )
    return group(panels, DECISION_KEY, caption)


def threshold_group(run: Run, read: Any) -> Group:
    """Signals and threshold over the stream."""
    panels = [
        (
            title(run, s.key.scale, s.key.language),
            figures.threshold_over_time(s, traces[run.ours], run.signal),
        )
        for s, traces in read
    ]
    key = (*DECISION_KEY, ("k-ink", "threshold"), ("area", "calibration"))
    return group(panels, key, "Signals in the order of the stream and the threshold they met.")


def rate_group(run: Run, read: Any, view: Any) -> Group:
    """The running update rate over the stream."""
    panels = [
        (
            title(run, s.key.scale, s.key.language),
            figures.rate_over_time(s, traces[run.ours], view.gate.rate),
        )
        for s, traces in read
    ]
    key = (("k-ours", "running rate"), ("area", "calibration"))
    return group(panels, key, f"Dotted: the target, {view.gate.rate:g}.")


def signals_group(results: Results, run: Run) -> Group:
    """Every signal's capture on the headline language, both references."""
    place = Place(run.scales[0], run.seeds[0], run.language)
    panels = []
    for r in REFERENCES:
        rows = {
            s: results.find("signals", place, "capture_topk", signal=s, reference=r)
            for s in LABEL_FREE
        }
        order = sorted(LABEL_FREE, key=lambda s: -(rows[s]["value"] or 0.0))
        lines = [
            (f"{s} ({BY_NAME[s].sees})", "ours" if s == run.signal else "best", rows[s])
            for s in order
        ]
        svg = figures.forest(lines, "capture, lookahead at the target rate")
        panels.append((f"{title(run, place.scale, place.language)}, against {r}", svg))
    key = (("k-ours", run.signal), ("k-best", "other label-free signals"))
    caption = f"In brackets what a signal sees. Whole lines: 95 % intervals over {run.units}."
    return group(panels, key, caption)


def history_group(layers: dict[tuple[str, int], dict[str, Any]]) -> Group:
    """Training curves of every scale."""
    panels = []
    for scale in dict.fromkeys(scale for scale, _ in layers):
        runs = [layer["history"] for (name, _), layer in layers.items() if name == scale]
        for column, name in (("ce", "CE, nats"), ("recon", "inner loss")):
            panels.append((scale, figures.history(runs, column, name)))
    return group(panels, (), "Each step faint, a running mean strong; one line per seed.")
