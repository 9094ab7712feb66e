# Two commands are enough: `make lab` to read the course, `make test` to check everything.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
# Two processes for two cores; one thread each, so that they do not fight for them.
WORKERS ?= 2

.PHONY: lab test site notebooks export lint format setup clean

lab: $(READY)
	$(BIN)/jupyter lab notebooks/00_start_here.ipynb

test: $(READY)
	$(BIN)/python tools/export.py --check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --nbval -q -n $(WORKERS) --dist loadfile

# the course as web pages, in build/site; it reads the committed notebooks and runs nothing
site: $(READY)
	$(BIN)/python site/build.py

setup: $(READY)

# torch goes first: resolved together with the rest, pip may pick another (much larger) build of it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; assert (3, 11) <= v < (3, 14), f"Python 3.11 to 3.13 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.12"'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

# for maintainers: the package from the notebooks; every notebook run again in place; ruff over code and notebooks
export: $(READY)
	$(BIN)/python tools/export.py
	$(BIN)/python tools/count_house.py --write

notebooks: $(READY)
	$(BIN)/python tools/notebooks.py run

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
