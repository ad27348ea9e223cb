"""The report: whole, honest about gaps, safe with any source text, the same bytes every time."""

import dataclasses
import doctest
import html
import json
import math
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pages
import pyarrow.parquet as pq
import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from ponderttt import gate, paper, report, streams
from ponderttt.page import (
    beside,
    cells,
    explorer,
    figures,
    lookup,
    pivot,
    sheets,
    summary,
    svg,
    verdicts,
)
from ponderttt.page.cells import DASH, cell, show
from ponderttt.page.lines import all_sheets


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A small project in the current folder."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("project"))
    view = pages.small_view()
    pages.build(view)
    yield view
    os.chdir(before)


@pytest.fixture(scope="module")
def page(project: SimpleNamespace) -> str:
    report.make(project)
    return report.OUT.read_text(encoding="utf-8")


def examples_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="examples">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize("module", [svg, cells, explorer, figures, summary, verdicts])
def test_examples_in_docstrings(module: object) -> None:
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0


def test_same_inputs_same_bytes(project: SimpleNamespace, page: str) -> None:
    report.make(project)
    assert report.OUT.read_text(encoding="utf-8") == page
    assert len(page.encode()) < report.LIMIT


def test_nothing_is_fetched_and_nothing_foreign_runs(page: str) -> None:
    assert "Content-Security-Policy" in page
    assert "default-src &#39;none&#39;" in page
    assert "unsafe" not in page
    assert not re.search(r"https?://|\bsrc=|@import|url\(", page)
    assert page.count("<script") == 2


def test_no_number_is_nan(page: str) -> None:
    shown = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.S)
    assert not re.search(r"\b(nan|NaN|inf|None|undefined)\b(?! for| in)", shown)


def test_every_table_and_figure_is_there(page: str) -> None:
    for sheet in sheets.SHEETS:
        assert f'id="t-{sheet.name}"' in page
    assert "Not measured in this run." not in page
    assert page.count("<svg") == 1 + 8 * 2  # eight groups, each with two panels
    for drawing in re.findall(r"<svg.*?</svg>", page, re.S):
        ET.fromstring(drawing)


def test_every_column_finds_its_numbers(project: SimpleNamespace) -> None:
    found = report.gather(project)
    for name, sheet in all_sheets(found["results"], found["run"]).items():
        ours = [line for block in sheet["blocks"] for line in block.lines if not line.paper]
        assert ours, name
        for i, head in enumerate(sheet["columns"]):
            reasons = {line.cells[i].title for line in ours}
            assert reasons != {"not measured in this run"}, (name, head)


def test_a_number_of_the_page_is_that_of_the_table(page: str) -> None:
    rows = pq.read_table("data/metrics/main.parquet").to_pylist()
    row = next(
        r
        for r in rows
        if (r["policy"], r["reference"], r["metric"]) == ("ema_recon", "skip", "recovery")
    )
    interval = cells.between(row["low"], row["high"], "percent")
    assert f">{show(row['value'], 'percent')}<small>{interval}</small>" in page


def test_the_paper_stands_beside(page: str) -> None:
    by_name = {sheet.name: {c.head for c in sheet.columns} for sheet in sheets.SHEETS}
    by_name |= {layout.name: set(layout.columns) for layout in pivot.PIVOTS}
    for name in beside.TABLES:
        for entry in beside.stated(name):
            assert set(entry.values) <= by_name[name], name
    assert "python: the paper, small (124M)" in page
    assert "89.2" in page  # the recovery that the paper states for it


def test_the_lead_tells_what_the_layer_was_trained_on(page: str) -> None:
    assert "trained for 30 steps on 77 chunks of python" in page


def test_the_training_stage_counts_its_chunks(scored: Path) -> None:
    card = json.loads((scored / "data/ttt/scale=tiny/seed=0/config.json").read_text())
    paths = (scored / "data/chunks/scale=tiny/set=train").glob("*.parquet")
    assert card["chunks"] == sum(pq.read_metadata(path).num_rows for path in paths) > 0


