# Everything runs in .venv, which the first target that needs it creates. ARGS goes to the scripts:
# make tables ARGS='results=results/demo ci=true'
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
# what gradio needs besides what is there
GRADIO := brotli fastapi gradio_client groovy hf-gradio httpx orjson pydub python-multipart pytz safehttpx \
	semantic-version tomlkit typer uvicorn

.PHONY: help install tools demo tables compare figures report status app benchmark test test-slow test-oracles test-app test-cluster gradio lint format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(INSTALLED) ## create .venv and install dap_bench with the pinned versions

$(INSTALLED): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

tools: ## TeX and Chromium for the tests that look at tables and the page (Debian, as root)
	apt-get update -q
	apt-get install -q -y --no-install-recommends chromium chromium-driver poppler-utils \
		texlive-latex-recommended texlive-latex-extra

demo: $(INSTALLED) ## all methods on the bundled default, then the first table
	rm -rf results/demo
	$(RUN) -m dap_bench experiment=demo
	$(RUN) -m dap_bench.tables results=results/demo tables=results/demo/tables summary=results/demo/summary.csv

tables: $(INSTALLED) ## the paper's tables from the rows in results/runs
	$(RUN) -m dap_bench.tables $(ARGS)

compare: $(INSTALLED) ## our numbers beside the published ones
	$(RUN) -m dap_bench.compare $(ARGS)

figures: $(INSTALLED) ## curves, ranks, layer-wise maps, best and worst cases
	$(RUN) -m dap_bench.figures $(ARGS)

status: $(INSTALLED) ## which of the paper's cells are done, and what is left
	$(RUN) -m dap_bench.status $(ARGS)

report: $(INSTALLED) ## one HTML page with all of it
	$(RUN) -m dap_bench.report $(ARGS)

gradio: $(INSTALLED)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(GRADIO)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gradio # it allows no Pillow 13

app: gradio ## maps of a photo in a browser, by gradio, which this installs
	$(RUN) -m dap_bench.app $(ARGS)

benchmark: $(INSTALLED) ## ratios of speed, also against other programs (results/benchmark.md)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[benchmark]'
	$(RUN) scripts/benchmark.py $(ARGS)

test: $(INSTALLED) lint ## linter, types and tests
	$(RUN) -m pytest -q -n 2

test-slow: $(INSTALLED) ## the checks that take longer
	$(RUN) -m pytest -q -m slow

test-oracles: $(INSTALLED) ## compare with captum, grad-cam, zennit, lxt and quantus, which this installs
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[oracles]'
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps lxt # its rules need torch alone
	$(RUN) -m pytest -q -m oracle tests/oracles

test-app: gradio ## the app in a browser, with gradio, which this installs
	$(RUN) -m pytest -q -rs tests/test_app.py

test-cluster: $(INSTALLED) ## sweeps on Slurm, where there is one, and on Ray, which this installs
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[slurm,ray]'
	$(RUN) -m pytest -q -rs -m cluster tests/test_cluster.py $(ARGS)

lint: $(INSTALLED) ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(INSTALLED) ## put the code in ruff's form
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean: ## remove .venv and what is made from rows, not the rows
	rm -rf $(VENV) results/demo results/tables results/figures results/report results/summary.csv
