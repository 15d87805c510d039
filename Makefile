# Every target makes the environment it needs in .venv, with uv where that is
# installed and with pip elsewhere. Python compiles modules on their first
# import and keeps the bytecode, even if PYTHONDONTWRITEBYTECODE is set: that
# takes less time than to compile all that is installed.
#
#   make demo        trains a plain and an equivariant network on digits
#   make test        the test suite on TensorFlow, JAX and PyTorch; for one
#                    backend and some tests: make test BACKENDS=jax K=pooling
#   make test-slow   full sweeps, prepared real data, oldest Keras; its parts are
#                    targets, such as make slow-jax
#   make formats     the tables of docs/guide/formats.md
#   make fuzz        layers with random arguments and inputs, and a summary
#   make lint        formatting, lint, spelling, types
#   make docs        the documentation, in site/
#   make dist        sdist and wheel, in dist/
#   make bench       the benchmarks, in benchmarks/results/ and docs/results.md

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
BACKENDS ?= torch tensorflow jax
PYTEST := $(BIN)/python -m pytest -q -n 2
# Runs only tests whose names match this expression; a backend may have none.
K ?=
some = $(if $(K),-k "$(K)" || test $$? -eq 5)
# Installs into the environment $(1).
install = $(if $(shell command -v uv),uv pip install -q --python $(1)/bin/python,\
  $(1)/bin/pip install -q --no-compile)

export PYTHONDONTWRITEBYTECODE :=
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: demo test test-slow test-floor formats fuzz lint types docs dist bench clean \
  slow-networks slow-tensorflow slow-jax slow-torch sweep-layers \
  sweep-tensorflow sweep-jax

demo: .venv/.demo
	KERAS_BACKEND=$${KERAS_BACKEND:-tensorflow} $(BIN)/python examples/demo.py

# Tests that use no tensor, or choose a backend themselves, run once: under
# PyTorch, which builds networks fastest. A process gets the tests of a whole
# class or module, which share what they compile.
test: .venv/.dev
	@set -e; which="not slow"; \
	for backend in $(BACKENDS); do \
	  echo "== $$backend"; \
	  KERAS_BACKEND=$$backend $(PYTEST) --dist loadscope --durations=20 -m "$$which" \
	    $(some); \
	  which="not slow and not once"; \
	done

# Slow tests compile as for users; sweeps, like the fast tests, without
# optimisation. Each part is a target: make -k test-slow goes on after failures.
SLOW := slow-networks slow-tensorflow slow-jax slow-torch sweep-layers \
  sweep-tensorflow sweep-jax
users = export XLA_FLAGS=--xla_cpu_multi_thread_eigen=false

test-slow: test-floor $(SLOW)

$(SLOW): .venv/.dev

# A backend keeps all that it compiles: half a gigabyte for a large network with
# attention. So the tests of $(2) with the marks $(3) run under the backend $(1)
# in several processes: one for each expression of $(4), with the tests whose
# names match it, and one for the rest. If one fails, the others still run.
define in_parts
failed=0; others=""; for some in $(4) ""; do \
  KERAS_BACKEND=$(1) $(PYTEST) $(2) -m "$(3)" \
    -k "$${some:-$${others# and }}$${some:+$$others}" || failed=1; \
  others="$$others and not $$some"; \
done; exit $$failed
endef

slow-networks:
	@$(users); $(call in_parts,tensorflow,tests/applications,slow and not sweep, \
	  resnet83 resnet29 acmix)

slow-tensorflow:
	@$(users); $(call in_parts,tensorflow,tests --ignore=tests/applications, \
	  slow and not sweep, \
	  deployment convert documentation layers openvino from_plain)

slow-jax:
	$(users); KERAS_BACKEND=jax $(PYTEST) \
	  -m "slow and every_backend and not sweep"

slow-torch:
	@$(call in_parts,torch,tests,slow and every_backend, \
	  layers deployment applications)

sweep-layers:
	@$(call in_parts,tensorflow,tests/layers,sweep and not once, \
	  affine acmix attentive group_self_attention group_)

sweep-tensorflow:
	@$(call in_parts,tensorflow,tests --ignore=tests/layers,sweep and not once, \
	  resnet29 acmix_ gsanet applications docstrings pairs windows)