def test_signals_are_judged_by_their_rows(page: str) -> None:
    rows = pq.read_table("data/metrics/signals.parquet").to_pylist()
    better = {
        row["signal"]
        for row in rows
        if row["metric"].split("_minus_recon")[0] in verdicts.JUDGED
        and row["metric"].endswith("_minus_recon")
        and (row["language"], row["reference"]) == ("python", "skip")
        and row["value"] > 0
        and row["p_holm"] < 0.05
    }
    assert better == {"gain_kl"}  # the better signal of the synthetic scores
    (words,) = re.findall(r"<li>python, against skip: (.*?)</li>", page)
    assert words.startswith("better than recon after Holm: gain_kl (")
    assert len(re.findall(r"<li>(?:python|go), against (?:skip|base): ", page)) == 4


def test_a_verdict_needs_something_to_test() -> None:
    row = {"signal": "delta", "value": 0.2, "p_holm": 0.2}
    none = {"signal": "delta", "value": None, "p_holm": None}
    assert verdicts.verdict({"capture": [none]}) == "no signal can be compared with recon."
    told = verdicts.verdict({"capture": [row], "Pearson r": [none]})
    assert told == "no signal is better than recon after Holm. Not tested: Pearson r."
    worse = verdicts.verdict({"capture": [row | {"value": -0.2, "p_holm": 0.001}]})
    assert worse == "no signal is better than recon after Holm."


def test_changed_code_is_told() -> None:
    assert summary.commit({"commit": "a" * 40, "dirty": True}) == "a" * 12 + " with changes"
    assert summary.commit({"commit": "a" * 40, "dirty": False}) == "a" * 12
    assert "not in a repository" in summary.commit({"commit": None, "dirty": None})


def test_the_bar_stands_where_the_caption_says(project: SimpleNamespace) -> None:
    found = report.gather(project)
    results, place = found["results"], lookup.Place("smollm2-135m", None, "python")
    rate = results.find("seeds", place, "rate", policy="ema_recon")["value"]
    drawing = figures.loss_against_rate(results, place, "ema_recon", "skip", 0.5)
    panel = svg.Panel((0.0, 1.0), (0.0, 1.0))
    (bar,) = re.findall(r'class="interval ours" x1="([\d.]+)" y1="[\d.]+" x2="([\d.]+)"', drawing)
    assert abs(rate - 0.5) > 0.05
    assert float(bar[0]) == float(bar[1]) == pytest.approx(panel.at((rate, 0))[0], abs=0.1)


def test_a_missing_number_is_a_dash_with_its_reason() -> None:
    gap = cell({"value": None, "reason": "one seed has no spread"}, "loss")
    assert (gap.text, gap.title) == (DASH, "one seed has no spread")
    bare = cell({"value": 1.0, "low": None, "reason": "no interval: not resampled"}, "loss")
    assert (bare.text, bare.interval, bare.title) == (
        "1.000",
        f"[{DASH}]",
        "no interval: not resampled",
    )


def test_dashes_of_the_page_have_reasons(page: str) -> None:
    assert re.search(rf'<td title="one seed has no spread[^"]*">{DASH}', page)
    assert not re.search(rf"<td>{DASH}", page)


def test_a_table_that_was_not_made_is_said_to_be_missing(project: SimpleNamespace) -> None:
    path = Path("data/metrics/entropy.parquet")
    kept = path.read_bytes()
    path.unlink()
    try:
        page = report.fit(report.gather(project), project)
    finally:
        path.write_bytes(kept)
    assert page.count("Not measured in this run.") == 1


def test_hostile_source_stays_text(page: str) -> None:
    assert "<script>alert(1)" not in page
    assert "<b>python</b>" not in page
    texts = {chunk["text"] for chunk in examples_of(page)["chunks"]}
    assert all("".join(pages.HOSTILE) in text for text in texts)


