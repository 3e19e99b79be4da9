# Everything that a change must pass is `make check`. `tools/setup --dev` prepares for all of it.
# Each target does one thing and says what failed; the tests come last, so that their summary is what is seen.

PY := .venv/bin/python
CARGO := ../tools/cargo
PYTHON_CODE := $(wildcard src tests bench examples tools hatch_build.py)

.PHONY: help setup check fmt fmt-check lint types imports rust test soak bench docs lock clean
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

help:
	@echo "make setup      system packages, .venv, native programs (tools/setup --dev)"
	@echo "make check      everything below up to test; what must pass before a change goes in"
	@echo "make fmt-check  lint  types  imports  rust  test"
	@echo "make fmt        format Python and Rust"
	@echo "make soak       the long tests"
	@echo "make bench      measurements of this machine"
	@echo "make docs       write docs/reference again"
	@echo "make lock       write tools/lock again"
	@echo "make clean      remove what was built, but for .venv"

setup:
	tools/setup --dev

check: fmt-check lint types imports rust test

fmt:
	$(PY) -m ruff format $(PYTHON_CODE)
	$(PY) -m ruff check --fix --select I $(PYTHON_CODE)
	cd native && $(CARGO) fmt

fmt-check:
	$(PY) -m ruff format --check $(PYTHON_CODE)

lint:
	$(PY) -m ruff check $(PYTHON_CODE)

types:
	$(PY) -m mypy
	$(PY) -m mypy hatch_build.py tools/gen_docs.py tools/erofs.py

imports:
	$(PY) -m pytest -q tests/style/test_imports.py

# Debian's Rust packages may come without rustfmt and clippy; then that part is said to be skipped.
rust:
	@cd native && if $(CARGO) fmt --version >/dev/null 2>&1; then $(CARGO) fmt --check; else echo "rust: skipped: no rustfmt"; fi
	@cd native && if $(CARGO) clippy --version >/dev/null 2>&1; then \
		$(CARGO) clippy --quiet --locked --all-targets -- -D warnings; else echo "rust: skipped: no clippy"; fi
	cd native && $(CARGO) test --quiet --locked

# pytest ends with 5 when it found no test: make fails then too.
test:
	$(PY) -m pytest -m "not slow" tests

soak:
	$(PY) -m pytest -m slow tests

bench:
	$(PY) -m bench

docs:
	$(PY) tools/gen_docs.py

lock:
	tools/lock/make

clean:
	rm -rf native/target build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/dsec/_bin
	find $(filter-out %.py,$(PYTHON_CODE)) -name __pycache__ -type d -prune -exec rm -rf {} +
