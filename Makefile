# `make demo` and `make test` each do all their set-up: a virtual environment in .venv, and system
# packages where they are missing and apt may be used: python3-venv, and for the tests shellcheck, a
# browser, tmux, sshd (not started), and what runs in a sandbox (SANDBOX). Of Slurm nothing is configured or started outside sandboxes.
SANDBOX := slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core mariadb-client-core \
  iproute2 util-linux podman crun catatonit

# The first Python that the pinned stack has wheels for: 3.11 to 3.13.
SUITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  if $$p -c '$(SUITS)' 2> /dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
FAULT_RESULTS := .make/faults
NEWER_SLURM := .make/slurm-24.11

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
# Tests start Python a thousand times, and each time our modules would be compiled again.
unexport PYTHONDONTWRITEBYTECODE

all: help
.PHONY: all help demo docs pictures test test-faults test-matrix test-slurm test-gpu bench-gpu soak fuzz check unit format goldens bench bench-training \
  bench-all bench-launcher bench-collectives bench-supervision bench-checkpoint bench-data bench-bert bench-reader bench-staging bench-restart bench-scale wheel clean

help:  ## Show what can be made
	@grep -hE '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: .venv/.train  ## Train gpt2_zero1 (tiny) on two emulated nodes of this machine
	@$(BIN)/trnslurm plan gpt2_zero1 --nodes 1,2,3,4,8,16
	echo
	$(BIN)/trnslurm submit gpt2_zero1 --nodes 2 --cluster local --preset tiny
	echo
	$(BIN)/trnslurm status last

docs: .venv/.train  ## Make the site of the pages, site/index.html; a dead link is an error
	@$(BIN)/python docs/make/site.py

pictures: sandbox screens .venv/.train  ## Remake docs/pictures/: run the commands, and record what they show
	@$(BIN)/python docs/make/pictures.py

test: shellcheck sandbox screens sshd .venv/.train .venv-pcluster  ## Everything that continuous integration checks
	@$(MAKE) --no-print-directory check unit

check: .venv/.train  ## Linters and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	shellcheck .ci/run tests/sandbox/*.sh cluster-config/parallelcluster/*.sh tests/parallelcluster/fake_bin/* tests/fake_bin/*

# Six files of tests side by side, in the order of tests/conftest.py: for two cores, as those that
# wait for Slurm leave them idle.
unit: sandbox screens sshd .venv/.train .venv-pcluster  ## The tests
	@$(MAKE) --no-print-directory $(NEWER_SLURM) || echo "warning: no newer Slurm: its tests are skipped"
	$(BIN)/pytest --numprocesses 6 --dist loadfile --no-loadscope-reorder

# One after the other: what they measure, and their bounds, are of a machine that does nothing else.
test-faults: sandbox .venv/.train  ## Every row of the fault matrix; writes the table of docs/reliability.md
	@export TRNSLURM_FAULT_RESULTS=$(FAULT_RESULTS)
	rm -f "$$TRNSLURM_FAULT_RESULTS"/row-*.json
	$(BIN)/pytest tests/faults -m 'not soak' --durations 0 --durations-min 1
	$(BIN)/python tests/faults/table.py "$$TRNSLURM_FAULT_RESULTS" docs/reliability.md

soak: sandbox .venv/.train  ## 50 random faults in one training; adds its row to that table
	@export TRNSLURM_FAULT_RESULTS=$(FAULT_RESULTS)
	$(BIN)/pytest tests/faults/test_soak.py -m soak --capture no
	$(BIN)/python tests/faults/table.py "$$TRNSLURM_FAULT_RESULTS" docs/reliability.md

fuzz: .venv/.train  ## Damage files at random for ten minutes, and read them (FUZZ_MINUTES, FUZZ_SEED)
	$(BIN)/pytest tests/test_fuzz.py -m fuzz

test-slurm: sandbox .venv/.train  ## The tests that need Slurm on another one: SLURM=/opt/slurm
	@test -x "$(SLURM)/bin/srun" || { echo "error: SLURM=DIR: a directory with bin/srun" >&2; exit 2; }
	TRNSLURM_SANDBOX_SLURM=$(abspath $(SLURM)) $(BIN)/pytest --numprocesses 3 --dist loadfile \
	  --no-loadscope-reorder tests/sandbox tests/faults

$(NEWER_SLURM): tests/sandbox/debian-slurm.sh
	@command -v patchelf > /dev/null || $(call apt,patchelf)
	rm -rf $@
	tests/sandbox/debian-slurm.sh $(CURDIR)/$@

test-matrix: .venv/.train  ## More worker counts on XLA than the tests have
	$(BIN)/pytest tests/train -m matrix

# With GPU_PYTHON=… in that Python, which has torch for its GPUs and what the tests need; no .venv is
# made. Several tests share the GPU, as small models leave most of it idle (JOBS); what is measured
# does not.
GPU_PYTHON ?= $(BIN)/python
DEVICE ?= cuda
JOBS ?= 4
ONLY ?=
GPU_RESULTS ?= .make/gpu
DRY_RUN ?=

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/.train)  ## What needs a GPU, in ten minutes on one; DRY_RUN=1 lists it, DEVICE=cpu rehearses it
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

bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/.train)  ## Measure training speed on a GPU beside a plain loop with transformers
	@PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/gpu_training.py --device $(DEVICE) \
	  --output $(GPU_RESULTS)/training.json

