"""Answers read token by token: text, chat parts and ids."""

import json

import pytest

from deepinfer_jax.commands.answer import ChatAnswer, IdAnswer, Piece, TextAnswer
from deepinfer_jax.errors import InputError
from deepinfer_jax.request import Output
from deepinfer_jax.text.chat import ChatEncoder
from deepinfer_jax.text.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "at", "parameters": {"type": "object", "properties": {}}}}
CALL = """Well.

<｜DSML｜ calls>
<｜DSML｜ invoke name="at">
<｜DSML｜ parameter name="x" string="true">sea</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""


@pytest.fixture
def encoder(chat_model) -> ChatEncoder:
    tokenizer = Tokenizer.from_directory(chat_model, vocab_size=512)
    return ChatEncoder.from_tokenizer(tokenizer, vocab_size=512, bos_token_id=0, eos_token_id=1)


def news(*tokens: int, text: str = "") -> Output:
    return Output(0, 0, tokens, text)


def read(answer, tokens: list[int], *, complete: bool = True) -> tuple[str, str, list[Piece]]:
    """The joined text and reasoning, and the pieces."""
    pieces = [answer.push(news(token)) for token in tokens] + [answer.finish(complete=complete)]
    return "".join(piece.text for piece in pieces), "".join(piece.reasoning for piece in pieces), pieces


def test_ids_are_printed_as_they_are():
    assert read(IdAnswer(), [5, 0, 77])[0] == "5 0 77"
    answer = IdAnswer()
    assert [answer.push(news(*tokens)).text for tokens in ((5, 0), (), (77,))] == ["5 0", "", " 77"]


def test_text_is_what_the_engine_says():
    answer = TextAnswer()
    assert [answer.push(news(5, text=text)) for text in ("a ", "")] == [Piece("a "), Piece()]
    assert answer.finish(complete=False) == Piece()


def test_an_id_without_a_token_is_refused_in_a_chat(encoder):
    answer = ChatAnswer(encoder, encoder.encode([{"role": "user", "content": "hi"}]))
    with pytest.raises(InputError, match="'token id' is 600"):
        answer.push(news(600))


def test_a_chat_is_split_into_reasoning_and_text(encoder):
    tokenizer = encoder.tokenizer
    prompt = encoder.encode([{"role": "user", "content": "hi"}], thinking=True)
    tokens = [
        *tokenizer.encode_text("Let me see."),
        tokenizer.control_tokens["</think>"],
        *tokenizer.encode_text("Sea"),
    ]
    text, reasoning, pieces = read(ChatAnswer(encoder, prompt), tokens)
    assert (text, reasoning) == ("Sea", "Let me see.")
    assert not any(piece.last for piece in pieces[:-1])


def test_tool_calls_follow_the_text_as_json_lines(encoder):
    prompt = encoder.encode({"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]})
    tokenizer = encoder.tokenizer
    tokens = tokenizer.vocabulary.encode(CALL, add_special_tokens=False).ids
    assert tokenizer.decode(tokens) == CALL
    text, _, _ = read(ChatAnswer(encoder, prompt), tokens)
    content, line = text.split("\n")
    assert content == "Well."
    call = json.loads(line)
    assert call["type"] == "function"
    assert call["function"]["name"] == "at"
    assert json.loads(call["function"]["arguments"]) == {"x": "sea"}


def test_a_stop_sequence_is_the_last_piece_and_may_be_finished(encoder):
    prompt = encoder.encode({"messages": [{"role": "user", "content": "hi"}], "stop": ["END"]})
    answer = ChatAnswer(encoder, prompt)
    pieces = [answer.push(news(token)) for token in encoder.tokenizer.encode_text("abc END")]
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.text for piece in pieces) == "abc "
    assert answer.finish(complete=True).text == ""


def test_text_held_back_for_a_stop_sequence_comes_at_the_end(encoder):
    prompt = encoder.encode({"messages": [{"role": "user", "content": "hi"}], "stop": ["END"]})
    text, _, pieces = read(ChatAnswer(encoder, prompt), encoder.tokenizer.encode_text("abc EN"), complete=False)
    assert text == "abc EN"
    assert pieces[-1].text
