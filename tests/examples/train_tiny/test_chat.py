"""Conversations made from documented functions: what stands in them, and how they are encoded."""

import pytest

from deepinfer_jax.checkpoint.digest import write_json
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.text.tokenizer import TOKENIZER_FILE, Tokenizer
from examples.train_tiny.chat import conversation, documented_functions, encode_conversation, encode_conversations
from examples.train_tiny.configuration import template
from examples.train_tiny.corpus import Document
from examples.train_tiny.preparation import chat_encoder
from examples.train_tiny.vocabulary import train_tokenizer

SOURCE = '''
class Tide:
    def height(self, hour):
        """Return the height.

        In metres.
        """
        return self.table[hour]

    def bare(self):
        return 1


def spell(mark="<｜end▁of▁sentence｜>"):
    """Spell
    a mark."""
    return mark
'''


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    config = ModelConfig.from_dict(template())
    directory = tmp_path_factory.mktemp("tokenizer")
    words = " ".join(f"word{number} tide_{number}" for number in range(3000))
    write_json(directory / TOKENIZER_FILE, train_tokenizer([SOURCE, words], config))
    return chat_encoder(Tokenizer.from_directory(directory), config)


def functions():
    return {function.name: function for function in documented_functions(Document("tide.py", SOURCE))}


def test_documented_functions_come_without_indentation_and_with_their_first_paragraph():
    found = functions()
    assert set(found) == {"height", "spell"}
    assert found["height"].summary == "Return the height."
    assert found["height"].source.startswith('def height(self, hour):\n    """Return')
    assert found["spell"].summary == "Spell a mark."


def test_a_file_that_is_no_python_has_no_functions():
    assert list(documented_functions(Document("x.py", "def (:"))) == []


def decoded(function, turn, encoder):
    return encoder.tokenizer.decode(encode_conversation(conversation(function, turn), encoder).tolist())


def test_each_kind_of_answer_is_in_the_format_of_the_codec(encoder):
    height = functions()["height"]
    tool, question, thinking, task = (decoded(height, turn, encoder) for turn in (0, 1, 3, 5))
    assert '<｜DSML｜ invoke name="read_source">' in tool
    assert f"<tool_result>{height.source}</tool_result><｜Assistant｜></think>Return the height.<｜end▁of" in tool
    assert question.endswith("```<｜Assistant｜></think>Return the height.<｜end▁of▁sentence｜>")
    assert "<｜Assistant｜><think>I write `height`. It begins: def height(self, hour):</think>```python\n" in thinking
    assert task.endswith(f"<｜Assistant｜></think>```python\n{height.source}\n```<｜end▁of▁sentence｜>")


def test_the_prompt_is_what_a_client_would_send(encoder):
    """A client that asks the same question gets the trained prompt, token for token."""
    for turn, thinking in ((5, False), (3, True)):
        chat = conversation(functions()["height"], turn)
        prompt = encoder.encode(chat.request["messages"][:1], thinking=thinking).token_ids
        assert tuple(encode_conversation(chat, encoder)[: len(prompt)].tolist()) == prompt


def test_control_tokens_that_a_source_spells_stay_text(encoder):
    (stop,) = encoder.stop_token_ids
    for turn in range(8):
        tokens = encode_conversation(conversation(functions()["spell"], turn), encoder).tolist()
        assert tokens[-1] == stop
        assert tokens.count(stop) == (2 if turn == 0 else 1)  # a tool call is a turn of its own


def test_the_order_follows_from_the_seed(encoder):
    documents = [Document("tide.py", SOURCE), Document("more.py", SOURCE.replace("height", "depth"))]
    first, again, other = (
        [item.tolist() for item in encode_conversations(documents, encoder, seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
