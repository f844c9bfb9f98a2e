"""``python -m examples.train_tiny DIRECTORY``: the whole recipe; a run that was stopped goes on where it was."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import click
import deepseek_recipe as recipe
import jax

from deepinfer_jax.checkpoint.digest import write_json
from deepinfer_jax.model.draft import DraftHead
from deepinfer_jax.model.transformer import Model
from examples.train_tiny.backbone import backbone_description, train_backbone
from examples.train_tiny.batches import Curriculum, Windows
from examples.train_tiny.curves import draw_curves, read_curve
from examples.train_tiny.draft_report import Survey
from examples.train_tiny.drafting import AGREEMENT, train_draft_head
from examples.train_tiny.figures import FIGURES_FILE, LENGTH, measure
from examples.train_tiny.optimisation import CURVE_FILE, Schedule
from examples.train_tiny.own_text import NOTHING, DraftWindows, own_text
from examples.train_tiny.preparation import Prepared, prepare
from examples.train_tiny.publish import publish
from examples.train_tiny.storage import as_stored

SHORT_LENGTH = 256
OWN_RATE = 2e-3
CALIBRATION_FILE = "draft_calibration.json"
SURVEY = Survey()


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--steps", type=click.IntRange(min=10), default=2600, show_default=True, help="Backbone steps.")
@click.option("--draft-steps", type=click.IntRange(min=10), default=2500, show_default=True, help="Draft head steps.")
@click.option(
    "--own-steps", type=click.IntRange(min=10), default=500, show_default=True, help="Draft head steps on own text."
)
@click.option(
    "--prompts",
    type=click.IntRange(min=16),
    default=10240,
    show_default=True,
    help="Prompts of training text that the backbone continues for the draft head.",
)
@click.option("--batch", type=click.IntRange(min=2), default=2, show_default=True, help="Windows of 1,024 a step.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(directory: Path, steps: int, draft_steps: int, own_steps: int, prompts: int, batch: int, seed: int) -> None:
    """Train the small model in DIRECTORY: text, backbone, draft head, checkpoint, figures.

    What is finished is not done again: the same command goes on where a run was stopped, at most 100 steps before.
    """
    say(f"text and tokenizer in {directory}")
    prepared = prepare(directory, seed)
    say(f"corpus {prepared.digest[:12]}: {sum(map(len, prepared.training)):,} tokens to train on")
    backbone = trained_backbone(prepared, directory, steps, batch, seed)
    head = trained_head(prepared, backbone, directory, draft_steps, batch, seed + 1)
    head = agreeing_head(prepared, backbone, head, directory, own_steps, prompts, batch, seed + 1)
    params = dataclasses.replace(backbone, draft=head)
    model = directory / "model"
    say(f"weights {publish(directory, params, prepared.config, model).value}")
    figures = measure(prepared, model, SURVEY)
    write_json(directory / FIGURES_FILE, figures)
    write_json(model / CALIBRATION_FILE, {"temperatures": figures["drafts"]["confidence_temperatures"]})
    draw_curves(
        [read_curve(directory / stage / CURVE_FILE) for stage in ("backbone", "draft", "agreement")],
        figures["kneser_ney"],
        directory / "curves.png",
    )


def trained_backbone(prepared: Prepared, directory: Path, steps: int, batch: int, seed: int) -> Model:
    """The backbone at its stored precision, with its token map."""
    params = train_backbone(
        prepared.config,
        prepared.token_map,
        curriculum(prepared, steps * 4 // 10, steps * 8 // 10, seed),
        schedule(steps, batch, seed),
        directory / "backbone",
        Reporter("backbone", steps),
        prepared.tokenizer.control_tokens[recipe.SpecialToken.Assistant.default_str()],
    )
    stored = as_stored(backbone_description(prepared.config), params)
    return dataclasses.replace(stored, token_map=prepared.token_map)


def schedule(steps: int, batch: int, seed: int) -> Schedule:
    """The last three tenths of the steps fall to a small rate, the last tenth runs at stored precision."""
    return Schedule(
        steps=steps,
        batch=batch,
        decay=steps * 3 // 10,
        stored_steps=steps // 10,
        warm_up=min(100, steps // 5),
        save_every=min(100, steps // 4),
        seed=seed,
    )


def curriculum(prepared: Prepared, long_from: int, chat_from: int, seed: int) -> Curriculum:
    """Short windows of text, long ones from a step on, and chats beside them from another."""
    text, chat = (Windows.of(documents, LENGTH, seed) for documents in (prepared.training, prepared.chats))
    return Curriculum(Windows.of(prepared.training, SHORT_LENGTH, seed), text, chat, long_from, chat_from)


def trained_head(prepared: Prepared, backbone: Model, directory: Path, steps: int, batch: int, seed: int) -> DraftHead:
    """The draft head after training on text, and from half of the steps on chats beside it."""
    return train_draft_head(
        backbone,
        prepared.config,
        DraftWindows(curriculum(prepared, 0, steps // 2, seed), NOTHING),
        schedule(steps, batch, seed),
        directory / "draft",
        Reporter("draft head", steps),
    )


def agreeing_head(
    prepared: Prepared,
    backbone: Model,
    head: DraftHead,
    directory: Path,
    steps: int,
    prompts: int,
    batch: int,
    seed: int,
) -> DraftHead:
    """The head after some more steps towards what the backbone itself says, at a falling rate."""
    own = own_text(
        backbone,
        prepared.config,
        prepared.training,
        prompts,
        directory,
        seed,
        lambda done: say(f"continuations of training text: {done}/{prompts}"),
    )
    warm_up = steps // 20
    falling = Schedule(
        steps=steps,
        batch=batch,
        decay=steps - warm_up,
        stored_steps=steps // 2,
        peak_rate=OWN_RATE,
        warm_up=warm_up,
        save_every=min(100, steps // 4),
        seed=seed,
    )
    return train_draft_head(
        backbone,
        prepared.config,
        DraftWindows(Windows.of(prepared.training, LENGTH, seed + 1), own, seed),
        falling,
        directory / "agreement",
        Reporter("agreement", steps),
        emphasis=AGREEMENT,
        begin=head,
    )


class Reporter:
    """Says how a stage goes, every twenty steps: losses of the step, speed, time left."""

    def __init__(self, stage: str, steps: int) -> None:
        self._stage, self._steps = stage, steps
        self._begin, self._first = time.monotonic(), 0

    def __call__(self, line: dict[str, float]) -> None:
        step = int(line["step"])
        self._first = self._first or step
        if step % 20 == 0 or step == self._steps:
            seconds = (time.monotonic() - self._begin) / (step - self._first + 1)
            figures = ", ".join(f"{name} {value:.3f}" for name, value in line.items() if name != "step")
            left = seconds * (self._steps - step) / 60
            say(f"{self._stage} {step}/{self._steps}: {figures}; {seconds:.2f} s a step, {left:.0f} min left")


def say(text: str) -> None:
    """A line of progress on standard error."""
    click.echo(text, err=True)


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    main()
