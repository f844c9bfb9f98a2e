"""The picture of training curves: what is read, how it is smoothed, and that it shows it."""

import io
import json

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from examples.train_tiny.curves import Curve, draw_curves, main, read_curve, smoothed


def steps(count, seed=0):
    """Noisy figures of a run, as its curve has them."""
    noise = np.random.default_rng(seed).standard_normal((count, 3))
    return [
        {"step": step + 1, "loss": 3 + 5 / (step + 1) + 0.1 * a, "index_loss": abs(b), "expert_load": 1.5 + 0.1 * c}
        for step, (a, b, c) in enumerate(noise)
    ]


def write(path, lines, tail=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail, encoding="utf-8")
    return path


def drawn(path, curves, baseline=3.332):
    draw_curves(curves, baseline, path)
    with Image.open(io.BytesIO(path.read_bytes())) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"), np.int32)


def test_a_value_is_smoothed_with_those_before_it():
    values = np.asarray([4.0, 2.0, 6.0, 0.0, 3.0])
    np.testing.assert_allclose(smoothed(values, 3), [4.0, 3.0, 4.0, 8 / 3, 3.0])
    np.testing.assert_allclose(smoothed(values, 1), values)
    np.testing.assert_allclose(smoothed(values, 9), np.cumsum(values) / np.arange(1, 6))


def test_a_curve_is_named_after_its_run_and_has_the_figures_that_are_there(tmp_path):
    lines = [{"step": step, "loss": step / 10, "emitted": 2.0} for step in (1, 2, 3)]
    curve = read_curve(write(tmp_path / "draft" / "curve.jsonl", lines, tail='{"step": 4, "lo'))
    assert curve.name == "draft"
    assert curve.steps.tolist() == [1, 2, 3]
    assert list(curve.figures) == ["loss"]
    assert curve.figures["loss"].tolist() == [0.1, 0.2, 0.3]


def test_a_curve_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no steps"):
        read_curve(write(tmp_path / "curve.jsonl", [], tail='{"step": 1'))


def test_the_command_writes_a_small_picture(tmp_path):
    files = [write(tmp_path / name / "curve.jsonl", steps(3000, seed)) for seed, name in enumerate(("one", "two"))]
    out = tmp_path / "curves.png"
    arguments = [*map(str, files), "--baseline", "3.332", "--out", str(out)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert 5_000 < out.stat().st_size < 80_000


def test_every_figure_and_the_baseline_change_the_picture(tmp_path):
    curve = read_curve(write(tmp_path / "run" / "curve.jsonl", steps(60)))
    whole = drawn(tmp_path / "a.png", [curve])
    assert (drawn(tmp_path / "a.png", [curve]) == whole).all()
    for name, values in curve.figures.items():
        other = Curve(curve.name, curve.steps, curve.figures | {name: values[::-1]})
        assert (drawn(tmp_path / "b.png", [other]) != whole).any(), name
    assert (drawn(tmp_path / "c.png", [curve], baseline=4.0) != whole).any()
