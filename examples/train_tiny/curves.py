"""``python -m examples.train_tiny.curves CURVE ...``: the curves of training runs as one picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from jaxtyping import Float, Int
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

# Steps over which the language loss is averaged; single steps differ by more than a hundred steps of progress.
SMOOTHED_STEPS = 20
SIZE_INCHES, DOTS_PER_INCH = (8.0, 8.0), 90
# So many are enough for a few lines and their edges, and make the file a third as large.
COLOURS = 64
# Figures of a step, and the title of their panel.
PANELS = {
    "loss": f"loss of the next token, or of the drafts, nats: mean of the last {SMOOTHED_STEPS} steps",
    "index_loss": "loss of the indexers, nats",
    "expert_load": "load of the busiest expert over the mean of all",
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """The figures of a run by step; a figure that a run does not have is absent."""

    name: str
    steps: Int[np.ndarray, " steps"]
    figures: dict[str, Float[np.ndarray, " steps"]]


def read_curve(path: Path) -> Curve:
    """Read a ``curve.jsonl``; the run is named after its directory. A last line that is still being written is left."""
    text = path.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    if not lines:
        raise ValueError(f"{path} has no steps")
    figures = {name: np.asarray([line[name] for line in lines]) for name in PANELS if name in lines[0]}
    return Curve(path.resolve().parent.name, np.asarray([line["step"] for line in lines]), figures)


def smoothed(values: Float[np.ndarray, " steps"], steps: int) -> Float[np.ndarray, " steps"]:
    """The mean of every value and those before it, ``steps`` in all; of fewer at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - steps, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_curves(curves: Sequence[Curve], baseline: float, target: Path) -> None:
    """Write the curves as a PNG: the loss with a line at ``baseline`` (nats a token), and panels below for the rest."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(len(PANELS), sharex=True, height_ratios=(3, *[1] * (len(PANELS) - 1)))
    for panel, (name, title) in zip(panels, PANELS.items(), strict=True):
        for curve in curves:
            if name in curve.figures:
                values = curve.figures[name]
                shown = smoothed(values, SMOOTHED_STEPS) if name == "loss" else values
                panel.plot(curve.steps, shown, linewidth=1.0, label=curve.name)
        panel.set_title(title, loc="left", fontsize="medium")
        panel.grid(linewidth=0.3)
    panels[0].axhline(baseline, color="black", linestyle="--", linewidth=0.8, label=f"baseline, {baseline:g}")
    panels[0].legend()
    panels[-1].set_xlabel("step")
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.quantize(COLOURS).save(target, format="PNG", optimize=True)


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--baseline", type=float, required=True, help="Loss to beat, in nats a token: a line across the panel.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default="curves.png", show_default=True)
def main(files: tuple[Path, ...], baseline: float, out: Path) -> None:
    """Draw the curves of FILES, each a curve.jsonl of a training run."""
    draw_curves([read_curve(path) for path in files], baseline, out)


if __name__ == "__main__":
    main()
