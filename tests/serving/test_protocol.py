"""The protocol's definitions, and the modules that are made of them."""

import re
import tomllib
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from serving.proto import build
from serving.proto.deepinfer.v1 import errors_pb2, inference_pb2, kv_transfer_pb2, prefill_pb2, types_pb2
from tests.conftest import REPOSITORY

FILES = (errors_pb2, inference_pb2, kv_transfer_pb2, prefill_pb2, types_pb2)
DEFINITIONS = sorted((build.ROOT / build.PACKAGE).glob("*.proto"))


def test_the_modules_are_those_of_the_definitions(tmp_path):
    """They were made of what stands there now; otherwise make them again: python -m serving.proto.build."""
    for path in DEFINITIONS:
        copy = tmp_path / path.relative_to(build.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    made = build.generate(tmp_path)
    assert len(made) == 3 * len(DEFINITIONS)
    for path in made:
        assert (build.ROOT / path.relative_to(tmp_path)).read_text() == path.read_text(), path.name
    before = [path.stat().st_mtime_ns for path in made]
    build.generate(tmp_path)
    assert [path.stat().st_mtime_ns for path in made] == before


def test_a_definition_that_is_refused_says_so(tmp_path, capfd):
    broken = tmp_path / build.PACKAGE / "broken.proto"
    broken.parent.mkdir(parents=True)
    broken.write_text('syntax = "proto3"; message A { B b = 1; }')
    with pytest.raises(RuntimeError, match="refuses the definitions"):
        build.generate(tmp_path)
    assert '"B" is not defined' in capfd.readouterr().err


def test_every_definition_has_modules_and_package():
    assert [path.stem for path in DEFINITIONS] == [file.DESCRIPTOR.name.split("/")[-1][:-6] for file in FILES]
    assert {file.DESCRIPTOR.package for file in FILES} == {"deepinfer.v1"}


def enums():
    for file in FILES:
        yield from file.DESCRIPTOR.enum_types_by_name.values()


@pytest.mark.parametrize("enum", list(enums()), ids=lambda enum: enum.name)
def test_zero_of_an_enum_is_unspecified(enum):
    assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def fields_of_token_ids():
    for file in FILES:
        for message in file.DESCRIPTOR.message_types_by_name.values():
            yield from (field for field in message.fields if "token_id" in field.name)


@pytest.mark.parametrize("field", list(fields_of_token_ids()), ids=lambda field: field.full_name)
def test_token_ids_are_packed_and_unsigned(field):
    assert field.type == FieldDescriptor.TYPE_UINT32
    assert field.is_packed or not field.is_repeated


def test_every_call_is_explained():
    explained = 0
    for path in DEFINITIONS:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.strip().startswith("rpc "):
                assert lines[number - 1].strip().startswith("//"), f"{path.name}:{number + 1}"
                explained += 1
    services = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
    assert explained == sum(len(service.methods) for service in services) > 0


def test_the_tools_are_one_release_and_what_runs_is_not_older():
    """Generated modules refuse to run with an older grpcio or protobuf than they were made for."""
    document = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    development = [line for line in project["optional-dependencies"]["dev"] if line.startswith("grpcio-tools")]
    assert development == [line for line in document["build-system"]["requires"] if line.startswith("grpcio-tools")]
    release = development[0].removeprefix("grpcio-tools==")
    for name in ("grpcio", "grpcio-health-checking", "grpcio-reflection"):
        assert f"{name}>={release}" in project["dependencies"]
    made_for = re.search(r"Protobuf Python Version: (\S+)", Path(types_pb2.__file__).read_text(encoding="utf-8"))
    assert f"protobuf>={made_for[1]},<8" in project["dependencies"]
