# Every target makes its own environment first: a clone needs Python, git and make, nothing else.
#   make demo   make lab   make test   make lessons   make mutants   make lint   make clean
# PYTHON names the interpreter that the environment is made with, PIP_ARGS what pip is told besides (another index),
# CHROME a browser for the browser tests, PYTEST_ARGS what pytest is told besides, JOBS how many test files run at a time.

PYTHON ?= python3
VENV   ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := demo
.PHONY: demo lab lessons mutants lint test clean

demo: $(STAMP)
	$(BIN)/minillm demo

lab: $(STAMP)
	$(BIN)/minillm lab

lessons: $(STAMP)
	$(BIN)/minillm build

# Which wrong answers do the checkers of the exercises miss? NAMES: lessons or exercises, as in NAMES="07 l02.best_r".
mutants: export OMP_NUM_THREADS := 1
mutants: $(STAMP)
	$(BIN)/minillm build --mutants $(NAMES) --jobs $(JOBS)

lint: $(STAMP)
	$(BIN)/ruff check .

# The quick checks come first, the long one last. JOBS files run at a time, a notebook in one kernel, each on one
# thread: two that share two cores are quicker than one after the other.
SPREAD := -n $(JOBS) --dist loadfile
test: export OMP_NUM_THREADS := 1
test: lint
	$(BIN)/minillm build --check
	$(BIN)/pytest $(SPREAD) --nbval-lax lessons/ $(PYTEST_ARGS)
	$(BIN)/pytest $(SPREAD) --nbval --nbval-sanitize-with tests/notebooks/sanitize.cfg solutions/ $(PYTEST_ARGS)
	$(BIN)/pytest $(SPREAD) tests/ $(PYTEST_ARGS)

# Installed once, and again when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	@echo "Making $(VENV): this happens once and takes a minute or more, most of it PyTorch."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt $(PIP_ARGS) -e '.[lab,dev]'
	@touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
