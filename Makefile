# Everything starts from a Python 3.11+ and make; the rest is installed into .venv.
#   make help

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-long test-versions check bench lock clean

VENV := .venv
BIN := $(VENV)/bin
# What an environment is made of; a change of any of these installs again.
SOURCES := pyproject.toml requirements/uv.txt tools/environment.py
# Most tests wait for something most of the time. Each of the three has services of its own.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder
TESTS := $(wildcard tests/unit tests/contract tests/system tests/crash)

# The first Python that runs, is new enough and can make environments. A pyenv shim may stand for
# a version that is not active, so each candidate is tried.
define find_python
	python=; for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11 python); do \
		if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
		then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "make: $(if $(PYTHON),$(PYTHON) is no,found no) Python 3.11 or later with venv and pip." >&2; \
		echo "  Install one (Debian: python3 and python3-venv), or name it: make PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi
endef

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.stack  ## Kafka, PostgreSQL and Spark on this machine: the story in one go
	@$(BIN)/sideline demo

test: $(VENV)/.dev  ## all tests, then the unit tests on every other Python that is here
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(TESTS)
	@$(MAKE) --no-print-directory test-versions

test-long: $(VENV)/.dev  ## the tests that take minutes
	@$(BIN)/python -m pytest -m long $(TESTS)

test-versions: $(VENV)/.dev  ## the unit tests on every other Python that is here
	@for version in $$($(BIN)/python tools/interpreters.py); do \
		$(MAKE) --no-print-directory test-$$version || exit 1; \
	done

test-3.%: .venv-3.%/.dev
	@echo "unit tests on Python 3.$*"
	@.venv-3.$*/bin/python -m pytest -q tests/unit

check: $(VENV)/.dev  ## lint, format, types, imports, requirements, docs
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python -m pytest -q tests/unit/test_packaging.py tests/unit/test_docs.py

bench: $(VENV)/.dev  ## measure; prints a table, writes bench/results
	@$(BIN)/python -m bench

lock: $(VENV)/.dev  ## resolve the requirements anew
	@$(BIN)/python tools/lock.py

clean:  ## remove what make made (not .sideline: it holds your data)
	@rm -rf .venv .venv-3.* .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	@find . -name __pycache__ -prune -exec rm -rf {} +

# The stamps stand for a finished installation: one that was interrupted is repeated.
$(VENV)/.stack: requirements/stack.txt $(SOURCES) $(BIN)/python
	@$(find_python); "$$python" tools/environment.py $(VENV) $< && touch $@

$(VENV)/.dev: requirements/dev.txt $(SOURCES) $(BIN)/python
	@$(find_python); "$$python" tools/environment.py $(VENV) $< && touch $@ $(VENV)/.stack

# No recipe of its own: tools/environment.py makes it. It is named so that an environment whose
# Python has gone is noticed.
$(BIN)/python: ;

# With the first environment's uv, if it has one. Precious: make would delete the stamp as a
# mere step on the way.
.PRECIOUS: .venv-3.%/.dev
.venv-3.%/.dev: requirements/dev.txt $(SOURCES)
	@python=$$($(BIN)/python tools/interpreters.py 3.$*) && \
		PATH="$(CURDIR)/$(BIN):$$PATH" "$$python" tools/environment.py .venv-3.$* $< && touch $@
