# Every target works as the first command in a fresh clone: all it needs is Python and make. `make help` lists them.

VENV ?= .venv
ARGS ?=
TORCH ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
TESTED := constraints/tested.txt
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=5
# The tested versions, but with the torch that is there.
CONSTRAINTS := $(VENV)/.constraints.txt
# A test run starts Python a thousand times: what it compiles is kept, whatever this machine's default.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help train test test-dist test-all verify-all verify-random mutants lint docs bench gpu clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="…"                    is passed on: make train ARGS="my.toml -s train.steps=500"'
	@echo '  TORCH="torch --index-url …" another build of torch, for CUDA; a torch >= 2.11 already in $(VENV) is kept'
	@echo '  PYTHON=python3.12           the Python to make $(VENV) with'

train: $(VENV)/.ready ## train a model: the preset quickstart, or what ARGS says
	@$(VENV)/bin/forge train $(ARGS)

test: $(VENV)/.ready-dev ## run the tests on each change, two files at a time; or those that ARGS names
	@$(if $(ARGS),$(PY) -m pytest $(ARGS),$(PYTEST) -m "not slow and not extended")

test-dist: $(VENV)/.ready-dev ## run the tests marked `slow`, in CI: layouts of two to four processes, and the longest of the others
	@$(if $(ARGS),$(PY) -m pytest $(ARGS),$(PYTEST) -m "slow and not extended")

test-all: $(VENV)/.ready-dev ## now and then: every test, with those that take longer than CI allows; before a release, and with verify-all
	@$(PYTEST) $(ARGS)

verify-all: $(VENV)/.ready-dev ## now and then: verify every composition of layouts; ARGS="context tp4" picks some
	@$(PY) benchmarks/verify_all.py $(ARGS)

verify-random: $(VENV)/.ready-dev ## now and then: verify COUNT=100 random compositions of layouts, in an hour; SEED=7 draws others
	@$(PY) benchmarks/verify_random.py --seed $(or $(SEED),0) --count $(or $(COUNT),100) $(ARGS)

mutants: $(VENV)/.ready-dev ## plant small faults in the code, and report those that the tests miss; ARGS="--count 9" for fewer
	@$(PY) benchmarks/mutants.py $(ARGS)

lint: $(VENV)/.ready-dev ## check format, style, types and who imports whom
	@$(PY) -m ruff format --check
	@$(PY) -m ruff check
	@$(PY) -m mypy
	@$(PY) -m pytest -q tests/test_layers.py

docs: $(VENV)/.ready-dev ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "Open site/index.html"

bench: $(VENV)/.ready-dev ## measure forge against plain PyTorch, and run the long trials; ARGS="startup loop" picks some
	@$(PY) benchmarks/run.py $(ARGS)

gpu: ## check and measure forge on this machine's CUDA device in ten minutes, or go on; installs nothing; ARGS="--toy" on a CPU
	@$(or $(PYTHON),$(if $(wildcard $(PY)),$(PY),python3)) benchmarks/gpu $(ARGS)

clean: ## remove caches and built files; keeps runs/ and $(VENV)
	@rm -rf site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

# -- the environment --------------------------------------------------------------------------------------------------

$(VENV)/.ready: pyproject.toml $(TESTED) | $(PY)
	$(install-torch)
	@echo "Installing forge and what it needs"
	@$(PIP) install -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.ready-dev: pyproject.toml $(TESTED) | $(PY)
	$(install-torch)
	@echo "Installing forge, what it needs, and the tools of its developers"
	@$(PIP) install -c $(CONSTRAINTS) -e '.[dev]'
# A test that kills a process while it compiles a module would leave half of it for all others.
	@$(PY) -m compileall -q -j 0 core plugins contrib cli
	@touch $(VENV)/.ready $@

# torch comes first and alone, so that its build is chosen here and no dependency brings another one. What TORCH was is
# written down: asking for another one installs that, asking for none keeps what is there.
define install-torch
@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
@if [ -n "$(NEW_TORCH)" ]; then \
	echo "Installing $(TORCH)"; \
	$(PIP) install --force-reinstall $(TORCH) && echo "$(TORCH)" > $(VENV)/.torch; \
elif ! $(PY) -c "$$INSTALLED_TORCH" >/dev/null; then \
	torch=$$(grep '^torch==' $(TESTED)); \
	echo "Installing $$torch: the largest part, some minutes, once"; \
	$(PIP) install "$$torch"; \
fi
@{ $(PY) -c "$$INSTALLED_TORCH" && grep -v '^torch==' $(TESTED); } > $(CONSTRAINTS)
endef

ifneq ($(TORCH),)
ifneq ($(TORCH),$(shell cat $(VENV)/.torch 2>/dev/null))
NEW_TORCH := yes
.PHONY: $(VENV)/.ready $(VENV)/.ready-dev
endif
endif

define INSTALLED_TORCH
from importlib.metadata import PackageNotFoundError, version
try:
    torch = version("torch")
except PackageNotFoundError:
    raise SystemExit(1)
print("torch==" + torch)
raise SystemExit(tuple(map(int, torch.split(".")[:2])) < (2, 11))
endef
export INSTALLED_TORCH

define NEW_ENOUGH
import sys
sys.exit(sys.version_info < (3, 11))
endef
export NEW_ENOUGH

$(PY):
	@for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
		$$python -c "$$NEW_ENOUGH" 2>/dev/null && found=$$python && break; \
	done; \
	if [ -z "$$found" ]; then \
		echo "Forge needs Python 3.11 or newer; $(or $(PYTHON),python3) is: $$($(or $(PYTHON),python3) --version 2>&1)" >&2; \
		echo "Install one and name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$found --version)"; \
	$$found -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
