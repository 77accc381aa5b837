# Everything a fresh clone needs; 'make' alone lists it. Only 'make slurm' and 'make page-tools' ask for root and install
# system packages.
#
# One environment for each framework, because they ask for different builds of the same CUDA libraries, and a small one
# without a framework for main.py. requirements/install.sh makes them.

.DEFAULT_GOAL := help
.PHONY: help run test test-full check types envs driver-env jax-env pytorch-env opacus test-env lock golden slurm clean
.PHONY: tools benchmark duel page-tools docs hugging-face tpu-env

# Empty: python3 for what is not there yet. Given: an environment of another version is made anew.
PYTHON ?=

# Empty: what the environment was made for before, else what suits the NVIDIA driver of this machine. On a login node
# without a GPU name what the compute nodes need.
JAX ?= $(or $(call made_for,jax),$(if $(driver),$(cuda),cpu))
PYTORCH ?= $(or $(call made_for,pytorch),$(if $(driver),$(cuda),cuda13))

made_for = $(patsubst .venv/$(1)/.stamp-$(1)-%,%,$(wildcard .venv/$(1)/.stamp-$(1)-*))
driver = $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n 's/^\([0-9][0-9]*\)\..*/\1/p;q')
# CUDA 13 needs driver 580 and compute capability 7.5 (not V100).
cuda = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader | awk '$$1 < 7.5 || $(driver) < 580 {old = 1} END {print old ? "cuda12" : "cuda13"}')

unexport PYTHONSAFEPATH# main.py imports its neighbour duel/ by name
install = @PYTHON='$(PYTHON)' sh requirements/install.sh
python = .venv/driver/bin/python

help: ## this list
	@echo "Duel compares JAX with PyTorch. 'make run' is the way to begin."
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo "Variables, as in 'make envs JAX=cuda12':"
	@echo "  JAX=cpu|cuda13|cuda12|tpu   PYTORCH=cuda13|cuda12   what to install; else what suits this machine"
	@echo "                              (PyTorch's cuda13 is its ordinary build, for machines without a GPU too)"
	@echo "  PYTHON=python3              3.11 or later, what environments are made with"

# libtpu is there for this platform alone.
tpu_env := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),tpu-env)

run: tools driver-env envs ## install what is missing, then ResNet-50 in both frameworks and the table
	@$(python) main.py --benchmark resnet50 --use_case 1 --wait

test: tools test-env envs opacus $(tpu_env) ## all tests but those of 'make test-full'
	@$(python) -m pytest

test-full: tools test-env envs opacus $(tpu_env) ## what 'make test' leaves out: proofs at full size and the like (hours on two cores, 20 GiB)
	@$(python) -m pytest -m full -n0 -raP --timeout=0

check: test-env envs ## ruff, mypy and the import contracts
	@$(python) -m ruff check
	@$(python) -m ruff format --check
	@$(MAKE) --no-print-directory types
	@$(python) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

# Each twin on its own, since their modules have the same names, with its framework's types. Frameworks leave much
# untyped: what they return may be Any.
types:
	@$(python) -m mypy
	@failed=0; for side in jax pytorch; do \
	    MYPYPATH=$$side $(python) -m mypy --python-executable .venv/$$side/bin/python --cache-dir .mypy_cache/$$side \
	        --explicit-package-bases --allow-untyped-calls --no-warn-return-any \
	        $$side tests/twin_contract.py || failed=1; \
	done; exit $$failed

envs: jax-env pytorch-env ## both frameworks' environments

PREFIX ?= $(HOME)/.local
duel: driver-env ## the command 'duel', main.py by another name, in PREFIX/bin (~/.local/bin)
	@mkdir -p '$(PREFIX)/bin' && ln -sfn '$(CURDIR)/main.py' '$(PREFIX)/bin/duel' && echo '$(PREFIX)/bin/duel'

driver-env: ## the environment of main.py
	$(install) driver driver 'what main.py needs (0.4 GB)'

jax-env: ## JAX's environment
	$(install) jax jax-$(JAX) 'JAX for $(JAX) ($(if $(filter cuda%,$(JAX)),4,0.9) GB)'

# PyTorch 2.10's wheel for aarch64 asks for no CUDA packages: what it installs computes on the CPU.
pytorch-env: ## PyTorch's environment
	@test '$(PYTORCH)' != cuda12 || test "$$(uname -m)" != aarch64 || { \
	    echo "PyTorch for CUDA 12 has no build for aarch64 (GH200, GB200): make envs PYTORCH=cuda13, with driver 580 or later" >&2; \
	    exit 1; }
	$(install) pytorch pytorch-$(PYTORCH) 'PyTorch for $(PYTORCH) (5.5 GB, some minutes)'

tpu-env: ## JAX with the TPU's compiler, which needs no TPU, for 'main.py fit'
	$(install) jax-tpu jax-tpu 'JAX with libtpu (1.2 GB)'

