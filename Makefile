# `make demo` and `make test` each do all their set-up: a virtual environment in .venv, and the
# system packages named in SYSTEM_PACKAGES (installed with apt where that is allowed).

PYTHON ?= $(shell command -v python3.13 || command -v python3.12 || command -v python3.11 || echo python3)
BIN := .venv/bin
SYSTEM_PACKAGES := python3-venv shellcheck

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:

.PHONY: help demo test check unit format goldens wheel clean system-packages

help:  ## Show what can be made
	@grep -hE '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: .venv/.train  ## Train gpt2_zero1 (tiny) on two emulated nodes of this machine
	@$(BIN)/trnslurm plan gpt2_zero1 --nodes 1,2,3,4,8,16
	echo
	$(BIN)/trnslurm submit gpt2_zero1 --nodes 2 --cluster local --preset tiny
	echo
	$(BIN)/trnslurm status last

test: system-packages .venv/.train .venv-pcluster  ## Everything that continuous integration checks
	@$(MAKE) --no-print-directory check unit

check: .venv/.train  ## Linters and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	shellcheck .ci/run cluster-config/parallelcluster/*.sh tests/parallelcluster/fake_bin/* tests/fake_bin/*

unit: .venv/.train .venv-pcluster  ## The tests
	$(BIN)/pytest

format: .venv/.train  ## Format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

goldens: .venv/.train  ## Write the rendered scripts that the tests compare with; review them with git diff
	$(BIN)/pytest tests/test_goldens.py --update-goldens

wheel: .venv/.train  ## Build dist/*.whl
	$(BIN)/python -m build --wheel --outdir dist .

clean:  ## Remove what make made
	rm -rf .venv .venv-pcluster dist

# pip alone needs minutes for torch, so its stamp follows pyproject.toml only.
.venv/.train: pyproject.toml
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
	  echo "error: $(PYTHON) is too old or missing: install Python 3.11 or newer, or pass PYTHON=" >&2
	  exit 1
	fi
	echo "Installing the launcher and the training stack into .venv (a few minutes, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	touch $@

.venv-pcluster: tests/parallelcluster/requirements.txt
	@echo "Installing the schema of AWS ParallelCluster into .venv-pcluster"
	$(PYTHON) -m venv --clear $@
	$@/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

system-packages:
	@missing=()
	command -v shellcheck > /dev/null || missing+=(shellcheck)
	$(PYTHON) -c 'import ensurepip' 2> /dev/null || missing+=(python3-venv)
	if [ "$${#missing[@]}" -eq 0 ]; then exit 0; fi
	sudo=; [ "$$(id -u)" -eq 0 ] || sudo='sudo -n'
	if ! { $$sudo apt-get update -qq && $$sudo apt-get install -y -qq "$${missing[@]}"; } > /dev/null; then
	  echo "error: please run: sudo apt-get install $${missing[*]}" >&2
	  exit 1
	fi