def test_examples_say_what_the_gate_did(project: SimpleNamespace, page: str) -> None:
    chunks = examples_of(page)["chunks"]
    assert {c["language"] for c in chunks} == {"python", "go"}
    assert {"calibration", "skip", "update"} == {c["decision"] for c in chunks}
    for chunk in chunks:
        assert (chunk["threshold"] is None) == (chunk["decision"] == "calibration")
        if chunk["decision"] != "calibration":
            above = chunk["signals"]["recon"][0] > chunk["threshold"]
            assert above == (chunk["decision"] == "update")


def test_examples_are_left_out_when_they_do_not_fit(
    project: SimpleNamespace, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = report.render(
        report.context(report.gather(project), project),
        [],
        {"text": "", "languages": [], "references": []},
    )
    room = (len(page.encode()) + len(empty.encode())) // 2
    monkeypatch.setattr(report, "LIMIT", room)
    smaller = report.fit(report.gather(project), project)
    assert len(smaller.encode()) <= room
    shown = len(examples_of(smaller)["chunks"])
    assert 2 * report.FEWEST < shown < 24
    assert f"{shown} chunks of the test sets" in smaller
    assert "24 were asked for" in smaller


def test_a_few_examples_stay_on_a_page_that_is_full(
    project: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    once = explorer.read_tokens
    monkeypatch.setattr(
        explorer, "read_tokens", lambda key, folder: read.append(key.language) or once(key, folder)
    )
    monkeypatch.setattr(report, "LIMIT", 1)
    full = report.fit(report.gather(project), project)
    languages = [chunk["language"] for chunk in examples_of(full)["chunks"]]
    assert languages == ["python"] * report.FEWEST + ["go"] * report.FEWEST
    assert f"{2 * report.FEWEST} chunks of the test sets" in full
    assert "24 were asked for" in full
    assert read == ["python", "go"]  # once, however many rounds it took


def test_a_run_without_tokens_has_a_page(project: SimpleNamespace) -> None:
    view = pages.small_view(examples=0)
    page = report.fit(report.gather(view), view)
    assert examples_of(page)["chunks"] == []


losses = st.one_of(st.none(), st.floats(0, 30, width=32))


@given(st.lists(st.tuples(st.text(max_size=90), losses, losses, losses), min_size=1, max_size=20))
def test_packing_keeps_text_and_losses(tokens: list[tuple]) -> None:
    pieces, base, skip, update = map(list, zip(*tokens, strict=True))
    given = {"pieces": pieces, "nll_base": base, "nll_skip": skip, "nll_update": update}
    packed = explorer.pack([given])
    chunk, steps = packed["chunks"][0], packed["steps"]
    assert chunk["text"] == "".join(pieces)
    for code, loss in zip(explorer.unpack(chunk["update"]), update, strict=True):
        known = None if code == 0 else (code - 1) * steps["loss"]
        assert known is None if loss is None else math.isclose(known, loss, abs_tol=steps["loss"])
    gaps = explorer.differences(given, "skip")
    for code, gap in zip(explorer.unpack(chunk["gap_skip"]), gaps, strict=True):
        saved = (code - explorer.MIDDLE) * steps["gap"]
        assert math.isclose(saved, gap or 0.0, abs_tol=steps["gap"])


@given(st.lists(st.integers(0, 500), max_size=30))
def test_lengths_are_read_back(lengths: list[int]) -> None:
    found, total = [], 0
    for digit in "".join(map(explorer.length_digits, lengths)):
        total += explorer.DIGITS.index(digit)
        if digit != explorer.DIGITS[-1]:
            found.append(total)
            total = 0
    assert found == lengths


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_lie_inside_and_are_few(low: float, width: float) -> None:
    found = svg.ticks(low, low + width)
    assert len(found) <= 12
    assert all(low - 1e-6 * width - 1e-9 <= t <= low + width * (1 + 1e-6) + 1e-9 for t in found)


def test_many_chunks_become_a_density() -> None:
    stream = streams._to_stream(
        pages.Key("s", 0, "python", "plain"), synthetic.scores(5000, seed=1)
    )
    trace = gate.ema(stream.signals["recon"], 0.5, 0.1, 16)
    r = {"value": 0.6, "low": 0.5, "high": 0.7}
    drawing = figures.signal_against_advantage(stream, trace, "recon", "skip", r)
    assert "cell d6" in drawing
    assert "r = 0.60 [0.50, 0.70]" in html.unescape(drawing)
    assert len(drawing) < 60_000


def test_the_verdict_follows_the_interval() -> None:
    assert summary.verdict({"low": 0.1, "high": 0.2}).startswith("beats")
    assert summary.verdict({"low": -0.2, "high": -0.1}).startswith("is worse")
    assert "too few" in summary.verdict({"low": None, "high": None})


def test_a_share_beyond_the_axis_is_an_arrow_with_its_number() -> None:
    rows = [("java", "ours", {"value": -47.8}), ("go", "ours", {"value": 0.4})]
    drawing = figures.forest([*rows, ("c", "ours", {"value": None})], "recovery")
    assert f"{figures.ARROWS[0]} {show(-47.8, 'r')}" in drawing
    assert drawing.count("<circle") == 1
    assert DASH in drawing
    assert figures.forest(rows[:0], "recovery") == ""


def test_a_constant_signal_has_no_fitted_line() -> None:
    assert figures.fit(np.ones(3), np.arange(3.0)) == []
    assert figures.fit(np.arange(3.0), 2 * np.arange(3.0)) == [(0.0, 0.0), (2.0, 4.0)]


def test_the_paper_is_checked_and_differences_are_marked() -> None:
    results = lookup.Results(paper.rows())
    sheet = pivot.other_tables(results)["paper"]
    assert sheet["heads"] == ["scale", "language", "what"]
    assert sheet["columns"] == ["stated", "recomputed", "differs by"]
    (block,) = sheet["blocks"]
    line = next(line for line in block.lines if "delta: capture of top-k" in line.heads)
    assert line.marked
    assert [c.text for c in line.cells[:2]] == ["0.905", "0.1556"]
    right = next(line for line in block.lines if "recovery of the gate" in line.heads)
    assert not right.marked
    assert right.cells[2].text == DASH


def test_several_scales_and_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    view = pages.small_view(examples=2)
    view.run = dataclasses.replace(
        view.run, scales=("smollm2-135m", "gpt2"), seeds=(0, 1), languages=("go",)
    )
    view.metrics = dataclasses.replace(view.metrics, cluster="repo")
    pages.build(view, chunks=40)
    report.make(view)
    page = report.OUT.read_text(encoding="utf-8")
    assert "go, gpt2" in page  # a panel of its own
    assert '<th scope="col" class="word">seed</th>' in page
    assert "one seed has no spread" not in page
    assert "with whole repositories as units" in page
    # Python, which was trained on, is not tested: the first language leads.
    assert "Held-out go" in page
    assert "t-main" in page
    assert page.count("Not measured in this run.") == 3  # main, shuffled, diagonal: python only
    named = set(re.findall(r"rows in <code>data/metrics/(\w+).parquet", page))
    assert named == {path.stem for path in Path("data/metrics").iterdir()} - {"all"}
    # The first screen shows means over both seeds, as metrics.json has them.
    loss = json.loads(Path("metrics/metrics.json").read_text())["smollm2-135m"]["go"]["loss_gate"]
    assert re.search(rf'<dt>Loss</dt><dd class="value"[^>]*>{show(loss, "gap")} ', page)
    assert "mean over seeds 0, 1." in page
    assert "Figures and folded tables show seed 0" in page
