PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOT_ACCESS := $(if $(filter-out 0,$(shell id -u)),sudo)

.DEFAULT_GOAL := help
.PHONY: help setup lint types test test-slow test-browser demo constraints clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# imagecorruptions asks for OpenCV with a display, which a server cannot load; the one without, that grad-cam brings, serves it.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps imagecorruptions-imaug
	touch $@

setup: $(VENV)/installed ## Create .venv with everything the project needs

lint: setup
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests

types: setup
	$(BIN)/mypy

# One thread for each of up to four processes: the models are so small that threads only wait for each other. Tests
# that ask for two of them should not find the cores taken by those that wait for work.
test: lint types ## Lint, type-check and run every test that is not slow
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile

test-slow: setup ## Run the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-browser: setup ## Look at the page of sot ui in Chromium, which is installed if missing
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	command -v chromium >/dev/null || { $(ROOT_ACCESS) apt-get update && $(ROOT_ACCESS) apt-get install --yes --no-install-recommends chromium; }
	$(BIN)/python -m pytest -m browser tests/browser

demo: setup ## Train class token, word tokens and both on bundled real pictures, and compare
	$(BIN)/sot demo

constraints: setup ## Record the exact versions of this .venv for everyone
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt
	touch $(VENV)/installed

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist
