# Every target makes its own environment first: a clone needs Python, git and make, nothing else.
#   make demo   make lab   make test   make lessons   make nbval   make mutants   make dist   make lint   make clean
#   make labextension                   pack the front end of code completion again (needs node and npm)
#   make figures                        after new weights or new results of benchmarks
#   make test-long                      what `make test` leaves out: every lesson in a browser, every drafting method on 200 prompts
#   make test-lowest   make test-colab      the quick tests with the oldest versions allowed, and with Colab's
#   make test-ray                       what runs on a cluster, with two nodes simulated on this machine
# PYTHON names the interpreter that the environment is made with, PIP_ARGS what pip is told besides (another index),
# CHROME a browser for the browser tests, PYTEST_ARGS what pytest is told besides, JOBS how many test files run at a time,
# UV_ARGS what uv is told besides, and EDGE_TESTS which tests run with other versions.

PYTHON ?= python3
VENV   ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 3
UV_ARGS ?= --torch-backend cpu
EDGE_TESTS ?= tests/test_*.py tests/engine tests/cache tests/models tests/speculative tests/viz

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := demo
.PHONY: demo figures lab lessons labextension lint test test-long nbval mutants test-lowest test-colab test-ray dist clean

demo: $(STAMP)
	$(BIN)/minillm demo

lab: $(STAMP)
	$(BIN)/minillm lab

lessons: $(STAMP)
	$(BIN)/minillm build

labextension: $(STAMP)
	$(BIN)/python labextension/build.py

# Everything that depends on the bundled weights or on benchmarks/*.json: recorded lessons and pictures, and the measured
# figures of the README and of docs/. Not what vLLM answers with these weights, which the tests compare: where there is a
# vLLM, tests/parity/record.py asks it again.
figures: $(STAMP)
	$(BIN)/minillm build --remeasure
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/techniques.py

# Which wrong answers do the checkers of the exercises miss? NAMES: lessons or exercises, as in NAMES="07 l02.best_r".
mutants: export OMP_NUM_THREADS := 1
mutants: $(STAMP)
	$(BIN)/minillm build --mutants $(NAMES) --jobs $(JOBS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports

# The wheel and the source distribution, models and lessons included, checked: see release/README.md.
DIST_ARGS ?=
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python release/check_dist.py dist $(DIST_ARGS)

# Lessons, solutions and tests wait in one queue (see conftest.py). JOBS of them run at a time, a notebook in one kernel,
# each on one thread. Many wait, for a browser or a limit of time: on two cores three are quicker than two.
SPREAD := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Many tests fork their worker, to guard a learner's code; in large pages of memory (glibc, Linux) that is quicker.
test: export OMP_NUM_THREADS := 1
test: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
test: lint
	$(BIN)/python -m compileall -q minillm  # once, where Python is told to write no bytecode: tests start many processes
	$(BIN)/minillm build --check
	$(BIN)/pytest $(SPREAD) --nbval-lax --like-solutions lessons/ tests/ $(PYTEST_ARGS)

# What repeats at full size what a quicker test does: for a schedule, or before a release.
test-long: export OMP_NUM_THREADS := 1
test-long: $(STAMP)
	$(BIN)/pytest -m long $(PYTEST_ARGS) tests/

# What a teacher runs over notebooks, here over all of ours. `make test` also compares them with the solutions.
nbval: export OMP_NUM_THREADS := 1
nbval: $(STAMP)
	$(BIN)/pytest $(SPREAD) --nbval-lax lessons/ $(PYTEST_ARGS)
	$(BIN)/pytest $(SPREAD) --nbval --nbval-sanitize-with tests/notebooks/sanitize.cfg solutions/ $(PYTEST_ARGS)

# Both ends of what is promised, each in an environment of its own, which uv resolves: it can take the oldest versions
# of what pyproject.toml names, and PyTorch without CUDA. They are long, so they are for a schedule and not for a commit.
EDGES := .edges
EDGE_TOOLS := 'hatchling>=1.27' 'hypothesis>=6.100' 'ipykernel>=6.17' 'jupytext>=1.16' 'nbclient>=0.10' 'nbformat>=5.10' \
	'nbval>=0.11' 'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-xdist>=3.8' 'scipy>=1.13'
UV := $(EDGES)/uv/bin/uv
$(UV):
	$(PYTHON) -m venv $(EDGES)/uv
	$(EDGES)/uv/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) uv

test-lowest: RESOLUTION := --resolution lowest-direct
test-colab: RESOLUTION := -c constraints-colab.txt
test-lowest test-colab: export OMP_NUM_THREADS := 1
test-lowest test-colab: test-%: $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(EDGES)/$*
	$(UV) pip install --quiet --python $(EDGES)/$* $(RESOLUTION) $(UV_ARGS) \
		-r pyproject.toml $(EDGE_TOOLS)
	$(UV) pip install --quiet --python $(EDGES)/$* --no-deps -e .
	$(EDGES)/$*/bin/python -m pytest $(EDGE_TESTS) $(PYTEST_ARGS)
	$(EDGES)/$*/bin/python -m pytest -p no:cacheprovider --nbval-lax lessons/ $(PYTEST_ARGS)

# `minillm cluster`, in an environment with Ray: a replica is killed under load, workers are killed, streams go on.
test-ray: export OMP_NUM_THREADS := 1
test-ray: $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(EDGES)/ray
	$(UV) pip install --quiet --python $(EDGES)/ray $(UV_ARGS) \
		-r pyproject.toml --extra ray $(EDGE_TOOLS) 'httpx>=0.27' 'openai>=1.56'
	$(UV) pip install --quiet --python $(EDGES)/ray --no-deps -e .
	PYTHONPATH=. $(EDGES)/ray/bin/python -m pytest --timeout 1200 tests/cluster tests/commands/test_cluster.py $(PYTEST_ARGS)

# Installed once, and again when what is to be installed has changed. An environment that was not finished may be one of
# another Python, so it is made anew.
TOO_OLD = minillm needs Python 3.10 or newer; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit("$(TOO_OLD)" % v if v < (3, 10) else 0)'
	@echo "Making $(VENV): this happens once and takes a minute or more, most of it PyTorch."
	$(PYTHON) -m venv $(if $(wildcard $(STAMP)),,--clear) $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt $(PIP_ARGS) -e '.[lab,dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip would do it on one core; some packages carry templates
	@touch $@

clean:
	rm -rf $(VENV) $(EDGES) dist .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
