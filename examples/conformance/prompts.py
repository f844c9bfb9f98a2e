"""The prompts of a kit: every way into the model, and lengths at which each of its limits begins to matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.text.chat import ChatEncoder
from deepinfer_jax.text.tokenizer import Tokenizer
from examples.conformance.kit import CHAIN_TOKENS

CODE_FILE = Path(__file__).parent / "code.txt"
LONGEST = 700
RANDOM_TOKENS = 64
TEXT = (
    "The lighthouse keeper climbed the narrow stairs every evening before the light went. He counted the steps aloud, "
    "although he had known their number for thirty years, and wrote it down beside the weather."
)
UNICODE = "naïve café, Zürich, Ελλάδα, 東京, 🚀 and a tab\there\r\n\x00"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You answer questions about Python."},
    {"role": "user", "content": "Write a Python function `first`: Return the first item of an iterable."},
]
TOOL_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Find out what `merge` does."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "read_source", "arguments": '{"name": "merge"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "def merge(left, right):\n    return left | right\n"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "read_source",
                "description": "Read the source of a function.",
                "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
        }
    ],
}


class PromptMaker:
    """Prompts in the tokens of one checkpoint.

    Raises:
      CheckpointError: it has no usable tokenizer, or one without the control tokens of the chat format.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self._config = config
        self._tokenizer = Tokenizer.from_directory(directory, vocab_size=config.vocab_size)
        self._encoder = ChatEncoder.from_tokenizer(
            self._tokenizer,
            vocab_size=config.vocab_size,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
        )
        self._code = self._text(CODE_FILE.read_text(encoding="utf-8"))[1:]

    @property
    def candidate_tokens(self) -> int:
        """Tokens with one block more than the candidate level keeps; 0 for a model without it."""
        level = self._config.candidates
        return (level.topk_blocks + 1) * level.block_size if level else 0

    def all(self) -> dict[str, tuple[int, ...]]:
        """Every prompt by name."""
        config = self._config
        random = np.random.default_rng(0).integers(0, config.vocab_size, RANDOM_TOKENS)
        prompts = {
            "single": (config.bos_token_id,),
            "code": self._text("def main(argv=None):"),
            "text": self._text(TEXT),
            "unicode": self._text(UNICODE),
            "random": tuple(random.tolist()),
            "window": self.code(0, config.sliding_window + 1),
            "top_k": self.code(100, max(config.compress_ratios) * (config.index_topk + 2)),
            "candidates": self.code(0, self.candidate_tokens),
            "long": self.code(0, min(LONGEST, config.max_position_embeddings - CHAIN_TOKENS)),
            "chat": self._encoder.encode(MESSAGES).token_ids,
            "thinking": self._encoder.encode(MESSAGES, thinking=True).token_ids,
            "tools": self._encoder.encode(TOOL_CHAT).token_ids,
        }
        return {name: tokens for name, tokens in prompts.items() if tokens}

    def code(self, start: int, length: int) -> tuple[int, ...]:
        """A begin token and a piece of the example code, ``length`` tokens together."""
        if length == 0:
            return ()
        piece = self._code[start : start + length - 1]
        assert len(piece) == length - 1, "the example code is too short for this tokenizer"
        return (self._config.bos_token_id, *piece)

    def _text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_text(text, bos_token_id=self._config.bos_token_id))