format: .venv/.train  ## Format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

goldens: .venv/.train  ## Write the rendered scripts that the tests compare with; review them with git diff
	$(BIN)/pytest tests/test_goldens.py --update-goldens

bench: .venv/.train .venv-torchx/.made  ## Measure start-up times, beside torchx
	$(BIN)/python benchmarks/startup.py --peer .venv-torchx/bin/python

bench-all: sandbox .venv/.train .venv-torchx/.made .venv-datasets/.made  ## Run all benchmarks of this machine; one page of tables, in about an hour
	@mkdir -p .make
	$(BIN)/python benchmarks/all.py --torchx .venv-torchx/bin/python --datasets .venv-datasets/bin/python -o .make/benchmarks.md

bench-launcher: .venv/.train  ## Measure runs and status beside thousands of runs
	$(BIN)/python benchmarks/launcher.py

bench-training: .venv/.train  ## Measure training speed beside accelerate and a plain DDP loop
	$(BIN)/python benchmarks/training.py

bench-collectives: .venv/.train  ## Count collectives and host work of a step on XLA devices, beside AWS's samples
	$(BIN)/python benchmarks/collectives.py

bench-supervision: .venv/.train  ## Measure what the look for a stop and the watchdog cost a step
	$(BIN)/python benchmarks/supervision.py

bench-checkpoint: .venv/.train  ## Measure how long a save holds training up, beside torch.save
	$(BIN)/python benchmarks/checkpoint_stall.py

bench-data: .venv/.train .venv-datasets/.made  ## Measure data preparation beside datasets and group_texts
	$(BIN)/python benchmarks/packing.py --peer .venv-datasets/bin/python

bench-bert: .venv/.train  ## Measure the making of BERT's samples beside a plain loop
	$(BIN)/python benchmarks/bert_preparation.py

bench-reader: .venv/.train  ## Measure reading BERT's shards beside a Dataset
	$(BIN)/python benchmarks/bert_reader.py

bench-staging: .venv/.train  ## Measure imports from a throttled file system, and from a staged copy
	$(BIN)/python benchmarks/staging.py

bench-restart: sandbox .venv/.train  ## Measure the way from a worker's death to the first new step
	$(BIN)/python benchmarks/restart.py

bench-scale: sandbox .venv/.train  ## Measure a job on sandboxes of 2 to 128 nodes, in ten minutes
	$(BIN)/python benchmarks/scale.py

wheel: .venv/.train  ## Build dist/*.whl
	$(BIN)/python -m build --wheel --outdir dist .

clean:  ## Remove what make made
	rm -rf .venv .venv-datasets .venv-torchx .venv-pcluster dist site

# pip alone needs minutes for torch, so its stamp follows pyproject.toml only.
# Remade when pyproject.toml changes: pip alone needs minutes for torch.
.venv/.train: pyproject.toml | python-venv
	@echo "Installing the launcher and the training stack into .venv (a few minutes, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	touch $@

.venv-pcluster: tests/parallelcluster/requirements.txt | python-venv
	@echo "Installing the schema of AWS ParallelCluster into .venv-pcluster"
	$(PYTHON) -m venv --clear $@
	$@/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

# The peer of make bench-data, in an environment of its own: it must not change ours.
.venv-datasets/.made: | python-venv
	@echo "Installing Hugging Face's datasets into .venv-datasets"
	$(PYTHON) -m venv --clear .venv-datasets
	.venv-datasets/bin/pip install --quiet --disable-pip-version-check datasets tokenizers
	touch $@

# That of make bench.
.venv-torchx/.made: | python-venv
	@echo "Installing torchx into .venv-torchx"
	$(PYTHON) -m venv --clear .venv-torchx
	.venv-torchx/bin/pip install --quiet --disable-pip-version-check torchx
	touch $@

.PHONY: python-venv shellcheck sandbox screens sshd
python-venv:
	@if [ -z "$(PYTHON)" ]; then
	  echo "error: no Python 3.11, 3.12 or 3.13 found: install one, or pass PYTHON=/path/to/python" >&2
	  exit 1
	fi
	$(PYTHON) -c 'import ensurepip' 2> /dev/null || $(call apt,python3-venv)

shellcheck:
	@command -v shellcheck > /dev/null || $(call apt,shellcheck)

# In which tests look at `report` and `top`.
screens:
	@command -v chromium > /dev/null && command -v tmux > /dev/null || $(call apt,chromium tmux)

# Which the tests start themselves: where the package brings it up as a service, that ends.
sshd:
	@PATH=$$PATH:/usr/sbin command -v sshd > /dev/null || {
	  $(call apt,openssh-server)
	  [ ! -d /run/systemd/system ] || systemctl disable --quiet --now ssh.service ssh.socket || true
	}

# The daemons lie in /usr/sbin, which is not on every PATH.
sandbox:
	@for command in slurmctld slurmd srun munged slurmdbd mariadbd my_print_defaults ip nsenter podman catatonit; do
	  if ! PATH=$$PATH:/usr/sbin command -v $$command > /dev/null; then
	    $(call apt,$(SANDBOX))
	    break
	  fi
	done

define apt
{ echo "Installing $(1)"; sudo=; [ "$$(id -u)" -eq 0 ] || sudo='sudo -n'; \
  { $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends $(1); } > /dev/null 2>&1 || \
  { echo "error: please run: sudo apt-get install $(1)" >&2; exit 1; }; }
endef