sweep-jax:
	@$(call in_parts,jax,tests,sweep and not once, \
	  applications deployment affine acmix group_self_attention windows)

fuzz: .venv/.dev
	FUZZ_RESULTS=benchmarks/results KERAS_BACKEND=torch $(BIN)/python -m pytest -q \
	  tests/test_fuzz.py tests/ops/test_arguments.py \
	  tests/deployment/test_random_networks.py -m ""

# With two converters that bring thirty packages, and that nothing else needs.
formats: .venv-formats/.done
	for backend in $(BACKENDS); do \
	  KERAS_BACKEND=$$backend .venv-formats/bin/python -m pytest -q -m "" \
	    tests/deployment/test_format_tables.py --update-golden; \
	done

# The oldest versions that pyproject.toml allows.
test-floor: .venv-floor/.done
	@set -e; for backend in $(BACKENDS); do \
	  echo "== $$backend, oldest versions"; \
	  KERAS_BACKEND=$$backend .venv-floor/bin/python -m pytest -q -n 2 \
	    -m "not slow and not once" tests/ops tests/layers \
	    tests/test_testing.py tests/applications/networks/test_models.py \
	    tests/applications/networks/test_sizes.py \
	    tests/applications/networks/test_shipped_weights.py; \
	done

lint: .venv/.dev types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

# The type checker needs the packages where they will be installed.
types: .venv/.dev
	rm -rf build/typing && mkdir -p build/typing
	cp -r keras_equiattn build/typing/
	cp -r applications build/typing/keras_equiattn/
	cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml

docs: .venv/.docs
	KERAS_BACKEND=$${KERAS_BACKEND:-tensorflow} $(BIN)/mkdocs build --strict

