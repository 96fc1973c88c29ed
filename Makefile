.DEFAULT_GOAL := help
.PHONY: help demo test check format bench services services-stop constraints clean

# Much of a test's time is waiting for servers: one process more than there are cores keeps them busy.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

# Tests start many interpreters; without compiled modules each of them takes a second longer.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## See it work: needs Python 3.11 or newer, nothing else
	@tools/bootstrap core
	@.venv/bin/pillarbox demo

test: services ## Run the tests on real databases and brokers; make test ARGS='-k claim'
	.venv/bin/pytest -n $(WORKERS) --dist worksteal $(ARGS)

check: .venv ## Lint, formatting, types and the direction of imports
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

format: .venv ## Format the code and fix what the linter can
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: services ## Run the benchmarks; make bench ONLY=relay_hold
	.venv/bin/python -m benchmarks $(ONLY)

services: .venv ## Start the test databases and brokers; their urls are in .services/env
	@tools/services start

services-stop: ## Stop the test databases and brokers; their data is kept
	@tools/services stop

constraints: .venv ## Renew the pinned versions in constraints.txt
	.venv/bin/uv pip compile -q --universal --upgrade --no-annotate --no-emit-index-url \
		--custom-compile-command 'make constraints' --extra dev pyproject.toml -o constraints.txt

clean: ## Delete the environment, the test databases and brokers, and all caches
	@tools/services remove
	rm -rf .venv .services .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist

.PHONY: .venv
.venv:
	@tools/bootstrap dev
