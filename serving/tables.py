"""TOML tables and the dataclasses that they describe: strict reading, and writing with comments.

A field's type says what its key may hold: ``bool``, ``int``, ``float``, ``str``, a tuple of one of these, one of them
or None (the key is left out), or another such dataclass, which is a table of its own. What the class says of its
attributes becomes the comments.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from deepinfer_jax.errors import ConfigError

_Section = TypeVar("_Section")

_ACCEPTED: Mapping[type, str] = types.MappingProxyType(
    {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
)
_ATTRIBUTE = re.compile(r"(\w+(?:, \w+)*): (.*)")
_COMMENT_WIDTH = 100


def read_table(default: _Section, table: Mapping[str, Any], path: str = "") -> _Section:
    """What a table makes of ``default``, a dataclass instance; keys that are absent keep its values.

    ``path``: of the table in its file, for errors.

    Raises:
      ConfigError: a key is unknown or its value of another type, or the class refuses a value.
    """
    assert dataclasses.is_dataclass(default)
    fields = typing.get_type_hints(type(default))
    changed: dict[str, Any] = {}
    for key, value in table.items():
        place = f"{path}.{key}" if path else key
        if key not in fields:
            raise _unknown(place, key, list(fields), path)
        current = getattr(default, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(place, value, f"a table, [{place}]")
            changed[key] = read_table(current, value, place)
        else:
            changed[key] = _value(fields[key], value, place)
    try:
        # mypy takes replace() for instances of known dataclasses only.
        return typing.cast(_Section, dataclasses.replace(typing.cast(Any, default), **changed))
    except ConfigError as error:
        if not path:
            raise
        raise ConfigError(f"{path}.{error.key}", error.value, error.accepted, error.remedy) from error


def write_table(section: Any, path: str = "") -> str:
    """A dataclass instance as TOML, which :func:`read_table` reads as an equal one. Keys without value are comments."""
    lines: list[str] = [f"[{path}]"] if path else []
    if not path:
        lines += _comment(inspect.cleandoc(type(section).__doc__ or "").partition("\n")[0])
    texts = attribute_texts(type(section))
    tables = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        place = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            tables.append("\n".join(["", *_comment(texts.get(field.name, "")), write_table(value, place)]))
        else:
            lines += _comment(texts.get(field.name, ""))
            lines.append(f"# {field.name} =" if value is None else f"{field.name} = {_toml(value)}")
    return "\n".join(lines) + "\n" + "".join(tables)


def attribute_texts(section: type) -> dict[str, str]:
    """What a class says of each attribute in its docstring."""
    texts: dict[str, str] = {}
    _, _, attributes = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")
    for entry in _entries(textwrap.dedent(attributes)):
        if found := _ATTRIBUTE.fullmatch(entry):
            texts |= dict.fromkeys(found[1].split(", "), found[2])
    return texts


def _entries(attributes: str) -> Iterator[str]:
    """Entries of a docstring's section, each as one line."""
    entry = ""
    for line in [*attributes.splitlines(), "end"]:
        if entry and not line.startswith(" "):
            yield entry
            entry = ""
        entry = f"{entry} {line.strip()}".strip()


def _unknown(place: str, key: str, known: list[str], path: str) -> ConfigError:
    near = difflib.get_close_matches(key, known, 1)
    where = f"keys of [{path}]" if path else "tables of the file"
    accepted = f"{where}: {', '.join(known)}"
    return ConfigError(place, "unknown", accepted, f"did you mean {near[0]!r}?" if near else "")


def _value(wanted: Any, value: Any, place: str) -> Any:
    """A value as its field has it."""
    options = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    (kind,) = (option for option in options if option is not types.NoneType)
    if typing.get_origin(kind) is not tuple:
        return _plain(kind, value, place)
    item = typing.get_args(kind)[0]
    if not isinstance(value, list):
        raise ConfigError(place, value, f"a list, each {_ACCEPTED[item]}")
    return tuple(_plain(item, entry, f"{place}[{number}]") for number, entry in enumerate(value))


def _plain(kind: type, value: Any, place: str) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and math.isnan(value)):
        raise ConfigError(place, value, _ACCEPTED[kind])
    return value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(entry) for entry in value)}]"
    if isinstance(value, str):
        # JSON's strings are TOML's, but for one control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text.replace("``", ""), _COMMENT_WIDTH)]
