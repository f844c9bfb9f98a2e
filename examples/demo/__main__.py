"""``make demo``: a prefill worker, a decode worker and a gateway on this machine, and a client that asks them."""

import argparse
import socket
import sys
import tempfile
import time
from pathlib import Path

import click

from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.commands.prompt import Prompt, chat_prompt, text_prompt
from deepinfer_jax.commands.settings import start_with_settings
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.request import SamplingParams
from deepinfer_jax.text.tokenizer import TextStream, Tokenizer
from serving.client import Client
from serving.events import Delta, Finished, ServedReceipt, Started
from serving.processes import Processes, interrupt_on_signals

CONFIGURATION = Path(__file__).parent.parent / "cluster" / "cluster.toml"
CHAT = Path(__file__).parent.parent / "chat.json"
CODE = "def main(argv=None):"
MAX_TOKENS = 48
SECONDS = 600.0
DESCRIPTION = """
Start a prefill worker, a decode worker and a gateway on this machine, let a client ask them to continue code and twice
to answer a chat, print the answers and what was done for them, and end the servers. There are no other arguments.
"""


def main() -> None:
    # Before anything is started: it may be that only the help is asked for.
    argparse.ArgumentParser(prog="python -m examples.demo", description=DESCRIPTION).parse_args()
    interrupt_on_signals()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="demo-") as directory:
        place = Path(directory)
        workers = [f"unix:{place / role}" for role in ("prefill", "decode")]
        gateway = f"127.0.0.1:{free_port()}"
        options = ["--config", str(CONFIGURATION), *(f"--worker={worker}" for worker in workers)]
        try:
            with Processes(place, options, note) as processes:
                note("starting a prefill worker, a decode worker and a gateway; the first start compiles the model")
                places = [("prefill", workers[0]), ("decode", workers[1]), ("gateway", gateway)]
                processes.start_all(places, seconds=SECONDS)
                ask(gateway)
        except Exception:
            for log in sorted(place.glob("*.log")):
                sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
            raise
    note(f"all of it took {time.monotonic() - begin:.0f} s")


def ask(gateway: str) -> None:
    model = default_model()
    config = ModelConfig.from_directory(model)
    with Client(gateway, timeout=120.0) as client:
        note(f"a client calls {gateway}: {client.model_info().model}")
        show(client, CODE, text_prompt(model, config, CODE, bos=True, stop=(), print_ids=False))
        for _ in range(2):
            with CHAT.open(encoding="utf-8") as file:
                show(
                    client,
                    CHAT.read_text(encoding="utf-8"),
                    chat_prompt(model, config, file, thinking=False, stop=(), print_ids=False),
                )
        note("the second time, the prefill worker found the prompt's pages in its cache")


def show(client: Client, asked: str, prompt: Prompt) -> None:
    """Print an answer as it comes, and what went where."""
    click.secho(f"\n{asked.strip()}", bold=True)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_ids=prompt.stop_ids - {1})
    text = TextStream(Tokenizer.from_directory(default_model()))
    for event in client.generate(prompt.token_ids, params):
        if isinstance(event, Delta):
            click.echo(text.push(event.tokens), nl=False)
        elif isinstance(event, Finished):
            click.echo()
            note(f"{event.completion_tokens} tokens, ended by {event.reason}")
            for line in what_went_where(event.receipt):
                note(f"  {line}")
        else:
            assert isinstance(event, Started)


def what_went_where(receipt: ServedReceipt) -> list[str]:
    engine, timing = receipt.engine, receipt.timing
    return [
        f"prompt     {receipt.prefill_worker}: {engine.hit_tokens} tokens found, {milliseconds(timing.prefill)}",
        f"hand-over  {receipt.handed_over_bytes:,} bytes by {receipt.transport}, {milliseconds(timing.transfer)}, "
        f"{milliseconds(timing.exposed_transfer)} of it after the prompt was computed",
        f"answer     {receipt.worker}: {milliseconds(timing.decode)} from the first token to the last",
        f"total      {milliseconds(timing.total)}, {engine.computed_tokens} rows computed",
    ]


def milliseconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{1000 * seconds:.1f} ms"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def note(line: str) -> None:
    click.secho(line, dim=True)


if __name__ == "__main__":
    start_with_settings()
    main()
