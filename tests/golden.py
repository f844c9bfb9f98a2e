"""Reading the golden data kept under tests/data (numpy only, nothing of the project itself).

The files were computed by other implementations of the model; the reader is kept separate from the project's own so
that a mistake in one cannot hide a mistake in the other.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"

_NUMPY_DTYPES = {
    "F32": "<f4",
    "F64": "<f8",
    "I32": "<i4",
    "I64": "<i8",
    "BOOL": "?",
    "U8": "u1",
    "I8": "u1",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}


def tensors(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of a `.safetensors` or `.npz` file, by name.

    `path` is relative to tests/data (absolute paths work too). In a `.safetensors` file bf16 is returned as float32,
    and fp8, e8m0 and packed fp4 (stored as I8) as uint8 bytes; everything else has its own dtype.
    """
    file = DATA / path
    if file.suffix == ".npz":
        with np.load(file) as archive:
            return dict(archive)
    content = file.read_bytes()
    (header_size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + header_size])
    header.pop("__metadata__", None)
    return {name: _array(entry, content, 8 + header_size) for name, entry in header.items()}


def document(path: str | Path) -> Any:
    """The content of a `.json` file; `path` is relative to tests/data."""
    return json.loads((DATA / path).read_text(encoding="utf-8"))


def _array(entry: dict[str, Any], content: bytes, data_start: int) -> np.ndarray:
    begin, end = (data_start + offset for offset in entry["data_offsets"])
    if entry["dtype"] == "BF16":
        bits = np.frombuffer(content[begin:end], "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(entry["shape"])
    return np.frombuffer(content[begin:end], _NUMPY_DTYPES[entry["dtype"]]).reshape(entry["shape"])
