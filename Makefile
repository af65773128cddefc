# Everything happens in one virtual environment. Its stamp files make repeated runs fast.
VENV   ?= .venv
PYTHON ?= python3
# ENGINE=full builds all of llama-cpp-python, videos too; GPU=cuda adds CUDA.
ENGINE ?= light
GPU    ?=
ARGS   ?=

# File by file in their order: those with the most tests are not the longest, and scheduler to wire,
# which are short, leave no core idle at the end. Four processes for two cores: one begins with the
# tests of tests/conftest.py's TOGETHER, which wait most of the time, as others do for a part of it.
# One that dies is not replaced, since xdist may then wait for ever; the report names its last test.
PARALLEL = -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# With ARGS, one of the two runs of `make test` may be left without tests: pytest's status 5.
NONE_CHOSEN = $(if $(ARGS), || [ $$? -eq 5 ])

PY     := $(VENV)/bin/python
# On a busy machine its processes do not start within the 3 s that it gives them: status 2. Then it
# runs without them.
MYPY   := $(PY) -m mypy $(addprefix -p ,inferd tests bench tools examples)
PIP    := $(PY) -m pip --disable-pip-version-check --quiet
STAMP  := $(VENV)/.stamp
ENGINE_STAMP := $(STAMP)-engine-$(ENGINE)$(GPU)

.DELETE_ON_ERROR:
.PHONY: help demo chat test test-ray files compiled wheel check lint bench attack compare answers compat dashboard-picture page-picture recording page-libraries protobuf guest docs models schemas graphs templates architectures archs variants prometheus browser install clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' Makefile | while read -r name text; do printf '  make %-17s %s\n' "$$name" "$$text"; done
	@echo 'VENV=… PYTHON=… ENGINE=full GPU=cuda ARGS="…" (of demo, chat, test, bench, compare, compat, page-libraries)'

demo: install ## several programs share one model: the main job, shown
	@$(PY) tools/get_models.py --only smollm2
	$(PY) tools/demo.py $(ARGS)

chat: $(STAMP)-chat ## chat in the browser, until Ctrl-C
	@$(PY) tools/get_models.py --only smollm2
	@$(PY) tools/chat.py $(ARGS)

test: $(STAMP)-test files ## run all tests, those on real models too
	$(PY) -m pytest $(PARALLEL) -m 'not alone and not ray' $(ARGS)$(NONE_CHOSEN)
	$(PY) -m pytest -m alone $(ARGS)$(NONE_CHOSEN)

test-ray: $(STAMP)-test ## lose every member of a fleet in a Ray cluster, in 2.5 GB of memory
	$(PY) -m pytest -m ray tests/gateways/fleet $(ARGS)

files: models schemas graphs templates architectures variants prometheus browser ## get all files that the tests read

# Each process of pytest would compile all modules of a fresh clone. The tests report any errors.
compiled: $(STAMP)-test files
	-@$(PY) -m pytest --collect-only -qq >/dev/null

wheel: $(STAMP)-install ## check the bare wheel in an empty environment
	$(PY) tools/check_wheel.py

check: lint ## lint, and the tests that start no process, in 90 s
	$(PY) -m pytest -q $(PARALLEL) --no-processes $(ARGS)

lint: $(STAMP)-lint ## check style, prose, types and the order of imports
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) tools/check_prose.py
	$(MYPY) -n 2 || { [ $$? -eq 2 ] && $(MYPY); }
	$(PY) -m pyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports --no-logo

bench: $(STAMP)-bench models ## compare with llama-server; ARGS="--list", "--scenario urgent"
	$(PY) -m bench $(ARGS)

attack: $(STAMP)-test models ## attack a daemon as another user, measure a victim; needs root
	$(PY) -m bench.attack $(ARGS)

compare: $(STAMP)-bench models ## check that llama-server gives the same answers; writes docs/compare.md
	$(PY) -m bench.equality $(ARGS)

archs: $(STAMP)-test ## check tiny models of all architectures of llama.cpp; writes docs/architectures.md
	$(PY) -m tools.architectures $(ARGS)

answers: $(STAMP)-test $(STAMP)-bench templates models ## try every chat template, beside llama-server too; writes docs/models.md
	$(PY) -m pytest -q --all-answers tests/sessions/answers/test_round_trip.py $(ARGS)
	$(PY) -m bench.answers
	$(PY) -m tools.docs

