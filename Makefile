# Every target sets up what it needs by itself: `make demo` and `make test` work on a fresh clone.
# Without make, in an environment of your own: pip install -c constraints.txt -e '.[dev,viz]'

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Python 3.12, which constraints.txt was made with, or else 3.13: by its own name, through pyenv, or as the default.
# Older ones have no megatron-core 0.19.
FIND_PYTHON = for p in python3.12 "$$(pyenv prefix 3.12 2>/dev/null)/bin/python" python3.13 \
	"$$(pyenv prefix 3.13 2>/dev/null)/bin/python" python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' 2>/dev/null && echo "$$p" && break; done
NO_PYTHON = make: neither Python 3.12 nor 3.13 found: install one (pyenv install 3.12, or your system's python3.12)
NEWEST := .venv-newest
# Several processes share the cores: one thread each is faster, and makes sums reproducible.
export OMP_NUM_THREADS ?= 1
# Images of containers often set it. Every process of the tests would compile again all that it imports, and pytest
# rewrite all assertions: ten seconds a worker before its first test.
unexport PYTHONDONTWRITEBYTECODE
# A file's tests stay together: they share runs. In the order of tests/conftest.py: the long ones first.
AT_ONCE := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-slow test-newest sanitize lint venv clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## train a small GPT at every level and compare (minutes, no GPU needed)
	@$(BIN)/python tools/demo.py

test: $(READY) ## the tests for every change
	@$(BIN)/python -m pytest $(AT_ONCE) -m "not slow"

test-slow: $(READY) ## every test, the slow ones too (nightly)
	@$(BIN)/python -m pytest $(AT_ONCE) --durations 20

test-newest: ## the tests for every change with the newest packages that pyproject.toml takes, in .venv-newest (nightly)
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then echo "$(NO_PYTHON)" >&2; exit 1; fi; \
	$$python -m venv $(NEWEST) && \
	$(NEWEST)/bin/python -m pip install -qq --disable-pip-version-check --upgrade -e '.[dev,viz]' && \
	$(NEWEST)/bin/python -m pytest $(AT_ONCE) -m "not slow"

# Kernels that are not ours are left out; without torch's cache each tensor has bounds of its own.
sanitize: $(READY) ## compute-sanitizer's memcheck over the kernels' smoke tests (a GPU, two minutes)
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 --kernel-name-exclude kns=native \
		--kernel-name-exclude kns=nvjet --kernel-name-exclude kns=cublas $(BIN)/python -m pytest tests/gpu -m smoke

lint: $(READY) ## ruff and mypy
	@$(BIN)/ruff check
	@$(BIN)/mypy

venv: $(READY) ## only the environment, in .venv

clean: ## remove the environment, the caches and runs/
	rm -rf $(VENV) $(NEWEST) runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp comes last, so an interrupted set-up is never taken for a finished one.
$(READY): pyproject.toml setup.py constraints.txt
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then echo "$(NO_PYTHON)" >&2; exit 1; fi; \
	echo "setting up $(VENV) with $$($$python -V) (about two minutes, once; torch is a large download)"; \
	rm -f $@ && $$python -m venv $(VENV) && \
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,viz]' && \
	touch $@
