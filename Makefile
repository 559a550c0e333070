# make pick    install, then train the LIBERO pick policy; options follow in ARGS, e.g. make pick ARGS="device=cuda seed=1"
# make assets  install, then fetch LIBERO's official objects and textures (360 MB); make pick uses them from then on
# make hover   install, then train a quadrotor to hover
# make vla     install, then train a policy from pictures and words: demonstrations, SFT, RL (a short run)
# make navigate   install, then train a vehicle to find its way among obstacles
# make test    install, then run the tests but the long evidence
# make test-evidence  install, then run the tests that train until they have learned, and all combinations of parts
# make test-changed   install, then run the tests of what differs from main (BASE=COMMIT: from that commit)
# make ros     install ROS 2 beside it, in .venv-ros (x86-64 Linux, Python 3.11 to 3.13; nothing else is needed)
# make test-ros  install, then run the tests over real ROS 2 messages
# make isaac   install Isaac Lab beside it, in .venv-isaac (x86-64 Linux, Python 3.11 or 3.12)
# make test-isaac  install, then run the tests of Isaac Lab
# make test-stock  install, then run policies in stock LIBERO (LIBERO_ASSETS=; stock is installed too, once)
# make test-crazyflow  install, then fly policies in crazyflow (which is installed too, once)
# make test-ray  install Ray, too, then run the tests of collectors on a Ray cluster of this machine
# make docs    install, then build the documents as a site: build/site/index.html
# make check   lint and types
# make mutants  install, then put generated faults into copies of the tree: which do the tests catch? (an hour at most)
# make clean   remove the virtual environments and build products (results in outputs/ stay)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ROS := .venv-ros
ISAAC := .venv-isaac
# Conflicts are not reported: hf-libero is here for its data, robosuite and torchrl work with newer packages than they
# ask for.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --no-warn-conflicts -c constraints.txt
ARGS ?=
BASE ?= main
# A process for each core, as tests use one thread.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal
PYTEST := $(BIN)/python -m pytest $(PARALLEL)
# Empty is as if it was not set: with a value, every program that a test starts would compile all that it imports anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: pick assets hover vla navigate test test-evidence test-changed ros test-ros isaac test-isaac test-stock test-crazyflow test-ray docs check mutants install clean

pick: $(VENV)/installed
	$(BIN)/python train.py task=libero_pick $(ARGS)

# Into the user's cache, whose place is $XDG_CACHE_HOME. ARGS=plus: the tasks of LIBERO-plus.
assets: $(VENV)/installed
	$(BIN)/python -m sims.libero.package_assets $(ARGS)

hover: $(VENV)/installed
	$(BIN)/python train.py task=quadrotor_hover $(ARGS)

# Without options about a third of the task's own run: options in ARGS go before.
vla: $(VENV)/installed
	$(BIN)/python train.py task=libero_pictures $(or $(ARGS),env_steps=150000 sft.steps=3000 evaluation_starts=20)

navigate: $(VENV)/installed
	$(BIN)/python train.py task=vehicle_navigate $(ARGS)

test: $(VENV)/installed-dev
	$(PYTEST) -m "not evidence" $(ARGS)

test-evidence: $(VENV)/installed-dev
	$(PYTEST) -m evidence $(ARGS)

test-changed: $(VENV)/installed-dev
	files=$$($(BIN)/python -m tests.changed $(BASE)) && \
		if [ -z "$$files" ]; then echo "no test depends on what differs from $(BASE)"; else \
		$(PYTEST) --dist load -m "not evidence" $$files $(ARGS); fi

# Without rclpy these tests are skipped by `make test`; here they fail. Each process claims ROS domains of its own.
test-ros: $(ROS)/installed
	CI_ROS=required $(ROS)/bin/python -m pytest $(PARALLEL) tests/real_robot/ros2 $(ARGS)

ros: $(ROS)/installed

# Without isaaclab these tests are skipped by `make test`; here they fail. Then the other interpreter's children, too.
test-isaac: $(ISAAC)/installed
	CI_ISAAC=required $(ISAAC)/bin/python -m pytest -k isaac tests/sims/isaac_lab tests/test_combinations.py $(ARGS)
	CI_ISAAC=required $(BIN)/python -m pytest -k isaac tests/conformance/test_environments.py $(ARGS)