compat: $(STAMP)-install models ## run programs that use the HTTP gateway; writes docs/compatibility.md
	$(PIP) install --editable '.[gateway]'
	$(PY) -m tools.compatibility $(ARGS)

dashboard-picture: $(STAMP)-test models prometheus browser ## draw docs/dashboard.png; needs Node.js, pngquant
	$(PY) -m tools.dashboard_picture $(ARGS)

page-picture: $(STAMP)-test models browser ## draw docs/page-light.png, page-dark.png and page-phone.png
	$(PY) -m tools.page_picture $(ARGS)

recording: $(STAMP)-test ## record the first minutes in a terminal: docs/first-minutes.svg and .cast
	$(PY) -m tools.recording $(ARGS)

page-libraries: install ## get the web page's JavaScript libraries; needs npm; ARGS="katex@0.20.0" pins another
	@$(PY) -m tools.page_libraries $(ARGS)

protobuf: $(STAMP)-test ## generate the messages of WasmEdge's RPC service from their .proto
	cd gateways/nnrpc && $(abspath $(PY)) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. wasi_ephemeral_nn.proto

guest: $(STAMP)-test ## compile the tests' guest of WebAssembly after a change of guest.c
	$(PIP) install --group guest
	$(PY) -m tests.gateways.wasm.guests.compile

docs: install ## write the generated parts of docs/ anew
	@$(PY) -m tools.vectors
	@$(PY) -m tools.docs
	@$(PY) -m tools.dashboard

models: $(STAMP)-venv ## get the models (350 MB) into .cache/models
	@$(PY) tools/get_models.py

schemas: $(STAMP)-venv ## get JSON schemas (27 MB) into .cache/schemas for the tests
	@$(PY) tools/get_schemas.py

graphs: $(STAMP)-venv ## get graphs that are not language models (55 MB) into .cache/graphs for the tests
	@$(PY) tools/get_graphs.py

templates: $(STAMP)-venv ## get chat templates from the engine's source for the tests
	@$(PY) -m tools.get_templates

architectures: $(STAMP)-test ## save tiny models of some architectures of llama.cpp for the tests
	@$(PY) -m tools.architectures.models

variants: $(STAMP)-test models ## write smaller variants of the models for the tests
	@$(PY) -m tests.variants

prometheus: $(STAMP)-venv ## get Prometheus (Debian's package, not installed) for the tests
	@$(PY) tools/get_prometheus.py

browser: $(STAMP)-venv ## install a headless Chromium for the tests, as root (Debian's package)
	@$(PY) tools/get_browser.py

install: $(STAMP)-install ## set up the virtual environment: engine, daemon, client

clean: ## remove the virtual environment, caches and build products; wheels in ~/.cache stay
	rm -rf $(VENV) .cache build dist clients/typescript/build clients/typescript/dist clients/typescript/node_modules src/*.egg-info .*_cache .hypothesis bench/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP)-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'inferd needs Python 3.11 or newer; name one: make PYTHON=python3.12 …' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install 'pip>=25.1'
	@touch $@

$(ENGINE_STAMP): $(STAMP)-venv pyproject.toml tools/build_engine.py tools/cuda_toolkit.py tools/engine.cmake tools/llama_only.cmake
	@rm -f $(STAMP)-engine-*
	@$(PY) -m tools.build_engine $(if $(filter full,$(ENGINE)),--full) $(if $(GPU),--gpu $(GPU))
	@touch $@

$(STAMP)-install: $(ENGINE_STAMP) pyproject.toml
	$(PIP) install --editable '.[daemon,uvloop,traces,top]'
	@touch $@

$(STAMP)-chat: $(STAMP)-install
	$(PIP) install --editable '.[gateway]'
	@touch $@

# Compiling all modules of these packages would take twice as long as installing them.
$(STAMP)-test: $(STAMP)-install
	$(PIP) install --no-compile --group test
	@touch $@

$(STAMP)-lint: $(STAMP)-test
	$(PIP) install --no-compile --group lint
	@touch $@

$(STAMP)-bench: $(STAMP)-install
	$(PIP) install --group bench
	@touch $@