hugging-face: driver-env ## adds Hugging Face's datasets and tokenizers to main.py's environment, for 'main.py data'
	$(install) --onto driver hugging-face 'Hugging Face datasets and tokenizers (0.3 GB)'

opacus: pytorch-env ## adds Opacus to PyTorch's environment, for --mode opacus
	$(install) --onto pytorch opacus 'Opacus (0.1 GB)'

test-env: driver-env ## adds the tools of 'make test' and 'make check' to main.py's environment
	$(install) --onto driver test 'the tools for tests and checks (0.2 GB)'

# driver first: test is held to its versions. Opacus' other needs are in PyTorch's lock, whichever that is.
LOCKS = driver hugging-face test jax-cpu jax-cuda13 jax-cuda12 jax-tpu pytorch-cuda13 pytorch-cuda12 opacus uv
lock: ## rewrite requirements/*.txt from *.in (UPGRADE=1: with the newest versions)
	$(install) uv uv 'uv, which writes the lock files (0.1 GB)'
	@cd requirements && for lock in $(LOCKS); do \
	    echo "requirements/$$lock.txt"; \
	    case $$lock in hugging-face|test) more='--constraint driver.txt';; opacus) more=--no-deps;; *) more=;; esac; \
	    ../.venv/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	        --only-binary :all: $(if $(UPGRADE),--upgrade) $$more $$lock.in --output-file $$lock.txt || exit 1; \
	done

benchmark: ## begin a new benchmark, both sides of it: make benchmark NAME=mlp_mixer
	@$(or $(PYTHON),$(wildcard $(python)),python3) -m duel.launch.skeleton '$(NAME)'

docs: test-env ## the documentation with search and API pages, in docs/_build (opens from disk)
	@$(python) -m sphinx --quiet --fail-on-warning --builder html docs docs/_build

golden: test-env ## rewrite what is generated: tests/golden, tables in docs and README, published tables and reports
	@$(python) -m tests.golden.regenerate

# The tests start daemons of their own: those of the packages neither start now (policy-rc.d) nor with the machine.
SLURM = slurm-wlm slurmdbd mariadb-server munge
slurm: ## install Debian's Slurm for the tests (asks for root; only when called)
	@command -v apt-get >/dev/null || { \
	    echo "There is no apt-get here: install Slurm (with slurmdbd), MariaDB's server and munge yourself." >&2; exit 1; }
	@test "$$(dpkg-query --show --showformat='$${db:Status-Status}\n' $(SLURM) 2>/dev/null | grep -cx installed)" = \
	    $(words $(SLURM)) || $(if $(filter 0,$(shell id -u)),,sudo) sh -euc ' \
	    policy=/usr/sbin/policy-rc.d; \
	    if [ ! -e $$policy ]; then \
	        trap "rm -f $$policy" EXIT; \
	        printf "#!/bin/sh\nexit 101\n" >$$policy; \
	        chmod 755 $$policy; \
	    fi; \
	    new=; \
	    for unit in munge mariadb slurmctld slurmd slurmdbd; do \
	        [ -e /lib/systemd/system/$$unit.service ] || new="$$new $$unit"; \
	    done; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    apt-get update -qq; \
	    apt-get install -qq --yes --no-install-recommends $(SLURM); \
	    if [ -n "$$new" ] && command -v systemctl >/dev/null; then systemctl disable --quiet $$new; fi'

# What the tests open a report with, a browser, and LaTeX with the packages of its table; and pictures to train on.
PAGE = chromium dataset-fashion-mnist texlive-latex-recommended texlive-science lmodern
page-tools: ## install Debian's Chromium, LaTeX and pictures for the tests (asks for root; only when called)
	@command -v apt-get >/dev/null || { \
	    echo "There is no apt-get here: install Chromium, and LaTeX with siunitx, yourself." >&2; exit 1; }
	@test "$$(dpkg-query --show --showformat='$${db:Status-Status}\n' $(PAGE) 2>/dev/null | grep -cx installed)" = \
	    $(words $(PAGE)) || $(if $(filter 0,$(shell id -u)),,sudo) sh -euc ' \
	    export DEBIAN_FRONTEND=noninteractive; \
	    apt-get update -qq; \
	    apt-get install -qq --yes --no-install-recommends $(PAGE)'

clean: ## remove the environments and caches; results stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find duel jax pytorch tests -name __pycache__ -prune -exec rm -rf {} +

tools:
	@command -v git >/dev/null || { echo "git is missing: every result names its commit. Install git." >&2; exit 1; }
	@command -v bash >/dev/null || { echo "bash is missing: the scripts are for it. Install bash." >&2; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	    echo "A C++ compiler (c++, g++ or clang++) is missing: PyTorch compiles with it." >&2; \
	    echo "Install one (Debian: g++, macOS: xcode-select --install), or on a cluster load its module." >&2; exit 1; }
