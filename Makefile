# `make demo` and `make test` set up everything that they need: a virtual environment in .venv, with the
# packages that .ci/locks names, and missing programs, where apt may be used. Slurm is configured and
# started in sandboxes only, and sshd by the tests only.
SANDBOX := slurmctld slurmd srun munged slurmdbd mariadbd my_print_defaults ip nsenter podman crun catatonit
TESTED := $(SANDBOX) shellcheck chromium tmux sshd g++ patchelf

# The first Python for which the pinned packages have wheels: 3.11 to 3.13.
SUITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  if $$p -c '$(SUITS)' 2> /dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
FAULT_RESULTS := .make/faults
NEWER_SLURM := .make/slurm-24.11
NEWER_PYTHON := .make/python-3.14

# Six files at once on two cores, because tests that wait for Slurm leave the cores idle.
# pyproject.toml leaves out what has a target of its own.
OWN_TARGET := faults or soak or matrix or fuzz or gpu or installs or ray
PYTEST := $(BIN)/python tests/supervise.py $(BIN)/pytest --numprocesses 6 --dist loadfile --no-loadscope-reorder

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
# Tests start Python a thousand times; without this every start would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

all: help
.PHONY: all help demo docs pictures setup test test-all test-loaded lock test-faults triage test-newest test-installs test-ray test-matrix test-slurm test-gpu bench-gpu soak fuzz simulate check durations format goldens bench bench-training \
  bench-all bench-launcher bench-checkpoint bench-mirror bench-data bench-loader bench-restart bench-scale wheel pyz release releases clean

help:  ## Show what can be made
	@grep -hE '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: .venv/.train  ## Train gpt2_zero1 (tiny) on two emulated nodes of this machine
	@$(BIN)/trnslurm plan gpt2_zero1 --nodes 1,2,3,4,8,16
	echo
	$(BIN)/trnslurm submit gpt2_zero1 --nodes 2 --cluster local --preset tiny
	echo
	$(BIN)/trnslurm status last

docs: .venv/.dev  ## Make the site of the pages, site/index.html; a dead link is an error
	@$(BIN)/python docs/make/site.py

pictures: programs .venv/.dev  ## Remake docs/pictures/: run the commands, and record what they show
	@$(BIN)/python docs/make/pictures.py

test: setup  ## Check in ten minutes: linters, types, all logic, one claim for each real part
	@$(MAKE) --no-print-directory check
	$(PYTEST)

# Together with `make test` it runs every test once.
test-all: setup  ## Run the tests that `make test` leaves out: more of Slurm, training, S3, faults
	@$(PYTEST) -m 'rest and not first and not ($(OWN_TARGET))'

# What fails there has a race, or knows how fast the machine is.
test-loaded: setup  ## Run the tests of `make test` beside twelve busy loops
	@for _ in {1..12}; do while :; do :; done & done
	trap 'kill $$(jobs -p)' EXIT
	$(PYTEST)

durations: setup  ## Run both, and record how long each file takes, which orders the files
	@$(PYTEST) --record-durations -m 'not ($(OWN_TARGET))'

check: .venv/.dev  ## Run linters and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	shellcheck .ci/environment .ci/lock .ci/packages .ci/run .ci/uv tests/*.sh tests/sandbox/*.sh cluster-config/parallelcluster/*.sh tests/parallelcluster/fake_bin/* tests/fake_bin/*

setup:  ## Install what the tests need
	@$(MAKE) --no-print-directory -j 3 programs .venv/.dev .venv-pcluster/.made newer-slurm

# Runs one test at a time: the time limits assume an otherwise idle machine.
test-faults: sandbox .venv/.dev  ## Test every row of the fault matrix; write the table of docs/reliability.md
	@export TRNSLURM_FAULT_RESULTS=$(FAULT_RESULTS)
	rm -f "$$TRNSLURM_FAULT_RESULTS"/row-*.json
	$(BIN)/pytest tests/faults -m 'not soak' --durations 0 --durations-min 1
	$(BIN)/python tests/faults/table.py "$$TRNSLURM_FAULT_RESULTS" docs/reliability.md

