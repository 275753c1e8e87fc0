# Every target sets up what it needs.
# Variables: DEVICE=cpu|cuda, BACKEND, ROWS, JOBS (tests at once), PYTHON, VENV.
PYTHON ?= python3
VENV ?= .venv
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
BACKEND ?= eager
ROWS ?= 264
JOBS ?= 2
LAYOUTS := tp1 tp2 tp4 tp8 tp4-cp2 tp4-cp2-sp tp8-local4

SIZE_cpu := tiny
SIZE_cuda := small
PINS_cpu := cpu
PINS_cuda := gpu
TRITON_cpu := 3.6
ifeq ($(SIZE_$(DEVICE)),)
$(error DEVICE: received '$(DEVICE)'; accepted: cpu, cuda)
endif

BIN := $(VENV)/bin
READY := $(VENV)/ready-$(DEVICE)
OTHER := $(TRITON_$(DEVICE):%=$(VENV)/triton-%/ready)
REPORTS := $(LAYOUTS:%=build/reports/%.json)
SOURCES := $(shell find h3lib -name '*.py')

.PHONY: reproduce test notebooks book check-book crate lint lab clean

reproduce: $(READY)  ## the whole result: every layout as real processes, notebooks, book
	rm -rf build/reports
	$(MAKE) --no-print-directory book DEVICE=$(DEVICE)

test: $(READY) $(OTHER)  ## all tests but the slow ones and those that need a GPU
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and not gpu and not browser"
	$(if $(OTHER),PYTHONPATH=$(abspath $(dir $(OTHER))) $(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and not gpu" tests/ops/hopper)

build/reports/%.json: $(SOURCES) | $(READY)
	@mkdir -p $(@D)
	$(BIN)/h3lib run --layout $* --size $(SIZE_$(DEVICE)) --rows $(ROWS) --device $(DEVICE) --backend $(BACKEND) --out $@

notebooks: $(REPORTS)  ## execute every notebook with papermill into book/runs/
	$(BIN)/python -m h3lib.book all

book: notebooks  ## build the book, warnings are errors
	$(BIN)/jupyter-book build book -W -n --keep-going --all -q
	@echo "The book: file://$(CURDIR)/book/_build/html/index.html"

check-book: $(READY)  ## the built book in a headless Chromium; screenshots in build/screenshots/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement env/requirements-browser.txt
	$(BIN)/python -m pytest -q -m browser tests/browser

crate: $(READY)  ## the committed reports as an RO-Crate in build/crate/
	rm -rf build/crate
	$(BIN)/python -m h3lib.crate build/crate
	$(BIN)/python -m h3lib.crate --check build/crate

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/python -m h3lib.readme --check
	$(BIN)/python -m h3lib.ledger --check
	$(BIN)/python -m h3lib.claims --check

lab: $(READY)  ## the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_FLAGS)

clean:
	rm -rf $(VENV) build book/runs book/_build

# Another Triton over the same environment: the kernels are compiled and interpreted with it too.
$(VENV)/triton-%/ready: env/requirements-triton-%.txt $(READY)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) --requirement $<
	PYTHONPATH=$(abspath $(@D)) $(BIN)/python -c 'import sys, triton; found = triton.__version__; sys.exit(not found.startswith("$*.") and f"Triton: received {found}; accepted: $*")'
	touch $@

# One virtual environment from exact pins; it is made again when a pin changes.
$(READY): env/requirements-$(PINS_$(DEVICE)).txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PYTHON: received %d.%d; accepted: 3.11 or newer" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	rm -f $(VENV)/ready-*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $<
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@
