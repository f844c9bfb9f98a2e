"""``python -m examples.grpc_client [ADDRESS]``: one streamed answer, and what was done for it."""

import argparse

from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.request import SamplingParams
from deepinfer_jax.text.tokenizer import TextStream, Tokenizer
from serving.client import Client
from serving.events import Delta, Finished, Started

ADDRESS = "127.0.0.1:8500"
PROMPT = "def main(argv=None):"
DESCRIPTION = f"""
Ask a running server of the shipped model to continue {PROMPT!r}; print the answer as it comes, and what was done for
it. Start a server with "deepinfer-jax serve" or "python -m examples.cluster".
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.grpc_client", description=DESCRIPTION)
    text = "HOST:PORT or unix:PATH of the server (default: %(default)s)"
    parser.add_argument("address", nargs="?", default=ADDRESS, metavar="ADDRESS", help=text)
    ask(parser.parse_args().address)


def ask(address: str) -> None:
    # Servers take and give token ids; the text is the client's business.
    tokenizer = Tokenizer.from_directory(default_model())
    text = TextStream(tokenizer)
    prompt = tokenizer.encode_text(PROMPT, bos_token_id=0)
    print(PROMPT, end="", flush=True)
    with Client(address, timeout=60.0) as client:
        for event in client.generate(prompt, SamplingParams(max_tokens=64, temperature=0.0, stop=("\n\n\n",))):
            match event:
                case Started(worker=worker, cached_tokens=cached):
                    print(f"    # {worker} answers, {cached} prompt tokens were cached", end="")
                case Delta(tokens=tokens):
                    print(text.push(tokens), end="", flush=True)
                case Finished(reason=reason, receipt=receipt):
                    print(f"\n\n{reason}: {receipt}")


if __name__ == "__main__":
    main()
