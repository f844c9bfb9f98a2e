"""The schedule of the release row by row, its segments, and what holds for any valid configuration."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.config import CandidateConfig, ModelConfig
from deepinfer_jax.topology import LayerKind, Mode, Segment, topology
from tests.configurations import raw_preset

# Model specification, section 1.2: layer, side, ratio, mode, KV, Sel, keys scored, extra. None stands for "-".
SCHEDULE = [
    (0, "enc", 0, "SWA", None, None, None, ""),
    (1, "enc", 0, "SWA", None, None, None, "engram"),
    (2, "enc", 2, "Full", 2, 2, 2, ""),
    (3, "enc", 2, "Reuse", 2, 2, None, ""),
    (4, "enc", 2, "Reuse", 2, 2, None, ""),
    (5, "enc", 2, "Reuse", 2, 2, None, ""),
    (6, "enc", 2, "Reuse", 2, 2, None, ""),
    (7, "enc", 2, "Reuse", 2, 2, None, ""),
    (8, "enc", 2, "Full", 8, 8, 8, ""),
    (9, "enc", 2, "Reuse", 8, 8, None, ""),
    (10, "enc", 2, "Reuse", 8, 8, None, ""),
    (11, "enc", 2, "Reuse", 8, 8, None, ""),
    (12, "enc", 2, "Reuse", 8, 8, None, ""),
    (13, "enc", 2, "Reuse", 8, 8, None, ""),
    (14, "enc", 2, "Full", 14, 14, 14, "engram"),
    (15, "enc", 2, "Reuse", 14, 14, None, ""),
    (16, "enc", 2, "Reuse", 14, 14, None, ""),
    (17, "enc", 2, "Reuse", 14, 14, None, ""),
    (18, "enc", 2, "Reuse", 14, 14, None, ""),
    (19, "enc", 2, "Reuse", 14, 14, None, ""),
    (20, "dec", 1, "Full", 20, 20, 20, "candidate source"),
    (21, "dec", 1, "Reuse", 20, 20, None, ""),
    (22, "dec", 1, "Reuse", 20, 20, None, ""),
    (23, "dec", 1, "Reuse", 20, 20, None, ""),
    (24, "dec", 1, "Reindex", 20, 24, 20, "inside candidates"),
    (25, "dec", 1, "Reuse", 20, 24, None, ""),
    (26, "dec", 1, "Reuse", 20, 24, None, ""),
    (27, "dec", 1, "Reuse", 20, 24, None, ""),
    (28, "dec", 1, "Reindex", 20, 28, 20, "inside candidates"),
    (29, "dec", 1, "Reuse", 20, 28, None, ""),
    (30, "dec", 1, "Reuse", 20, 28, None, ""),
    (31, "dec", 1, "Reuse", 20, 28, None, ""),
    (32, "dec", 1, "Reindex", 20, 32, 20, "inside candidates"),
    (33, "dec", 1, "Reuse", 20, 32, None, ""),
    (34, "dec", 1, "Reuse", 20, 32, None, ""),
    (35, "dec", 1, "Reuse", 20, 32, None, ""),
    (36, "dec", 1, "Reindex", 20, 36, 20, "inside candidates"),
    (37, "dec", 1, "Reuse", 20, 36, None, "draft"),
    (38, "dec", 1, "Reuse", 20, 36, None, "draft"),
    (39, "dec", 1, "Reuse", 20, 36, None, "draft"),
]

WINDOW = LayerKind(Mode.WINDOW, 0)
FULL_2, REUSE_2 = LayerKind(Mode.FULL, 2), LayerKind(Mode.REUSE, 2)
FULL_1 = LayerKind(Mode.FULL, 1, publishes_candidates=True)
REUSE_1, REINDEX_1 = LayerKind(Mode.REUSE, 1), LayerKind(Mode.REINDEX, 1, inside_candidates=True)

# Design section 3: L0; Engram; L1; 2 x [Full + Reuse x 5]; Engram; [Full + Reuse x 5]; [Full + Reuse x 3];
# 4 x [Reindex + Reuse x 3].
SEGMENTS = (
    Segment(0, 1, ((WINDOW, 1),), None),
    Segment(1, 1, ((WINDOW, 1),), 0),
    Segment(2, 2, ((FULL_2, 1), (REUSE_2, 5)), None),
    Segment(14, 1, ((FULL_2, 1), (REUSE_2, 5)), 1),
    Segment(20, 1, ((FULL_1, 1), (REUSE_1, 3)), None),
    Segment(24, 4, ((REINDEX_1, 1), (REUSE_1, 3)), None),
)


@pytest.fixture(scope="module", params=["v4.1-flash", "mini-40"])
def released(request):
    """The release and its miniature have one schedule."""
    config = ModelConfig.preset(request.param)
    return config, topology(config)


@pytest.mark.parametrize("row", SCHEDULE, ids=lambda row: f"layer {row[0]}")
def test_released_schedule(released, row):
    config, schedule = released
    layer, side, ratio, mode, kv, selection, keys, extra = row
    plan = schedule.layers[layer]
    assert plan.layer == layer
    assert plan.side == {"enc": "encoder", "dec": "decoder"}[side]
    assert (plan.kind.ratio, plan.kind.mode.value) == (ratio, mode)
    assert (plan.kv_source, plan.index_source) == (kv, selection)
    # The keys scored are those of the KV source; a layer that selects nothing scores none.
    assert (plan.kv_source if plan.kind.selects else None) == keys
    assert plan.group == (None if kv is None else [2, 8, 14, 20].index(kv))
    assert plan.engram == ({1: 0, 14: 1}[layer] if extra == "engram" else None)
    assert plan.draft_tap == (layer - 37 if extra == "draft" else None)
    assert plan.kind.publishes_candidates == (extra == "candidate source")
    assert plan.kind.inside_candidates == (extra == "inside candidates")
    if ratio:
        assert (config.kv_source(layer), config.index_source(layer)) == (kv, selection)


def test_released_schedule_is_complete(released):
    _, schedule = released
    assert len(SCHEDULE) == len(schedule.layers) == 40
    assert schedule.encoder_layers == 20
    assert [plan.layer for plan in schedule.groups] == [2, 8, 14, 20]


def test_released_segments(released):
    assert released[1].segments == SEGMENTS


def test_released_size_has_about_ten_distinct_bodies(released):
    """What a compiled forward pass holds: one body per run of a segment."""
    assert sum(len(segment.runs) for segment in released[1].segments) == 10


def test_run_layers():
    assert SEGMENTS[2].run_layers(0) == [[2], [8]]
    assert SEGMENTS[2].run_layers(1) == [[3, 4, 5, 6, 7], [9, 10, 11, 12, 13]]
    assert SEGMENTS[5].run_layers(1) == [[25, 26, 27], [29, 30, 31], [33, 34, 35], [37, 38, 39]]
    assert SEGMENTS[5].layers == range(24, 40)


def test_without_candidates_no_layer_publishes_or_is_restricted():
    config = dataclasses.replace(ModelConfig.preset("mini-40"), candidates=None)
    kinds = {plan.kind for plan in topology(config).layers}
    assert kinds == {WINDOW, FULL_2, REUSE_2, LayerKind(Mode.FULL, 1), REUSE_1, LayerKind(Mode.REINDEX, 1)}


def test_a_later_candidate_source_leaves_earlier_layers_free():
    config = ModelConfig.preset("mini-40")
    config = dataclasses.replace(config, candidates=CandidateConfig(28, 4, 4))
    kinds = [topology(config).layers[layer].kind for layer in (20, 24, 28, 32, 36)]
    assert [kind.publishes_candidates for kind in kinds] == [False, False, True, False, False]
    assert [kind.inside_candidates for kind in kinds] == [False, False, False, True, True]


def test_a_model_of_ratio_2_only_is_all_encoder():
    config = ModelConfig.preset("mini-40")
    ratios = (0, 0) + (2,) * 38
    schedule = topology(dataclasses.replace(config, compress_ratios=ratios))
    assert schedule.encoder_layers == 40
    assert {plan.side for plan in schedule.layers} == {"encoder"}


@st.composite
def configurations(draw):
    """Valid raw configurations: window layers and Engram anywhere, groups of either ratio, any nesting of sources."""
    ratios, kv_sources, index_sources = [0] * draw(st.integers(0, 3)), [], []
    for _ in range(draw(st.integers(1, 4))):
        kv_sources.append(len(ratios))
        ratio = draw(st.sampled_from([1, 2]))
        for place in range(draw(st.integers(1, 6))):
            if place == 0 or draw(st.booleans()):
                if place == 0 or draw(st.booleans()):
                    index_sources.append(len(ratios))
                ratios.append(ratio)
            else:
                ratios.append(draw(st.sampled_from([0, ratio])))
    layers = len(ratios)
    raw = raw_preset("mini-40")
    text = raw["text_config"]
    text |= {
        "num_hidden_layers": layers,
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv_sources,
        "index_source_layer_ids": index_sources,
        "num_nextn_predict_layers": 0,
        "candidate_source_layer_id": None,
        "engram_layer_ids": sorted(draw(st.sets(st.integers(0, layers - 1), max_size=3))),
    }
    text["engram_num_embeddings"] = [1] * len(text["engram_layer_ids"])
    sources = [source for source in index_sources if all(ratios[later] == ratios[source] for later in index_sources
                                                         if later > source)]  # fmt: skip
    if draw(st.booleans()):
        text["candidate_source_layer_id"] = draw(st.sampled_from(sources))
    if draw(st.booleans()):
        targets = sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=3)))
        text |= {"num_nextn_predict_layers": 2, "dspark_target_layer_ids": targets}
    return raw


@given(raw=configurations())
def test_segments_hold_every_layer_once_in_order(raw):
    schedule = topology(ModelConfig.from_dict(raw))
    layers = [layer for segment in schedule.segments for layer in segment.layers]
    assert layers == list(range(len(schedule.layers)))
    for segment in schedule.segments:
        by_run = [layer for run in range(len(segment.runs)) for row in segment.run_layers(run) for layer in row]
        assert sorted(by_run) == list(segment.layers)


@given(raw=configurations())
def test_segments_repeat_the_kinds_of_their_layers(raw):
    """The scan order, repeat by repeat and run by run, is the layer order, and every body fits its layers."""
    schedule = topology(ModelConfig.from_dict(raw))
    for segment in schedule.segments:
        order = [
            layer
            for repeat in range(segment.repeats)
            for run in range(len(segment.runs))
            for layer in segment.run_layers(run)[repeat]
        ]
        assert order == list(segment.layers)
        for run, (kind, count) in enumerate(segment.runs):
            for row in segment.run_layers(run):
                assert len(row) == count
                assert {schedule.layers[layer].kind for layer in row} == {kind}


@given(raw=configurations())
def test_engram_stands_at_segment_starts_only(raw):
    schedule = topology(ModelConfig.from_dict(raw))
    starts = {segment.first_layer: segment.engram for segment in schedule.segments}
    expected = {plan.layer: plan.engram for plan in schedule.layers if plan.engram is not None}
    assert {layer: engram for layer, engram in starts.items() if engram is not None} == expected
    assert sorted(expected.values()) == list(range(len(raw["text_config"]["engram_layer_ids"])))


@given(raw=configurations())
def test_plans_follow_the_sources(raw):
    """Written from the definition: the nearest source at or before the layer; window layers have none."""
    config = ModelConfig.from_dict(raw)
    schedule = topology(config)
    text = raw["text_config"]
    kv_source = index_source = None
    for plan, ratio in zip(schedule.layers, text["compress_ratios"], strict=True):
        kv_source = plan.layer if plan.layer in text["kv_source_layer_ids"] else kv_source
        index_source = plan.layer if plan.layer in text["index_source_layer_ids"] else index_source
        expected = (kv_source, index_source) if ratio else (None, None)
        assert (plan.kv_source, plan.index_source) == expected
        assert plan.kind.ratio == ratio
        assert (plan.kind.mode is Mode.FULL) == (plan.kv_source == plan.layer)
        assert plan.kind.selects == (plan.index_source == plan.layer)
        assert (plan.kind.mode is Mode.WINDOW) == (ratio == 0)
        if ratio:
            assert schedule.groups[plan.group] == schedule.layers[kv_source]
            assert schedule.layers[kv_source].kind.ratio == ratio
    assert [plan.side for plan in schedule.layers].count("encoder") == schedule.encoder_layers


@given(raw=configurations())
def test_candidates_are_published_before_they_are_used(raw):
    schedule = topology(ModelConfig.from_dict(raw))
    source = raw["text_config"]["candidate_source_layer_id"]
    publishing = [plan.layer for plan in schedule.layers if plan.kind.publishes_candidates]
    inside = [plan for plan in schedule.layers if plan.kind.inside_candidates]
    assert publishing == ([] if source is None else [source])
    later = (
        [] if source is None else [layer for layer in raw["text_config"]["index_source_layer_ids"] if layer > source]
    )
    assert [plan.layer for plan in inside] == later
    assert {plan.kind.ratio for plan in inside} <= {schedule.layers[layer].kind.ratio for layer in publishing}


def test_plans_are_plain_data():
    """Topologies are compared and hashed as static arguments."""
    config = ModelConfig.preset("mini-40")
    assert topology(config) == topology(config)
    assert len({topology(config), topology(config)}) == 1
