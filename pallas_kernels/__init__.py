"""The operations that deserve a kernel, each with a jnp reference that is its contract.

This package knows nothing of the model: it imports only jax, numpy, jaxtyping and itself. Public ops take
``implementation=None`` (the default, which runs on every platform) or a name, and refuse what they cannot do.
"""

from pallas_kernels.attention_partial import EMPTY_MAXIMUM, AttentionPartial, merge_partials
from pallas_kernels.grouped_experts import clamped_swiglu, grouped_experts
from pallas_kernels.hyper_connection_mix import Mix, hyper_connection_mix
from pallas_kernels.index_pages import IndexPages
from pallas_kernels.index_selection import Selection, candidate_entries, index_scores, index_selection
from pallas_kernels.packed_weight import PackedWeight, expand, pack_weight, rounded_inputs
from pallas_kernels.paged_index_selection import paged_index_selection
from pallas_kernels.product import TransposedWeight, Weight, product
from pallas_kernels.row_formats import CachedRows
from pallas_kernels.sparse_attention import gather_rows, sparse_attention
from pallas_kernels.window_attention import window_attention

__all__ = [
    "EMPTY_MAXIMUM",
    "AttentionPartial",
    "CachedRows",
    "IndexPages",
    "Mix",
    "PackedWeight",
    "Selection",
    "TransposedWeight",
    "Weight",
    "candidate_entries",
    "clamped_swiglu",
    "expand",
    "gather_rows",
    "grouped_experts",
    "hyper_connection_mix",
    "index_scores",
    "index_selection",
    "merge_partials",
    "pack_weight",
    "paged_index_selection",
    "product",
    "rounded_inputs",
    "sparse_attention",
    "window_attention",
]