soak: sandbox .venv/.dev .venv-libraries/.made  ## Cause 100 random faults in one training; add a row to that table; kill scripts at random
	@export TRNSLURM_FAULT_RESULTS=$(FAULT_RESULTS)
	$(BIN)/pytest tests/faults tests/local/test_killed.py -m soak --capture no
	$(BIN)/python tests/faults/table.py "$$TRNSLURM_FAULT_RESULTS" docs/reliability.md

# PART=learn measures the cases that patterns were made from; SHOW=1 prints those that are not right.
PART ?= fresh
triage: .venv/.dev  ## Measure the diagnosis on failures from public threads (PART, SHOW, BESIDE)
	@$(BIN)/python -m tests.node.measure_triage $(PART) $(if $(SHOW),--show) $(if $(BESIDE),--beside $(BESIDE))

fuzz: .venv/.dev  ## Damage files at random for ten minutes and read them (FUZZ_MINUTES, FUZZ_SEED)
	$(BIN)/pytest tests/test_fuzz.py -m fuzz

# A seed that breaks something is one command: python -m tests.simulate --seed N.
MINUTES ?= 5
simulate: .venv/.dev  ## Cause random faults to jobs in virtual time, up to 1,000 nodes (MINUTES)
	@$(BIN)/python -m tests.simulate --minutes $(MINUTES)

test-slurm: sandbox .venv/.dev  ## Run the tests that need Slurm on another version: SLURM=/opt/slurm
	@test -x "$(SLURM)/bin/srun" || { echo "error: SLURM=DIR: a directory with bin/srun" >&2; exit 2; }
	TRNSLURM_SANDBOX_SLURM=$(abspath $(SLURM)) $(BIN)/pytest --numprocesses 3 --dist loadfile \
	  --no-loadscope-reorder tests/sandbox tests/faults

newer-slurm: programs
	@$(MAKE) --no-print-directory $(NEWER_SLURM) || echo "warning: no newer Slurm: its tests are skipped"

$(NEWER_SLURM): tests/sandbox/debian-slurm.sh tests/debian-packages.sh
	@rm -rf $@
	$< $(CURDIR)/$@

$(NEWER_PYTHON): tests/debian-python.sh tests/debian-packages.sh
	@.ci/packages patchelf
	rm -rf $@
	$< $(CURDIR)/$@

# What GPU nodes may have, on CPUs: without XLA, which needs PyTorch 2.9. The losses are also
# compared with those of .venv.
test-newest: .venv/.dev .venv-newest/.made  ## Test the runtime on the newest PyTorch and transformers
	export PYTHONPATH=$(CURDIR) TRNSLURM_GPU_DEVICE=cpu TRNSLURM_GPU_RESULTS=.make/newest
	TRNSLURM_OTHER_PYTHON=$(CURDIR)/$(BIN)/python .venv-newest/bin/python -m pytest tests/gpu -m gpu -q -W default \
	  -p no:cacheprovider -n 2 --dist loadgroup
	.venv-newest/bin/python -m pytest tests/train/test_torchneuron.py -q -W default -p no:cacheprovider

test-installs: .venv/.dev  ## Test the launcher with its oldest and newest packages, on each Python
	@$(MAKE) --no-print-directory $(NEWER_PYTHON) || echo "warning: no Python 3.14 from Debian"
	$(BIN)/pytest tests/test_installs.py -m installs

test-ray: .venv/.dev .venv-ray/.made  ## Test scripts that need Ray
	PATH=$(CURDIR)/.venv-ray/bin:$$PATH .venv-ray/bin/python -m pytest tests/local/test_examples.py tests/local/test_ray_train.py -m ray

test-matrix: .venv/.dev  ## Test more worker counts on XLA
	$(BIN)/pytest tests/train -m matrix

