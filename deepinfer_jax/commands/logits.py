"""``deepinfer-jax logits``: every position's logits of one pass over given token ids, for comparisons."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

import click
import jax
import numpy as np
from jaxtyping import Array, Float, Int

from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.commands.console import Console
from deepinfer_jax.commands.options import model_option, numerics_option, parse_token_ids, quiet_option
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.hyper_connections import Taps
from deepinfer_jax.model.rows import padded_sequence_rows
from deepinfer_jax.model.source import SequenceSource
from deepinfer_jax.model.taps import golden_taps
from deepinfer_jax.model.transformer import Model, forward
from deepinfer_jax.model.transformer import logits as output_head
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.request import SamplingParams

# Lengths are padded to a multiple, so that sequences of similar length share one compiled pass.
TILE_ROWS = 128

EPILOG = """
\b
Examples:
  deepinfer-jax logits --token-ids 0,17,25 --out logits.npz
  deepinfer-jax logits --model MODEL --token-ids-file ids.json --out run.npz --taps --numerics f32q

\b
Reading the file:
  python -c "import numpy; print(numpy.load('logits.npz')['logits'].argmax(-1))"
"""


@click.command(name="logits", epilog=EPILOG)
@model_option
@click.option("--token-ids", callback=parse_token_ids, metavar="IDS", help="Token ids, separated by commas.")
@click.option(
    "--token-ids-file",
    type=click.File(encoding="utf-8"),
    metavar="FILE",
    help="A JSON array of token ids; - reads standard input.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The .npz file to write; an existing one is replaced when everything is computed.",
)
@numerics_option
@click.option("--taps", "with_taps", is_flag=True, help="Write the intermediates of every layer too.")
@quiet_option
def command(
    directory: Path | None,
    token_ids: tuple[int, ...] | None,
    token_ids_file: TextIO | None,
    out: Path,
    numerics: str,
    with_taps: bool,
    quiet: bool,
) -> None:
    """Write the logits of every position of a sequence to a file.

    One pass over the whole sequence, without caches: row t of the array `logits`, float32 [tokens, vocab], scores the
    token behind position t. Memory grows with the square of the length.

    With --taps the file also holds named intermediates such as `embed_out`, `layers.2.compress_kv`,
    `layers.2.topk_compressed` or `layers.10.streams_out`; bfloat16 ones are widened to float32.
    """
    console = Console(quiet)
    tokens = _token_ids(token_ids, token_ids_file)
    place = default_model() if directory is None else directory
    config = ModelConfig.from_directory(place)
    SamplingParams(max_tokens=0).check(tokens, config)
    chosen = Numerics.preset(numerics)
    with _replacing(out) as stream:
        params = console.load_model(place, config, chosen)
        console.note("compiling and running", terminal_only=True)
        arrays = sequence_logits(params, tokens, config, chosen, with_taps=with_taps)
        _save(stream, arrays, out)
    shape = "x".join(map(str, arrays["logits"].shape))
    console.note(f"{out}: logits {shape}, {len(arrays) - 1} taps, numerics {numerics}")


def sequence_logits(
    params: Model, tokens: tuple[int, ...], config: ModelConfig, numerics: Numerics, *, with_taps: bool
) -> dict[str, np.ndarray]:
    """``logits``, float32 ``[tokens, vocabulary]``, and the taps by name, if asked for."""
    length = len(tokens)
    padded = np.zeros(-(-length // TILE_ROWS) * TILE_ROWS, np.int32)
    padded[:length] = tokens
    scores, taps = _full_pass(params, padded, np.int32(length), config=config, numerics=numerics, with_taps=with_taps)
    return {"logits": np.asarray(scores)[:length]} | golden_taps(taps, config, length)


@functools.partial(jax.jit, static_argnames=("config", "numerics", "with_taps"))
def _full_pass(
    params: Model,
    tokens: Int[Array, " rows"],
    length: Int[Array, ""],
    *,
    config: ModelConfig,
    numerics: Numerics,
    with_taps: bool,
) -> tuple[Float[Array, "rows vocabulary"], Taps]:
    count = tokens.shape[0]
    rows = padded_sequence_rows(tokens, length, TILE_ROWS)
    source = SequenceSource.empty(count, count, config.head_dim, config.index_head_dim, numerics.dtype)
    output = forward(params, rows, source, config, numerics)
    return output_head(params, output.hidden), output.taps if with_taps else {}


def _token_ids(token_ids: tuple[int, ...] | None, file: TextIO | None) -> tuple[int, ...]:
    if (token_ids is None) == (file is None):
        raise click.UsageError("give the sequence by one of --token-ids and --token-ids-file")
    if file is None:
        assert token_ids is not None
        return token_ids
    try:
        document = json.load(file)
    except (ValueError, RecursionError) as error:
        raise InputError("--token-ids-file", file.name, f"a JSON array of token ids ({error})") from error
    if not isinstance(document, list) or not all(type(item) is int for item in document):
        raise InputError("--token-ids-file", document, "a JSON array of token ids, as in [0, 17, 25]")
    return tuple(document)


@contextmanager
def _replacing(out: Path) -> Iterator[IO[bytes]]:
    """A temporary file beside ``out`` that takes its place at the end, or vanishes when something goes wrong.

    It is opened first, so that a place that cannot be written is reported before anything is computed.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        stream = partial.open("xb")
    except OSError as error:
        raise click.FileError(str(out), error.strerror) from error
    try:
        with stream:
            yield stream
        partial.replace(out)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _save(stream: IO[bytes], arrays: Mapping[str, Any], out: Path) -> None:
    try:
        np.savez(stream, **arrays)
    except OSError as error:
        raise click.FileError(str(out), error.strerror) from error
