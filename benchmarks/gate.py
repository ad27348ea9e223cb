"""Time the gate, the bootstrap, and both stages at the paper's size, on synthetic scores.

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

import synthetic  # noqa: E402

from ponderttt import bootstrap, gate, metrics, params, stage, streams  # noqa: E402

ROWS = 1_000_000
CHUNKS = 16_000
RESAMPLES = 10_000
READS = ("run", "corpus", "chunks", "scores", "gate", "metrics")


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def tell(what: str, taken: float, allowed: float) -> None:
    """One line: seconds taken beside seconds allowed."""
    print(f"{what:58} {taken:7.2f} s   allowed {allowed:5.1f} s")


def both_stages() -> None:
    """Gate and metrics, four languages and the variants, all policies."""
    view = stage.view(params.load(ROOT / "params.yaml"), READS)
    synthetic.write_all(streams.SCORES, view, CHUNKS)
    taken = seconds(lambda: gate.make(view)) + seconds(lambda: metrics.make(view))
    count = f"{len(streams.keys(view))} streams x {CHUNKS} chunks x {len(gate.policies())} policies"
    tell(f"gate + metrics, {count}", taken, 60)


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
        both_stages()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'peak memory':58} {peak:7.2f} GB  allowed   2.0 GB")


if __name__ == "__main__":
    main()
