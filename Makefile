# The one list of commands. `make` prints it.
# Needs cargo (the toolchain is pinned in rust-toolchain.toml), Python 3.11 and a C compiler; nothing else is
# installed, and nothing is written outside this tree but the caches of cargo, uv and npm. What Python needs beyond that
# stands pinned in requirements/ and goes into .venv; `make pytest PY=/path/to/python` takes an environment of yours.

.DEFAULT_GOAL := help
SHELL := /bin/bash -euo pipefail
PYTHON ?= python3
CARGO ?= cargo
TARGET ?=
SECONDS ?= 60
SYNCS ?= 1000
FAULTS ?= 10000
JOBS ?= 2
# Of the wheel: x86_64 or aarch64.
HOST_ARCH := $(shell uname -m)
ARCH ?= $(HOST_ARCH)
# More groups for `make test`, as .ci/run has it run.
BEFORE ?=
# A tag or commit, for `make compat`; by default the newest tag before this commit.
PREVIOUS ?=
TAG ?=
# What was skipped and which tests were slowest is said at the end.
SLOW := -r sfE --durations 15 --durations-min 5

ifeq ($(origin PY),undefined)
PY := .venv/bin/python
READY := .venv/ready
COMPILED := target/torch-extensions/ready
AZURITE := .tools/azurite/ready
endif
# Where the package and its tests are looked for; the extension is put there by `develop`.
PYCODE := python tests examples crates/windlass/src/tools/init crates/windlass/src/lab/demo scripts/stubs.py scripts/entry_points.py scripts/docs_site.py \
    scripts/compat.py scripts/licences.py scripts/version.py
EXTENSION := python/windlass/_windlass.abi3.so

.PHONY: help demo build test check test-busy rust loom soak bench peers peers-gpu gpu gpu-build gpu-vllm gpu-sanitize lint fmt layers ptx ptx-check contract testdata fuzz doc docs
.PHONY: clean crates fuzz-smoke
.PHONY: venv develop wheel wheel-check test-aarch64 sbom licences compat version release-notes portable pytest engines frameworks engine-venvs lint-py fmt-py stubs requirements

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One profile and one feature set for the demo, the extension and the tests: cargo compiles each crate once for all of them.
# A selection of packages (`-p`) would change the features of what they share.
DEV := --locked --features windlass-data/conformance

demo: ## show the main job on this machine
	@echo "building the windlass command: about three minutes on two cores the first time" >&2
	$(CARGO) build $(DEV) --bin windlass
	$(CARGO) run --quiet $(DEV) --bin windlass -- demo

build: crates develop ## everything that tests need

crates: # what cargo builds of it
	$(CARGO) test $(DEV) --no-run

test: build engine-venvs .venv-nixl/ready $(AZURITE) ## all tests: the contract table, the golden files, the models, Rust with doc tests, Python, real engines
	PY="$(PY)" CARGO="$(CARGO)" PYTHON="$(PYTHON)" scripts/groups.sh engines "contract testdata pytest" "$(BEFORE) rust frameworks loom"

check: layers ## the daily loop: formatting, clippy, types, unit tests of Rust, Python tests without other processes
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(DEV) --all-targets --quiet -- -D warnings
	$(CARGO) test $(DEV) --lib --quiet
	$(MAKE) --no-print-directory lint-py
	$(PY) -m pytest python $(QUICK:%=tests/python/test_%.py)

QUICK := chunk config facts http load_plan names requests series strategy strategies_document vectors

test-busy: ## all tests three times in a row beside processes that keep every core busy
	STRICT=1 scripts/busy.sh 3 $(MAKE) --no-print-directory test

rust: $(READY) .venv-nixl/ready $(AZURITE) ## the Rust tests and doc tests
	$(CARGO) test $(DEV) --no-fail-fast

loom: ## every interleaving of the region's header protocol
	CARGO_TARGET_DIR=target/loom $(CARGO) test --manifest-path loom/Cargo.toml --locked

soak: ## 10,000 faults of every kind in the whole system, 1,000 syncs over a bad network, a tensor of 3 GiB (FAULTS=n, SYNCS=n, WINDLASS_SEED=n)
	WINDLASS_FAULTS=$(FAULTS) $(CARGO) test --locked -p windlass --test it -- soak:: --nocapture
	WINDLASS_SOAK=$(SYNCS) $(CARGO) test --locked -p windlass-data --test it -- faults:: --nocapture
	$(CARGO) test --locked -p windlass-data --test it -- odd:: --ignored

bench: ## measure every part beside the limits of this machine
	for part in codec digest seal offload load tcp sync fanout; do \
	    $(CARGO) run --release --locked -p windlass --features zstd -- bench $$part || exit; done