# GPU_PYTHON=… uses a Python that has torch for the GPU and the tests' packages, and makes no .venv.
# JOBS tests share the GPU, because small models leave most of it idle; the benchmark runs alone.
GPU_PYTHON ?= $(BIN)/python
DEVICE ?= cuda
JOBS ?= 4
ONLY ?=
GPU_RESULTS ?= .make/gpu
DRY_RUN ?=

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/.dev)  ## Run the tests that need a GPU, in ten minutes; DRY_RUN=1 lists them, DEVICE=cpu rehearses them
	@export PYTHONPATH=$(CURDIR) TRNSLURM_GPU_DEVICE=$(DEVICE) TRNSLURM_GPU_RESULTS=$(GPU_RESULTS)
	tests=(tests/gpu -m gpu -q -W default -p no:cacheprovider)
	only='$(ONLY)'
	if [ -n "$$only" ]; then tests+=(-k "$$only"); fi
	if [ -n "$(DRY_RUN)" ]; then
	  TRNSLURM_GPU_LIST=1 $(GPU_PYTHON) -m pytest "$${tests[@]}"
	  printf '%s\n    %s\n' 'make bench-gpu' \
	    'GPT-2 124 M and Llama 1.1 B, 50 steps: tokens/s and MFU, beside a plain loop.'
	  exit
	fi
	$(GPU_PYTHON) tests/gpu/machine.py $(DEVICE)
	code=0
	$(GPU_PYTHON) -m pytest "$${tests[@]}" -n $(JOBS) --dist loadgroup || code=$$?
	if [ -z "$$only" ]; then
	  $(MAKE) --no-print-directory bench-gpu || code=$$?
	fi
	exit $$code

bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/.dev)  ## Measure training speed on a GPU, and that of a plain loop
	@PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/gpu_training.py --device $(DEVICE) \
	  --output $(GPU_RESULTS)/training.json

format: .venv/.dev  ## Format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

releases: .venv/.dev  ## Ask PyPI for the days of packages' releases, by which triage tells the older
	$(BIN)/python docs/make/releases.py

goldens: .venv/.dev  ## Rewrite the rendered scripts in tests/goldens, and share/; review them with git diff
	$(BIN)/pytest tests/test_goldens.py --update-goldens
	$(BIN)/python docs/make/share.py
	$(BIN)/python docs/make/reference.py

bench: .venv/.dev .venv-torchx/.made  ## Measure start-up times, also of torchx
	$(BIN)/python benchmarks/startup.py --peer .venv-torchx/bin/python

bench-all: sandbox .venv/.dev .venv-torchx/.made .venv-datasets/.made  ## Run all benchmarks but bench-gpu; write a page of tables (under an hour)
	@mkdir -p .make
	$(BIN)/python benchmarks/all.py --torchx .venv-torchx/bin/python --datasets .venv-datasets/bin/python -o .make/benchmarks.md

bench-launcher: .venv/.dev  ## Measure runs and status with thousands of runs
	$(BIN)/python benchmarks/launcher.py

bench-training: .venv/.dev  ## Measure training speed, also of accelerate and a plain DDP loop
	$(BIN)/python benchmarks/training.py

bench-checkpoint: .venv/.dev  ## Measure how long a save interrupts training, also with torch.save
	$(BIN)/python benchmarks/checkpoint_stall.py

bench-mirror: .venv/.dev  ## Measure what copies to S3 cost the steps beside them
	$(BIN)/python benchmarks/mirror.py

bench-data: .venv/.dev .venv-datasets/.made  ## Measure data preparation, also with datasets
	$(BIN)/python benchmarks/packing.py --peer .venv-datasets/bin/python

bench-restart: sandbox .venv/.dev .venv-resiliency/.made  ## Measure the time from a worker's death to the first new step, also of ft_launcher
	$(BIN)/python benchmarks/restart.py
	$(BIN)/python benchmarks/restart_peer.py --peer .venv-resiliency/bin/ft_launcher

bench-loader: .venv/.dev .venv-libraries/.made  ## Measure trnslurm.loader and mix, also of torchdata and mosaicml-streaming
	$(BIN)/python benchmarks/loader.py --peer .venv-libraries/bin/python

bench-scale: sandbox .venv/.dev  ## Measure a job on sandboxes of 2 to 128 nodes, in ten minutes
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/first_node.py

wheel: .venv/.dev  ## Build dist/*.whl
	$(BIN)/python -m build --wheel --outdir dist .

pyz: .venv/.dev  ## Build dist/trnslurm.pyz, the launcher as one file
	$(BIN)/python .ci/release.py --launcher dist

release: .venv/.dev  ## Make dist/: wheel, source, one-file launcher, checksums (DRAFT=1)
	rm -rf dist
	$(BIN)/python .ci/release.py $(if $(DRAFT),--draft) dist

