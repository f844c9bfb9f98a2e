"""Makes the Python modules of the protocol: ``python -m serving.proto.build``. Installing does so by itself.

The modules lie beside the definitions and are never committed: protobuf package ``deepinfer.v1`` is
``serving.proto.deepinfer.v1`` in Python, so that no second name is installed at the top level. They run with releases
of grpcio and protobuf not older than those of ``grpcio-tools``; pyproject.toml therefore names one release of it, and
asks for no older ones at run time.
"""

from __future__ import annotations

import importlib.resources
import re
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("deepinfer", "v1")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
"""Patterns of what is made, in the package's directory."""

# protoc derives imports from the protobuf package, which is not where the modules are found.
_IMPORT = re.compile(r"^from deepinfer\.v1 import ", re.MULTILINE)


def generate(root: Path = ROOT) -> list[Path]:
    """Make the modules of every definition below ``root``. Returns their paths; files of equal content stay untouched.

    Raises:
      RuntimeError: the compiler refuses a definition; it says why on standard error.
    """
    definitions = sorted(str(path) for path in (root / PACKAGE).glob("*.proto"))
    google = importlib.resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as directory:
        outputs = [f"--{kind}_out={directory}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"--proto_path={root}", f"--proto_path={google}", *outputs, *definitions]):
            raise RuntimeError(f"protoc refuses the definitions in {root / PACKAGE}")
        made = sorted(path for pattern in GENERATED for path in Path(directory, PACKAGE).glob(pattern))
        return [_place(path, root / PACKAGE / path.name) for path in made]


def _place(source: Path, target: Path) -> Path:
    content = _IMPORT.sub("from serving.proto.deepinfer.v1 import ", source.read_text(encoding="utf-8"))
    if not target.exists() or target.read_text(encoding="utf-8") != content:
        target.write_text(content, encoding="utf-8")
    return target


if __name__ == "__main__":
    for module in generate():
        print(module)
