"""From scores and gates to results: the headline as JSON, every table as Parquet, the plots."""

from pathlib import Path
from typing import Any

from ponderttt import (
    cost,
    files,
    gate,
    measure,
    paper,
    params,
    plots,
    provenance,
    result_tables,
    results,
    stage,
    streams,
    tables,
)
from ponderttt.measure import headline_policy
from ponderttt.results import ARM_POLICIES, ORACLES
from ponderttt.rows import Measured, Row, label, to_arrow
from ponderttt.streams import Key, Stream

OUT = Path("data/metrics")
HEADLINE = Path("metrics/metrics.json")
ORIGIN = Path("metrics/provenance.json")
PLACES = 6  # decimals in the headline file
TABLE_OF = {"shuffled": "shuffled", "strict": "diagonal"}


def make(view: Any) -> None:
    """Every statistic of every stream, as params say."""
    rows: list[Row] = []
    kept: dict[Key, Measured] = {}
    drawn = plots.Plots(streams=len(streams.keys(view)))
    for number, key in enumerate(streams.keys(view)):
        stream = streams.read(key)
        traces = gate.read(number, stream)
        measured = measure_stream(stream, traces, view)
        rows += stream_rows(measured, stream, view)
        kept[key] = measured.keep(compared(view.gate), [view.gate.signal])
        drawn.add(stream, traces, view)
    rows += joint_rows(kept, view) + results.seed_curves(rows, view.gate) + paper.rows()
    write_tables(rows)
    files.write_json(HEADLINE, headline(rows, view))
    files.write_json(ORIGIN, provenance.collect(view))
    drawn.write(rows, view)


def measure_stream(stream: Stream, traces: measure.Traces, view: Any) -> Measured:
    """All statistics of one stream at the target rate."""
    values = measure.measure(stream, traces, view.gate, view.metrics)
    names = tuple(sorted(set(stream.clusters(view.metrics.cluster))))
    resamples = view.metrics.resamples
    return Measured(
        key=stream.key, n=len(stream), clusters=names, resamples=resamples, values=values
    )


def stream_rows(measured: Measured, stream: Stream, view: Any) -> list[Row]:
    """The tables that need only this stream."""
    found = list(measured.rows())
    rows = label("all", found)
    if stream.key.variant != "plain":
        return rows
    rows += results.paper_tables(found, view.gate, view.corpus.train_language)
    rows += results.signal_table(measured)
    if stream.key.language == streams.headline_language(view):
        rows += cost.cost_table(measured, view.gate)
    curve = results.curve_values(stream, view.gate, view.metrics)
    return rows + label("curve", measured.rows(curve))


def compared(settings: params.Gate) -> tuple[str, ...]:
    """The policies that are compared between streams."""
    return (headline_policy(settings), "random", "always", *ORACLES, *ARM_POLICIES)


def joint_rows(kept: dict[Key, Measured], view: Any) -> list[Row]:
    """The tables that put streams side by side."""
    rows: list[Row] = []
    for key, measured in kept.items():
        table = TABLE_OF.get(key.variant)
        if table:
            plain = kept[key._replace(variant="plain")]
            rows += results.variant_table(table, plain, measured, headline_policy(view.gate))
        elif key.seed == view.run.seeds[0]:
            runs = [kept[key._replace(seed=seed)] for seed in view.run.seeds]
            rows += results.seed_table(runs, view.gate)
    return rows


def write_tables(rows: list[Row]) -> None:
    """One file per table, all of one schema."""
    work = stage.work_folder("metrics", sorted({row["table"] for row in rows}))
    for name in sorted({row["table"] for row in rows}):
        table = to_arrow([row for row in rows if row["table"] == name])
        tables.write(work / f"{name}.parquet", table, result_tables.METRICS)
    stage.publish(work, OUT)


def headline(rows: list[Row], view: Any) -> dict[str, Any]:
    """The few numbers that experiments are compared by: means over the seeds."""
    ours, r = headline_policy(view.gate), view.metrics.reference
    wanted = {
        **{f"loss_{arm}": (f"arm_{arm}", None, "loss") for arm in streams.ARMS},
        "loss_gate": (ours, r, "loss"),
        "rate": (ours, None, "rate"),
        "recovery": (ours, r, "recovery"),
        "capture": (ours, r, "capture"),
        "capture_matched": (ours, r, "capture_matched"),
        "pearson": (view.gate.signal, r, "pearson"),
    }
    found: dict[str, Any] = {}
    for row in rows:
        if row["table"] != "seeds" or row["rate"] is not None:
            continue
        about = (row["policy"] or row["signal"], row["reference"], row["metric"])
        place = found.setdefault(row["scale"], {}).setdefault(row["language"], {"n": row["n"]})
        for name, what in wanted.items():
            if about == what:
                place[name] = None if row["value"] is None else round(row["value"], PLACES)
    return found