clean:  ## Remove what make built
	rm -rf .venv .venv-datasets .venv-newest .venv-ray .venv-resiliency .venv-torchx .venv-pcluster dist site

# What the demo needs.
.venv/.train: .ci/locks/train.txt pyproject.toml | uv
	@.ci/environment $(PYTHON) .venv $< .
	touch $@

# And what the tests need. uv leaves compilation to the first import: six processes at once would
# each compile PyTorch.
.venv/.dev: .ci/locks/dev.txt pyproject.toml | uv
	@.ci/environment $(PYTHON) .venv $< .
	$(BIN)/python -m compileall -q -j 0 \
	  .venv/lib/python*/site-packages/{accelerate,numpy,sympy,torch,torch_xla,transformers} || true
	touch $@

.venv-pcluster/.made: .ci/locks/pcluster.txt | uv
	@.ci/environment $(PYTHON) .venv-pcluster $<
	touch $@

lock: | uv  ## Write .ci/locks: the newest packages that pyproject.toml allows
	@.ci/lock "$$(.ci/uv $(PYTHON))"

# The peer of `make bench-data`, in a separate environment so that it does not change ours.
.venv-datasets/.made: | python-venv
	@echo "Installing Hugging Face's datasets into .venv-datasets"
	$(PYTHON) -m venv --clear .venv-datasets
	.venv-datasets/bin/pip install --quiet --disable-pip-version-check datasets tokenizers
	touch $@

# The newest versions on the index, without pins; 6 GB with PyTorch for CUDA, which the index has.
.venv-newest/.made: pyproject.toml | python-venv
	@echo "Installing the newest PyTorch and transformers into .venv-newest"
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --editable '.[gpu]' pytest pytest-xdist hypothesis lightning
	touch $@

# The peer of `make bench`.
.venv-torchx/.made: | python-venv
	@echo "Installing torchx into .venv-torchx"
	$(PYTHON) -m venv --clear .venv-torchx
	.venv-torchx/bin/pip install --quiet --disable-pip-version-check torchx
	touch $@

.venv-ray/.made: .venv/.dev
	@echo "Installing Ray into .venv-ray"
	$(call venv_on_train,.venv-ray)
	.venv-ray/bin/pip install --quiet --disable-pip-version-check "ray[train]"
	touch $@

.venv-resiliency/.made: .venv/.dev
	@echo "Installing nvidia-resiliency-ext into .venv-resiliency"
	$(call venv_on_train,.venv-resiliency)
	.venv-resiliency/bin/pip install --quiet --disable-pip-version-check nvidia-resiliency-ext==0.4.1
	touch $@

# The peers of `make bench-loader`; torchtitan 0.2.0 is the last version for our PyTorch. The rest of
# mosaicml-streaming's dependencies are the clients of seven object stores.
.venv-libraries/.made: .venv/.dev
	@echo "Installing torchtitan and mosaicml-streaming into .venv-libraries"
	$(call venv_on_train,.venv-libraries)
	.venv-libraries/bin/pip install --quiet --disable-pip-version-check torchtitan==0.2.0 torchdata==0.11.0 "datasets<4.5"
	.venv-libraries/bin/pip install --quiet --disable-pip-version-check --no-deps mosaicml-streaming==0.13.0 zstd python-snappy cramjam Brotli catalogue
	touch $@

.PHONY: python-venv uv sandbox programs newer-slurm
python-venv:
	@if [ -z "$(PYTHON)" ]; then
	  echo "error: no Python 3.11, 3.12 or 3.13 found: install one, or pass PYTHON=/path/to/python" >&2
	  exit 1
	fi
	$(PYTHON) -c 'import ensurepip' 2> /dev/null || .ci/packages python3-venv

# Once, before several environments are made at the same time.
uv: | python-venv
	@.ci/uv $(PYTHON) > /dev/null || true

sandbox:
	@.ci/packages $(SANDBOX)

programs: python-venv
	@.ci/packages $(TESTED)

# Make an environment with the packages of .venv, of which torch is the largest.
define venv_on_train
$(PYTHON) -m venv --clear $(1)
echo $(CURDIR)/.venv/lib/python*/site-packages > "$$(echo $(1)/lib/python*/site-packages)/train.pth"
endef
