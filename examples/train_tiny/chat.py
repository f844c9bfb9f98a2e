"""Conversations about the training text, in the chat format, so that the small model answers in it.

Each documented function of a training file gives one conversation: "write it", "what does it do", or a call of a tool
that would read it. The prompts are encoded by the project's own chat encoder; the answers stand behind them.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import deepseek_recipe as recipe
import numpy as np

from deepinfer_jax.text.chat import ChatEncoder
from examples.train_tiny.batches import Tokens
from examples.train_tiny.corpus import Document

LONGEST_SOURCE_LINES = 40
READ_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_source",
        "description": "Read the source of a function.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


@dataclasses.dataclass(frozen=True)
class Function:
    """A documented function: its name, the first sentence about it, and its source without indentation."""

    name: str
    summary: str
    source: str


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A chat request whose last message is the answer, and the reasoning before it, None without thinking."""

    request: dict[str, Any]
    reasoning: str | None = None


def documented_functions(document: Document) -> Iterator[Function]:
    """Functions and methods of a file that have a docstring and fit on a screen."""
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return
    lines = document.text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            source = lines[node.lineno - 1 : node.end_lineno]
            if summary and len(source) <= LONGEST_SOURCE_LINES:
                yield Function(node.name, summary, textwrap.dedent("\n".join(source)))


def conversation(function: Function, turn: int) -> Conversation:
    """A conversation about a function; what is asked of the model goes with ``turn``, in rounds of eight."""
    task = f"Write a Python function `{function.name}`: {function.summary}"
    code = f"```python\n{function.source}\n```"
    match turn % 8:
        case 0:
            return Conversation(_tool_request(function))
        case 1 | 2:
            return Conversation(_request(f"What does this function do?\n\n{code}", function.summary))
        case 3 | 4:
            first_line = function.source.split("\n", 1)[0]
            reasoning = f"I write `{function.name}`. It begins: {first_line}"
            return Conversation(_request(task, code), reasoning)
        case _:
            return Conversation(_request(task, code))


def encode_conversations(documents: Iterable[Document], encoder: ChatEncoder, seed: int) -> list[Tokens]:
    """One conversation a documented function, in a drawn order."""
    functions = [function for document in documents for function in documented_functions(document)]
    order = np.random.default_rng(seed).permutation(len(functions))
    return [encode_conversation(conversation(functions[place], turn), encoder) for turn, place in enumerate(order)]


def encode_conversation(chat: Conversation, encoder: ChatEncoder) -> Tokens:
    """Prompt, answer and end token. Control tokens that a source file spells stay text."""
    (stop,) = encoder.stop_token_ids
    if chat.reasoning is None:
        ids = encoder.encode(chat.request, thinking=False).token_ids
        # Behind the answer the codec already opens the next one.
        return np.asarray(ids[: len(ids) - ids[::-1].index(stop)], np.int32)
    *before, answer = chat.request["messages"]
    prompt = encoder.encode(chat.request | {"messages": before}, thinking=True).token_ids
    text = encoder.tokenizer.encode_text
    end = encoder.tokenizer.control_tokens[recipe.SpecialToken.ThinkingEnd.default_str()]
    return np.asarray([*prompt, *text(chat.reasoning), end, *text(answer["content"]), stop], np.int32)


def _request(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _tool_request(function: Function) -> dict[str, Any]:
    """A call of the tool, its result, and what the answer makes of it."""
    request = _request(f"Find out what `{function.name}` does.", function.summary)
    call = {"name": READ_TOOL["function"]["name"], "arguments": json.dumps({"name": function.name})}
    calls = [{"id": "call_0", "type": "function", "function": call}]
    question, answer = request["messages"]
    steps = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": function.source},
    ]
    return {"messages": [question, *steps, answer], "tools": [READ_TOOL]}
