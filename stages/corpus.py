"""Fetch, clean and split the source files: data/corpus."""

from ponderttt import corpus, stage

if __name__ == "__main__":
    stage.run(corpus.make, reads=["run.languages", "corpus"])
