# Everything runs in .venv, which is made when it is missing. Every target can be run again.
#
#   make demo     the main job: a small GPT that loses workers, gets new ones, and ends with the same weights
#   make test     all tests but those of the next lines, and those that need a GPU
#   make test-clusters   tests that start Ray clusters of several nodes, job servers and notebooks of their own
#   make test-long   by hand, before a release: more cases, and longer runs, of the other tests; it resumes where it was
#                    interrupted (docs/dev/long-runs.md)
#   make compat   before a release: the demo, the quick tests and the engine's with the lowest and the newest versions that
#                 pyproject.toml allows, each in a separate environment; COMPAT=lowest:demo,engine does a part
#   make mutants  before a release: 60 changes of single places of the engine's code, drawn by a seed, each against the
#                 engine's tests, for four minutes at most: 95 of 100 should be found; resumes where interrupted
#   make mutants-device   before a release: each call that orders streams, of the engine and of FSDP2, removed, one at a
#                 time, against the engine on simulated streams: 95 of 100 that it reaches should be found; some ten minutes
#   make test-gpu  on a machine with a GPU, half an hour: workers that share it, NCCL with two and more, torch's sanitizer, failed
#                 kernels, memory, torchtitan; then the benchmark `gpu`. A table lists all, with the reasons of those it skips
#   make cuda-names   before a release: whether torch for CUDA has all names and options that the code for GPUs uses; needs
#                 no GPU, and some 3 GB of downloads into .venv-cuda
#   make test-s3  the tests on a real S3 server (Ceph's, from Debian's packages, unpacked into a cache: 70 MB once)
#   make check    format, lint, types, import layers, and the quick tests, on two cores: a minute or two
#   make docs     the documentation as a site, build/site/index.html, which needs no network
#   make bench    raysharded compared with its alternatives, in less than an hour on two cores: a page in build/
#   make bench-quick   the same at smaller sizes, in minutes: a check that it works
#   make bench-full    the same with five rounds and more, in four to five hours: docs/benchmarks.md
#   make lock     requirements/locked.txt: the newest versions of what a run needs, each with the hashes of its files
#   make clean    remove what was built and cached; .venv stays
#
# Settings: PYTHON (3.11 or later), TORCH (what to give `pip install` for torch: a machine without a GPU saves gigabytes
# with PyTorch's CPU wheels, from a file or from their own index), DEMO_ARGS, PYTEST_ARGS, BENCH (`recovery`, `stops`,
# `nodes`, `resizes`, `steps`, `steps-large`, `goodput`, `checkpoints`, `scale`, `report`, `gpu`, or `all`), COMPAT
# (`lowest`, `newest`, or parts of them), CUDA_TORCH (as TORCH, for `make cuda-names`), NEWEST_TORCH (as TORCH, for `make compat`; default: what pip finds), CLOCK
# (what to put before each part of the tests to take its time, as `.ci/run` does), BESIDE (targets that `make test` makes
# beside its last part), MUTANTS (`--count N --seed K`).

PYTHON ?= python3
TORCH ?= torch==2.13.0
DEMO_ARGS ?=
PYTEST_ARGS ?=
BESIDE ?=
BENCH ?= all
CLOCK ?=
MUTANTS ?=
COMPAT ?= lowest newest
NEWEST_TORCH ?= torch

