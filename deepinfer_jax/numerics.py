"""Numerics: the dtype of activations and weights, and every quantisation boundary as a named switch.

The presets are the rows of the design's table. ``f32`` is the reference; ``f32q`` adds the released cache formats as
round trips and nothing else; ``bf16`` computes in bfloat16 without round trips; ``released`` is the release: packed
weights, cache formats and fp8 inputs of linear layers.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes  # noqa: F401  # numpy learns bfloat16's name from it
import numpy as np

from deepinfer_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Static numerics of a forward pass (model specification, sections 0, 15.3 and 15.4).

    ``name``: the preset, or a name of one's own.
    ``compute``: dtype name of activations, matrix weights and caches; reductions are always float32.
    ``window_keys_fp8``: window keys round trip fp8 e4m3, groups of 32, after RoPE.
    ``main_entries_fp4``: compressed entries round trip fp4, groups of 16 with an e4m3 scale, after RoPE.
    ``index_queries_fp4``, ``index_keys_fp4``: index vectors round trip fp4, groups of 32, after RoPE.
    ``packed_weights``: what the release stores as fp8 or fp4 stays packed on the device.
    ``linear_inputs_fp8``: inputs of packed weights round trip fp8, groups of 32.
    ``output_down_inputs_fp8``: those of the output down projection (``wo_a``) too, as the original engine does and the
    reference implementation does not.
    """

    name: str
    compute: str = "float32"
    window_keys_fp8: bool = False
    main_entries_fp4: bool = False
    index_queries_fp4: bool = False
    index_keys_fp4: bool = False
    packed_weights: bool = False
    linear_inputs_fp8: bool = False
    output_down_inputs_fp8: bool = False

    @property
    def dtype(self) -> np.dtype:
        """The compute dtype."""
        return np.dtype(self.compute)

    @classmethod
    def preset(cls, name: str) -> Numerics:
        """``f32``, ``f32q``, ``bf16`` or ``released``.

        Raises:
          InputError: no preset of that name.
        """
        for numerics in (F32, F32Q, BF16, RELEASED):
            if numerics.name == name:
                return numerics
        raise InputError("numerics", name, f"one of {', '.join(NUMERICS_NAMES)}")


F32 = Numerics("f32")
F32Q = Numerics("f32q", window_keys_fp8=True, main_entries_fp4=True, index_queries_fp4=True, index_keys_fp4=True)
BF16 = Numerics("bf16", compute="bfloat16")
RELEASED = dataclasses.replace(F32Q, name="released", compute="bfloat16", packed_weights=True, linear_inputs_fp8=True)
NUMERICS_NAMES = (F32.name, F32Q.name, BF16.name, RELEASED.name)
