"""Hatchling's way to :mod:`.build`: wheels, editable installations and builds from a source archive get the modules.

Hatchling loads this file by its path, in an environment where the project cannot be imported.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtocolBuildHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there during builds only
    """Makes the modules before files are collected, and has the wheel take them though git ignores them."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling; ``version`` is ``standard`` or ``editable``."""
        generate = runpy.run_path(str(Path(self.root, "serving", "proto", "build.py")))["generate"]
        build_data["artifacts"] += [path.relative_to(self.root).as_posix() for path in generate()]
