"""The report: everything gathered into one plain dict, and rendered as one page.

The page is a single file without a clock in it: the same inputs give the same bytes. It lives in
git, so it is kept near a size; examples are left out, all but a few, and the page says so, if
they do not fit.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ponderttt import files, gate, metrics, streams, tables
from ponderttt.gate import Trace
from ponderttt.measure import headline_policy
from ponderttt.page import explorer, lookup, summary
from ponderttt.page.lines import all_sheets
from ponderttt.page.lookup import Place, Results
from ponderttt.page.panels import draw
from ponderttt.page.pivot import other_tables
from ponderttt.page.sheets import Run
from ponderttt.streams import Stream

OUT = Path("metrics/report.html")
LAYERS = Path("data/ttt")
HERE = Path(__file__).parent / "page"
LIMIT = 900_000  # bytes of the page
FEWEST = 3  # examples of each stream that stay even if the page is larger then

Read = list[tuple[Stream, dict[str, Trace]]]


def make(view: Any) -> None:
    """Gather, render, write."""
    page = fit(gather(view), view)
    with files.atomic(OUT) as temporary:
        temporary.write_text(page, encoding="utf-8")


def fit(found: dict[str, Any], view: Any) -> str:
    """The page with as many examples per language as fit in its size."""
    filled = context(found, view)
    ours = found["run"].ours
    kept = [explorer.examples(stream, traces, ours) for stream, traces in found["read"]]
    count = view.report.examples
    while True:
        chosen = [example for stream in kept for example in explorer.take(stream, count)]
        page = render(filled, chosen, summary.explorer_words(found, chosen, view))
        size = len(page.encode())
        if size <= LIMIT or count <= FEWEST:
            return page
        count = max(FEWEST, min(count - 1, int(count * LIMIT / size)))


def gather(view: Any) -> dict[str, Any]:
    """All that the page is made from."""
    results = lookup.read(metrics.OUT)
    read = read_plain(view)
    run = Run(
        ours=headline_policy(view.gate),
        signal=view.gate.signal,
        reference=view.metrics.reference,
        cluster=view.metrics.cluster,
        language=streams.headline_language(view),
        scales=view.run.scales,
        seeds=view.run.seeds,
    )
    return {
        "results": results,
        "read": read,
        "run": run,
        "origin": files.read_json(metrics.ORIGIN),
        "layers": {k: read_layer(*k) for k in layer_keys(view)},
    }


def read_plain(view: Any) -> Read:
    """Streams of plain input with what every policy decided; the first seed of each scale."""
    found = []
    for number, key in enumerate(streams.keys(view)):
        if key.variant == "plain" and key.seed == view.run.seeds[0]:
            stream = streams.read(key)
            found.append((stream, gate.read(number, stream)))
    return found


def layer_keys(view: Any) -> list[tuple[str, int]]:
    """The layers that were trained."""
    return [(scale, seed) for scale in view.run.scales for seed in view.run.seeds]


def read_layer(scale: str, seed: int) -> dict[str, Any]:
    """A layer's card and training history."""
    folder = LAYERS / f"scale={scale}/seed={seed}"
    history = tables.read(folder / "history.parquet", tables.HISTORY)
    return {"card": files.read_json(folder / "config.json"), "history": history}


def render(
    filled: dict[str, Any], chosen: Sequence[explorer.Example], words: dict[str, Any]
) -> str:
    """The page as text."""
    packed = explorer.pack(chosen)
    style, script = (Markup(read_own(name)) for name in ("page.css", "page.js"))  # noqa: S704
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(
        **filled,
        explorer={**words, "deep": packed["deep"]},
        policy=content_policy(style, script),
        style=style,
        script=script,
        examples=Markup(script_json(packed)),  # noqa: S704
    )


def read_own(name: str) -> str:
    """A file of this package."""
    return (HERE / name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content_policy(style: str, script: str) -> str:
    """Allow this style and this script, by their hashes, and nothing else."""
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    rules = (
        "default-src 'none'",
        "img-src data:",
        f"style-src 'sha256-{hashes[0]}'",
        f"script-src 'sha256-{hashes[1]}'",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(rules)


def context(found: dict[str, Any], view: Any) -> dict[str, Any]:
    """The words, tables and figures of the page."""
    run: Run = found["run"]
    results: Results = found["results"]
    place = Place(run.scales[0], None, run.language)
    n = results.find(summary.TABLE, place, "loss", policy="arm_update")
    return {
        "scales": ", ".join(run.scales),
        "lead": summary.lead(found, view),
        "headline": summary.headline(results, place, run, n),
        "tiles": summary.Headline(results, place, run).tiles(),
        "facts": summary.facts(found, view),
        "units": run.units,
        "seed_note": summary.seed_note(run),
        "sheets": all_sheets(results, run) | other_tables(results),
        "figures": draw(found, view),
        "limits": summary.limits(n, run, view),
        "footer": "This page holds all its data and asks nothing of the network. "
        "The same inputs give the same bytes.",
    }
