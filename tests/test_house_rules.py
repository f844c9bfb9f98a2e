"""The house rules that a machine can check: sizes, marks, paths, docstrings, the rooms, and how errors speak."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_jax.errors import CheckpointError, ConfigError, DeepInferError, InputError, SnapshotError

REPOSITORY = Path(__file__).resolve().parent.parent
LIBRARIES = ("deepinfer_jax", "pallas_kernels", "serving")
REQUIRED = {
    "README.md",
    "deepinfer_jax",
    "pallas_kernels",
    "serving",
    "tests",
    "docs",
    "Makefile",
    ".ci",
    "pyproject.toml",
    "LICENSE",
}
ROOMS = {"deepinfer_jax", "pallas_kernels", "serving", "tests", "docs", "examples"}
BUILD_PRODUCTS = re.compile(r"build|dist|.*\.egg-info|__pycache__")
GENERATED = re.compile(r".*_pb2(_grpc)?\.pyi?")
TEXT_SUFFIXES = {".py", ".pyi", ".md", ".toml", ".proto", ".sh", ".cfg", ".ini", ".yaml", ".yml"}
MAXIMUM_LINES = 600

# Spelled in pieces, so that this file passes its own test.
FORBIDDEN = {
    "mark": re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b"),
    "machine path": re.compile(
        r"(?<![\w.\-/~$}>*])/(?:" + "|".join(["work", "tmp", "root", "home", "Users", "opt"]) + r")/\w"
    ),
    "registry host": re.compile("|".join(["pypi" + r"\.org", "python" + r"hosted\.org", "registry" + r"\.npmjs"])),
}


def text_files() -> Iterator[Path]:
    """Every text file that people wrote: the rooms and the top level, without data, caches and generated modules."""
    yield from (path for path in REPOSITORY.iterdir() if path.suffix in TEXT_SUFFIXES or path.name == "Makefile")
    yield from (path for path in (REPOSITORY / ".ci").iterdir() if path.is_file())
    for room in sorted(ROOMS):
        for path in sorted((REPOSITORY / room).rglob("*")):
            parts = path.relative_to(REPOSITORY).parts
            written = path.suffix in TEXT_SUFFIXES and path.is_file() and not GENERATED.fullmatch(path.name)
            if written and parts[:2] != ("tests", "data"):
                yield path


def identifier(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


every_text_file = pytest.mark.parametrize("path", list(text_files()), ids=identifier)
every_library_module = pytest.mark.parametrize(
    "path",
    [path for path in text_files() if path.suffix == ".py" and path.relative_to(REPOSITORY).parts[0] in LIBRARIES],
    ids=identifier,
)


def lines_matching(pattern: re.Pattern[str], text: str) -> list[str]:
    return [f"{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def undocumented(source: str) -> list[str]:
    """Public classes and functions of a module without a docstring, and the module itself if it has none."""
    module = ast.parse(source)
    found = [] if ast.get_docstring(module) else ["module"]
    public = [node for node in module.body if is_public_definition(node)]
    return found + [f"{node.name} (line {node.lineno})" for node in public if not ast.get_docstring(node)]


def is_public_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")


@every_text_file
def test_file_is_short_enough_to_review(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAXIMUM_LINES


@every_text_file
def test_file_has_no_marks_machine_paths_or_registry_hosts(path):
    text = path.read_text(encoding="utf-8")
    assert {name: lines_matching(pattern, text) for name, pattern in FORBIDDEN.items()} == {
        name: [] for name in FORBIDDEN
    }


@every_library_module
def test_public_names_have_docstrings(path):
    assert undocumented(path.read_text(encoding="utf-8")) == []


def test_top_level_has_the_fixed_names_and_no_other_room():
    present = {path.name for path in REPOSITORY.iterdir()}
    assert present >= REQUIRED
    directories = {path.name for path in REPOSITORY.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert {name for name in directories - ROOMS if not BUILD_PRODUCTS.fullmatch(name)} == set()


def test_ci_script_is_executable():
    assert (REPOSITORY / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mark", "# TO" + "DO: later"),
        ("mark", "x = 1  # XX" + "X"),
        ("machine path", "open('/tm" + "p/x')"),
        ("machine path", "see /wo" + "rk/main"),
        ("machine path", "PATH=/ro" + "ot/bin"),
        ("registry host", "https://pypi" + ".org/simple"),
    ],
)
def test_a_forbidden_line_is_found(name, line):
    assert lines_matching(FORBIDDEN[name], line) == [f"1: {line}"]


@pytest.mark.parametrize("line", ["a method", "tests/work/x", "../root/x", "https://example.com/home/x", "1/tmp"])
def test_an_innocent_line_passes(line):
    assert [name for name, pattern in FORBIDDEN.items() if lines_matching(pattern, line)] == []


def test_a_missing_docstring_is_found():
    source = "def f(): ...\nclass C:\n    'Documented.'\nclass D: ...\ndef _h(): ...\nasync def i(): ..."
    assert undocumented(source) == ["module", "f (line 1)", "D (line 4)", "i (line 6)"]


@pytest.mark.parametrize(
    ("error", "exit_code", "sentence"),
    [
        (
            ConfigError("text_config.head_dim", 500, "a multiple of 32"),
            3,
            "configuration key 'text_config.head_dim' is 500; accepted: a multiple of 32",
        ),
        (
            CheckpointError("head.weight", (512, 60), "shape (512, 64)", "convert the checkpoint again"),
            4,
            "checkpoint entry 'head.weight' is (512, 60); accepted: shape (512, 64) (convert the checkpoint again)",
        ),
        (SnapshotError("slot(3)", "missing", "all"), 5, "state section 'slot(3)' is 'missing'; accepted: all"),
        (InputError("token id", 512, "ids from 0 to 511"), 2, "input 'token id' is 512; accepted: ids from 0 to 511"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_name_key_value_and_what_is_accepted(error, exit_code, sentence):
    assert isinstance(error, DeepInferError)
    assert (error.exit_code, str(error)) == (exit_code, sentence)
    assert str(pickle.loads(pickle.dumps(error))) == sentence


def test_errors_shorten_long_values():
    error = InputError("prompt", "a" * 10_000, "at most 4096 tokens")
    assert len(str(error)) < 250
    assert "10002 characters" in str(error)
