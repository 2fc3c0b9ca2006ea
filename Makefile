# Two commands do all the set-up: `make demo` and `make test`.
#
# A system interpreter comes first: every user of a cluster can run it, which is
# not so of one under somebody's home directory.
PYTHON ?= $(firstword $(foreach p,/usr/bin/python3 /usr/local/bin/python3 python3,\
            $(shell $(p) -c 'import sys, ensurepip, venv; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
# Processes of a job write no bytecode, so without this each would compile what it loads.
COMPILE := python -m compileall -q exporter launcher

.PHONY: help install install-dev packages demo demo-stack test test-quick test-gpu test-programs test-slurm-versions test-stack-versions test-mutations fuzz lint check pictures bench soak kills clean

help:
	@echo "make install   a virtual environment in .venv with gpujob and gpujob-exporter"
	@echo "make demo      run four workers on this machine and watch them"
	@echo "make demo-stack  the same, with Prometheus and boards of your own"
	@echo "make test      install what the tests need and run them all"
	@echo "make test-quick  the tests that need no process, server or clock, in a minute"
	@echo "make test-gpu  the tests of a real NVIDIA GPU, on a machine that has one"
	@echo "make test-programs  programs of frameworks under gpujob, and damaged checkpoints of libraries (installs them into .venv-programs)"
	@echo "make test-slurm-versions  the same jobs on Slurm 22.05, 24.11 and 26.05 (root; fetches Debian trees)"
	@echo "make test-stack-versions  the same rules and messages on three versions of Prometheus and Alertmanager"
	@echo "make test-mutations       changes alert rules one detail at a time: tests must notice 95 % (RULES=gpujob-disk or an alert: only these)"
	@echo "make fuzz      damaged input for every parser of foreign data, for SECONDS=600"
	@echo "make check     format, lint, types, layers, rules"
	@echo "make pictures  take the pictures of the board page with a real job"
	@echo "make bench     measure; prints ratios"
	@echo "make soak      a job whose workers come and go, for SOAK_SECONDS (1800): nothing may grow"
	@echo "make kills     KILLS (150) random kills of parts of jobs on a real Slurm (root)"

install: $(VENV)/.installed
	@$(BIN)/$(COMPILE)
	@echo "Installed. Now type:"
	@echo '  export PATH="$(CURDIR)/$(BIN):$$PATH" && gpujob --help'

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv; on Debian: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml exporter/__init__.py launcher/_entry.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

install-dev: $(VENV)/.installed-dev

# Debian's pip takes twice as long as a new one to choose packages, which tests of packaging do too.
$(VENV)/.installed-dev: pyproject.toml exporter/__init__.py launcher/_entry.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed

packages:
	@bash tests/realstack/packages.sh

demo: $(VENV)/.installed
	@$(BIN)/$(COMPILE)
	$(BIN)/gpujob run examples/embed/job.yaml

# The stack stays up, so that its boards can be looked at: `gpujob stack down` ends it.
demo-stack: $(VENV)/.installed
	@$(BIN)/$(COMPILE)
	$(BIN)/gpujob run --stack examples/embed/job.yaml

test: install-dev packages
	@$(BIN)/$(COMPILE)
	@bash tests/lanes.sh "$(CURDIR)/$(BIN)/python" $(PYTEST_OPTIONS)

test-quick: install-dev
	$(BIN)/python -m pytest -q -m quick --by-room $(PYTEST_OPTIONS)

# Installs nothing: machines with GPUs are often without a network.
test-gpu:
	@bash tests/gpu/run.sh $(PYTEST_OPTIONS)

# Large packages, so CI leaves this out; TORCH=torch==2.8.0+cpu chooses a build.
test-programs: install-dev
	@TORCH="$(TORCH)" bash tests/programs/run.sh $(PYTEST_OPTIONS)

# SUITES="machine forky" takes some of them.
test-slurm-versions: install-dev packages
	@bash tests/realstack/versions.sh $(SUITES)

# The packages are extracted into a folder, so this needs no root but for that folder: GPUJOB_STACK_CACHE names another.
test-stack-versions: install-dev packages
	@bash tests/realstack/stack-versions.sh $(SUITES)

# Nothing is kept: a failure prints the smallest input, which becomes a test of its parser.
test-mutations: install-dev
	$(BIN)/python -m tests.alertmanager.mutations $(RULES)

fuzz: install-dev
	FUZZ_SECONDS=$(or $(SECONDS),600) nice $(BIN)/python -m pytest -q tests/fuzz $(PYTEST_OPTIONS)

lint: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy exporter launcher tests examples bench grafana

check: lint packages
	$(BIN)/python -m pytest -q tests/test_layers.py tests/alertmanager tests/grafana tests/docker tests/docs tests/exporter/sidecar/test_golden_pages.py

pictures: install-dev packages
	$(BIN)/python -m tests.grafana.pictures

bench: install-dev
	$(BIN)/python -m bench

soak: install-dev
	$(BIN)/python -m bench soak

kills: install-dev packages
	$(BIN)/python -m bench slurm_kills

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
