"""Which slices are updated together."""

from __future__ import annotations

from ortflow.workflow.layout import FlatIndex, Group, Tensor
from ortflow.workflow.optim.segments import Piece, Segment, pieces, segments
from ortflow.workflow.spec.optimizers import Adam, Lamb, Sgd


def index(*groups: Group) -> FlatIndex:
    return FlatIndex.place([Tensor(f"t{i}", (10, 10), group) for i, group in enumerate(groups)])


def test_element_wise_rules_get_a_segment_a_group() -> None:
    flat = index("no_decay", "decay", "frozen", "decay", "state")
    expected = [Segment(0, 256, 0.1), Segment(256, 384, 0.0)]
    assert segments(Adam(name="adamw", lr=1.0, weight_decay=0.1), flat) == expected
    assert segments(Sgd(name="sgd", lr=1.0, weight_decay=0.1), flat) == expected


def test_lamb_gets_a_segment_a_parameter() -> None:
    flat = index("no_decay", "decay", "frozen", "decay", "state")
    expected = [Segment(0, 128, 0.1), Segment(128, 256, 0.1), Segment(256, 384, 0.0)]
    assert segments(Lamb(name="lamb", lr=1.0, weight_decay=0.1), flat) == expected


def test_a_group_without_tensors_gets_none() -> None:
    optimizer = Adam(name="adam", lr=1.0, weight_decay=0.1)
    assert segments(optimizer, index("no_decay", "frozen")) == [Segment(0, 128, 0.0)]
    assert segments(optimizer, index("decay")) == [Segment(0, 128, 0.1)]
    assert segments(optimizer, index("frozen", "state")) == []


def test_a_share_has_pieces_of_segments() -> None:
    whole = [Segment(0, 128, 0.1), Segment(128, 256, 0.0), Segment(256, 384, 0.1)]
    assert pieces(whole, 0, 384) == [Piece(0, 128, 0.1, 0), Piece(128, 256, 0.0, 1), Piece(256, 384, 0.1, 2)]
    assert pieces(whole, 64, 192) == [Piece(64, 128, 0.1, 0), Piece(128, 192, 0.0, 1)]
    assert pieces(whole, 128, 256) == [Piece(128, 256, 0.0, 1)]
    assert pieces(whole, 384, 384) == []
    assert [piece.count for piece in pieces(whole, 64, 384)] == [64, 128, 128]
