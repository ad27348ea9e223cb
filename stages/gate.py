"""data/scores -> data/gate: one row per chunk and policy."""

from ponderttt import gate, stage

if __name__ == "__main__":
    stage.run(gate.make, reads=["run", "chunks", "scores", "gate"])
