.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV := .venv
# What a job needs, and what the tests and tools need too.
BASE := $(VENV)/.base
READY := $(VENV)/.ready
# A path to the checkout. Without it pip's hook costs 20 ms at each start of Python, and mypy finds no package.
EDITABLE := --config-settings editable_mode=compat --editable
RUN := $(VENV)/bin/python
# Other projects that tests run, beside the packages of $(VENV), which stay as they are.
INTEGRATIONS := .venv-integrations
# Frameworks of the oldest releases that the adapters support, before those of the environment of the tests.
OLDEST_FRAMEWORKS := .venv-oldest-frameworks
# The two ends of the ranges in pyproject.toml; the newer one with Python 3.13 where there is one.
OLDEST := .venv-oldest
NEWEST := .venv-newest
NEWEST_PYTHON ?= $(shell for p in python3.13 "$$(pyenv prefix 3.13 2>/dev/null)/bin/python3.13"; do \
  "$$p" -c 'import ensurepip, ssl' 2>/dev/null && echo "$$p" && break; done)
RANGE_TESTS := $(addprefix tests/unit/, comm consistency parallel snapshots state worker checkpoint/convert launcher/store \
    launcher/options/test_torchrun.py test_torch_internals.py) \
  tests/contract/test_store.py $(addprefix tests/integration/, test_unused_parameters.py test_changes_inside.py test_joins_inside.py)
# What makes a site of the pages, likewise.
DOCS := .venv-docs
PAGES := README.md CONTRIBUTING.md SECURITY.md docs examples benchmarks/results tests/gpu/README.md
# Tests run at a time, on two cores: those of clusters wait for a third of their time. Whole files, the longest first.
JOBS ?= 3
# A runner that dies ends the run, with a summary: another one would begin the same test again, and die of it.
RUNNERS := -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# pytest's own limit ends a run between two tests, with a summary; `timeout` ends one that hangs elsewhere.
# A part of the slow tests, drawn by a text: make slow SHARE=0.05 SEED=text
SHARE ?= 1
SEED ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo 0)
# Version of Python on the machine with the GPU, for which wheels are fetched; tests that run there at a time.
GPU_PYTHON ?= 3.12
GPU_JOBS ?= 8
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Thousands of agents and workers start in the tests; without it each compiles the whole package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test slow quick check reference manifests changelog bench chaos gpu gpu-all gpu-wheels integrations versions docs pictures tools links clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 21

$(BASE): pyproject.toml setup.py constraints.txt | links
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "error: Python 3.11 or newer is needed; name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing ElasticZero and a CPU build of torch in $(VENV): this takes a minute or two"
	$(RUN) -m pip install --quiet -c constraints.txt $(EDITABLE) '.[local]'
	@touch $@

$(READY): $(BASE)
	@echo "installing what the tests and tools need in $(VENV)"
	$(RUN) -m pip install --quiet -c constraints.txt $(EDITABLE) '.[local,dev]'
	@touch $@

links: # a tree unpacked from a zip has plain files in their place
	@for name in launcher checkpoint; do [ -d elasticzero/$$name ] || ln -sfn ../$$name elasticzero/$$name; done

demo: $(BASE) ## train a GPT on three nodes, kill one, let one join, report (about 4 minutes)
	$(RUN) -m tools.demo

test: $(READY) tools ## unit tests, and a story of each kind of fault with real processes (about 10 minutes)
	timeout --foreground --kill-after=10 2700 $(RUN) -m pytest -ra -q $(RUNNERS) --session-timeout 2400

slow: $(READY) tools ## the other stories and cases, each python started anew (about 90 minutes; SHARE=0.05 for a twentieth)
	TESTS_COLD=1 timeout --foreground --kill-after=10 7500 $(RUN) -m pytest -ra -q $(RUNNERS) \
	  --session-timeout 7200 -m "slow and not chaos" \
	  --share $(SHARE) --seed $(SEED)

quick: $(READY) ## tests of what the change touched (under a minute)
	@$(RUN) -m pytest -ra -q $(RUNNERS) --session-timeout 600 $$($(RUN) -m tools.touched)

check: $(READY) ## ruff, mypy --strict, import contracts, house rules, no stale page or manifest
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	$(RUN) -m pytest -q tests/unit/test_house.py
	$(RUN) -m tools.reference --check
	$(RUN) -m tools.kubernetes_fields --check
	$(RUN) -m tools.manifests --check
	$(RUN) -m tools.monitoring --check

reference: $(READY) ## write docs/reference, and generated files of monitoring, from the code
	$(RUN) -m tools.reference
	$(RUN) -m tools.monitoring

manifests: $(READY) ## write k8s/ by elasticzero k8s render, and the table of fields for --patch
	$(RUN) -m tools.kubernetes_fields
	$(RUN) -m tools.manifests

changelog: $(READY) ## put the files of changes/ into CHANGELOG.md: make changelog VERSION=0.3.0
	$(RUN) -m tools.changes $(VERSION)

bench: $(READY) ## recovery beside torchrun's, checkpoints beside torch DCP's, steps beside DDP's (over an hour)
	$(RUN) benchmarks/recovery.py
	$(RUN) benchmarks/checkpoint.py
	$(RUN) benchmarks/training.py
	$(RUN) benchmarks/streams.py

