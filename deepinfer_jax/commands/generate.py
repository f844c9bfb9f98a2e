"""``deepinfer-jax generate``: continue one prompt and print the answer as it is generated."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

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
from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.model.params import backend_form
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.request import Output, Request, SamplingParams
from deepinfer_jax.settings import EngineSettings

# Short enough to be typed again from the summary.
_DRAWN_SEED_BITS = 32

EPILOG = """
\b
Examples:
  deepinfer-jax generate --prompt 'def main(argv=None):' --max-tokens 64 --temperature 0
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
    help="Chat to answer: a JSON array of messages, or a Chat Completions request body, whose max_tokens, temperature, "
    "top_p, stop and seed count unless given here; - reads standard input.",
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
@click.option("--top-k", type=int, metavar="K", help="Sample from the K likeliest tokens; 0 takes all.  [default: 0]")
@click.option(
    "--top-p",
    type=float,
    metavar="P",
    help="Sample from the likeliest tokens that together have probability P.  [default: 1]",
)
@click.option(
    "--min-p",
    type=float,
    metavar="P",
    help="Sample from tokens with at least P times the likeliest one's probability.  [default: 0]",
)
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="End the answer before this text; may be given several times. In a chat, the reasoning does not count.",
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
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    stop: tuple[str, ...],
    seed: int | None,
    numerics: str,
    thinking: bool,
    no_bos: bool,
    print_ids: bool,
    quiet: bool,
) -> None:
    """Continue a prompt and print the answer while it is generated.

    Give the prompt by exactly one of --prompt, --messages and --token-ids. The answer ends at the model's end token, at
    a --stop text or after --max-tokens. Standard output holds the answer alone; progress, reasoning and a summary with
    the seed go to standard error. Ctrl-C ends the answer where it is. The model that comes with the library knows the
    sources of Python's standard library, and short chats about its functions.
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
        ready = text_prompt(place, config, prompt, bos=not no_bos, stop=stop, print_ids=print_ids)
    elif messages is not None:
        ready = chat_prompt(place, config, messages, thinking=thinking, stop=stop, print_ids=print_ids)
    else:
        assert token_ids is not None
        ready = id_prompt(place, config, token_ids, stop=stop, print_ids=print_ids)
    request = _request(
        ready,
        {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
        },
    )
    request.params.check(request.prompt, config)
    console = Console(quiet)
    chosen = Numerics.preset(numerics)
    params = console.load_model(place, config, chosen, form=backend_form)
    console.note("compiling for this length", terminal_only=True)
    report = Report(time.perf_counter())
    settings = EngineSettings.for_one(len(request.prompt) + request.params.max_tokens)
    engine = build_engine(params, config, chosen, settings, tokenizer=ready.tokenizer)
    interrupt: KeyboardInterrupt | None = None
    try:
        _print_answer(engine, request, ready.answer, console, report)
    except KeyboardInterrupt as pressed:
        interrupt = pressed
    console.close_text()
    model = f", model {DEFAULT_MODEL_NAME}" if directory is None else ""
    console.note(f"{report}; {_described(request.params)}, numerics {numerics}{model}")
    if interrupt is not None:
        raise interrupt
    if report.error is not None:
        raise click.ClickException(report.error)


@dataclasses.dataclass
class Report:
    """What the summary says of a run: when each token came (seconds of a steady clock), and how it ended."""

    started: float
    ended: str = "interrupted"
    times: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None

    def __str__(self) -> str:
        sentence = f"{len(self.times)} tokens, {self.ended}"
        if self.times:
            sentence += f"; first after {self.times[0] - self.started:.2f} s"
        # The first two tokens wait for the compilation of the prefill and of the decode step.
        if len(self.times) > 2:
            sentence += f", then {(len(self.times) - 2) / (self.times[-1] - self.times[1]):.1f} tokens/s"
        return sentence


def _print_answer(engine: Engine, request: Request, answer: Answer, console: Console, report: Report) -> None:
    """Print the answer piece by piece, keeping the report."""
    with contextlib.closing(_news(engine, request)) as news:
        for output in news:
            report.times += [time.perf_counter()] * len(output.tokens)
            piece = answer.push(output)
            console.remark(piece.reasoning)
            console.text(piece.text)
            report.error = output.error
            if piece.last or output.finish_reason is not None:
                report.ended = "ended by a stop sequence" if piece.last else _ending(output)
                break
    piece = answer.finish(complete=report.ended != "at the limit")
    console.remark(piece.reasoning)
    console.text(piece.text)


def _news(engine: Engine, request: Request) -> Generator[Output]:
    """Everything that comes of a request; leaving early ends it."""
    number = engine.submit(request)
    try:
        while engine.busy:
            yield from engine.step()
    finally:
        engine.abort(number)
        engine.close()


def _ending(output: Output) -> str:
    if output.finish_reason == "stop":
        return "ended by a stop sequence" if isinstance(output.matched, str) else "ended by the model"
    return "at the limit" if output.finish_reason == "length" else "ended by an error"


def _request(prompt: Prompt, given: dict[str, Any]) -> Request:
    """Options win over what the prompt asks for; a seed that neither gives is drawn."""
    asked: dict[str, Any] = {
        name: getattr(prompt, name) for name in ("max_tokens", "temperature", "top_p", "seed", "stop_ids", "stop")
    }
    asked |= {name: value for name, value in given.items() if value is not None}
    if asked["seed"] is None:
        asked["seed"] = secrets.randbits(_DRAWN_SEED_BITS)
    return Request(prompt.token_ids, SamplingParams(**asked))


def _described(params: SamplingParams) -> str:
    """Everything that the choice of tokens depends on, as it was typed or could be."""
    filters = [("top-k", params.top_k, 0), ("top-p", params.top_p, 1.0), ("min-p", params.min_p, 0.0)]
    used = "".join(f", {name} {value:g}" for name, value, neutral in filters if value != neutral)
    return f"temperature {params.temperature:g}{used}, seed {params.seed}"
