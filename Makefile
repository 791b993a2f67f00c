# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo train-curves test vllm check types layers installed format clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

train-curves: $(STAMP)
	$(BIN)/python examples/train_curves.py $(if $(shell $(BIN)/python -c "import matplotlib" 2>&1),,--plot out/train-curves.svg)

test: $(STAMP) check
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# vLLM wants other versions of what we use: an environment of its own, of some 3 GB.
vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -m "slow or not slow" tests/vllm

check: $(STAMP) types layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: installed
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

layers: installed
	cd build/typed && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache

# passes/ and kernels/ are subpackages only once installed: lay them out as an installation does.
installed: $(STAMP)
	rm -rf build/typed && mkdir -p build/typed
	cp -r mla_compile build/typed/ && cp -r passes kernels build/typed/mla_compile/

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and pinned: an open range would pull CUDA libraries of several GB. Python compiles what it imports
# when it does so; pip would compile everything, which takes it half a minute for torch alone.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	touch $@

# The torchvision that it brings does not load beside torch for CPUs, and vLLM does without.
.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet "torch==2.13.0"
	.venv-vllm/bin/python -m pip install --quiet --editable ".[vllm]" pytest
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm build dist *.egg-info
