"""``deepinfer-jax generate``: continue one prompt and print the answer as it is generated."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import click

from deepinfer_jax.checkpoint.default_model import DEFAULT_MODEL_NAME, default_model
from deepinfer_jax.commands.answer import Answer
from deepinfer_jax.commands.console import Console
from deepinfer_jax.commands.options import model_option, numerics_option, parse_token_ids, quiet_option
from deepinfer_jax.commands.prompt import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TEMPERATURE,
    Prompt,
    chat_prompt,
    id_prompt,
    text_prompt,
)
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.generation import Sampling, check_prompt, generate
from deepinfer_jax.model.params import backend_form
from deepinfer_jax.numerics import Numerics

# Short enough to be typed again from the summary.
_DRAWN_SEED_BITS = 32

EPILOG = """
\b
Examples:
  deepinfer-jax generate --prompt 'def main(argv=None):' --max-tokens 64
  deepinfer-jax generate --model MODEL --prompt 'The lighthouse' --temperature 0
  deepinfer-jax generate --model MODEL --messages chat.json --thinking > answer.txt
  echo '[{"role": "user", "content": "Hello"}]' | deepinfer-jax generate --model MODEL --messages -
  deepinfer-jax generate --model MODEL --token-ids 0,17,25 --temperature 0 --print-ids
"""


@click.command(name="generate", epilog=EPILOG)
@model_option
@click.option("--prompt", metavar="TEXT", help="Text to continue; control tokens spelled in it stay ordinary text.")
@click.option(
    "--messages",
    type=click.File(encoding="utf-8"),
    metavar="FILE",
    help="Chat to answer: a JSON array of messages, or a Chat Completions request body, whose max_tokens, temperature "
    "and seed count unless given here; - reads standard input.",
)
@click.option("--token-ids", callback=parse_token_ids, metavar="IDS", help="Token ids to continue, as in 0,17,25.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Most tokens to generate.  [default: {DEFAULT_MAX_TOKENS}]",
)
@click.option(
    "--temperature",
    type=float,
    metavar="T",
    help=f"0 always takes the likeliest token; 1 samples as the model was trained.  [default: {DEFAULT_TEMPERATURE}]",
)
@click.option(
    "--seed",
    type=int,
    metavar="S",
    help="The same seed gives the same answer, whatever else runs.  [default: drawn, and named in the summary]",
)
@numerics_option
@click.option("--thinking", is_flag=True, help="Chat: reason before answering; the reasoning goes to standard error.")
@click.option("--no-bos", is_flag=True, help="With --prompt: put no begin-of-sentence token in front.")
@click.option("--print-ids", is_flag=True, help="Print token ids, separated by spaces, instead of text.")
@quiet_option
def command(
    directory: Path | None,
    prompt: str | None,
    messages: TextIO | None,
    token_ids: tuple[int, ...] | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    numerics: str,
    thinking: bool,
    no_bos: bool,
    print_ids: bool,
    quiet: bool,
) -> None:
    """Continue a prompt and print the answer while it is generated.

    Give the prompt by exactly one of --prompt, --messages and --token-ids. The answer ends at the model's end token or
    after --max-tokens. Standard output holds the answer alone; progress, reasoning and a summary with the seed go to
    standard error. Ctrl-C ends the answer where it is. The model that comes with the library knows the sources of
    Python's standard library, and short chats about its functions.
    """
    if sum(source is not None for source in (prompt, messages, token_ids)) != 1:
        raise click.UsageError("give the prompt by exactly one of --prompt, --messages and --token-ids")
    if thinking and messages is None:
        raise click.UsageError("--thinking goes with --messages")
    if no_bos and prompt is None:
        raise click.UsageError("--no-bos goes with --prompt")
    place = default_model() if directory is None else directory
    config = ModelConfig.from_directory(place)
    if prompt is not None:
        ready = text_prompt(place, config, prompt, bos=not no_bos, print_ids=print_ids)
    elif messages is not None:
        ready = chat_prompt(place, config, messages, thinking=thinking, print_ids=print_ids)
    else:
        assert token_ids is not None
        ready = id_prompt(place, config, token_ids, print_ids=print_ids)
    sampling = _sampling(ready, max_tokens, temperature, seed)
    check_prompt(ready.token_ids, config, sampling.max_tokens)
    console = Console(quiet)
    chosen = Numerics.preset(numerics)
    params = console.load_model(place, config, chosen, form=backend_form)
    console.note("compiling for this length", terminal_only=True)
    report = Report(time.perf_counter())
    tokens = generate(params, config, chosen, ready.token_ids, sampling)
    settings = f"temperature {sampling.temperature:g}, seed {sampling.seed}, numerics {numerics}"
    if directory is None:
        settings += f", model {DEFAULT_MODEL_NAME}"
    try:
        _print_answer(tokens, ready.answer, sampling.max_tokens, console, report)
    except KeyboardInterrupt:
        console.close_text()
        console.note(f"{report}; {settings}")
        raise
    console.close_text()
    console.note(f"{report}; {settings}")


@dataclasses.dataclass
class Report:
    """What the summary says of a run: when each token came (seconds of a steady clock), and how it ended."""

    started: float
    ended: str = "interrupted"
    times: list[float] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        sentence = f"{len(self.times)} tokens, {self.ended}"
        if self.times:
            sentence += f"; first after {self.times[0] - self.started:.2f} s"
        # The first two tokens wait for the compilation of the prefill and of the decode step.
        if len(self.times) > 2:
            sentence += f", then {(len(self.times) - 2) / (self.times[-1] - self.times[1]):.1f} tokens/s"
        return sentence


def _print_answer(tokens: Iterator[int], answer: Answer, limit: int, console: Console, report: Report) -> None:
    """Print the answer piece by piece, keeping the report."""
    for token in tokens:
        report.times.append(time.perf_counter())
        piece = answer.push(token)
        console.remark(piece.reasoning)
        console.text(piece.text)
        if piece.last:
            report.ended = "ended by a stop sequence"
            break
    else:
        report.ended = "at the limit" if len(report.times) == limit else "ended by the model"
    piece = answer.finish(complete=report.ended != "at the limit")
    console.remark(piece.reasoning)
    console.text(piece.text)


def _sampling(prompt: Prompt, max_tokens: int | None, temperature: float | None, seed: int | None) -> Sampling:
    """Options win over what the prompt asks for; a seed that neither gives is drawn."""
    if seed is None:
        seed = prompt.seed
    return Sampling(
        max_tokens=prompt.max_tokens if max_tokens is None else max_tokens,
        temperature=prompt.temperature if temperature is None else temperature,
        seed=secrets.randbits(_DRAWN_SEED_BITS) if seed is None else seed,
        stop_ids=prompt.stop_ids,
    )
