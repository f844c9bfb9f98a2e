"""``python -m examples.train_tiny DIRECTORY``: the whole recipe; a run that was stopped goes on where it was."""

from __future__ import annotations

from pathlib import Path

import click

from examples.train_tiny.backbone import Schedule, train_backbone
from examples.train_tiny.batches import Curriculum, Windows
from examples.train_tiny.preparation import Prepared, prepare

LENGTH = 1024


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--steps", default=2600, show_default=True, help="Optimiser steps of the backbone.")
@click.option("--seed", default=0, show_default=True)
def main(directory: Path, steps: int, seed: int) -> None:
    """Train the small model in DIRECTORY."""
    prepared = prepare(directory, seed)
    click.echo(f"corpus {prepared.digest[:12]}: {sum(map(len, prepared.training)):,} tokens", err=True)
    schedule = Schedule(steps=steps, batch=2, decay=steps * 3 // 10, stored_steps=steps // 10, seed=seed)
    train_backbone(
        prepared.config,
        prepared.token_map,
        curriculum(prepared, steps * 8 // 10, seed),
        schedule,
        directory / "backbone",
        lambda line: click.echo(line, err=True),
    )


def curriculum(prepared: Prepared, chat_from: int, seed: int) -> Curriculum:
    """Text, and chats beside it from a step on."""
    text, chat = (Windows.of(documents, LENGTH, seed) for documents in (prepared.training, prepared.chats))
    return Curriculum(text, chat, chat_from)


if __name__ == "__main__":
    main()
