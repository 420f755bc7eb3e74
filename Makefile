# Every target works from a bare clone. PYTHON is any Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FAULT ?= hang
# For images: podman or docker; more flags for its build, such as --build-arg BASE=... (docs/get-started/containers.md).
CONTAINER ?= podman
IMAGE_FLAGS ?=
# Where test-kubernetes keeps the control plane that it builds.
KUBERNETES ?= $(HOME)/.cache/eagle-eye/kubernetes
# For test-gpu: a Python whose torch sees the GPU, if neither ours nor one on the PATH does.
TORCH_PYTHON ?=
# Tests run in so many processes, each file of them in one. To run a file alone: .venv/bin/python -m pytest tests/x.py
# Those of make test wait more than they compute; those that make test-full adds are jobs and servers, and fill two cores.
QUICK_TEST_WORKERS ?= 4
TEST_WORKERS ?= 2
TEST_OPTIONS ?=
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder \
  --durations 60 --durations-min 2 $(TEST_OPTIONS)
# Asks nothing, starts no service, waits for another that holds the lock, and tries a mirror again.
APT = DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get --quiet -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 \
  -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
SOURCES := schema agent server detectors orchestrators client cli demo simulator learning checks checkpoint planning traces

.PHONY: help venv demo test test-full test-again test-gpu test-kubernetes test-newcomer test-grafana-schema check check-page check-dashboards format images picture pictures dashboards docs dist clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

venv: $(VENV)/.ready  ## the environment alone, with pinned dependencies

$(VENV)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments. On Debian: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned dependencies: some minutes, once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: venv  ## the closed loop on a real training job; FAULT=hang|slow|unreachable|crash|nan|no-spare|none, HA=1, KEEP=1
	$(BIN)/eagle-eye demo --fault $(FAULT) $(if $(filter 1,$(HA)),--ha) $(if $(filter 1,$(KEEP)),--keep)

test: venv  ## all tests that this machine can run within minutes
	$(PYTEST) --numprocesses $(QUICK_TEST_WORKERS) -m "not slow"

test-full: venv  ## installs the components that tests ask for (Debian, as root), then runs all tests
	$(APT) update
	$(APT) install --yes --no-install-recommends $$(cat tests/debian-packages.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/full.lock
	EAGLE_EYE_TEST_ATTACK=1 EAGLE_EYE_TEST_CONTAINERS=1 EAGLE_EYE_TEST_DASHBOARDS=1 EAGLE_EYE_TEST_DOCS=1 EAGLE_EYE_TEST_PACKAGES=1 EAGLE_EYE_TEST_SLURM=1 $(PYTEST) --numprocesses $(TEST_WORKERS)

test-again: venv  ## the tests that failed last, one after the other
	EAGLE_EYE_TEST_ATTACK=1 EAGLE_EYE_TEST_CONTAINERS=1 EAGLE_EYE_TEST_DASHBOARDS=1 EAGLE_EYE_TEST_DOCS=1 EAGLE_EYE_TEST_PACKAGES=1 EAGLE_EYE_TEST_SLURM=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(TEST_OPTIONS)

test-gpu: venv  ## what only a GPU shows, kept in benchmarks/results/gpu; TORCH_PYTHON: one with torch for CUDA
	$(if $(TORCH_PYTHON),EAGLE_EYE_TEST_TORCH_PYTHON=$(TORCH_PYTHON) )$(BIN)/python -m benchmarks.gpu

test-kubernetes: venv  ## builds a Kubernetes control plane (Debian, as root, once), then runs the tests that need one
	sh tests/orchestrators/kubernetes/build.sh $(KUBERNETES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $$(grep '^aws-cdk' tests/full.lock)
	EAGLE_EYE_TEST_KUBERNETES=$(KUBERNETES) $(BIN)/python -m pytest tests/orchestrators/kubernetes tests/packaging/test_helm_cluster.py

test-newcomer: venv  ## after make dist: its packages by the documents' commands on empty Debians (Debian, as root)
	EAGLE_EYE_TEST_NEWCOMER=$(CURDIR)/dist $(BIN)/python -m pytest tests/packaging/test_newcomer.py

test-grafana-schema: venv  ## checks the dashboards with Grafana's own types (npm and its registry)
	EAGLE_EYE_TEST_GRAFANA_SCHEMA=1 $(BIN)/python -m pytest tests/dashboards/test_grafana_schema.py

check: venv  ## style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES:%=%/eagle_eye) dashboards packaging/release tests benchmarks
	$(BIN)/mypy --python-version 3.10 schema/eagle_eye agent/eagle_eye client/eagle_eye cli/eagle_eye checks/eagle_eye
	$(BIN)/lint-imports

check-page:  ## the page's types; needs Node.js and npm
	npm --prefix tests/page/types ci --ignore-scripts --no-audit --no-fund
	npm --prefix tests/page/types run check

check-dashboards: venv  ## draws the dashboards with Grafana's libraries: build/dashboards/*.png; needs npm, Chromium, Prometheus
	npm --prefix tests/dashboards/grafana_render ci --ignore-scripts --no-audit --no-fund
	EAGLE_EYE_TEST_DASHBOARD_PICTURES=$(CURDIR)/build/dashboards $(BIN)/python -m pytest tests/dashboards/test_render.py

format: venv  ## rewrites the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

images:  ## container images of agent, server and orchestrator; CONTAINER=podman|docker
	for image in agent server orchestrator; do \
	  $(CONTAINER) build $(if $(findstring podman,$(CONTAINER)),--format docker) \
	    --file packaging/container/$$image.Dockerfile --tag eagle-eye-$$image:$(VERSION) \
	    --build-arg VERSION=$(VERSION) --build-arg CREATED=$$(date --utc +%Y-%m-%dT%H:%M:%SZ) \
	    --build-arg REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown) $(IMAGE_FLAGS) . || exit; \
	done

dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
dist: venv  ## what a release is made of: wheel, sdist, .deb, .rpm, bills of materials, SHA256SUMS
	rm -rf dist
	PYTHONPATH=packaging $(BIN)/python -m release.build --out dist
	$(BIN)/python packaging/host/build.py --out dist
	PYTHONPATH=packaging $(BIN)/python -m release.describe dist

docs: venv .venv-docs/.ready  ## the documentation as a site: build/site/index.html
	rm -rf build/site-pages
	mkdir -p build/site-pages/reference build/site-pages/how-to
	$(BIN)/python packaging/site/api_reference.py > build/site-pages/reference/api-reference.md
	$(BIN)/python packaging/site/other_pages.py docs/how-to/incident-notebook.ipynb > build/site-pages/how-to/incident-notebook.md
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: packaging/site/requirements.lock
	$(BIN)/python -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r packaging/site/requirements.lock
	@touch $@

picture: venv  ## draws the packages and their imports into docs/assets; needs Graphviz
	$(BIN)/python packaging/site/package_graph.py

pictures: venv  ## makes the documents' pictures of real runs, in Chromium; PICTURES=page|loop|plot for some alone
	$(BIN)/python -m tests.page.pictures $(PICTURES)

dashboards: venv  ## writes the Grafana dashboards anew from their source
	$(BIN)/python -m dashboards.grafana.source

clean:  ## removes what the other targets made
	rm -rf $(VENV) .venv-docs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
