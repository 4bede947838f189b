# Everything a checkout needs, in one environment: .venv. GNU make and any POSIX sh. `make` alone prints the targets.

PYTHON ?= python3
# Another index for torch only, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Passed on: to `podium train` by demo, to pytest by test and slow.
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := constraints/cpu.txt
EXTRAS := ray,tasks,tensorboard,plot,dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test check lint layers types doctests slow bench clean

help: ## This list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile
	@echo '  Options: PYTHON=python3.11  TORCH_INDEX=URL  ARGS="key=value ..."'

venv: $(STAMP) ## Make or refresh .venv (every other target does so by itself)

# The stamp is newer than what it was made from, so the second time costs nothing.
$(STAMP): pyproject.toml $(PINS)
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; Podium needs Python 3.11 to 3.13: make venv PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit("error: Podium needs Python 3.11 to 3.13, but $(PYTHON) is %d.%d; say which to use: make venv PYTHON=python3.11" % v)'
	@command -v cc >/dev/null || command -v gcc >/dev/null || echo "warning: no C compiler (cc) found; pycosat, which reasoning-gym needs, is compiled when no wheel fits this machine" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c $(PINS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet -c $(PINS) -e ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP) ## Warm up a small model, then teach it to spell backward by GRPO (ARGS="key=value ...")
	$(BIN)/podium train spell_backward $(ARGS)

test: $(STAMP) ## The fast tests (ARGS="-k name")
	$(BIN)/python -m pytest $(ARGS)

check: lint layers types doctests ## Lint, layers, types, doctests (make -k check: all, even when one fails)

lint: $(STAMP)
	$(BIN)/ruff check .

layers: $(STAMP)
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy --strict src

doctests: $(STAMP)
	$(BIN)/python -m pytest --doctest-modules src/podium -q

slow: $(STAMP) ## The slow tests: whole runs, kills, leaks, properties at length
	$(BIN)/python -m pytest -m slow --hypothesis-profile=long $(ARGS)

bench: $(STAMP) ## Every benchmarks/*.py at its quick setting
	@found=no; for file in benchmarks/[!_]*.py; do \
	  [ -e "$$file" ] || continue; found=yes; \
	  echo "== $$file"; $(BIN)/python "$$file" --quick || exit 1; \
	done; [ $$found = yes ] || echo "no benchmarks/*.py yet"

clean: ## Remove .venv, caches and build products (never runs/)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
