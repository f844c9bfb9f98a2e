"""A checkpoint with one table of any size in a sparse file, and what it takes to read, convert and restore it.

Run as a program, in a process of its own, this measures memory: peak anonymous and shared memory above what the process
had before, clean pages of mapped files excluded. Prints one JSON object.
"""

import contextlib
import gc
import json
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from deepinfer_jax.checkpoint.convert import convert
from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.checkpoint.synthetic import synthesize
from deepinfer_jax.commands.logits import sequence_logits
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import map_parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parallel.layouts import expert_and_data_parallel, padded
from tests.containers import read_container, write_container

TABLE = "layers.1.engram.embed"
COLUMNS = 32
MEBIBYTE = 1 << 20
# Rows in which the table is not zero, as fractions of its length: the ends, and the seams of blocks and devices.
MARKED = (0, 1 / 8, 1 / 3, 1 / 2, 7 / 8, 1)
MARKED_ROWS = 40


def small_document(engram_vocab_size: int = 31) -> dict:
    """T2 of the model specification: six layers of every kind, and one Engram memory of six hashed columns."""
    return {
        "model_type": "deepseek_v41",
        "text_config": {
            "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "head_dim": 32,
            "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_groups": 1, "o_lora_rank": 32, "sliding_window": 4,
            "compress_ratios": [0, 2, 2, 1, 1, 1], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5],
            "candidate_source_layer_id": 3, "candidate_topk_blocks": 2, "candidate_block_size": 2,
            "index_n_heads": 2, "index_head_dim": 32, "index_topk": 3, "moe_intermediate_size": 32,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
            "rms_norm_eps": 1e-20, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rope_theta": 10000.0,
            "compress_rope_theta": 160000.0, "max_position_embeddings": 256,
            "engram_layer_ids": [1], "engram_num_embeddings": [sum(hash_moduli(engram_vocab_size))],
            "engram_max_ngram_size": 4, "engram_vocab_size": engram_vocab_size, "engram_n_heads": 2,
            "engram_head_dim": COLUMNS, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 280,
            "num_nextn_predict_layers": 1, "dspark_block_size": 3, "dspark_noise_token_id": 319,
            "dspark_target_layer_ids": [3, 4, 5], "dspark_markov_rank": 32, "dspark_n_routed_experts": 4,
            "dspark_num_experts_per_tok": 2,
        },
    }  # fmt: skip


def hash_moduli(start: int) -> list[int]:
    """The six primes from ``start`` up that two heads of three n-gram lengths use."""
    found: list[int] = []
    while len(found) < 6:
        if start % 2 and all(start % divisor for divisor in range(3, int(start**0.5) + 1, 2)):
            found.append(start)
        start += 1
    return found


def write_large(directory: Path, engram_vocab_size: int) -> None:
    """A small random checkpoint whose Engram table is replaced by a large one, a hole but for the marked rows."""
    document = small_document(engram_vocab_size)
    synthesize(small_document(), directory, shards=1)
    (file,) = directory.glob("*.safetensors")
    stored = read_container(file)
    write_container(file, {name: tensor for name, tensor in stored.items() if not name.startswith(TABLE)})
    rows = document["text_config"]["engram_num_embeddings"][0]
    write_table(directory / "table.safetensors", rows)
    weight_map = {name: "table.safetensors" if name.startswith(TABLE) else file.name for name in stored}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "digest.json").unlink()
    written = json.loads((directory / "config.json").read_text())
    engram = {key: value for key, value in document["text_config"].items() if key.startswith("engram_")}
    del engram["engram_compressed_vocab_size"]
    written["text_config"] |= engram
    (directory / "config.json").write_text(json.dumps(written))


