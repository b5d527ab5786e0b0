# Needs make and a Python from 3.11 to 3.13, nothing else. `make` alone lists what there is.
#   VENV=folder      the environment to use (default .venv; in an activated conda environment: VENV="$CONDA_PREFIX")
#   PYTHON=command   the Python that makes it
VENV ?= .venv
PYTHON ?=
LAB_ARGS ?=
TEST_ARGS ?=

PY := "$(VENV)/bin/python"
# Each step of the set-up leaves its stamp here and runs again when what it reads is newer.
STAMP := $(VENV)/.labkit
WITH_VENV_PATH = PATH="$$(cd "$(VENV)/bin" && pwd):$$PATH"
HELP_SETUP = echo "The set-up stopped: see 'Troubleshooting' in README.md. 'make setup' goes on from here." >&2

export OMP_WAIT_POLICY ?= passive
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: FORCE help setup lab test lint aot bench record record-peers record-kv record-ladder quantlibs notebooks picture gpu-check gpu-notebooks constraints clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

# The first Python that runs, is of a supported version and can make an environment; what is on the PATH may do none.
define FIND_PYTHON
find_python() { \
	for python in $(if $(PYTHON),"$(PYTHON)",python3.13 python3.12 python3.11 python3 python); do \
		if "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
			2>/dev/null; then echo "$$python"; return 0; fi; \
	done; \
	echo "No Python from 3.11 to 3.13 that has venv$(if $(PYTHON), at PYTHON=$(PYTHON), on the PATH)." \
		"Install one (Debian, Ubuntu: python3 and python3-venv)" \
		"or name it: make setup PYTHON=/path/to/python3.12" >&2; \
	return 1; \
}
endef

# An environment whose Python has gone (an upgrade, a moved folder) is made again.
$(STAMP)/venv: $(if $(shell test -x "$(VENV)/bin/python" && echo there),,FORCE)
	@$(FIND_PYTHON); if ! $(PY) -m pip --version >/dev/null 2>&1; then \
		python=$$(find_python) || exit 1; \
		echo "Making $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv $(if $(filter .venv,$(VENV)),--clear) "$(VENV)" || { $(HELP_SETUP); exit 1; }; \
	fi
	@mkdir -p "$(STAMP)" && touch "$@"

$(STAMP)/packages: requirements.txt constraints.txt $(STAMP)/venv
	@echo "Installing the pinned packages of requirements.txt into $(VENV) (once; a torch with CUDA is about 3 GB)"
	@$(PY) -m pip install -r requirements.txt || { $(HELP_SETUP); exit 1; }
	@touch "$@"

$(STAMP)/labkit: pyproject.toml tools/jupyterlab_overrides.json $(STAMP)/packages
	@echo "Installing labkit itself, from this folder"
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation -e . || { $(HELP_SETUP); exit 1; }
	@mkdir -p "$(VENV)/share/jupyter/lab/settings"
	@cp tools/jupyterlab_overrides.json "$(VENV)/share/jupyter/lab/settings/overrides.json"
	@touch "$@"

setup: $(STAMP)/labkit ## make .venv, install the pinned packages, fetch the default model
	@$(PY) -m labkit fetch || { $(HELP_SETUP); exit 1; }

# No call to the outside; the question about news is answered in tools/jupyterlab_overrides.json.
QUIET_LAB = --LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate \
	--LabApp.extension_manager=readonly --LanguageServerManager.autodetect=False

lab: setup ## set up, then open the course in JupyterLab on this machine
	@echo "Starting JupyterLab on 127.0.0.1 (Ctrl-C stops it)"
	@$(WITH_VENV_PATH) python -m jupyterlab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) \
		--ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(QUIET_LAB) $(LAB_ARGS)

# Three runs, quickest first; a failure in one does not hide the next. Measurements go into a ledger of the tests' own.
TEST_ENV = $(WITH_VENV_PATH) LABKIT_LEDGER="$(CURDIR)/.pytest_cache/ledger.jsonl"
PYTEST = $(TEST_ENV) python -m pytest
NBVAL = --nbval --nbval-current-env --nbval-cell-timeout=300 --nbval-sanitize-with=tests/notebooks/sanitize.cfg

.PHONY: test-units test-notebooks test-browser
test: setup ## set up, then run every test: units, notebooks, browser
	@failed=; for part in units notebooks browser; do \
		$(MAKE) --no-print-directory test-$$part || failed="$$failed test-$$part"; \
	done; \
	if [ -n "$$failed" ]; then \
		echo "make test: failures in$$failed. Each is a make target of its own: mend, and run that one again." >&2; \
		exit 1; \
	fi

# On two cores, two processes of one thread take 100 s where one process of two threads takes 165.
test-units: $(STAMP)/labkit ## only the unit tests
	@echo "Unit tests, two processes of one thread each"
	@OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist worksteal --ignore=tests/notebooks --ignore=tests/browser $(TEST_ARGS)

# nbval does not compare pictures, and drawing one starts a browser for 2 s: without a path to one there are none.
test-notebooks: $(STAMP)/labkit ## only the notebooks: every output by nbval, hygiene, solutions
	@echo "Notebooks, two at a time"
	@BROWSER_PATH=/none $(PYTEST) $(NBVAL) -n 2 --dist loadscope notebooks tests/notebooks $(TEST_ARGS) || { \
		git diff --quiet -- notebooks 2>/dev/null || \
			echo "The notebooks hold changes of your own: see 'Troubleshooting' in README.md" >&2; \
		exit 1; \
	}