peers: gpu-build .venv-peers/ready .venv-vllm/ready .venv-sglang/ready ## compare Windlass with what is used instead, into target/peers (ARGS="--only gloo")
	.venv-peers/bin/python bench/peers $(ARGS)

peers-gpu: ## the same with all weights on one GPU, and a real vLLM there (PY=python with torch, ARGS="--sizes 8B --served 8B"); says what is missing
	$(has_python)
	@$(MAKE) --no-print-directory gpu-build
	PYTHONPATH=python $(PY) bench/peers --device cuda $(ARGS)

lint: layers ptx-check ## formatting, clippy, layers, PTX, documentation, and the same for Python; warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	$(CARGO) fmt --manifest-path loom/Cargo.toml --check
	$(CARGO) clippy $(DEV) --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	$(MAKE) --no-print-directory lint-py

fmt: fmt-py ## format all code
	$(CARGO) fmt --all
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml
	$(CARGO) fmt --manifest-path loom/Cargo.toml

layers: ## forbidden dependencies, `unsafe` and `async` outside their places
	$(PYTHON) scripts/layers.py --self-test
	$(PYTHON) scripts/layers.py

ptx: ## compile the CUDA kernels anew, into the PTX files beside them (needs nvidia-cuda-nvrtc-cu12; no GPU)
	$(PYTHON) scripts/ptx.py

ptx-check: # the PTX files were made of the sources as they are
	$(PYTHON) scripts/ptx.py --check

# Whether the Python is there, before anything is built for it.
has_python = @command -v "$(PY)" >/dev/null || { echo "*** there is no Python $(PY): name one that has torch, as in" \
	    "\`make $@ PY=python3\`; \`make venv\` makes .venv" >&2; exit 2; }

gpu: ## the tests of the GPU path, with a real vLLM where WINDLASS_VLLM_PYTHON has one (PY=python with torch and transformers); says loudly what it skips
	$(has_python)
	@found=0; $(PY) tests/gpu/needs.py || found=$$?; \
	    if [ $$found = 77 ]; then exit 0; elif [ $$found != 0 ]; then exit $$found; fi; \
	    $(MAKE) --no-print-directory gpu-build; \
	    for part in kernels device manager quantised merged ipc end_to_end real_vllm vllm_ipc; do \
	        echo "== $$part"; PYTHONPATH=python $(PY) tests/gpu/$$part.py; done

# Puts the extension in its place if it is another one: tests that run meanwhile have it open.
put = built="$${CARGO_TARGET_DIR:-target}/$(1)/lib_windlass.so"; \
	    cmp --silent "$$built" $(EXTENSION) || { cp "$$built" $(EXTENSION).new; mv $(EXTENSION).new $(EXTENSION); }; \
	    $(PYTHON) scripts/entry_points.py

gpu-build: ## build the extension for release and put it where python/ finds it: what figures are measured with
	$(CARGO) build --release --locked -p windlass-py
	$(call put,release)

gpu-vllm: ## a real vLLM server that follows a trainer on a GPU (PY=python with vLLM, ARGS="--size 8B"); says what is missing
	$(has_python)
	@$(MAKE) --no-print-directory gpu-build
	PYTHONPATH=python $(PY) bench/gpu_vllm.py $(ARGS)

SANITIZER ?= compute-sanitizer
gpu-sanitize: ## the kernels' tests under compute-sanitizer, of the CUDA toolkit (SANITIZER=path, PY=python with torch)
	$(has_python)
	@command -v "$(SANITIZER)" >/dev/null || { echo "*** there is no $(SANITIZER): it comes with the CUDA toolkit, as" \
	    "bin/compute-sanitizer; name it: make $@ SANITIZER=/path/to/compute-sanitizer" >&2; exit 2; }
	@found=0; $(PY) tests/gpu/needs.py || found=$$?; \
	    if [ $$found = 77 ]; then exit 0; elif [ $$found != 0 ]; then exit $$found; fi; \
	    $(MAKE) --no-print-directory gpu-build; \
	    for tool in memcheck racecheck synccheck; do \
	        echo "== $$tool"; \
	        PYTHONPATH=python $(SANITIZER) --tool $$tool --error-exitcode 9 $(PY) tests/gpu/kernels.py \
	            --scale 0.3 --patience 1800 || exit 1; \
	    done

contract: version ## docs/contract.md names tests that exist
	$(PYTHON) scripts/again.py --self-test
	$(PYTHON) scripts/contract.py --self-test
	$(PYTHON) scripts/contract.py

testdata: ## the generators in testdata/ make the golden files that are there
	$(PYTHON) scripts/testdata.py --self-test
	$(PYTHON) scripts/testdata.py

fuzz: ## fuzz every parser, or TARGET=name, for SECONDS=60 each
	scripts/fuzz.sh run "$(SECONDS)" $(TARGET)

fuzz-smoke: # the committed corpus, and two seconds for each parser
	scripts/fuzz.sh smoke

doc: ## build the API documentation
	$(CARGO) doc --workspace --no-deps --locked
	@echo "open target/doc/windlass_core/index.html"

# Not quiet: mkdocs does not count the warnings that it does not show. The variable silences a notice of the theme.
docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv-docs/ready ## the documentation site, in target/site; warnings are errors (DOCS_REPOSITORY=url, DOCS_REF=v0.1.0)
	.venv-docs/bin/python scripts/docs_site.py --self-test
	.venv-docs/bin/mkdocs build --strict
	@echo "open target/site/index.html; to search, serve it: python3 -m http.server -d target/site"

venv: $(READY) ## the Python environment .venv, from the pinned requirements

.venv/ready: requirements/dev.txt requirements/torch.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	.venv/bin/uv pip sync --quiet --require-hashes --compile-bytecode --python .venv/bin/python $^
	touch $@

# These need no .venv, so that pages can be written and wheels built without torch; its uv is taken, which is faster, if there is one.
.venv-docs/ready .venv-wheel/ready: .venv-%/ready: requirements/%.txt
	if test -e .venv/ready; then \
	    .venv/bin/uv venv --quiet --clear --python .venv/bin/python .venv-$*; \
	    .venv/bin/uv pip sync --quiet --require-hashes --python .venv-$*/bin/python $<; \
	else \
	    $(PYTHON) -m venv --clear .venv-$*; \
	    .venv-$*/bin/python -m pip install --quiet --require-hashes -r $<; fi
	touch $@

# DeepSpeed compiles a part of itself at its first use, which takes longer on a busy machine than tests wait. A lock is of a
# build that was killed. tests/python/conftest.py names the folder.
target/torch-extensions/ready: .venv/ready
	rm -f target/torch-extensions/*/lock
	TORCH_EXTENSIONS_DIR=$(CURDIR)/target/torch-extensions DS_ACCELERATOR=cpu PATH=$(CURDIR)/.venv/bin:$$PATH \
	    .venv/bin/python -c 'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)' >/dev/null
	touch $@

# A real Azure Blob server, for the tests of the store.
.tools/azurite/ready: requirements/azurite/package-lock.json | .venv/ready
	scripts/azurite.sh install
	touch $@

engine-venvs: .venv-vllm/ready .venv-sglang/ready .venv-verl/ready .venv-skyrl/ready .venv-openrlhf/ready ## environments with vLLM, SGLang, verl, SkyRL and OpenRLHF for a CPU, from the pinned requirements

# Programs of these environments compile what they import, and keep it; that is a small part of the 27,000 files in each.
.venv-%/ready: requirements/%.txt .venv/ready
	.venv/bin/uv venv --quiet --clear --python .venv/bin/python .venv-$*
	.venv/bin/uv pip sync --quiet --require-hashes --python .venv-$*/bin/python $<
	touch $@

develop: $(READY) ## build the extension and put it where python/ finds it
	$(CARGO) build $(DEV) --lib
	$(call put,debug)

# zig links with the glibc of manylinux_2_28, whatever glibc this machine has, and compiles ring, also for another architecture.
# Which compiler has that one's standard library, scripts/aarch64.sh says.
WHEEL_MIB := 12
WHEELS := target/wheels/windlass-*_$(ARCH).whl
wheel: .venv-wheel/ready licences ## a wheel for release, for every Linux with glibc 2.28 and Python 3.10 or later, in target/wheels (ARCH=aarch64)
	rm -f $(WHEELS)
	$(if $(filter-out $(HOST_ARCH),$(ARCH)),export RUSTC && RUSTC=$$(scripts/$(ARCH).sh rustc) && $$RUSTC --version &&) \
	    PATH="$(CURDIR)/.venv-wheel/bin:$$PATH" .venv-wheel/bin/maturin build --release --locked --strip --zig \
	    --target "$(ARCH)-unknown-linux-gnu" --compatibility manylinux_2_28 --out target/wheels
	.venv-wheel/bin/auditwheel show $(WHEELS) | tr '\n' ' ' | grep -o 'consistent with.*platform tag: "manylinux_2_28_$(ARCH)"'
	@size=$$(stat -c %s $(WHEELS)); echo "$$((size >> 10)) KiB"; [ $$size -le $$(($(WHEEL_MIB) << 20)) ] || \
	    { echo "*** the wheel has more than $(WHEEL_MIB) MiB" >&2; exit 1; }

wheel-check: ## install the wheel where nothing but Python is, in roots of two releases of Debian, and run it (root; needs debootstrap; with ARCH=aarch64, qemu)
	ARCH=$(ARCH) scripts/wheel_check.sh

