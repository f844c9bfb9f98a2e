"""Reading and writing safetensors files byte for byte, independently of the project's own reader and writer."""

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One stored tensor, byte for byte."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def read_container(file: Path) -> dict[str, Tensor]:
    """Name -> Tensor of one file."""
    content = file.read_bytes()
    header, start = read_header(file)
    return {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), content[start:][slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def read_header(file: Path) -> tuple[dict, int]:
    """Name -> entry of one file, and where its tensors begin."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def write_container(file: Path, stored: Mapping[str, Tensor]) -> None:
    """One file with these tensors in this order."""
    header, offset = {}, 0
    for name, tensor in stored.items():
        end = offset + len(tensor.content)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.content for tensor in stored.values()))


def place_of(directory: Path, name: str) -> tuple[Path, int, int]:
    """File, first byte and size of a tensor."""
    for file in sorted(directory.glob("*.safetensors")):
        header, start = read_header(file)
        if name in header:
            first, last = header[name]["data_offsets"]
            return file, start + first, last - first
    raise KeyError(name)


def flip_bit(file: Path, offset: int) -> None:
    """Change one bit in place."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x10]))
