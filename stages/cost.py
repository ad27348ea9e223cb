"""data/backbone + data/ttt + data/chunks -> data/cost/scale=S/seed=K"""

from ponderttt import stage, timing

if __name__ == "__main__":
    stage.run(timing.make, reads=[], arguments=["scale", "seed"])
