# The house keeper. `make` alone lists what it can do.
#
# Another interpreter: make demo PYTHON=/path/to/python3.12      Another place for it: make demo VENV=/tmp/venv
# One test:            make test ARGS="tests/unit/core -k seeding"

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?=
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
export PYTHONUNBUFFERED := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without its cache each process compiles the source anew, and each test worker rewrites the asserts of all tests.
unexport PYTHONDONTWRITEBYTECODE
# The theme of the docs ends in May 2027, and says so at every build. CONTRIBUTING.md has what its successor still lacks.
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test check format docs bench nightly install install-dev clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/  make \1 \t/p' Makefile

demo: install  ## show who gains by joining: a federated run, its IID twin and its baselines, in one page
	@$(BIN)/fedlens cost demo --seeds 1 --out runs/demo $(ARGS)
	@echo; echo "Open the result page: $$PWD/runs/demo/cost.html"

test: install-dev  ## run all tests of the ci tier
	@$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

check: install-dev  ## format, lint, types, import contract, docs
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/mkdocs build --strict
	@echo "All checks passed."

format: install-dev  ## rewrite the code in the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: install-dev  ## build the documentation into site/
	@$(BIN)/mkdocs build --strict
	@echo "Open site/index.html, or look at it while you write: $(BIN)/mkdocs serve"

bench: install-dev  ## measure fedlens against the bare-PyTorch limit of this machine (many minutes)
	@$(BIN)/fedlens bench $(ARGS)

nightly: install-dev  ## run the nightly tier: up to an hour, needs FEDLENS_DATA
	@[ -n "$${FEDLENS_DATA:-}" ] || { echo "$$NO_DATA" >&2; exit 1; }
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m nightly --timeout=0 $(ARGS)
	@$(BIN)/python -m tests.mutations

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

clean:  ## remove everything that was built, .venv too; runs/ stays
	rm -rf "$(VENV)" build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests tools benchmarks docs -name __pycache__ -prune -exec rm -rf {} +

# The stamps are newer than pyproject.toml exactly as long as nothing has to be installed again.
$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "Installing fedlens and PyTorch into $(VENV) (a large download the first time)"
	@$(call pip-install,.)
	@touch "$@"

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	@echo "Installing fedlens, PyTorch and the development tools into $(VENV) (a large download the first time)"
	@$(call pip-install,.[dev])
	@touch "$(VENV)/.installed" "$@"

# One dot a package, so that a slow line does not look like a stand-still; what pip complains of is shown if it fails.
define pip-install
set -o pipefail; "$(BIN)/python" -m pip install --progress-bar off --editable "$(1)" 2>"$(VENV)/pip.log" \
	| while IFS= read -r line; do case "$$line" in \
		Collecting*) printf '.' ;; \
		"Installing collected"*) printf ' unpacking ...' ;; \
		"Successfully installed"*) printf ' done' ;; \
	esac; done || { echo; cat "$(VENV)/pip.log" >&2; exit 1; }; echo
endef

define NO_DATA
The nightly tests need real data, and FEDLENS_DATA is not set.
Say where the data is: make nightly FEDLENS_DATA=/path/to/data
endef
export NO_DATA

define NO_PYTHON
fedlens needs Python 3.11.4 or newer, and none was found (looked for: $(if $(PYTHON),$(PYTHON),python3 python3.11 python3.12 ...)).
Install one and say where it is: make demo PYTHON=/path/to/python3.12
endef
export NO_PYTHON

define NO_VENV
This Python has no venv module.
On Debian and Ubuntu it is a package of its own: sudo apt install python3-venv
endef
export NO_VENV

$(VENV)/.created:
	@found=; for python in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11 python3.14 python); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "$$NO_PYTHON" >&2; exit 1; fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then echo "$$NO_VENV" >&2; exit 1; fi; \
	echo "Making $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv --clear "$(VENV)" && touch "$@"
