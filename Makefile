# Needs make, a POSIX shell, Python 3.11 or newer and a package index. Everything else is installed under .venv-3.X here.

SUPPORTED := 3.13 3.12 3.11
PYTHON ?=
ARGUMENTS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-long lint mutants campaign cancels aot clean

# Shell functions, run by the recipes with `eval`. They report on standard error and print their result.
define SETUP
say() { printf '%s\n' "$$*" >&2; }

# is_version INTERPRETER VERSION: whether it runs and is that release (free-threaded builds say 3.13t and do not match).
is_version() {
	"$$1" -c 'import sys; sys.exit("%d.%d%s" % (*sys.version_info[:2], sys.abiflags) != sys.argv[1])' "$$2" >/dev/null 2>&1
}

# interpreter_of VERSION: print an interpreter of that version. A name on PATH may be a shim that does not run, so each is tried.
interpreter_of() {
	version=$$1
	if [ -n "$(PYTHON)" ]; then
		set -- "$(PYTHON)"
	else
		pyenv_root=$$(pyenv root 2>/dev/null) || pyenv_root=$$HOME/.pyenv
		set -- "python$$version" python3 python "$$pyenv_root/versions/$$version".*/bin/python3
	fi
	for candidate do
		if is_version "$$candidate" "$$version"; then command -v "$$candidate"; return 0; fi
	done
	return 1
}

# The mark of a finished installation: where it was made (environments cannot be moved), from which pyproject.toml, and
# from which protocol, whose modules installing makes.
mark() { pwd && cat pyproject.toml serving/proto/deepinfer/v1/*.proto; }

# prepare ENVIRONMENT VERSION INTERPRETER EXTRA: status 1 if this Python makes no virtual environment, 2 if installing failed.
prepare() {
	if is_version "$$1/bin/python" "$$2" && [ "$$(head -n 1 "$$1/installed" 2>/dev/null)" = "$$(pwd)" ]; then
		mark | cmp -s - "$$1/installed" && return 0
		say "pyproject.toml or the protocol has changed: installing again into $$1"
	else
		say "Creating $$1 with $$3"
		"$$3" -m venv --clear "$$1" >&2 || { rm -rf "$$1"; return 1; }
		say "Installing deepinfer-jax and its dependencies into $$1 (this once; it takes some minutes)"
	fi
	"$$1/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$$4]" >&2 || return 2
	mark >"$$1/installed"
}

# environments first|all [EXTRA]: prepare and print the environment of the newest supported Python found, or of each one
# found, with the dependencies of an extra (dev) of pyproject.toml.
environments() {
	found=
	extra=$${2:-dev}
	name=.venv
	[ "$$extra" = dev ] || name=.venv-$$extra
	for version in $(SUPPORTED); do
		if ! interpreter=$$(interpreter_of "$$version"); then
			[ "$$1" = first ] || [ -n "$(PYTHON)" ] || say "Python $$version: not found, left out"
			continue
		fi
		prepare "$$name-$$version" "$$version" "$$interpreter" "$$extra"
		case $$? in
			0) found=yes; echo "$$name-$$version"; [ "$$1" = all ] || return 0 ;;
			1) say "Python $$version: $$interpreter cannot create a virtual environment (its venv or ensurepip module is missing), left out" ;;
			*) say "Python $$version: installing into $$name-$$version failed, see above"; return 2 ;;
		esac
	done
	[ -z "$$found" ] || return 0
	if [ -n "$(PYTHON)" ]; then
		say "PYTHON=$(PYTHON) is not usable; accepted: an interpreter of one of $(SUPPORTED) with the venv module"
	else
		say "No usable Python found; looked for $(SUPPORTED) on PATH and under pyenv. Install one, or name it: make PYTHON=/path/to/python3"
	fi
	return 1
}
endef
export SETUP

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=/path/to/python3 chooses the interpreter; otherwise the newest of $(SUPPORTED) is found."
	@echo "  ARGUMENTS=... is passed on to pytest, to the mutation run, the campaigns or the compiles."

demo: ## serve the small trained model by three processes, and stream answers from them over gRPC
	@eval "$$SETUP"; environment=$$(environments first) || exit 1; \
	"$$environment/bin/python" -m examples.demo

test: ## check the style and run the tests with the newest supported Python found
	@eval "$$SETUP"; environment=$$(environments first) || exit 1; \
	"$$environment/bin/python" -m ruff check && \
	"$$environment/bin/python" -m pytest -n 2 --dist loadfile $(ARGUMENTS)

test-all: ## run the tests with every supported Python found, in turn
	@eval "$$SETUP"; found=$$(environments all) || exit 1; \
	for environment in $$found; do \
		echo "== $$environment"; \
		"$$environment/bin/python" -m pytest -n 2 --dist loadfile $(ARGUMENTS) || exit 1; \
	done

test-long: ## run the tests that are too long for every change
	@eval "$$SETUP"; environment=$$(environments first) || exit 1; \
	"$$environment/bin/python" -m pytest -n 2 --dist loadfile -m slow -o timeout=7200 $(ARGUMENTS)

lint: ## check style, format and types
	@eval "$$SETUP"; environment=$$(environments first) || exit 1; \
	"$$environment/bin/python" -m ruff check && \
	"$$environment/bin/python" -m ruff format --check && \
	"$$environment/bin/python" -m mypy

mutants: ## break the code on purpose, one place at a time, and see that the tests notice
	@eval "$$SETUP"; environment=$$(environments first) || exit 1; \
	"$$environment/bin/python" -m tests.mutants $(ARGUMENTS)

campaign: ## load an engine with random requests for 20 minutes; nothing may grow, leak or compile
	@eval "$$SETUP"; environment=$$(environments first) || exit 1; \
	"$$environment/bin/python" -m tests.campaigns.random_load $(ARGUMENTS)

cancels: ## cancel 10,000 requests at a cluster of processes, wherever they are; nothing may leak or grow
	@eval "$$SETUP"; environment=$$(environments first) || exit 1; \
	"$$environment/bin/python" -m tests.campaigns.cancels $(ARGUMENTS)

aot: ## compile the released size for TPU, GPU and CPU meshes, in an environment of its own (1 GB of compilers)
	@eval "$$SETUP"; environment=$$(environments first aot) || exit 1; \
	"$$environment/bin/python" -m deepinfer_jax.bench.aot --write docs/accelerators.md $(ARGUMENTS)

clean: ## remove environments, caches and build products
	rm -rf .venv-* .jax_cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	rm -f serving/proto/deepinfer/v1/*_pb2*.py*
	find deepinfer_jax pallas_kernels serving tests -name __pycache__ -type d -prune -exec rm -rf {} +
