"""The small trained model that comes with the library: what commands run when no checkpoint is named.

It lies inside the package in the released layout, with a model card. A stripped installation may lack it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from deepinfer_jax.errors import CheckpointError

PACKAGE, FOLDER = "deepinfer_jax", "default_model"
DEFAULT_MODEL_NAME = f"{PACKAGE}/{FOLDER}"
"""How summaries call the model, wherever the package is installed."""


def default_model() -> Path:
    """The checkpoint directory of the shipped model.

    Raises:
      CheckpointError: this installation was made without it.
    """
    place = resources.files(PACKAGE).joinpath(FOLDER)
    # Inside a zip file it would be no directory that can be mapped.
    if isinstance(place, Path) and (place / "config.json").is_file():
        return place
    raise CheckpointError(
        DEFAULT_MODEL_NAME,
        f"not in {place}",
        "the folder of the small trained model, which a complete installation has",
        "install the package with its data files, or name a checkpoint by --model",
    )
