# One word per need. CI and the docs call these; nothing else knows how.
PYTHON ?= python3
# Whether the user has named it.
ASKED := $(if $(filter command,$(firstword $(origin PYTHON))),--asked)
PY := .venv/bin/python
ARGS ?=
# Containers set it often. With it pytest compiles every test module again, in each of its processes.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(PY) -m pytest
# What starts no engine runs on every core; a single file is faster without (`python -m pytest FILE`).
PARALLEL := -n logical --maxprocesses 8 --dist worksteal
IN_PROCESS := tests/unit tests/web tests/server
# What `make unit` leaves out and nothing else of `make test` proves (tests/support/long_tests.py).
PROOFS := tests/unit/features/adapter_store/test_bounds.py tests/unit/features/adapters_state/test_sharing.py

.PHONY: help setup serve test test-all check lint format unit contract integration matrix docs site bench storm chaos fleet fuzz gpu pictures
.PHONY: constraints release image clean

help:             ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup:            ## build .venv for this machine (cheap when it is there)
	@$(PYTHON) scripts/begin_setup.py $(ASKED)

serve: setup      ## start the server: the embedded model, or what HF_MODEL_ID names
	@$(PY) -m lmi_vllm serve $(if $(HF_MODEL_ID),,--demo) $(ARGS)

test: unit        ## every promise, on the real engine too
	@$(PYTHON) scripts/install_test_tools.py
	$(PY) -m scripts.run_together -m "not long" $(PROOFS) $(ARGS)

test-all: setup   ## all that starts an engine, the long ones too: CI runs it beside `make check`
	@$(PYTHON) scripts/install_test_tools.py
	$(PY) -m scripts.run_together $(ARGS)

check: lint       ## what must be green before a commit
	$(PYTEST) $(PARALLEL) $(IN_PROCESS) $(ARGS)
	$(PY) scripts/make_docs.py --check

lint: setup       ## ruff, mypy and the linter of prose
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PY) scripts/lint_prose.py

format: setup     ## write what ruff can fix
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

unit: setup       ## the quick ones of `make check`'s tests, in about a minute: what a change is tried with
	$(PYTEST) $(PARALLEL) -m "not slow" $(IN_PROCESS) $(ARGS)

contract:         ## the engine's promises, scripted and real; VLLM=0.31.0 on that release, in .venv-vllm-0.31.0
	@$(PYTHON) scripts/begin_setup.py $(ASKED) $(if $(VLLM),--vllm $(VLLM))
	$(if $(VLLM),.venv-vllm-$(VLLM)/bin/python,$(PY)) -m pytest tests/contract $(ARGS)

integration: setup ## the scenarios over real servers
	$(PYTEST) integration $(ARGS)

matrix: setup    ## every architecture that config/models/ has no result of, on the real engine; ARGS=--again for all
	$(PY) -m integration.matrix $(ARGS)

docs: setup       ## generated pages into config/ and docs/, and the recorded engine arguments
	$(PY) scripts/record_vllm_arguments.py
	$(PY) scripts/record_vllm_routes.py
	$(PY) scripts/record_class_defaults.py
	$(PY) scripts/make_docs.py

site: setup       ## the documentation as a site in build/site; a broken link is an error (python3 -m http.server -d build/site)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

fuzz: setup       ## atheris on every parser, two minutes each, then schemathesis over our API description
	$(PY) -m tests.fuzz.run --seconds 120 $(ARGS)
	$(PYTEST) integration/openapi_fuzz.py -s

bench: setup      ## every benchmark, and its report in bench-report/
	$(PY) -m integration.bench $(ARGS)

gpu: setup        ## the suite for a machine with a GPU, and its report in gpu-report/; without one its CPU form
	$(PY) -m integration.gpu $(ARGS)

storm: setup      ## the isolation storm over adapters, five minutes unless ARGS says otherwise
	$(PY) -m integration.storm --seconds 300 $(ARGS)

chaos: setup      ## mixed traffic, invalid input, disconnects and engine kills, ten minutes unless ARGS says otherwise
	$(PY) -m integration.chaos --seconds 600 $(ARGS)

fleet: setup      ## four real servers behind a proxy, killed and rolled under load, 200 adapters in S3; ARGS="--proxy nginx"
	$(PY) -m integration.fleet $(ARGS)

pictures: setup   ## the pictures of config/console.md, taken by the tests of the console
	LMI_CONSOLE_PICTURES=$(CURDIR)/config/console $(PYTEST) integration/console_in_a_browser.py $(ARGS)

constraints: setup ## resolve config/constraints/ again; ARGS=--upgrade takes the newest of everything
	$(PY) scripts/make_constraints.py $(ARGS)

release: setup    ## sdist, wheel and SBOMs into dist/; ARGS=0.2.0 cuts that version first, ARGS=--draft changes nothing
	$(PY) scripts/make_release.py $(ARGS)

KIND ?= cuda
TAG ?= lmi-vllm:$(KIND)
image: setup      ## the container image, with docker, podman or buildah; KIND=cpu: without a GPU, TAG=name:tag
	$(PY) scripts/make_release.py --draft
	@sh scripts/build_image.sh $(KIND) $(TAG)

clean:            ## remove what was built here
	rm -rf .venv .venv-litellm .venv-ray .venv-routers .venv-clients .venv-with_sdk_* .venv-vllm-* .schemathesis build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz
