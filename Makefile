# `make train` sets everything up and runs the main job on CPU; `make test` sets everything up and runs the tests.
# Both can be repeated and then start at once.
VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
ARGS   ?=
TESTS  ?=
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: train test quick check bench soak compat faults parity learning site doctor clean
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(VENV)/bin/megarl train experiment=quickstart $(ARGS)

test: $(VENV)/.installed
	$(PY) -m $(if $(TESTS),pytest,tests.together) --durations=15 $(ARGS) $(TESTS)

check: $(VENV)/.installed  ## format, lint and types, in seconds
	$(VENV)/bin/ruff format --check -q .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: $(VENV)/.installed
	$(PY) benchmarks/loop.py $(ARGS)
	$(PY) benchmarks/kernels.py

quick: check  ## while one works: format, lint, types and the fast unit tests
	$(PY) -m tests.quick $(ARGS)

soak: $(VENV)/.installed  ## what is too long for `make test`; resumable; docs/soak.md
	$(PY) -m tests.soaks $(ARGS)

compat: .compat/.installed  ## the tests with Megatron-Core 0.19 on Python 3.12; resumable; docs/compat.md
	.compat/bin/python -m tests.compat $(ARGS)

faults: $(VENV)/.installed  ## do faults to running jobs, about ten minutes; the table of docs/faults.md
	$(PY) -m tests.system.fault_table $(ARGS)

parity: $(VENV)/.installed  ## measure every grid against transformers again and write the table
	MEGARL_SOAK=1 $(PY) -W ignore -m tests.parallel.parity docs/parity.md

learning: $(VENV)/.installed  ## every algorithm on the quickstart's task, about two hours; resumable
	$(PY) benchmarks/learning.py $(ARGS)

site: .site/.installed  ## the documentation site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .site/bin/mkdocs build -q --strict -f tools/site/mkdocs.yml

.site/.installed: tools/requirements-site.txt
	test -x .site/bin/python || $(PYTHON) -m venv .site
	.site/bin/python -m pip install -q --disable-pip-version-check --no-deps -r $<
	touch $@

doctor: $(VENV)/.installed
	$(VENV)/bin/megarl doctor

# The lock holds exact versions of everything, so nothing is resolved (--no-deps). The CPU build of torch is on
# PyTorch's own index where the package index does not carry it.
$(VENV)/.requirements: tools/requirements-cpu.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -r $< \
	  || $(PY) -m pip install -q --disable-pip-version-check --no-deps --extra-index-url https://download.pytorch.org/whl/cpu -r $<
	touch $@

$(VENV)/.installed: $(VENV)/.requirements $(SOURCES)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The lock with another Megatron-Core. torch is that of the package index: the CPU build has no wheel for each Python.
COMPAT_PYTHON ?= python3.12
.compat/.installed: tools/requirements-cpu.txt $(SOURCES)
	test -x .compat/bin/python || $(COMPAT_PYTHON) -m venv .compat
	sed 's/^megatron-core==.*/megatron-core==0.19.2/; /^torch==/d' $< > .compat/requirements.txt
	.compat/bin/python -m pip install -q --disable-pip-version-check $$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' $<)
	.compat/bin/python -m pip install -q --disable-pip-version-check --no-deps -r .compat/requirements.txt
	.compat/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf build $(VENV)/.installed
