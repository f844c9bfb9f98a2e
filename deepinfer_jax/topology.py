"""The per-layer plan derived from a ModelConfig, and its segments.

A layer's *kind* is everything that changes the program of its body; layers of one kind differ only in weights and in
which rows of the state they use. *Segments* group the layers as nested repeats of kinds, so that a compiled forward
pass over stacked parameters holds one body per distinct kind and not one per layer.
"""

from __future__ import annotations

import dataclasses
import enum

from deepinfer_jax.config import ModelConfig


class Mode(enum.Enum):
    """How a layer obtains its long-range context (technical report, section on shared sparse attention)."""

    WINDOW = "SWA"  # ratio 0: window only
    FULL = "Full"  # owns compressor, index keys and a selection
    REINDEX = "Reindex"  # own selection over another layer's keys
    REUSE = "Reuse"  # another layer's keys and selection


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The static part of a layer: two layers of equal kind share one compiled body.

    ``publishes_candidates``: its index scores choose the candidate blocks of later layers.
    ``inside_candidates``: its own selection is restricted to those blocks.
    """

    mode: Mode
    ratio: int
    publishes_candidates: bool = False
    inside_candidates: bool = False

    @property
    def selects(self) -> bool:
        """Whether the layer computes a selection of its own."""
        return self.mode in (Mode.FULL, Mode.REINDEX)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """One layer of the schedule (model specification, section 1.2).

    ``group`` numbers the key/value source layers in order; it is the layer's page group, or None for window layers.
    ``engram`` and ``draft_tap`` are positions in ``engram.layer_ids`` and ``draft.target_layer_ids``, or None.
    """

    layer: int
    kind: LayerKind
    side: str
    kv_source: int | None
    index_source: int | None
    group: int | None
    engram: int | None
    draft_tap: int | None


@dataclasses.dataclass(frozen=True)
class Segment:
    """``repeats`` times the ``runs`` (kind, count) in order, starting at ``first_layer``.

    ``engram`` is set when the Engram memory with that index is read before the first layer of the segment; such a
    segment boundary is forced, so that Engram is a body of its own.
    """

    first_layer: int
    repeats: int
    runs: tuple[tuple[LayerKind, int], ...]
    engram: int | None

    @property
    def cell_layers(self) -> int:
        """Layers in one repeat."""
        return sum(count for _, count in self.runs)

    @property
    def layers(self) -> range:
        """All layer ids of the segment."""
        return range(self.first_layer, self.first_layer + self.repeats * self.cell_layers)

    def run_layers(self, run: int) -> list[list[int]]:
        """Layer ids of one run, as ``[repeats][count]``."""
        start = self.first_layer + sum(count for _, count in self.runs[:run])
        return [
            [start + repeat * self.cell_layers + offset for offset in range(self.runs[run][1])]
            for repeat in range(self.repeats)
        ]


@dataclasses.dataclass(frozen=True)
class Topology:
    """The schedule of a configuration: one plan per backbone layer, and the segments they form."""

    layers: tuple[LayerPlan, ...]
    segments: tuple[Segment, ...]
    encoder_layers: int

    @property
    def groups(self) -> tuple[LayerPlan, ...]:
        """The key/value source layers in page-group order."""
        return tuple(plan for plan in self.layers if plan.kind.mode is Mode.FULL)


def topology(config: ModelConfig) -> Topology:
    """Derive the layer plans and segments of a checked configuration."""
    plans = tuple(_plan(config, layer) for layer in range(config.num_hidden_layers))
    return Topology(layers=plans, segments=tuple(_segments(plans)), encoder_layers=config.encoder_layers)


def _plan(config: ModelConfig, layer: int) -> LayerPlan:
    ratio = config.compress_ratios[layer]
    compressed = ratio > 0
    kv_source = config.kv_source(layer) if compressed else None
    engram_layers = config.engram.layer_ids if config.engram else ()
    targets = config.draft.target_layer_ids if config.draft else ()
    return LayerPlan(
        layer=layer,
        kind=_kind(config, layer, ratio),
        side="encoder" if layer < config.encoder_layers else "decoder",
        kv_source=kv_source,
        index_source=config.index_source(layer) if compressed else None,
        group=config.kv_source_layer_ids.index(kv_source) if kv_source is not None else None,
        engram=engram_layers.index(layer) if layer in engram_layers else None,
        draft_tap=targets.index(layer) if layer in targets else None,
    )


def _kind(config: ModelConfig, layer: int, ratio: int) -> LayerKind:
    if ratio == 0:
        return LayerKind(Mode.WINDOW, 0)
    if layer not in config.index_source_layer_ids:
        return LayerKind(Mode.REUSE, ratio)
    source = config.candidates.source_layer_id if config.candidates else None
    return LayerKind(
        mode=Mode.FULL if layer in config.kv_source_layer_ids else Mode.REINDEX,
        ratio=ratio,
        publishes_candidates=layer == source,
        inside_candidates=source is not None and layer > source,
    )


def _segments(plans: tuple[LayerPlan, ...]) -> list[Segment]:
    segments: list[Segment] = []
    cell: list[LayerPlan] = []
    for plan in plans:
        starts_cell = plan.kind.mode is not Mode.REUSE or plan.engram is not None
        if starts_cell and cell:
            _append_cell(segments, cell)
            cell = []
        cell.append(plan)
    if cell:
        _append_cell(segments, cell)
    return segments


def _append_cell(segments: list[Segment], cell: list[LayerPlan]) -> None:
    """Add one leader-and-followers cell, as a further repeat of the last segment where the runs are the same."""
    runs: list[tuple[LayerKind, int]] = []
    for plan in cell:
        if runs and runs[-1][0] == plan.kind:
            runs[-1] = (plan.kind, runs[-1][1] + 1)
        else:
            runs.append((plan.kind, 1))
    engram = cell[0].engram
    if segments and engram is None and segments[-1].runs == tuple(runs):
        segments[-1] = dataclasses.replace(segments[-1], repeats=segments[-1].repeats + 1)
    else:
        segments.append(Segment(cell[0].layer, 1, tuple(runs), engram))
