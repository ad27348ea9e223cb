# `make repro` runs the pipeline, `make test` the tests; both make their own environment first.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
READY := $(VENV)/.ready

.PHONY: repro test check fix bench soak clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

repro: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" dvc repro

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	for name in layer gate hidden ray_cost near_duplicates stack_fetch; do \
	  $(BIN)/python benchmarks/$$name.py || exit 1; done

# Kills a process COUNT times at random moments and counts what was lost; at most SECONDS.
COUNT ?= 50
SECONDS ?= 1800
soak: $(READY)
	$(BIN)/python benchmarks/soak.py --count $(COUNT) --seconds $(SECONDS)

clean:
	rm -rf $(VENV) data/.work
