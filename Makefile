# Everything runs in .venv, which the first command makes. `make help` lists the commands.
PYTHON ?= python3
TORCH ?= auto
PY := .venv/bin/python
SETUP := @$(PYTHON) course_utils/bootstrap.py --torch $(TORCH)
ROOT_OK := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help setup lab ffcv test notebooks bench restore clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' Makefile

setup:  ## make the environment (TORCH=cpu, cuda or cu126 chooses the build of torch)
	$(SETUP)

lab:  ## open the course in JupyterLab
	$(SETUP)
	@$(PY) -m nbformat.sign notebooks/*.ipynb exercises/*.ipynb solutions/*.ipynb >/dev/null
	$(PY) -m jupyterlab $(ROOT_OK) --ip=127.0.0.1 --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

ffcv:  ## add FFCV for lesson 15 (Linux, Python 3.11), or say what it needs
	$(SETUP) --extra ffcv

test:  ## run every test
	$(SETUP) --extra test --extra nccl --extra-if-possible ffcv
	$(PY) -m pytest -n 2 --dist loadscope --nbval --nbval-cell-timeout=300 --nbval-sanitize-with tests/sanitise.cfg --durations=40 tests notebooks solutions

notebooks:  ## build notebooks, exercises and solutions from sources (what changed)
	$(SETUP) --extra test --extra nccl --extra-if-possible ffcv
	$(PY) -m course_utils.workshop build

bench:  ## measure the launcher against other ways to start ranks
	$(SETUP)
	$(PY) tests/benchmarks/run.py

restore:  ## bring the original notebooks back; changed ones are kept in saved/
	$(SETUP)
	$(PY) -m course_utils.workshop restore

clean:  ## remove the environment and caches
	rm -rf .venv .uv *.egg-info .pytest_cache .ruff_cache
	find . \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