test-aarch64: .venv-wheel/ready ## the Rust tests of core and data for aarch64, under qemu (needs qemu-aarch64-static); not in CI
	scripts/aarch64.sh test

licences: # LICENSE-THIRD-PARTY: the licences of the crates in the wheel
	$(PYTHON) scripts/licences.py

sbom: licences ## the SBOM that is in the wheel of `make wheel`, to target/sbom, compared with what the wheel is built of
	$(PYTHON) scripts/licences.py --check-sbom "$$(ls -t $(WHEELS) | sed -n 1p)"

compat: ## the command of the previous release (PREVIOUS=tag) against this one: agents, receivers, controllers, stores
	$(CARGO) build $(DEV) --bin windlass
	previous=$$(scripts/previous.sh $(PREVIOUS)) && $(PYTHON) scripts/compat.py "$$previous" "$${CARGO_TARGET_DIR:-target}/debug/windlass"

version: # the version stands in one place; with TAG=v1.2.3, it is the tag's and the changelog has it
	$(PYTHON) scripts/version.py $(TAG)

release-notes: # what the changelog says of TAG
	@$(PYTHON) scripts/version.py $(TAG) --notes

NO_AVX2 := qemu-x86_64 -cpu Nehalem
portable: ## the tests of kernels, deltas and digests, and `windlass doctor`, on an emulated processor without AVX2 (needs qemu-x86_64)
	@command -v qemu-x86_64 >/dev/null || { echo "*** there is no qemu-x86_64 (Debian: qemu-user)" >&2; exit 2; }
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$(NO_AVX2)" $(CARGO) test $(DEV) --lib -- simd:: kernel:: delta:: digest::
	$(CARGO) build $(DEV) --bin windlass
	$(NO_AVX2) target/debug/windlass doctor | grep 'cores, portable'

pytest: develop $(COMPILED) ## the Python tests and doc tests (ARGS="-k name", JOBS=2 at a time)
	$(PY) -m pytest -n $(JOBS) --dist loadfile $(SLOW) $(ARGS)

FRAMEWORKS := tests/engines/verl tests/engines/skyrl tests/engines/openrlhf tests/engines/trl
engines: develop engine-venvs ## the tests with real vLLM and SGLang servers (ARGS="-k name", JOBS=2 at a time)
	failed=0; $(PY) -m pytest tests/engines $(FRAMEWORKS:%=--ignore=%) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(SLOW) $(ARGS) || failed=1; \
	    .venv-vllm/bin/python -m pytest tests/engines/vllm/inside $(ARGS) || failed=1; exit $$failed

frameworks: develop engine-venvs ## the tests with real verl, SkyRL, OpenRLHF and TRL (ARGS="-k name", JOBS=2 at a time)
	$(PY) -m pytest $(FRAMEWORKS) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(SLOW) $(ARGS)

lint-py: develop ## formatting, ruff, mypy, and the stubs against the extension
	$(PY) -m ruff format --check $(PYCODE)
	$(PY) -m ruff check $(PYCODE)
	$(PY) -m mypy
	MYPYPATH=python PYTHONPATH=python $(PY) -m mypy.stubtest --mypy-config-file pyproject.toml windlass._windlass
	$(PY) scripts/stubs.py --check

fmt-py: $(READY) ## format all Python code
	$(PY) -m ruff check --fix $(PYCODE)
	$(PY) -m ruff format $(PYCODE)

stubs: $(READY) ## write python/windlass/_windlass.pyi anew
	$(PY) scripts/stubs.py

requirements: ## pin the newest versions that requirements/*.in allow (needs uv: PY=... or a .venv)
	for group in dev torch docs wheel; do \
	    $(PY) -m uv pip compile --quiet --upgrade --generate-hashes --no-header --no-annotate --no-emit-index-url \
	        --no-emit-find-links --python-version 3.11 requirements/$$group.in -o requirements/$$group.txt || exit; done
	$(PY) -m uv pip compile --quiet --upgrade --no-deps --generate-hashes --no-header --no-annotate --no-emit-index-url \
	    --no-emit-find-links --python-version 3.11 requirements/nixl.in -o requirements/nixl.txt
	for group in vllm sglang verl skyrl openrlhf peers; do \
	    $(PY) -m uv pip compile --quiet --upgrade --generate-hashes --no-header --no-annotate --no-emit-index-url \
	        --no-emit-find-links --python-version 3.11 --override requirements/$$group.overrides \
	        requirements/$$group.in -o requirements/$$group.txt || exit; done

clean: ## remove everything that was built or installed here
	rm -rf target fuzz/target fuzz/artifacts fuzz/coverage .venv .venv-vllm .venv-sglang .venv-verl .venv-skyrl .venv-openrlhf .venv-nixl .venv-peers .venv-docs .venv-wheel .tools python/windlass-*.dist-info LICENSE-THIRD-PARTY
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
