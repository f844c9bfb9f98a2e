"""The table of mutants fits the code: every change can be made, in one place, and names tests that exist."""

import ast
from pathlib import Path

import pytest

from tests.mutants.table import Mutant, mutants

REPOSITORY = Path(__file__).resolve().parents[2]
MUTANTS = mutants()
every_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


def test_there_are_enough_mutants_and_their_names_differ():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30


@every_mutant
def test_the_change_can_be_made_in_exactly_one_place(mutant):
    source = (REPOSITORY / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(source)
    assert changed != source
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@every_mutant
def test_the_named_tests_exist(mutant):
    assert mutant.caught_by
    for test in mutant.caught_by:
        path, name = test.split("[")[0].split("::")
        module = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


@every_mutant
def test_tests_themselves_are_not_changed(mutant):
    assert mutant.file.startswith(("deepinfer_jax/", "pallas_kernels/", "serving/", "examples/"))


@pytest.mark.parametrize(("source", "found"), [("b", 0), ("a a", 2)])
def test_a_text_that_is_not_there_once_is_refused(source, found):
    mutant = Mutant("m", "something", "file.py", "a", "c", ())
    with pytest.raises(ValueError, match=f"m: the old text occurs {found} times in file.py"):
        mutant.applied(source)
    assert mutant.applied("xay") == "xcy"
