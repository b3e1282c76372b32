# make reproduce   from a clean clone to the Dyck study's claims table and report
# make test        everything that CI runs: lint, types, tests, kernels under the interpreter, packages
# make lint        ruff and mypy alone
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Two threads on busy cores are ten times slower than one: one BLAS thread a process, no spinning.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: reproduce test lint format clean

reproduce: $(VENV)/.installed
	$(BIN)/interp run dyck_myopia --scale quick --out runs/dyck_myopia-quick

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal tests --ignore tests/kernels_triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels_triton

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# pip takes the CPU build of torch where it is pinned; see constraints.txt.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"interp needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}: run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
