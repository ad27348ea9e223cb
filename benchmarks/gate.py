"""Time the gate, the bootstrap, and the last three stages at the paper's size, on made-up scores.

python benchmarks/gate.py
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pages  # noqa: E402
import synthetic  # noqa: E402

from ponderttt import bootstrap, gate, metrics, params, report, stage, streams  # noqa: E402

ROWS = 1_000_000
CHUNKS = 16_000
RESAMPLES = 10_000


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def tell(what: str, taken: float, allowed: float) -> None:
    """One line: seconds taken beside seconds allowed."""
    print(f"{what:58} {taken:7.2f} s   allowed {allowed:5.1f} s")


def last_stages() -> None:
    """Gate, metrics and report, four languages and the variants, all policies."""
    view = stage.view(params.load(ROOT / "params.yaml"), pages.READS)
    synthetic.write_all(streams.SCORES, view, CHUNKS)
    pages.write_rest(view, view.scores.token_chunks, length=view.chunks.length)
    taken = {
        made.__name__: seconds(lambda m=made: m.make(view)) for made in (gate, metrics, report)
    }
    for name, each in taken.items():
        print(f"  {name.removeprefix('ponderttt.'):56} {each:7.2f} s")
    count = f"{len(streams.keys(view))} streams x {CHUNKS} chunks x {len(gate.policies())} policies"
    tell(f"together, {count}", sum(taken.values()), 60)
    print(f"{'the page':58} {report.OUT.stat().st_size / 1000:7.0f} kB")


def main() -> None:
    """Run all three and print them."""
    rng = np.random.default_rng(0)
    settings = params.load(ROOT / "params.yaml").gate
    signal, columns = rng.lognormal(size=ROWS), rng.normal(size=(CHUNKS, 2))
    once = seconds(lambda: gate.ema(signal, settings.rate, settings.alpha, 16))
    tell(f"EMA gate, {ROWS:,} rows", once, 1)
    each = np.arange(CHUNKS)
    drawn = seconds(lambda: bootstrap.resampled_sums(columns, each, RESAMPLES, 0))
    tell(f"{RESAMPLES:,} resamples of {CHUNKS:,} chunks, each a cluster", drawn, 5)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        last_stages()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'peak memory':58} {peak:7.2f} GB  allowed   2.0 GB")


if __name__ == "__main__":
    main()
