"""The arithmetic of each figure, the report, and that what differs is found."""

import dataclasses
import json

import pytest

from deepinfer_jax.request import Receipt
from serving.bench.input_rate import InputFigures
from serving.bench.overhead import OverheadFigures, compare
from serving.bench.overlap import overlap_of
from serving.bench.report import Report
from serving.bench.streams import StreamFigures
from serving.bench.transfer import TransferFigures
from serving.bench.turn import Spread, Turn
from serving.events import ServedReceipt, Timing

TRANSFER = TransferFigures(
    bytes=100_000_000,
    chunk_bytes=1 << 20,
    lanes=2,
    rounds=3,
    bare_grpc=1.0e9,
    bare_grpc_lanes=1.2e9,
    grpc=0.7e9,
    bare_tcp=2.0e9,
    shm=1.5e9,
    sealing=0.2e9,
    opening=0.4e9,
)
STREAMS = StreamFigures(streams=8, prompt=16, tokens=10, held=8, answering=7, equal=8, failed=0, seconds=2.0)


def turn(first, token, count=5):
    return Turn(tuple(range(count)), first, first + (count - 1) * token)


def receipt(**fields):
    times = {name: fields.pop(name) for name in ("transfer", "exposed_transfer") if name in fields}
    engine = Receipt(1, 0, 0, 0, (), 0, 0, 0, "")
    return ServedReceipt(engine, handed_over_bytes=1000, timing=Timing(**times), **fields)


def test_what_a_way_adds_is_that_of_the_best_turns_and_the_median_of_neighbours():
    alone = [turn(0.1, 0.010), turn(0.2, 0.020), turn(0.3, 0.012)]
    served = [turn(0.105, 0.0105), turn(0.203, 0.0202), turn(0.309, 0.0121)]
    way = compare("worker", alone, served)
    assert dataclasses.astuple(way.first_token_ms) == pytest.approx((105, 203))
    assert dataclasses.astuple(way.added_first_token_ms) == pytest.approx((5, 5))
    assert dataclasses.astuple(way.token_us) == pytest.approx((10_500, 12_100))
    assert dataclasses.astuple(way.added_token_us) == pytest.approx((500, 200))


def test_a_single_token_takes_no_time_behind_the_first():
    assert Turn((3,), 0.5, 0.5).token_seconds == 0


def test_input_is_counted_with_and_without_hits():
    figures = InputFigures(4, 90, 10, 2, input_tokens=400, hit_tokens=270, seconds=2.0)
    assert (figures.with_hits, figures.without_hits) == (200, 65)


def test_overlap_compares_what_was_exposed_with_all_of_it():
    fresh = [
        receipt(exposed_bytes=size, transfer=9.0, exposed_transfer=seconds)
        for size, seconds in ((100, 0.2), (300, 0.3), (200, 0.1))
    ]
    fresh.append(receipt(exposed_bytes=0, transfer=9.0))
    known = [receipt(exposed_bytes=1000, transfer=9.0, exposed_transfer=seconds) for seconds in (0.5, 1.0, 3.0)]
    figures = overlap_of("shm", 4000, fresh, known)
    assert (figures.outstanding_share, figures.exposed_share) == (0.2, pytest.approx(0.2))
    assert (figures.turns, figures.bytes, figures.whole_seconds) == (3, 1000, 1.0)


def test_a_known_prompt_of_which_something_travelled_early_is_no_whole_hand_over():
    fresh = [receipt(exposed_bytes=100, exposed_transfer=0.2)]
    figures = overlap_of("shm", 4000, fresh, [receipt(exposed_bytes=999, exposed_transfer=0.5)])
    assert (figures.whole_seconds, figures.exposed_share) == (None, None)


def test_shares_are_of_the_bare_streams():
    assert (TRANSFER.grpc_share, TRANSFER.shm_share) == (pytest.approx(0.7), pytest.approx(0.75))


def test_streams_are_equal_when_all_are():
    assert (STREAMS.all_equal, STREAMS.tokens_per_second) == (True, 40)
    assert not dataclasses.replace(STREAMS, equal=7).all_equal


def full_report():
    alone = [turn(0.1, 0.01)] * 2
    overhead = OverheadFigures(16, 5, 2, Spread(100.0, 100.0), Spread(1e4, 1e4), (compare("gateway", alone, alone),))
    kinds = [[receipt(exposed_bytes=size, exposed_transfer=seconds)] for size, seconds in ((10, 0.1), (1000, 0.5))]
    overlap = [overlap_of("grpc", 4000, *kinds)]
    return Report("m", "wide", overhead, InputFigures(4, 90, 10, 2, 400, 270, 2.0), overlap, TRANSFER, STREAMS)


def test_json_has_fields_and_what_follows_from_them():
    document = json.loads(json.dumps(full_report().document()))
    assert document["transfer"]["grpc_share"] == pytest.approx(0.7)
    assert document["streams"]["all_equal"] is True
    assert document["input"]["with_hits"] == 200
    assert document["overlap"][0]["exposed_share"] == pytest.approx(0.2)
    assert document["overhead"]["ways"][0]["added_token_us"] == {"best": 0.0, "median": 0.0}
    empty = Report("m", left_out={"overlap": "for a reason"}).document()
    assert (empty["streams"], empty["overlap"], empty["left_out"]) == (None, None, {"overlap": "for a reason"})


def test_the_table_has_every_figure_with_its_aim():
    text = full_report().text()
    for line in (
        "gRPC, of bare gRPC",
        "70.0%",
        "at least 60%",
        "at most 40%",
        "8 streams of 16 + 10 tokens: equal to the engine alone",
        "200 tokens/s",
    ):
        assert line in text
    assert "overlap: left out, for a reason" in Report("m", left_out={"overlap": "for a reason"}).text()
