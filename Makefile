# Every target sets itself up from a bare Python >= 3.11. To use another interpreter, name both it and a folder:
#   make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
VENV_ORACLE ?= .venv-oracle
VENV_AMD ?= .venv-amd
VENV_NOTEBOOKS ?= .venv-notebooks
MODEL ?= tiny
LIVES ?= 200
PYTEST = -m pytest -q --durations=10
comma := ,

.PHONY: help demo serve test fuzz oracle oracle-test amd notebooks lint clean

help:
	@echo "make demo         set up, serve the shipped checkpoint over HTTP, ask one chat, print the answer"
	@echo "make serve        set up, serve MODEL=$(MODEL) until interrupted (ARGS='--port 8000 ...')"
	@echo "make test         set up, run the tests (float64 ones in a process of their own)"
	@echo "make fuzz         the engine's random lives, over a fake device and LIVES=$(LIVES) in float64"
	@echo "make oracle       set up torch and transformers, write the fixtures of the tests"
	@echo "make oracle-test  compare with transformers on fresh random models"
	@echo "make amd          compile the kernels for AMD GPUs (needs no GPU)"
	@echo "make notebooks    run the notebooks from top to bottom (their stored outputs stay as they are)"
	@echo "make lint         ruff and mypy"

# A stamp is newer than pyproject.toml once its extra is installed.
define install
@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) and v < (3, 14) or \
	sys.exit("glm_jax needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: set PYTHON" % v)'
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --quiet --upgrade pip
$(1)/bin/python -m pip install --quiet --editable '$(2)'
@touch $@
endef

$(VENV)/.installed: pyproject.toml
	$(call install,$(VENV),.)
$(VENV)/.installed-test: pyproject.toml
	$(call install,$(VENV),.[test])
	@touch $(VENV)/.installed
$(VENV_ORACLE)/.installed-oracle: pyproject.toml
	$(call install,$(VENV_ORACLE),.[oracle])
$(VENV_AMD)/.installed-amd: pyproject.toml
	$(call install,$(VENV_AMD),.[amd])
$(VENV_NOTEBOOKS)/.installed-notebooks: pyproject.toml
	$(call install,$(VENV_NOTEBOOKS),.[test$(comma)notebooks])

demo: $(VENV)/.installed
	$(VENV)/bin/python -m serving.demo $(MODEL)

serve: $(VENV)/.installed
	$(VENV)/bin/python -m glm_jax.serve $(MODEL) $(ARGS)

test: $(VENV)/.installed-test
	$(VENV)/bin/python $(PYTEST) tests --ignore=tests/float64 --ignore=tests/oracle --ignore=tests/amd \
		--ignore=tests/notebooks
	JAX_ENABLE_X64=1 $(VENV)/bin/python $(PYTEST) tests/float64

fuzz: $(VENV)/.installed-test
	GLM_JAX_FUZZ_LIVES=5000 $(VENV)/bin/python $(PYTEST) tests/serving/test_engine_fuzz.py
	JAX_ENABLE_X64=1 GLM_JAX_FUZZ_LIVES=$(LIVES) $(VENV)/bin/python $(PYTEST) tests/float64/test_engine.py

oracle: $(VENV_ORACLE)/.installed-oracle
	$(VENV_ORACLE)/bin/python -m tests.oracle.write_fixtures

oracle-test: $(VENV_ORACLE)/.installed-oracle
	$(VENV_ORACLE)/bin/python $(PYTEST) tests/oracle

amd: $(VENV_AMD)/.installed-amd
	$(VENV_AMD)/bin/python $(PYTEST) tests/amd

notebooks: $(VENV_NOTEBOOKS)/.installed-notebooks
	$(VENV_NOTEBOOKS)/bin/python $(PYTEST) tests/notebooks

lint: $(VENV)/.installed-test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m mypy

clean:
	rm -rf $(VENV) $(VENV_ORACLE) $(VENV_AMD) $(VENV_NOTEBOOKS) build *.egg-info
