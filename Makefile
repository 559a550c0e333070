# make pick    install, then train the LIBERO pick policy; options follow in ARGS, e.g. make pick ARGS="device=cuda seed=1"
# make hover   install, then train a quadrotor to hover
# make test    install, then run the whole test suite
# make check   lint and types
# make clean   remove the virtual environment and build products (results in outputs/ stay)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Conflicts are not reported: hf-libero and robosuite are here for their data, without what their code needs.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-warn-conflicts -c constraints.txt
ARGS ?=

.PHONY: pick hover test check install clean

pick: $(VENV)/installed
	$(BIN)/python train.py task=libero_pick $(ARGS)

hover: $(VENV)/installed
	$(BIN)/python train.py task=quadrotor_hover $(ARGS)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python embodied

install: $(VENV)/installed-dev

# Some distributions ship Python without ensurepip; pip then installs itself into the environment from outside.
$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer not found: install it, or make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# The first install fetches PyTorch: on Linux its standard wheel, which uses a CUDA device where there is one.
$(VENV)/installed: pyproject.toml constraints.txt $(wildcard hatch_build.py sims/libero/*.[ch]) | $(BIN)/pip
	@echo "Installing into $(VENV) (once; a few minutes with a slow network)"
	$(PIP) --editable '.[libero]'
	$(PIP) --no-deps hf-libero robosuite
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[libero,onnx,dev]'
	@touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis
	find embodied policies sims real_robot tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find sims -name '*.so' -delete
