# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-all lint bench clean

demo: $(VENV)/demo.installed
	$(BIN)/regard demo

# The tests' tensors are tiny: one thread is faster than two, and does not starve beside other programs.
test: $(VENV)/test.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/test.installed
	$(BIN)/python -m pytest

# mypy cannot follow the import hook of an editable install, so it gets the package laid out as links.
lint: $(VENV)/lint.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed/regard
	ln -s $(CURDIR)/app/* $(CURDIR)/vit $(CURDIR)/crossattn $(CURDIR)/datasets $(CURDIR)/train build/typed/regard/
	MYPYPATH=build/typed $(BIN)/mypy -p regard

bench: $(VENV)/test.installed
	$(BIN)/python benchmarks/look_once.py

clean:
	rm -rf $(VENV) build *.egg-info

# On a machine without an NVIDIA GPU the CPU build of torch is enough and many times smaller: take it where pip
# can see one, else what pip chooses.
$(VENV)/torch.installed:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Regard needs Python 3.10 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@command -v nvidia-smi >/dev/null 2>&1 || { \
	  cpu=$$($(BIN)/python -m pip index versions torch 2>/dev/null | tr ', ' '\n\n' | grep -m 1 '^[0-9.]*+cpu$$'); \
	  if [ -n "$$cpu" ]; then echo "installing torch $$cpu"; $(PIP) install "torch==$$cpu"; fi; }
	@touch $@

$(VENV)/%.installed: $(VENV)/torch.installed pyproject.toml
	@echo "installing regard[$*] into $(VENV)"
	$(PIP) install --editable ".[$*]"
	@touch $@