chaos: $(READY) ## long runs with random faults
	$(RUN) -m pytest -ra -q -m chaos --timeout=3600

$(INTEGRATIONS)/.ready: PACKAGES = -c constraints.txt torchao datasets playwright pillow matplotlib mlflow-skinny wandb \
  torchdata webdataset brotli catalogue python-snappy zstd
# Without torchvision, whose wheels need torch for CUDA, mosaicml-streaming without its caps on numpy, transformers and xxhash, and
# deepspeed without its compiled parts.
$(INTEGRATIONS)/.ready: ALONE = litdata mosaicml-streaming deepspeed hjson ninja py-cpuinfo einops msgpack \
  megatron-core
$(INTEGRATIONS)/.ready: export DS_BUILD_OPS := 0
$(OLDEST_FRAMEWORKS)/.ready: PACKAGES = -r tests/integrations/oldest_frameworks.txt
$(OLDEST_FRAMEWORKS)/.ready: tests/integrations/oldest_frameworks.txt
$(INTEGRATIONS)/.ready $(OLDEST_FRAMEWORKS)/.ready: .venv-%/.ready: $(READY) constraints.txt
	$(RUN) -m venv --clear .venv-$*
	@site=$$($(RUN) -c 'import site; print(site.getsitepackages()[0])'); \
	  echo "import site; site.addsitedir('$$site')" > $$(echo .venv-$*/lib/python*/site-packages)/base.pth
	.venv-$*/bin/python -m pip install --quiet $(PACKAGES)
	$(if $(ALONE),.venv-$*/bin/python -m pip install --quiet -c constraints.txt --no-deps $(ALONE))
	@touch $@

integrations: $(INTEGRATIONS)/.ready $(OLDEST_FRAMEWORKS)/.ready versions ## what make versions does; scripts and optimizers of other projects (about 25 minutes)
	@.ci/browser
	timeout --foreground --kill-after=10 1800 $(INTEGRATIONS)/bin/python -m pytest -ra -q $(RUNNERS) -n 2 -m integrations tests/integrations
	timeout --foreground --kill-after=10 900 $(OLDEST_FRAMEWORKS)/bin/python -m pytest -ra -q tests/integration/adapters

# Each Python is a try, since gigabytes are fetched.
$(OLDEST)/.ready: PYTHONS = $(RUN) $(RUN)
$(NEWEST)/.ready: PYTHONS = $(NEWEST_PYTHON) $(RUN) $(RUN)
$(OLDEST)/.ready $(NEWEST)/.ready: .venv-%/.ready: $(READY) pyproject.toml setup.py tests/integrations/%.txt tests/integrations/tools.txt
	for python in $(PYTHONS); do $$python -m venv --clear .venv-$* \
	  && timeout --foreground --kill-after=10 1200 .venv-$*/bin/python -m pip install --quiet --no-compile \
	    -r tests/integrations/$*.txt -r tests/integrations/tools.txt $(EDITABLE) . && exit; done; exit 1
	@touch $@

versions: $(OLDEST)/.ready $(NEWEST)/.ready ## tests with the oldest and the newest packages (about 10 minutes; fetches 6 GB)
	@for end in $(OLDEST) $(NEWEST); do $$end/bin/python -c 'import sys, torch; \
	  print("packages of", sys.argv[1] + ": torch", torch.__version__, "on Python", sys.version.split()[0])' $$end; done
	timeout --foreground --kill-after=10 1200 $(OLDEST)/bin/python -m pytest -ra -q $(RUNNERS) $(RANGE_TESTS)
	timeout --foreground --kill-after=10 1200 $(NEWEST)/bin/python -m pytest -ra -q $(RUNNERS) $(RANGE_TESTS)

$(DOCS)/.ready: $(READY) constraints.txt
	$(RUN) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt mkdocs-material
	@touch $@

docs: $(DOCS)/.ready ## the pages as a site in build/site; a broken link is an error
	rm -rf build/pages && mkdir -p build/pages && cp -r --parents $(PAGES) build/pages
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet --strict

pictures: $(INTEGRATIONS)/.ready tools ## write docs/pictures by Chromium, Debian's package chromium (about 6 minutes)
	$(INTEGRATIONS)/bin/python -m tools.pictures
	$(INTEGRATIONS)/bin/python -m tools.report_picture
	$(INTEGRATIONS)/bin/python -m tools.dashboard_picture

# Torch of constraints.txt is the CPU's: name a Python that has torch for CUDA. tests/gpu/README.md says more.
gpu: ## the 25 essential tests with CUDA and NCCL, on one GPU within 200 s: make gpu RUN=python3
	$(RUN) -m tests.gpu.kit --jobs $(GPU_JOBS)

gpu-all: ## every test that can use a GPU, within 30 minutes: make gpu-all RUN=python3
	$(RUN) -m tests.gpu.kit --jobs $(GPU_JOBS) --all --seconds 1800

gpu-wheels: $(READY) ## fetch what these tests need beside torch, for a machine without a network
	$(RUN) -m tests.gpu.wheels --python $(GPU_PYTHON)

tools: # programs that some tests run, from Debian's packages where they are missing
	@.ci/tools

clean: ## remove everything that make has built
	rm -rf $(VENV) .gpu $(INTEGRATIONS) $(OLDEST_FRAMEWORKS) $(OLDEST) $(NEWEST) $(DOCS) build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