isaac: $(ISAAC)/installed

# Its virtual environment lies in the user's cache; `make test` skips these tests.
test-stock: $(VENV)/installed-dev
	CI_STOCK=required $(BIN)/python -m pytest tests/sims/libero/stock $(ARGS)

# As above.
test-crazyflow: $(VENV)/installed-dev
	CI_CRAZYFLOW=required $(BIN)/python -m pytest tests/sims/quadrotor/test_crazyflow.py $(ARGS)

# Clusters of processes on one machine: their tests wait on time limits, so that they run alone; `make test` skips them.
test-ray: $(VENV)/installed-ray
	CI_RAY=required $(BIN)/python -m pytest tests/placement/test_ray.py $(ARGS)

# Documents lie all over the tree: the site is built from a copy of what they link to. It links to the clone's origin.
docs: export REPOSITORY := $(shell git remote get-url origin 2>/dev/null | sed -nE 's,^(git@|https://)([^:/]+)[:/](.+),https://\2/\3,p')
docs: $(VENV)/installed-dev
	rm -rf build/docs && mkdir -p build/docs
	git ls-files '*.md' '*.py' '*.yaml' '*.c' '*.h' 'benchmarks/results' docs LICENSE | tar --create --files-from - | tar --extract --directory build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python embodied

# Options in ARGS, e.g. make mutants ARGS="--package real_robot --count 20"; without them the stored table is written.
# The environment with ROS 2 has all packages of the first, and runs the tests over ROS 2, too: it is used if it exists.
mutants: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 nice -n 5 $(or $(wildcard $(ROS)/bin/python),$(BIN)/python) -m benchmarks.mutants $(or $(ARGS),--json benchmarks/results/mutants.json)

install: $(VENV)/installed-dev

# Some distributions ship Python without ensurepip; pip then installs itself into the environment from outside.
$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer not found: install it, or make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# The first install fetches PyTorch: on Linux its standard wheel, which uses a CUDA device where there is one.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing into $(VENV) (once; a few minutes with a slow network)"
	$(PIP) --editable '.[libero]'
	$(PIP) --no-deps hf-libero robosuite
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[devices,diffusion,gym,libero,maniskill,onnx,orbax,rerun,robosuite,robot,rsl-rl,tune,viewer,vla,dev]'
	$(PIP) --no-deps torchrl
	@touch $@

$(VENV)/installed-ray: $(VENV)/installed-dev
	$(PIP) --editable '.[ray]'
	@touch $@

# Its wheels set LD_LIBRARY_PATH for every Python of their environment, so they have one of their own, which adds the
# packages of the first.
$(ROS)/installed: real_robot/ros2/requirements.txt $(VENV)/installed-dev
	rm -rf $(ROS)
	$(BIN)/python -m venv --without-pip $(ROS)
	$(BIN)/python -m pip --disable-pip-version-check --python $(ROS)/bin/python install --quiet --no-deps --require-hashes \
		-r real_robot/ros2/requirements.txt
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		echo "import site; site.addsitedir('$$site')" \
		> $$($(ROS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/embodied_rl.pth
	@touch $@

# It needs older releases of MuJoCo and Warp than other simulators, so it has an environment of its own, which adds the
# packages of the first. It asks for Python 3.12; on 3.11 what its Newton backend imports is installed without asking.
$(ISAAC)/installed: sims/isaac_lab/requirements.txt $(VENV)/installed-dev
	rm -rf $(ISAAC)
	$(BIN)/python -m venv --without-pip $(ISAAC)
	if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then wanted="--editable .[isaac-lab]"; \
		else wanted="--no-deps --ignore-requires-python --require-hashes -r sims/isaac_lab/requirements.txt"; fi && \
		$(BIN)/python -m pip --disable-pip-version-check --python $(ISAAC)/bin/python install --quiet $$wanted
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		echo "import site; site.addsitedir('$$site')" \
		> $$($(ISAAC)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/embodied_rl.pth
	@touch $@

clean:
	rm -rf $(VENV) $(ROS) $(ISAAC) dist build .pytest_cache .ruff_cache .hypothesis
	find embodied policies sims real_robot tests -name __pycache__ -type d -prune -exec rm -rf {} +
