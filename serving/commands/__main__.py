"""``python -m serving.commands``: the same commands from a source tree that is not installed."""

from __future__ import annotations

import click

from deepinfer_jax.cli import SentenceGroup
from deepinfer_jax.commands.settings import start_with_settings
from serving.commands.bench_serve import command as bench_serve_command
from serving.commands.serve import command


@click.group(cls=SentenceGroup, commands=[command])
def main() -> None:
    """Servers of deepinfer-jax."""


@main.group(name="bench")
def bench() -> None:
    """Measure speed on this machine."""


bench.add_command(bench_serve_command)


if __name__ == "__main__":
    start_with_settings()
    main()
