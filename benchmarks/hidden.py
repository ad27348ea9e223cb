"""The `hidden` stage against the bare transformers forward of the same batches, in one run.

Needs data/backbone and data/chunks of the first scale (`dvc repro chunks`).
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from ponderttt import backbone, hidden, params, tables


def bare(model, tokens, batch):
    """What transformers alone needs: body, head and nothing kept."""
    with torch.inference_mode():
        for part in tokens.split(batch):
            model(input_ids=part, use_cache=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="as each worker has")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = params.load()
    scale = settings.run.scales[0]
    model = backbone.load(Path(f"data/backbone/scale={scale}"))
    path = sorted(Path(f"data/chunks/scale={scale}").glob("set=*/part-*.parquet"))[0]
    rows = tables.read(path, tables.CHUNKS).slice(0, args.chunks)
    tokens, _ = hidden.to_tensors(rows)
    times: dict[str, list[float]] = {"bare": [], "pipeline": []}
    with tempfile.TemporaryDirectory() as name:
        shard = hidden.Shard(chunks=path, out=Path(name) / "part")
        for _ in range(args.rounds + 1):  # the first round warms up
            began = time.perf_counter()
            bare(model.model, tokens, settings.hidden.batch)
            middle = time.perf_counter()
            hidden.run(shard, rows, model, settings.hidden)
            times["bare"].append(middle - began)
            times["pipeline"].append(time.perf_counter() - middle)
    median = {kind: statistics.median(found[1:]) / len(tokens) for kind, found in times.items()}
    ratio = statistics.median(
        p / b for p, b in zip(times["pipeline"][1:], times["bare"][1:], strict=True)
    )
    result = {"seconds_per_chunk": median, "ratio": ratio, "target": 1.15}
    print(json.dumps(result) if args.json else f"hidden: {ratio:.2f} x bare forward, {median}")


if __name__ == "__main__":
    main()