SHELL := /bin/sh
# The tests start hundreds of processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
.DELETE_ON_ERROR:
.PHONY: help install demo test test-ray test-clusters test-long compat mutants mutants-device test-gpu cuda-names test-s3 check lint-then-s3 lint docs bench bench-quick bench-full peers lock clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PACKAGE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
COMPILER := $(VENV)/.has-compiler
S3FS := $(VENV)/.installed-s3fs
BROWSER := $(VENV)/.has-browser
TITAN := build/torchtitan/.installed
PEERS := $(patsubst benchmarks/environments/%.txt,.venv-bench/%/.installed,$(wildcard benchmarks/environments/*.txt))

# Tests run two at a time, but for those that depend on timing, and those that use Ray, which are no faster so: they run
# one by one, and only the files with such tests are collected. Those on Ray mostly wait: `.ci/run` has BESIDE them.
# Files of tests that run two at a time are in memory, where there is enough of it: many disks make them wait.
QUICK := not long and not ray and not gpu and not s3 and not slow and not procs and not alone
TWO_AT_A_TIME := not long and not ray and not gpu and not s3 and not alone
ALONE := not long and alone and not ray and not clusters and not gpu and not s3
ON_RAY := not long and ray and not clusters and not gpu and not s3
CLUSTERS := not long and clusters and not gpu and not s3
ON_S3 := not long and s3 and not gpu
SIDE_BY_SIDE := -n 2 --dist worksteal --in-memory
SLOWEST := --durations=12
# A test with separate processes may fail once because another program took the machine: it is retried, at most a few
# tests per run. The first failure is printed with its traceback, as it may be a race that is worth finding. Quick tests
# are not retried (tests/second_tries.py). A table at the end lists all tests that needed a retry.
SECOND_TRY := --max-suite-reruns 3 --rerun-show-tracebacks
# The files of tests that contain one of these words, unless PYTEST_ARGS names others.
files_with = $(if $(findstring tests,$(PYTEST_ARGS)),,$$(grep -rlE "$(1)" tests --include="test_*.py"))
timed = $(if $(CLOCK),$(CLOCK) $(1))
# With PYTEST_ARGS a part may have no test: pytest's exit status is 5.
or_none = $(if $(PYTEST_ARGS),|| [ $$? = 5 ])

help:
	@sed -n 's/^#   make/make/p' Makefile

# All that the tests need, but for the S3 server.
install: $(DEV) $(COMPILER) $(BROWSER) $(S3FS)

demo: $(PACKAGE)
	@$(BIN)/python -m raysharded demo $(DEMO_ARGS)

test: $(DEV) $(COMPILER) $(BROWSER) $(S3FS)
	@$(call timed,two-at-a-time) $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(SECOND_TRY) $(SLOWEST) -m "$(TWO_AT_A_TIME)" \
		$(PYTEST_ARGS) $(or_none)
	@$(call timed,alone) $(BIN)/python -m pytest $(SECOND_TRY) $(SLOWEST) -m "$(ALONE)" \
		$(call files_with,mark\.alone) $(PYTEST_ARGS) $(or_none)
	@$(MAKE) --no-print-directory $(if $(BESIDE),-j --output-sync=target) test-ray $(BESIDE)

test-ray: $(DEV) $(COMPILER) $(BROWSER) $(S3FS)
	@$(call timed,ray) $(BIN)/python -m pytest $(SECOND_TRY) $(SLOWEST) -m "$(ON_RAY)" \
		$(call files_with,mark\.ray) $(PYTEST_ARGS) $(or_none)

test-clusters: $(DEV)
	@$(call timed,clusters) $(BIN)/python -m pytest $(SECOND_TRY) $(SLOWEST) -m "$(CLUSTERS)" \
		$(call files_with,mark\.clusters) $(PYTEST_ARGS) $(or_none)

# Tests that passed at this commit are not repeated: the run may be interrupted at any time and resumes from there.
LONG := build/long/$(shell git rev-parse --short HEAD 2>/dev/null)
test-long: $(DEV) $(COMPILER) $(TITAN) $(S3FS)
	@$(call timed,long) $(BIN)/python -m pytest $(SECOND_TRY) $(SLOWEST) -m "long and not gpu" \
		--ignore tests/driver/test_histories.py --passed $(LONG)/cases.txt \
		$(call files_with,mark\.long|tried_each_time) $(PYTEST_ARGS)
	@RAYSHARDED_SCHEDULES=3000 $(call timed,long-histories) $(BIN)/python -m pytest $(SIDE_BY_SIDE) \
		--passed $(LONG)/histories.txt tests/driver/test_simulation.py tests/driver/test_replay.py \
		tests/driver/test_histories.py $(PYTEST_ARGS)
	@RAYSHARDED_ALL_EXAMPLES=1 $(call timed,long-examples) $(BIN)/python -m pytest $(SIDE_BY_SIDE) \
		-m "hypothesis and not long" --passed $(LONG)/examples.txt $(call files_with,max_examples=examples) \
		$(PYTEST_ARGS) $(or_none)

# torchtitan and what it needs beside the tests' environment: a folder that only its own tests look into.
$(TITAN): tests/adapters/torchtitan.txt $(DEV)
	@$(PIP) install --no-deps --upgrade --target $(@D) --requirement $<
	@touch $@

# Parts that passed for the same commit are not repeated. Results: .venv-compat/results.txt
compat: $(COMPILER)
	@QUICK='$(QUICK)' PYTEST_ARGS='$(PYTEST_ARGS)' NEWEST_TORCH='$(NEWEST_TORCH)' \
		$(PYTHON) -m tests.packaging.compat $(COMPAT)

mutants: $(DEV) $(COMPILER)
	@$(BIN)/python -m tests.mutation $(MUTANTS)

mutants-device: $(DEV)
	@$(BIN)/python -m tests.actors.device.simulated

# Not PyTorch's CPU wheels, which TORCH may name.
CUDA_TORCH ?= torch==2.13.0
.venv-cuda/.installed:
	@echo "installing $(CUDA_TORCH) into .venv-cuda: some 3 GB of downloads"
	@$(PYTHON) -m venv .venv-cuda
	@.venv-cuda/bin/python -m pip --disable-pip-version-check --quiet install '$(CUDA_TORCH)' numpy
	@touch $@

cuda-names: .venv-cuda/.installed
	@.venv-cuda/bin/python -m tools.cuda_names

# An environment of your own with torch for CUDA, where .venv has the CPU's: GPU_PYTHON=.venv-cuda/bin/python
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(DEV) $(COMPILER) $(TITAN)
	@status=0; \
	$(GPU_PYTHON) -m pytest --durations=12 -m gpu tests/gpu $(PYTEST_ARGS) || status=$$?; \
	$(GPU_PYTHON) -m benchmarks gpu --effort quick || status=$$?; \
	exit $$status

test-s3: $(DEV) $(S3FS)
	@$(BIN)/python -c 'from tests.s3.server import programs; print("S3 server:", programs())'
	@$(call timed,s3) $(BIN)/python -m pytest $(SECOND_TRY) $(SLOWEST) -m "$(ON_S3)" \
		$(call files_with,mark\.s3) $(PYTEST_ARGS) $(or_none)

check: lint $(S3FS)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "$(QUICK)" $(PYTEST_ARGS)

# In `.ci/run`, beside tests that mostly wait.
lint-then-s3: $(DEV) $(S3FS)
	@$(call timed,lint) $(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory test-s3

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python -m tools.prose
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

# Warnings are errors: a link that leads nowhere, a page that is in no part of the sidebar.
docs: $(DEV)
	@$(BIN)/python -m sphinx -q -E -W --keep-going -c docs -b html . build/site
	@echo "build/site/index.html"

peers: $(PEERS)

bench: EFFORT := hour
bench-quick: EFFORT := quick
bench-full: EFFORT := full
bench bench-quick bench-full: $(DEV) $(S3FS) $(PEERS)
	@$(BIN)/python -m benchmarks $(BENCH) --effort $(EFFORT)
	@$(BIN)/python -m benchmarks page --effort $(EFFORT)

# Of PyPI's files alone, as pip would choose them here: `pip install --require-hashes -r requirements/locked.txt`.
LOCKED := --python-version 3.11 --python-platform x86_64-manylinux_2_28 --extra s3 --extra jobs --extra tokenizers \
	--extra tensorboard
lock: | $(BIN)/python
	@$(PIP) install 'uv>=0.9'
	@$(BIN)/uv pip compile pyproject.toml $(LOCKED) --generate-hashes --upgrade --quiet --no-annotate \
		--custom-compile-command 'make lock' --output-file requirements/locked.txt

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find raysharded tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Each peer that is measured has a separate environment: pinned, never a dependency; torch first, as above.
.venv-bench/%/.installed: benchmarks/environments/%.txt | $(BIN)/python
	@echo "installing benchmarks/environments/$*.txt into .venv-bench/$*"
	@$(PYTHON) -m venv .venv-bench/$*
	@.venv-bench/$*/bin/python -m pip --disable-pip-version-check --quiet install $(TORCH)
	@.venv-bench/$*/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@touch $@

# A bare Debian has Python without its venv module: install it if permitted, otherwise print what to install.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "raysharded needs Python 3.11 or later; '$(PYTHON)' is not. Name one: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	    rm -rf $(VENV); \
	    package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        echo "installing $$package"; \
	        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$package >/dev/null; \
	    fi; \
	    $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	        rm -rf $(VENV); \
	        echo "'$(PYTHON) -m venv' does not work here. As root: apt-get install $$package"; exit 1; }; }

