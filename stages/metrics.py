"""data/scores + data/gate -> data/metrics, metrics/*.json, metrics/plots."""

from ponderttt import metrics, stage

if __name__ == "__main__":
    stage.run(
        metrics.make, reads=["run", "corpus.train_language", "chunks", "scores", "gate", "metrics"]
    )
