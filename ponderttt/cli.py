"""`ponderttt plan` and `ponderttt doctor`: what a run will take, and whether this machine can."""

import argparse
import json
import sys
from collections.abc import Sequence

from transformers.utils import logging as transformers_logging

from ponderttt import doctor, params, plan, plan_text, shapes, speed
from ponderttt.cores import Split, split_cores
from ponderttt.errors import UserError
from ponderttt.layers import config_for
from ponderttt.params import Params

SECONDS = 10.0
ROWS = 4  # of a trial's batch; each row of a larger one takes as long


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    transformers_logging.set_verbosity_error()
    given = _parser().parse_args(arguments)
    try:
        if given.command == "plan":
            return show_plan(as_json=given.json, seconds=given.seconds)
        return doctor.show(as_json=given.json)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ponderttt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser(
        "plan", help="chunks, operations, time, disk and memory of the run in params.yaml"
    )
    planning.add_argument(
        "--seconds", type=float, default=SECONDS, help="length of the measurement; 0: none"
    )
    checking = commands.add_parser("doctor", help="what stands in the way of a run, with remedies")
    for command in (planning, checking):
        command.add_argument("--json", action="store_true", help="for programs")
    return parser


def show_plan(*, as_json: bool, seconds: float) -> int:
    """Print the plan of params.yaml."""
    settings = params.load()
    split = split_cores(settings.ray)
    found = {name: shapes.find(name, settings.scales[name]) for name in settings.run.scales}
    speeds = measure(settings, found, split, seconds) if seconds > 0 else None
    report = plan_text.report(settings, plan.make(settings, found, split), speeds)
    print(json.dumps(report, indent=2) if as_json else plan_text.text(report))
    return 0


def measure(
    settings: Params, found: dict[str, shapes.Shape | None], split: Split, seconds: float
) -> speed.Speeds | None:
    """Speeds with the smallest of the scales; the others follow from their operations."""
    known = {name: shape for name, shape in found.items() if shape}
    if not known:
        return None
    name = min(known, key=lambda n: known[n].parameters)
    shape, config = known[name], shapes.config_of(name, settings.scales[name])
    assert config is not None
    ranks = max(1, split.workers)
    trial = speed.Trial(
        config=config[0],
        shape=shape,
        layer=config_for(settings.ttt, {"heads": shape.heads, "width": shape.width}),
        length=settings.chunks.length,
        body_rows=min(ROWS, settings.hidden.batch),
        score_rows=min(ROWS, settings.scores.batch),
        train_rows=min(ROWS, -(-settings.size.batch // ranks)),
        max_logits_mb=settings.hidden.max_logits_mb,
    )
    return speed.measure(trial, split, seconds)