dist: .venv/.dev
	rm -rf dist
	$(BIN)/python -m build -o dist .
	$(BIN)/twine check --strict dist/*

bench: .venv/.dev
	for backend in $(BACKENDS); do \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/group_conv.py; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/pointwise.py; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/pointwise.py --parts; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/vit.py; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/resnet29.py; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/traffic.py; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/step_time.py; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/step_time.py --repeats 3 \
	    --size 14 --width 256; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/step_time.py --repeats 3 \
	    --size 7 --width 512; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/windows.py time; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/group_self_attention.py time; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/acmix.py time --repeats 15; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/acmix.py profile --repeats 15; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/acmix.py folding --repeats 15; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/attentive_conv.py time; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/attentive_conv.py rss; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/attentive_conv.py profile; \
	done
	for backend in $(BACKENDS); do \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/deployment.py plain; \
	  KERAS_BACKEND=$$backend $(BIN)/python benchmarks/scale.py processes; \
	done
	KERAS_BACKEND=torch $(BIN)/python benchmarks/scale.py folders
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 KERAS_BACKEND=jax \
	  $(BIN)/python benchmarks/vit.py
	KERAS_BACKEND=jax taskset -c 0 $(BIN)/python benchmarks/group_conv.py
	KERAS_BACKEND=jax $(BIN)/python benchmarks/widths.py
	set -e; for name in rot_mnist cifar10 pcam; do \
	  $(BIN)/python -m keras_equiattn.applications.data prepare $$name; \
	done
	KERAS_BACKEND=tensorflow $(BIN)/python benchmarks/network_angles.py
	KERAS_BACKEND=tensorflow $(BIN)/python benchmarks/network_angles.py --shipped
	KERAS_BACKEND=tensorflow $(BIN)/python benchmarks/recipe_changes.py
	KERAS_BACKEND=tensorflow $(BIN)/python benchmarks/protocols.py \
	  rotmnist_p4cnn_input
	set -e; for seed in 0 1 2; do \
	  KERAS_BACKEND=tensorflow $(BIN)/python benchmarks/protocols.py \
	    rotmnist_p4cnn_input --milestones 80 --dropout-after-attention \
	    --tested 5 --seed $$seed; \
	done
	KERAS_BACKEND=torch $(BIN)/python benchmarks/deployment.py int8
	KERAS_BACKEND=torch $(BIN)/python benchmarks/parameters.py
	KERAS_BACKEND=jax $(BIN)/python benchmarks/multiply_adds.py
	KERAS_BACKEND=torch $(BIN)/python benchmarks/angles.py --draws 3
	KERAS_BACKEND=torch $(BIN)/python benchmarks/angles.py --draws 3 --dilation 2
	KERAS_BACKEND=torch $(BIN)/python benchmarks/angles.py --draws 3 --whole-image
	KERAS_BACKEND=jax $(BIN)/python benchmarks/angles.py --groups p12 p16 p8m
	TORCH_COMPILE_DISABLE=1 KERAS_BACKEND=torch $(BIN)/python \
	  benchmarks/angles.py --trained --sizes 5
	TORCH_COMPILE_DISABLE=1 KERAS_BACKEND=torch $(BIN)/python \
	  benchmarks/angle_choices.py
	KERAS_BACKEND=torch $(BIN)/python benchmarks/step_time.py --eager
	KERAS_BACKEND=torch $(BIN)/python benchmarks/step_time.py --eager \
	  --size 14 --width 256 --repeats 3
	KERAS_BACKEND=torch $(BIN)/python benchmarks/step_time.py --eager \
	  --size 7 --width 512 --repeats 3
	KERAS_BACKEND=torch $(BIN)/python benchmarks/window_forms.py
	KERAS_BACKEND=torch $(BIN)/python benchmarks/traffic.py --compiled
	KERAS_BACKEND=torch $(BIN)/python benchmarks/traffic.py \
	  --dtype mixed_bfloat16
	KERAS_BACKEND=jax $(BIN)/python benchmarks/windows.py memory
	KERAS_BACKEND=jax $(BIN)/python benchmarks/windows.py profile
	KERAS_BACKEND=jax $(BIN)/python benchmarks/group_self_attention.py memory
	KERAS_BACKEND=jax $(BIN)/python benchmarks/acmix.py memory
	KERAS_BACKEND=torch $(BIN)/python benchmarks/acmix.py stages
	KERAS_BACKEND=torch $(BIN)/python benchmarks/acmix.py networks
	KERAS_BACKEND=jax $(BIN)/python benchmarks/attentive_conv.py memory
	KERAS_BACKEND=tensorflow $(BIN)/python benchmarks/short_runs.py
	KERAS_BACKEND=torch $(BIN)/python benchmarks/tuning.py
	KERAS_BACKEND=jax $(BIN)/python benchmarks/tuning.py
	KERAS_BACKEND=torch $(BIN)/python benchmarks/import_time.py
	KERAS_BACKEND=torch $(BIN)/python benchmarks/report.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python pyproject.toml
	$(call install,.venv) tensorflow-cpu -e ".[examples]"
	@touch $@

.venv/.dev: .venv/bin/python pyproject.toml requirements-dev.txt
	$(call install,.venv) -r requirements-dev.txt
	@touch $@

.venv/.docs: .venv/.dev
	$(call install,.venv) -e ".[docs]"
	@touch $@

# The oldest version of everything that pyproject.toml names; where it names two
# for a package, as Keras for OpenVINO, the first one. OpenVINO, which needs the
# newer Keras, is left out. TensorFlow is the build for CPUs, which is smaller.
floors = $(shell grep -o '"[A-Za-z-]\+\(\[[a-z]*\]\)\?>=[0-9.]*"' pyproject.toml | \
  tr -d '"' | awk -F '>=' '!seen[$$1]++ && $$1 != "openvino" \
    {sub(/^tensorflow$$/, "tensorflow-cpu", $$1); print $$1 "==" $$2}')

.venv-floor/.done: pyproject.toml
	test -x .venv-floor/bin/python || $(PYTHON) -m venv .venv-floor
	$(call install,.venv-floor) $(floors) -e .
	@touch $@

.venv-formats/.done: pyproject.toml requirements-dev.txt
	test -x .venv-formats/bin/python || $(PYTHON) -m venv .venv-formats
	$(call install,.venv-formats) -r requirements-dev.txt tf2onnx==1.17.0 jax2onnx==0.17.1
	@touch $@

clean:
	rm -rf .venv .venv-floor .venv-formats build dist site
