VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-all check docs bench clean
.DEFAULT_GOAL := demo

setup: $(READY)  ## create .venv with everything the project needs

$(READY): pyproject.toml
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[train,report,dev,docs]"
	touch $@

DEMO := --compute-ms-per-sample 0 --workers 4 --steps 600 --batch 256 --checkpoint-every 300

demo: $(READY)  ## price every policy on the built-in shopping trace, then train with two of them
	mkdir -p runs
	$(BIN)/embroute compare --data online-retail --compute-ms-per-sample 0.05 \
		--dim 64 --optimizer sgd --cache 0.1 --report runs/compare.html
	rm -rf runs/demo-vanilla runs/demo-embroute
	$(BIN)/embroute train $(DEMO) --policy vanilla --out runs/demo-vanilla
	$(BIN)/embroute train $(DEMO) --out runs/demo-embroute
	$(BIN)/embroute report runs/demo-vanilla runs/demo-embroute --html runs/train.html
	@echo "All ranks ran on this machine: compare the rows moved, not the speed."

test: $(READY)  ## the fast tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-all: $(READY)  ## every test in full size; MARKS="not slow" leaves out those of minutes
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "$(MARKS)"

check: $(READY)  ## style, types, shape
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_tidy.py

docs: $(READY)  ## the documentation as a site, offline, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html."

bench: $(READY)  ## speed and size, recorded under benchmarks/results
	$(BIN)/python -m benchmarks.decisions

clean:  ## remove the environment and everything compiled or cached
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