# Each process has a JupyterLab and a Chromium of its own, and shows one lab after another in one kernel: by files.
test-browser: $(STAMP)/labkit ## only JupyterLab in a headless Chromium
	@echo "Browser tests, two at a time"
	@$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder tests/browser $(TEST_ARGS)

picture: test-browser ## the browser tests, then the README's picture of a lab from them
	@cp artifacts/browser/*_lab.png docs/images/

lint: $(STAMP)/packages ## ruff's checks and format
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . || \
		{ echo "make lint: $(VENV)/bin/ruff check --fix . and $(VENV)/bin/ruff format . mend most of it" >&2; exit 1; }

aot: $(STAMP)/labkit ## every Triton kernel compiled for six generations of chips: shared memory, registers, spills
	@env -u TRITON_INTERPRET $(PY) -m labkit.kernels.aot --all

bench: setup ## the speed and memory ratios that the course promises
	@$(PY) -m tools.bench

record: setup ## the runs over a whole model that chapters show as recorded: about half an hour
	@$(PY) -m tools.record_quantization

# The other libraries need packages that exclude the course's and one another's: two more environments, each with a
# stamp inside that its list was installed. A failure in one does not keep the other from being made.
QUANTLIBS = $(or $(LABKIT_QUANTLIBS),.venv-quantlibs)
LEGACY = $(or $(LABKIT_LEGACY),.venv-legacy)
PYTHON311 ?= python3.11

# $(1) folder, $(2) list, $(3) how its Python is found
define INSTALL_PEERS
{ "$(1)/bin/python" -m pip --version >/dev/null 2>&1 || { \
	python=$$($(3)) && echo "Making $(1) with $$("$$python" --version)" && "$$python" -m venv --clear "$(1)"; }; } && \
echo "Installing $(2) into $(1) (once; about 2 GB, with CUDA's libraries 7 GB)" && \
"$(1)/bin/python" -m pip install -r $(2) && touch "$(1)/.labkit-installed" || { \
	echo "$(2) was not installed into $(1): the lines above say why. Mend that and run 'make quantlibs' again;" \
		"it goes on from here. The course itself needs none of this." >&2; exit 1; }
endef

# AutoGPTQ has wheels for Python 3.11 at most.
FIND_PYTHON311 = "$(PYTHON311)" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' \
	2>/dev/null && echo "$(PYTHON311)" || { \
	echo "AutoGPTQ and AutoAWQ need Python 3.11 with venv, and $(PYTHON311) is none: install one" \
		"or name it: make quantlibs PYTHON311=/path/to/python3.11" >&2; false; }

$(QUANTLIBS)/.labkit-installed: requirements-quantlibs.txt
	@$(FIND_PYTHON); $(call INSTALL_PEERS,$(QUANTLIBS),$<,find_python)

$(LEGACY)/.labkit-installed: requirements-legacy.txt
	@$(call INSTALL_PEERS,$(LEGACY),$<,$(FIND_PYTHON311))

quantlibs: ## the libraries that chapter 02 compares with (GPTQModel, AutoGPTQ, AutoAWQ), in environments of their own
	@$(MAKE) --no-print-directory --keep-going $(QUANTLIBS)/.labkit-installed $(LEGACY)/.labkit-installed
	@echo "GPTQModel is in $(QUANTLIBS), AutoGPTQ and AutoAWQ are in $(LEGACY)"

record-peers: setup ## the runs of those libraries that chapter 02 shows as recorded: about an hour
	@$(PY) -m tools.record_peers

record-ladder: setup ## what chapter 06 shows as recorded: the ladder on the default model, ten minutes
	@$(PY) -m tools.record_ladder

record-kv: setup ## what chapter 03 shows as recorded: caches measured, KV heads merged: half an hour
	@$(PY) -m tools.record_kv_cache && $(PY) -m tools.record_kv_merge

notebooks: setup ## run every notebook and keep its outputs, normalised
	@$(WITH_VENV_PATH) python -m tools.notebooks

# On a borrowed GPU machine there is no set-up: its own Python, or PYTHON=…, runs from this folder.
GPU_PYTHON = $(or $(PYTHON),$(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3))

gpu-check: ## on a CUDA machine, without set-up: tests marked gpu, ceilings, decode speed (SECTION=name: one part)
	@"$(GPU_PYTHON)" -m labkit gpu-check

gpu-notebooks: ## on a CUDA machine, without set-up: the notebooks themselves
	@"$(GPU_PYTHON)" -m tools.gpu_notebooks

constraints: $(STAMP)/packages ## write constraints.txt from what is installed
	@$(PY) -m tools.constraints

clean: ## remove .venv, .venv-quantlibs, .venv-legacy and caches; keep the model
	@rm -rf .venv .venv-quantlibs .venv-legacy "$(STAMP)" build labkit.egg-info .pytest_cache .ruff_cache .hypothesis
	@find labkit tools tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
	@echo "Removed the environments and the caches. Models and measurements stay in $${LABKIT_CACHE:-$$HOME/.cache/labkit}."
