# The two commands of the README, and a few more. `make help` lists them.
# PYTHON: the interpreter that .venv is made from; it counts when .venv is made. TORCH: what is installed first, so
# that a GPU user keeps their own CUDA build (make install TORCH="torch==2.9.1", or TORCH=path/to/a.whl). A torch
# that is already in .venv stays, unless TORCH is given and differs from what was given before.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHOSEN := $(filter command environment,$(origin TORCH))
ifneq ($(and $(CHOSEN),$(filter-out $(shell cat $(STAMP) 2>/dev/null),$(TORCH))),)
$(STAMP): FORCE
endif

# Large temporaries of attention scoring: keep them in the heap instead of handing pages back to the
# kernel after each one (several times faster on a CPU with glibc; harmless elsewhere).
export MALLOC_MMAP_THRESHOLD_ = 4294967296
export MALLOC_TRIM_THRESHOLD_ = 4294967296
# No chapter at lab size needs a model hub: fail at once instead of waiting for one.
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_PROGRESS_BARS = 1
export TOKENIZERS_PARALLELISM = false
export PYDEVD_DISABLE_FILE_VALIDATION = 1
# Compiled modules are kept: a run is three processes, and pytest, which rewrites every test file, is three as well.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: FORCE help install book test unit pytest parity notebooks pages serve export bench reproduce faults student classroom lint format clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 20
	@echo
	@echo '  PYTHON=$(PYTHON)  TORCH=$(TORCH)  VENV=$(VENV)   (override on the command line)'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c pass 2>/dev/null || { echo 'PYTHON=$(PYTHON) does not run: give a Python of 3.11 or later' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d; this book needs 3.11 or later: make … PYTHON=python3.12" % v)'
	@start=$$(date +%s); \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || exit 1; \
	echo 'installing into $(VENV) (once; several minutes on a slow connection)'; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip && \
	{ $(if $(CHOSEN),false,$(BIN)/python -c 'import torch' 2>/dev/null) || \
	  $(BIN)/python -m pip install --quiet '$(TORCH)'; } && \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[book,dev]' && \
	echo '$(TORCH)' > $(STAMP) && echo "install: $$(( $$(date +%s) - start )) s"

install: $(STAMP)  ## create .venv and install everything, once

book: $(STAMP)  ## run every chapter on the embedded data, then build the HTML
	@start=$$(date +%s); \
	$(BIN)/itm scenes build && $(BIN)/itm notebooks run && $(BIN)/itm book build --executed && \
	echo "book: $$(( $$(date +%s) - start )) s; open _build/html/index.html"

# Side by side, each with all that it says in one piece, where make can do that (GNU make 4).
WHOLE := $(addprefix --,$(addsuffix =target,$(filter output-sync,$(.FEATURES))))
test: $(STAMP)  ## all tests, slow ones included, parity, notebooks, strict book build
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory pytest && $(MAKE) --no-print-directory --jobs=2 $(WHOLE) parity notebooks pages && \
	echo "test: $$(( $$(date +%s) - start )) s"

unit pytest: export OMP_NUM_THREADS = 1
unit: $(STAMP)  ## the fast tests (about two minutes): models, metrics, data, parity; see tests/README.md
	@$(BIN)/python -m pytest tests/unit tests/contract tests/parity -m 'not slow' -n 2 --dist loadgroup --no-loadscope-reorder

pytest: $(STAMP)  # every test, slow ones included, two at a time
	@$(BIN)/python -m pytest tests --ignore=tests/browser -n 2 --dist loadgroup --no-loadscope-reorder

parity: $(STAMP)  # golden cases of the public implementations
	@$(BIN)/itm parity tests/golden

notebooks: $(STAMP)  # every chapter once, its stored outputs compared
	@$(BIN)/itm export --check && $(BIN)/itm notebooks lint && $(BIN)/itm scenes build
	@$(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=300 -n 2 --dist loadscope notebooks

pages: $(STAMP)  # the book from the committed outputs, warnings are errors; then every page in a browser, where one is installed
	@$(BIN)/itm book build && $(BIN)/python -m pytest tests/browser -n 2

serve: export ITM_PROGRESS = 1
serve: $(STAMP)  ## JupyterLab on the chapters
	@$(BIN)/jupyter lab --notebook-dir=.

export: $(STAMP)  ## write itm_utils/models/ from the chapters' exported cells
	@$(BIN)/itm export

bench: export OMP_NUM_THREADS = 1
bench: $(STAMP)  ## every ratio the book claims, measured in turns; fails if one is 20 % worse than the committed one
	@$(BIN)/python -m benchmarks

reproduce: $(STAMP)  ## run the lab experiments again with their seeds, and compare with the committed receipts (hours)
	@$(BIN)/itm run --table lab/foundations --dry-run | tail -2
	@ITM_PROGRESS=1 $(BIN)/itm run --table lab/foundations --receipts runs/reproduced

faults: $(STAMP)  ## strike every work with over 200 faults, readers and commands with over 500 damaged inputs (half an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/faults/campaign.py

student: $(STAMP)  ## copies of the chapters without solutions, in _build/student/
	@$(BIN)/itm notebooks student

classroom: $(STAMP)  ## a course folder in _build/classroom/: nbgrader, slides, questions, wheels, dataset
	@$(BIN)/itm classroom make

lint: $(STAMP)  ## ruff, bandit, pyright, import contracts, spelling, vocabulary, notebook rules, stale modules
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell && $(BIN)/lint-imports && \
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml itm_utils itm_lab && $(BIN)/pyright && $(BIN)/itm vocabulary && $(BIN)/itm notebooks lint && $(BIN)/itm export --check

format: $(STAMP)  ## ruff fixes and formatting, notebook metadata cleaned
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format . ; $(BIN)/itm notebooks lint --fix

clean:  ## remove what was built (never runs/, receipts/ or .venv)
	@rm -rf _build .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find benchmarks book itm_lab itm_utils notebooks tests -name __pycache__ -type d -prune -exec rm -rf {} +
