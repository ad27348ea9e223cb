"""data/metrics, data/gate, data/scores, data/tokens, data/ttt -> metrics/report.html"""

from ponderttt import report, stage

if __name__ == "__main__":
    stage.run(
        report.make,
        reads=["run", "corpus", "chunks", "scores", "gate", "metrics", "report"],
    )
