# Every target that needs Python makes .venv on its first run and starts at once afterwards, with the
# best Python of the machine, or with SYSTEM_PYTHON.
#
#   make train ARGS="--right_guesses=60"   train; WORKDIR=folder says where to write
#   make test          lint and the fast tests
#   make test-all      lint, the site, fast and slow tests, one other Python; .ci/run calls it
#   make nightly       planted bugs, presets, papers, experiments, notebooks, kills, fuzz, all Pythons
#   make smoke-test    install and try it on every other supported Python; PYTHONS=3.13 on one;
#                      PRE=1 runs the fast tests on pre-releases of Keras and TensorFlow
#   make lint          style, formatting and types, changing nothing
#   make format        fix what ruff can fix
#   make bazel-check   show that BUILD loads and misses no Python file (Debian or Ubuntu, or Bazel)
#   make compare       tfdpx and its peers, each in an environment of its own; 33 minutes, ARGS=--quick less
#   make docs          build the documentation into site/; python3 -m http.server -d site shows it
#   make tpu-check     compile the training step for a TPU, without one; ARGS="--augmult=4"
#   make clean         remove what the targets above made, but for training runs

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# The compiler of TPUs, apart: its packages and TensorFlow's exclude each other.
TPU_VENV := .venv-tpu
TPU_COMPILER := jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.51

# The builder of the site, apart: it needs no TensorFlow, and shows signatures by ruff.
DOCS_VENV := .venv-docs
DOCS_PACKAGES := mkdocs==1.6.1 mkdocs-material==9.8.1 mkdocs-jupyter==0.26.3 mkdocstrings==1.0.8 \
  mkdocstrings-python==2.0.11 griffelib==2.4.1 latex2mathml==3.81.1 ruff==0.14.0

# The peers that `make compare` compares with, each apart: the minor versions of Python that it runs
# on, and its packages.
COMPARE_VENV := .venv-compare
PEERS := opacus jax-privacy tensorflow-privacy
opacus_PYTHONS := 11|12|13|10
opacus_PACKAGES := opacus==1.6.0 torch==2.13.0 scikit-learn==1.9.1
jax-privacy_PYTHONS := 12|13
jax-privacy_PACKAGES := jax-privacy==2.0.0 jax==0.12.0.1 flax==0.12.12 optax==0.2.8 scikit-learn==1.9.1
tensorflow-privacy_PYTHONS := 10|11
tensorflow-privacy_PACKAGES := tensorflow-privacy==0.9.0 tensorflow==2.15.1 scikit-learn

ARGS ?=
WORKDIR := $(or $(patsubst --workdir=%,%,$(filter --workdir=%,$(ARGS))),$(WORKDIR),\
  runs/$(shell date +%Y%m%d-%H%M%S))

export SYSTEM_PYTHON

.PHONY: train test test-all nightly smoke-test lint format bazel-check docs compare \
  tpu-check clean

train: $(INSTALLED)
	$(VENV)/bin/tfdpx classify --workdir=$(WORKDIR) $(ARGS)
	@{ echo "Written:"; find $(WORKDIR) -type f | sort | sed 's/^/  /'; } >&2

test: lint
	$(PYTHON) -m pytest

test-all: lint docs
	$(PYTHON) -m pytest -m "not nightly"
	$(MAKE) --no-print-directory smoke-test PYTHONS=3.13

nightly: lint
	$(PYTHON) -m pytest -m nightly
	$(PYTHON) tools/kill_loop.py --kills=50
	$(PYTHON) tools/sensitivity_search.py
	$(PYTHON) tools/fuzz.py --seconds=1300
	$(MAKE) --no-print-directory smoke-test
	$(MAKE) --no-print-directory smoke-test PRE=1

smoke-test: $(if $(PRE),,$(INSTALLED))
	$(if $(PRE),tools/test_prereleases.sh,PYTHON=$(PYTHON) tools/smoke_test_pythons.sh $(PYTHONS))

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) tools/plain_english.py

format: $(INSTALLED)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

$(INSTALLED): setup.py
	@python=$${SYSTEM_PYTHON:-$$(tools/find_pythons.sh | sed -n 1p)}; \
	if [ -z "$$python" ]; then \
	  echo "Found no working Python 3.10, 3.11, 3.12 or 3.13 (with venv)." \
	    "Install Python 3.11, on Debian or Ubuntu: apt-get install python3.11 python3.11-venv" >&2; \
	  exit 1; \
	fi; \
	echo "Installing into $(VENV), once; it takes some minutes." >&2; \
	[ -z "$${SYSTEM_PYTHON:-}" ] && $(PYTHON) -m pip --version >/dev/null 2>&1 || \
	  "$$python" -m venv --clear $(VENV)
	@# An interrupted installation goes on, but for one with another SYSTEM_PYTHON.
	@# The pip that Python 3.10 brings searched for half an hour without an answer.
	@$(PYTHON) -m pip install --quiet --upgrade pip
	@PYTHONWARNINGS=ignore $(PYTHON) -m pip install --quiet -e '.[test]'
	@touch $@

bazel-check:
	@command -v bazel >/dev/null || \
	  { run=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	    $$run apt-get -qq update && $$run apt-get -qq install -y bazel-bootstrap; }
	python3 tools/check_bazel_targets.py

# Docstrings are read in the layout of the installed package, which links stand for.
docs: $(DOCS_VENV)/.installed
	@echo "Building the site into site/." >&2
	rm -rf $(DOCS_VENV)/tree && mkdir -p $(DOCS_VENV)/tree/tfdpx
	ln -s $(CURDIR)/tfdpx/* $(CURDIR)/layers $(CURDIR)/models $(CURDIR)/train $(DOCS_VENV)/tree/tfdpx
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/.installed: Makefile
	@echo "Installing into $(DOCS_VENV), once; it takes some minutes." >&2
	$${SYSTEM_PYTHON:-$$(tools/find_pythons.sh | sed -n 1p)} -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(DOCS_VENV)/bin/python -m pip install --quiet $(DOCS_PACKAGES)
	touch $@

compare: $(INSTALLED) $(PEERS:%=$(COMPARE_VENV)/%/.installed)
	$(PYTHON) -m experiments.comparison --environments=$(COMPARE_VENV) $(ARGS)

# A peer that no Python of the machine runs is left out.
$(COMPARE_VENV)/%/.installed: Makefile
	for python in $$(tools/find_pythons.sh); do \
	  case $$("$$python" -c "import sys; print(sys.version_info[1])") in $($*_PYTHONS)) \
	    "$$python" -m venv --clear $(@D); \
	    $(@D)/bin/python -m pip install --quiet --upgrade pip; \
	    $(@D)/bin/python -m pip install --quiet $($*_PACKAGES); \
	    touch $@; exit ;; \
	  esac; \
	done; \
	echo "$* is left out: it needs Python 3.$(subst |, or 3.,$($*_PYTHONS))." >&2

tpu-check: $(INSTALLED) $(TPU_VENV)/.installed
	TF_CPP_MIN_LOG_LEVEL=3 $(PYTHON) -m experiments.tpu --python=$(TPU_VENV)/bin/python $(ARGS)

$(TPU_VENV)/.installed: $(INSTALLED) Makefile
	$(PYTHON) -m venv --clear $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet $(TPU_COMPILER)
	touch $@

clean:
	rm -rf $(VENV) $(TPU_VENV) $(DOCS_VENV) $(COMPARE_VENV) .venv-3.* .venv-pre site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