# torch first, at the version that is tested, so that nothing else chooses one.
$(PACKAGE): pyproject.toml | $(BIN)/python
	@echo "installing raysharded into $(VENV) (a few minutes the first time)"
	@$(PIP) install $(TORCH)
	@$(PIP) install -e .
	@touch $@

$(DEV): pyproject.toml | $(PACKAGE)
	@echo "installing the development tools"
	@$(PIP) install -e '.[dev]'
	@touch $@

# s3fs takes a botocore of its own choice, and with it a boto3.
$(S3FS): pyproject.toml | $(DEV)
	@$(PIP) install -e '.[s3]'
	@touch $@

# torch.compile, which the tests try too, needs a C++ compiler and Python's headers.
HEADERS = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
$(COMPILER): | $(BIN)/python
	@{ command -v g++ >/dev/null && test -f "$(HEADERS)"; } || { \
	    packages="g++ $$($(BIN)/python -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"; \
	    test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing $$packages" && \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$packages >/dev/null; \
	    { command -v g++ >/dev/null && test -f "$(HEADERS)"; } || { \
	        echo "the tests need a C++ compiler and Python's headers: as root, apt-get install $$packages"; exit 1; }; }
	@touch $@

# The page of a report is tried in a real browser: Debian's Chromium without a window, 100 MB once. Where there is none
# and none can be installed those tests are skipped, and say so.
CHROMIUM = command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null
$(BROWSER): | $(BIN)/python
	@$(CHROMIUM) || { \
	    test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing chromium-headless-shell" && \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	        chromium-headless-shell fonts-dejavu-core >/dev/null; } || true
	@if $(CHROMIUM); then touch $@; else \
	    echo "no Chromium here: the report's page is not tried. As root: apt-get install chromium-headless-shell"; fi
