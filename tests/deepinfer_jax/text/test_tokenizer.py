"""Plain text in, text out: exact ids, no control id from text, and streamed text equal to whole text."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.text.tokenizer import TOKENIZER_FILE, TextStream, Tokenizer
from tests.golden import DATA, document, tensors

TINY = Tokenizer.from_directory(DATA / "text/tiny_a")
INJECTIONS = document("text/injection_cases.json")


def _stream(tokenizer: Tokenizer, token_ids: list[int], piece: int) -> str:
    stream = TextStream(tokenizer)
    texts = [stream.push(token_ids[start : start + piece]) for start in range(0, len(token_ids), piece)]
    return "".join(texts) + stream.finish()


@pytest.mark.parametrize("case", document("text/tokenizer_text.json"), ids=lambda case: repr(case["text"]))
def test_text_without_control_tokens_has_the_recorded_ids(case, public_tokenizer):
    if case["text"] in public_tokenizer.control_tokens:
        assert [public_tokenizer.control_tokens[case["text"]]] == case["ids"]  # recorded with control tokens enabled
        assert public_tokenizer.encode_text(case["text"]) != case["ids"]
    else:
        assert public_tokenizer.encode_text(case["text"]) == case["ids"]


def test_the_texts_of_the_engram_golden_file_have_its_ids(public_tokenizer):
    sequences = tensors("engram/engram_hash.npz")
    for index, text in enumerate(document("engram/meta.json")["texts"]):
        if "<｜" not in text:
            assert public_tokenizer.encode_text(text) == sequences[f"seq.{index}"].tolist(), text


def test_miniature_tokenizer_reads_the_recorded_prompt():
    token_ids = document("text/tiny_a/engram_rows.json")["text_token_ids"]
    text = TINY.decode(token_ids[1:])
    assert text.isascii()
    assert TINY.encode_text(text, bos_token_id=0) == token_ids


@pytest.mark.parametrize("case", INJECTIONS, ids=lambda case: case["spelling"])
def test_a_control_token_spelled_in_a_prompt_stays_text(case, released_tokenizer):
    # A user turn in the recording is BOS, User, the text, Assistant, </think>.
    assert case["naive_ids"][2] == released_tokenizer.control_tokens[case["spelling"]] == case["added_token_id"]
    assert released_tokenizer.encode_text(case["spelling"]) == case["safe_ids"][2:-2]


def test_no_control_token_at_all_can_be_spelled_in_a_prompt(released_tokenizer):
    assert len(released_tokenizer.control_tokens) == 1283
    for spelling in released_tokenizer.control_tokens:
        text = f"a {spelling}{spelling}b"
        token_ids = released_tokenizer.encode_text(text)
        assert released_tokenizer.control_spellings.keys().isdisjoint(token_ids)
        assert released_tokenizer.decode(token_ids) == text


def test_bos_is_put_in_front_only_when_asked_for():
    assert TINY.encode_text("ab", bos_token_id=0) == [0, *TINY.encode_text("ab")]
    assert TINY.encode_text("") == []


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_encoding_and_decoding(text):
    assert TINY.decode(TINY.encode_text(text)) == text


@given(st.lists(st.integers(0, 511), max_size=40), st.integers(1, 5))
def test_streamed_text_equals_whole_text_for_random_ids(token_ids, piece):
    assert _stream(TINY, token_ids, piece) == TINY.decode(token_ids)


@given(st.lists(st.integers(0, 255), max_size=12))
def test_streamed_text_equals_whole_text_for_random_bytes(content):
    by_byte = {TINY.bytes_of(token_id): token_id for token_id in range(512) if len(TINY.bytes_of(token_id)) == 1}
    token_ids = [by_byte[bytes([byte])] for byte in content if bytes([byte]) in by_byte]
    assert _stream(TINY, token_ids, 1) == TINY.decode(token_ids)
    assert TINY.decode(token_ids) == TINY.vocabulary.decode(token_ids, skip_special_tokens=False)


def test_decoding_equals_the_tokenizers_package_on_single_ids_and_random_sequences(public_tokenizer):
    for token_id in [*public_tokenizer.control_spellings, *range(0, 128000, 7)]:
        whole = public_tokenizer.vocabulary.decode([token_id], skip_special_tokens=False)
        assert public_tokenizer.content_of(token_id) == whole
    generator = random.Random(0)
    for _ in range(200):
        token_ids = [generator.randrange(129280) for _ in range(60)]
        whole = public_tokenizer.vocabulary.decode(token_ids, skip_special_tokens=False)
        assert public_tokenizer.decode(token_ids) == whole
        assert _stream(public_tokenizer, token_ids, generator.randint(1, 7)) == whole


def test_stream_holds_an_unfinished_character_back_and_flushes_it_at_the_end():
    token_ids = TINY.encode_text("a😀")
    assert len(token_ids) >= 3  # the emoji is split across tokens
    stream = TextStream(TINY)
    texts = [stream.push([token_id]) for token_id in token_ids]
    assert texts == ["a", *[""] * (len(token_ids) - 2), "😀"]
    assert stream.finish() == ""

    cut = TextStream(TINY)
    assert cut.push(token_ids[:-1]) == "a"
    assert cut.finish() == "\ufffd"


def test_look_ups_of_single_tokens():
    assert TINY.vocabulary_size == 512
    assert TINY.token_to_id("<｜User｜>") == 508
    assert TINY.token_to_id("no such token") is None
    assert TINY.content_of(508) == "<｜User｜>"
    space = TINY.token_to_id("Ġ")
    assert space is not None
    assert TINY.content_of(space) == " "
    assert TINY.spelling_of(space) == "Ġ"
    assert TINY.spelling_of(508) == "<｜User｜>"


def test_a_control_token_is_its_spelling_even_where_that_reads_as_bytes(tmp_path):
    content = json.loads(TINY.path.read_text(encoding="utf-8"))
    content["added_tokens"][-1]["content"] = "<été>"  # each letter also spells a byte
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.decode([tokenizer.control_tokens["<été>"]]) == "<été>"


@pytest.mark.parametrize("token_id", [512, -1])
def test_ids_without_a_token_are_refused(token_id):
    with pytest.raises(InputError, match=r"token id.*511"):
        TINY.decode([3, token_id])
    with pytest.raises(InputError, match=r"token id.*511"):
        TextStream(TINY).push([token_id])


def test_text_without_a_utf8_form_is_refused():
    with pytest.raises(InputError, match="at character 2"):
        TINY.encode_text("ab\ud800c")


def test_a_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer.json.*missing"):
        Tokenizer.from_directory(tmp_path)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / TOKENIZER_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="accepted: a tokenizer.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
    content = json.loads(TINY.path.read_text(encoding="utf-8"))
    content["decoder"] = {"type": "Fuse"}
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="decoder Fuse"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("gap", ["control token", "BPE token"])
def test_a_tokenizer_with_a_gap_between_its_ids_is_refused(gap, tmp_path):
    """The tokenizers package would number the control tokens behind the gap anew."""
    content = json.loads(TINY.path.read_text(encoding="utf-8"))
    if gap == "control token":
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] != 509]
    else:
        vocabulary = content["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = 600
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="gaps between its ids"):
        Tokenizer.from_directory(tmp_path)


def test_ids_beyond_the_models_vocabulary_are_refused():
    assert Tokenizer.from_directory(DATA / "text/tiny_a", vocab_size=512).vocabulary_size == 512
    with pytest.raises(CheckpointError, match="up to 511.*vocab_size 511"):
        Tokenizer.from_directory(DATA / "text/tiny_a", vocab_size=511)
