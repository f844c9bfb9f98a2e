"""The layering of the packages, read from the source: which module may import which, and who reads the environment.

Imports count wherever they stand: inside functions, under ``TYPE_CHECKING``, relative or absolute. A rule about what a
module must not import follows the project's own imports to the end, so that an intermediate module cannot hide one.
"""

import ast
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("deepinfer_jax", "pallas_kernels", "serving")


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file: its dotted name, whether it is a package's ``__init__``, and its text."""

    name: str
    is_package: bool
    source: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the modules matching ``scope`` (dotted name patterns; a pattern covers what lies below it) may not import.

    Exactly one of the two is given: ``forbidden`` names what must not be reached, directly or through other modules of
    the project; ``allowed`` names, besides the standard library, all that may be imported directly.
    """

    scope: tuple[str, ...]
    reason: str
    forbidden: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()


RULES = (
    Rule(
        scope=("pallas_kernels",),
        allowed=("jax", "numpy", "jaxtyping", "pallas_kernels"),
        reason="kernels are usable without the rest",
    ),
    Rule(
        scope=("deepinfer_jax.model",),
        forbidden=(
            "deepinfer_jax.runtime",
            "deepinfer_jax.engine",
            "deepinfer_jax.scheduler",
            "deepinfer_jax.checkpoint",
            "serving",
        ),
        reason="the model is mathematics, whoever runs it",
    ),
    Rule(
        scope=(
            "deepinfer_jax.scheduler",
            "deepinfer_jax.request",
            "deepinfer_jax.cache.blocks",
            "deepinfer_jax.cache.fingerprint",
            "deepinfer_jax.cache.records",
            "deepinfer_jax.cache.sections",
            "deepinfer_jax.cache.snapshot",
            "deepinfer_jax.cache.store",
            "*.policies",
            "*.budget",
            "*.placement",
            "*.eviction",
            "*.balancing",
        ),
        forbidden=("jax", "jaxlib", "flax"),
        reason="plans, policies and wire formats are pure host code, tested without a device",
    ),
    Rule(
        scope=("deepinfer_jax.runtime",),
        forbidden=("deepinfer_jax.engine",),
        reason="the engine drives the runtime, never the other way",
    ),
    Rule(
        scope=("serving.client", "serving.async_client"),
        forbidden=("jax", "jaxlib", "flax"),
        reason="clients start without loading what computes",
    ),
    Rule(
        scope=("deepinfer_jax",),
        forbidden=("serving",),
        reason="the library does not know its servers",
    ),
)

# Command entry points: the only modules that read environment variables.
COMMANDS = ("deepinfer_jax.cli", "deepinfer_jax.commands", "serving.commands")
ENVIRONMENT_NAMES = ("environ", "environb", "getenv", "getenvb")


def covers(pattern: str, name: str) -> bool:
    """Whether the dotted ``name`` is matched by ``pattern`` or lies below something that is."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def covered(patterns: tuple[str, ...], name: str) -> bool:
    return any(covers(pattern, name) for pattern in patterns)


def imports(module: Module) -> set[str]:
    """Dotted names that a module imports; ``from a import b`` gives ``a`` and ``a.b``, since b may be a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(module, node)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def absolute_base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    package = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*package, *([node.module] if node.module else [])])


def import_chains(start: Module, modules: Mapping[str, Module]) -> Iterator[tuple[str, ...]]:
    """Chains ``(start, ..., imported name)`` over the project's modules, each module visited once."""
    waiting = [(start.name,)]
    visited = {start.name}
    while waiting:
        chain = waiting.pop()
        for name in sorted(imports(modules[chain[-1]])):
            yield (*chain, name)
            if name in modules and name not in visited:
                visited.add(name)
                waiting.append((*chain, name))


