"""The paper's figures and what they give when computed again."""

import pytest

from ponderttt import paper, result_tables
from ponderttt.rows import to_arrow

CHECKS = {(c.what, c.scale, c.language): c for c in paper.all_checks()}


def find(what: str, scale: str = "small", language: str = "python") -> paper.Check:
    return CHECKS[what, scale, language]


def test_no_check_is_made_twice() -> None:
    assert len(CHECKS) == len(paper.all_checks())


@pytest.mark.parametrize(
    ("scale", "stated"), [("small", 0.892), ("medium", 0.828), ("large", 0.821), ("xl", 0.838)]
)
def test_stated_recovery_is_what_the_losses_give(scale: str, stated: float) -> None:
    found = find("recovery of the gate", scale)
    assert found.stated is not None
    assert found.stated.value == stated
    assert found.agrees


@pytest.mark.parametrize(("scale", "value"), [("medium", 0.279), ("large", 0.356), ("xl", 0.458)])
def test_the_gate_does_not_win_most_of_what_random_leaves(scale: str, value: float) -> None:
    found = find("capture of the gate, at least", scale)
    assert found.value == pytest.approx(value, abs=5e-4)
    assert found.agrees is False


def test_random_alone_recovers_most() -> None:
    shares = [c.value for key, c in CHECKS.items() if key[0] == "recovery of Random alone"]
    assert min(shares) == pytest.approx(0.56, abs=0.005)
    assert max(shares) == pytest.approx(0.81, abs=0.005)


def test_the_delta_table_contradicts_itself() -> None:
    found = find("delta: capture of top-k")
    assert found.stated is not None
    assert found.stated.value == 0.905
    assert found.value == pytest.approx(0.156, abs=5e-4)
    assert found.high < 0.18
    assert found.agrees is False


def test_what_only_rounding_sets_apart_agrees() -> None:
    assert find("delta: top-k above UPDATE_1, nats").agrees
    assert find("improvement on normal input").agrees
    assert find("cost, 1 + 2 rate").agrees
    assert find("loss of UPDATE_1 in the text", "large").agrees is False
    assert find("training chunks", "all").agrees is False


def test_rows_mark_only_what_differs() -> None:
    rows = to_arrow(paper.rows())
    assert rows.schema.equals(result_tables.METRICS)
    found = rows.to_pylist()
    assert all(row["table"] == "paper" and row["value"] is not None for row in found)
    marked = {
        (r["policy"], r["scale"], r["language"]) for r in found if r["metric"] == "differs_by"
    }
    python = {(what, scale) for what, scale, language in marked if language == "python"}
    random = "loss of Random, mean of both arms"
    assert python == {
        ("capture of the gate, at least", "medium"),
        ("capture of the gate, at least", "large"),
        ("capture of the gate, at least", "xl"),
        *(("accuracy of Random", scale) for scale in ("small", "medium", "large", "xl")),
        *((random, scale) for scale in ("small", "medium", "large", "xl")),
        ("delta: capture of top-k", "small"),
        ("delta: top-k below Random", "small"),
        ("delta: oracle below Random", "small"),
        ("loss of UPDATE_1 in the text", "large"),
        ("training chunks", "all"),
    }
    assert {what for what, _, language in marked if language != "python"} == {random}


def test_a_row_says_by_how_much_it_differs() -> None:
    rows = [r for r in paper.rows() if r["policy"] == "training chunks"]
    assert {r["metric"]: r["value"] for r in rows} == {
        "stated": 160_000,
        "recomputed": 320_000,
        "differs_by": 160_000,
    }
