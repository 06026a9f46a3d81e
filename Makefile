PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOT_ACCESS := $(if $(filter-out 0,$(shell id -u)),sudo)

.DEFAULT_GOAL := help
.PHONY: help setup lint types test test-slow test-browser test-peers test-faults demo docs constraints clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
VERSIONS := $(VENV)/versions.txt
FITS := import platform, sys; print((sys.platform, platform.machine(), *sys.version_info[:2]) == ("linux", "x86_64", 3, 11))
HASHED := $(and $(shell grep -- --hash constraints.txt),$(filter True,$(shell $(PYTHON) -c '$(FITS)')))

# constraints.txt names everything that Python 3.11 needs on Linux, with hashes: what has others, or is not in it, is
# refused. Elsewhere its versions are taken as far as they are needed, without hashes. imagecorruptions asks for OpenCV
# with a display, which a server cannot load; the one without, that grad-cam brings, serves it.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '/^ *--hash/d; s/ *\\$$//' constraints.txt > $(VERSIONS)
ifneq ($(HASHED),)
	$(PIP) --require-hashes --no-deps --requirement constraints.txt
	$(PIP) --no-index --no-build-isolation --editable '.[dev]'
else
	$(PIP) --constraint $(VERSIONS) --editable '.[dev]'
	$(PIP) --constraint $(VERSIONS) --no-deps imagecorruptions-imaug
endif
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
	$(PIP) --constraint $(VERSIONS) --editable '.[browser]'
	command -v chromium >/dev/null || { $(ROOT_ACCESS) apt-get update && $(ROOT_ACCESS) apt-get install --yes --no-install-recommends chromium; }
	$(BIN)/python -m pytest -m browser tests/browser

# TIMM and TRANSFORMERS name checkouts of the installed versions; tests/peers/exceptions.yaml says what is left out. The
# source archive of timm has its tests: pip download --no-deps --no-binary timm timm==VERSION. Where a machine is busy,
# TIMEOUT=3600 gives most of them more than timm's two to six minutes.
test-peers: setup ## Run the suites of timm and transformers on our models: make test-peers TIMM=… TRANSFORMERS=…
	$(PIP) --constraint $(VERSIONS) --editable '.[peers]'
	test -n "$(TIMM)$(TRANSFORMERS)" || { echo "name checkouts: make test-peers TIMM=FOLDER TRANSFORMERS=FOLDER"; exit 2; }
	TIMM="$(TIMM)" TRANSFORMERS="$(TRANSFORMERS)" HF_HUB_OFFLINE=1 \
		$(BIN)/python -m pytest -o addopts= -m peers -q -rs -W ignore tests/peers

test-faults: setup ## Kill, fill the disk, damage and write twice for a quarter of an hour, and print the figures
	$(BIN)/python -m pytest -o addopts= -m faults -q -s tests/faults

demo: setup ## Train class token, word tokens and both on bundled real images, and compare
	$(BIN)/sot demo

docs: setup ## Build the site of docs/ in site/; a broken link or a missing page fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

constraints: setup ## Record the exact versions of this .venv for everyone, with the hashes of all their files
	$(BIN)/python -m pip freeze --all --exclude-editable | grep -v '^pip==' > $(VENV)/frozen.txt
	test -x $(VENV)/tools/bin/uv || { $(PYTHON) -m venv $(VENV)/tools && $(VENV)/tools/bin/python -m pip install --quiet uv; }
	$(VENV)/tools/bin/uv pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate --no-emit-index-url \
		--python $(BIN)/python --output-file constraints.txt $(VENV)/frozen.txt
	touch $(VENV)/installed

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist site