def import_violations(rule: Rule, modules: Mapping[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        if not covered(rule.scope, module.name):
            continue
        if rule.allowed:
            permitted = set(rule.allowed) | sys.stdlib_module_names
            refused = [(module.name, name) for name in imports(module) if name.split(".")[0] not in permitted]
        else:
            refused = [chain for chain in import_chains(module, modules) if covered(rule.forbidden, chain[-1])]
        found += [f"{' -> '.join(chain)}: {rule.reason}" for chain in sorted(refused)]
    return found


def environment_reads(module: Module) -> list[str]:
    """Places where a module that is no command touches the environment, as ``name:line``."""
    if covered(COMMANDS, module.name):
        return []
    lines = []
    for node in ast.walk(ast.parse(module.source)):
        attribute = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES
        imported = isinstance(node, ast.ImportFrom) and any(alias.name in ENVIRONMENT_NAMES for alias in node.names)
        if attribute or imported:
            lines.append(f"{module.name}:{node.lineno}")
    return lines


def read_modules() -> dict[str, Module]:
    modules = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules[name] = Module(name, is_package, path.read_text(encoding="utf-8"))
    return modules


def as_modules(sources: Mapping[str, str]) -> dict[str, Module]:
    return {
        name: Module(name, any(other.startswith(f"{name}.") for other in sources), source)
        for name, source in sources.items()
    }


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    found = read_modules()
    assert "deepinfer_jax" in found, f"no source under {REPOSITORY}"
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.scope[0])
def test_imports_follow_the_rules(rule, modules):
    assert import_violations(rule, modules) == []


def test_only_commands_read_environment_variables(modules):
    assert [place for module in modules.values() for place in environment_reads(module)] == []


VIOLATIONS = {
    "kernel imports the library": {"pallas_kernels.attention": "from deepinfer_jax import quant"},
    "kernel imports a third package": {"pallas_kernels.formats": "import ml_dtypes"},
    "model imports the engine": {"deepinfer_jax.model.moe": "from deepinfer_jax import engine"},
    "model imports the runtime, relatively": {"deepinfer_jax.model.moe": "from ..runtime.step import run"},
    "model imports the checkpoint inside a function": {
        "deepinfer_jax.model.params": "def read():\n    import deepinfer_jax.checkpoint.reader"
    },
    "scheduler imports jax": {"deepinfer_jax.scheduler": "import jax.numpy as jnp"},
    "blocks import flax for types only": {
        "deepinfer_jax.cache.blocks": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flax import struct"
    },
    "a policy imports jax": {"serving.gateway.placement": "from jax import Array"},
    "a policy package imports jax": {"serving.policies.routing": "import jax"},
    "request reaches jax through another module": {
        "deepinfer_jax.request": "from deepinfer_jax.middle import value",
        "deepinfer_jax.middle": "from .deep import value",
        "deepinfer_jax.deep": "import jax",
    },
    "runtime imports the engine": {"deepinfer_jax.runtime.step": "from deepinfer_jax.engine import Engine"},
    "runtime package imports the engine, relatively": {
        "deepinfer_jax.runtime": "from ..engine import Engine",
        "deepinfer_jax.runtime.step": "",
    },
    "a client reaches jax": {
        "serving.client": "from serving.generate_call import GenerateCall",
        "serving.generate_call": "from deepinfer_jax.engine import Engine",
        "deepinfer_jax.engine": "import jax",
    },
    "library imports serving": {"deepinfer_jax.metrics": "import serving.gateway"},
}


@pytest.mark.parametrize("sources", VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_violation_is_found(sources):
    found = [violation for rule in RULES for violation in import_violations(rule, as_modules(sources))]
    assert len(found) >= 1
    assert next(iter(sources)) in found[0]


PERMITTED = {
    "kernel": {"pallas_kernels.attention": "import functools\nimport jax.numpy as jnp\nfrom . import formats"},
    "model": {
        "deepinfer_jax.model.moe": "import jax\nfrom deepinfer_jax.runtimes import x\nfrom pallas_kernels import y"
    },
    "scheduler": {"deepinfer_jax.scheduler": "from jaxtyping import Int\nimport numpy as np"},
    "engine": {"deepinfer_jax.engine": "from deepinfer_jax.runtime import step\nfrom deepinfer_jax import scheduler"},
    "server": {"serving.decode": "from deepinfer_jax.engine import Engine\nimport jax"},
}


@pytest.mark.parametrize("sources", PERMITTED.values(), ids=PERMITTED.keys())
def test_what_is_permitted_passes(sources):
    assert [violation for rule in RULES for violation in import_violations(rule, as_modules(sources))] == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "import os as system\nsystem.getenv('A')",
        "from os import environ",
        "from os import getenv as read",
    ],
)
def test_an_environment_read_is_found(source):
    assert environment_reads(Module("deepinfer_jax.engine", False, source)) != []
    assert environment_reads(Module("deepinfer_jax.commands.generate", False, source)) == []
