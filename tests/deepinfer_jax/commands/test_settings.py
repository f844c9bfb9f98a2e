"""The environment that commands give themselves: what is set, what stays as the user has it, and the second start."""

import json
import os
import subprocess
import sys

import pytest

from deepinfer_jax.commands import settings

HOME = {"HOME": "/there"}
# The program with a main of its own, which shows the environment it runs in.
PROGRAM = """
import json, os, sys
from deepinfer_jax import cli
cli.main = lambda: print(json.dumps([sys.argv[1:], dict(os.environ)]))
cli.run()
"""


@pytest.fixture(autouse=True)
def on_linux(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")


def test_allocator_and_compilation_cache_are_set_where_nobody_did():
    chosen = settings.process_settings(HOME)
    assert chosen.keys() == {settings.ALLOCATOR, settings.CACHE, settings.CACHED_FROM}
    assert "glibc.malloc.hugetlb=1" in chosen[settings.ALLOCATOR].split(":")
    assert chosen[settings.CACHE] == "/there/.cache/deepinfer-jax/compiled"
    moved = settings.process_settings(HOME | {"XDG_CACHE_HOME": "/elsewhere"})
    assert moved[settings.CACHE] == "/elsewhere/deepinfer-jax/compiled"


@pytest.mark.parametrize("value", ["", "mine"])
def test_what_the_user_sets_stays(value):
    assert settings.ALLOCATOR not in settings.process_settings(HOME | {settings.ALLOCATOR: value})
    assert settings.process_settings(HOME | {settings.CACHE: value}).keys() == {settings.ALLOCATOR}
    assert settings.CACHED_FROM not in settings.process_settings(HOME | {settings.CACHED_FROM: value})


def test_other_systems_have_another_allocator(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert settings.ALLOCATOR not in settings.process_settings(HOME)


def test_without_a_home_nothing_is_kept():
    assert settings.process_settings({}).keys() == {settings.ALLOCATOR}


def test_the_outer_environment_is_the_users():
    user = HOME | {settings.CACHED_FROM: "3"}
    chosen = settings.process_settings(user)
    assert settings.outer_environment(user | chosen | {settings.OWN: " ".join(chosen)}) == user
    assert settings.outer_environment(user) == user


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="the allocator settings are those of Linux")
def test_the_program_starts_itself_once_with_its_arguments(tmp_path):
    own = {settings.ALLOCATOR, settings.CACHE, settings.CACHED_FROM, settings.OWN}
    environment = {name: value for name, value in os.environ.items() if name not in own} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, "one", "two words"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    arguments, seen = json.loads(done.stdout)
    assert arguments == ["one", "two words"]
    assert seen[settings.ALLOCATOR] == ":".join(settings.TUNABLES)
    assert settings.outer_environment(seen).keys() == environment.keys() - {settings.OWN}