def write_table(file: Path, rows: int) -> None:
    """The table and its scale: a header, a hole of the right size, and the marked rows."""
    sizes = {f"{TABLE}.weight": ("F8_E4M3", COLUMNS), f"{TABLE}.scale": ("F8_E8M0", 1)}
    header, offset = {}, 0
    for name, (dtype, columns) in sizes.items():
        header[name] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [offset, offset + rows * columns]}
        offset += rows * columns
    text = json.dumps(header).encode()
    start = 8 + len(text)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(start + offset)
        for first in marked_rows(rows):
            stream.seek(start + first * COLUMNS)
            stream.write(marked_content(first).tobytes())
            stream.seek(start + rows * COLUMNS + first)
            stream.write(bytes([127] * MARKED_ROWS))


def marked_rows(rows: int) -> list[int]:
    """First rows of the runs that are not zero."""
    return [int(fraction * (rows - MARKED_ROWS)) for fraction in MARKED]


def marked_content(first: int) -> np.ndarray:
    """uint8 ``[MARKED_ROWS, COLUMNS]``: e4m3 bytes other than zero and NaN, different for every run."""
    codes = (np.arange(MARKED_ROWS * COLUMNS) * 5 + first) % 0x70 + 1
    return codes.astype(np.uint8).reshape(MARKED_ROWS, COLUMNS)


def check_table(table: np.ndarray, rows: int) -> None:
    """Every marked run is in its place, and there is nothing else."""
    marked = marked_rows(rows)
    for first in marked:
        np.testing.assert_array_equal(table[first : first + MARKED_ROWS], marked_content(first))
    assert np.count_nonzero(table[:rows]) == len(marked) * MARKED_ROWS * COLUMNS
    assert not table[rows:].any()


@contextlib.contextmanager
def measured(figures: dict, name: str) -> Iterator[None]:
    """Peak memory above the start in MiB, and seconds, as ``figures[name]``."""
    peak = start = anonymous_memory()
    running = True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, anonymous_memory())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        yield
    finally:
        running = False
        watcher.join()
    figures[name] = {"peak": (peak - start) / MEBIBYTE, "seconds": time.perf_counter() - began}


def anonymous_memory() -> int:
    """Bytes of this process that no file stands behind."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def load(figures: dict, name: str, directory: Path, numerics: str, devices: int = 1) -> tuple[ModelConfig, Model]:
    """Load onto this many devices; of the figures of memory, the arrays themselves are subtracted."""
    shardings = tall = None
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
        layout = expert_and_data_parallel(devices)
        described = Model.describe(ModelConfig.from_directory(directory))
        tall = padded(described, layout)
        shardings = map_parameters(lambda item: NamedSharding(mesh, layout.spec(item.axes)), described)
    with measured(figures, name):
        config, model = load_model(directory, Numerics.preset(numerics), shardings, padded=tall)
    slices = {
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for array in jax.tree.leaves(model)
        for shard in array.addressable_shards
    }
    figures[name]["resident"] = sum(size for _, size in slices) / MEBIBYTE
    figures[name]["above"] = figures[name]["peak"] - figures[name]["resident"]
    return config, model


def main(work: Path, steps: list[str]) -> None:
    """Steps: ``load NUMERICS DEVICES``, ``convert``, ``restore NUMERICS DEVICES``; logits are kept beside."""
    figures: dict = {}
    jnp.zeros(1).block_until_ready()
    for step in steps:
        action, *arguments = step.split()
        source, target = work / "released", work / "converted"
        if action == "convert":
            with measured(figures, step):
                convert(source, target)
            continue
        numerics, devices = arguments[0], int(arguments[1])
        config, model = load(figures, step, source if action == "load" else target, numerics, devices)
        assert config.engram is not None
        if numerics == "released":
            check_table(np.asarray(model.engrams[0].table.data), config.engram.num_embeddings[0])
        logits = sequence_logits(model, tuple(range(3, 40)), config, Numerics.preset(numerics), with_taps=False)
        np.save(work / f"{'-'.join([action, *arguments])}.npy", logits["logits"])
        del model
        gc.collect()
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
