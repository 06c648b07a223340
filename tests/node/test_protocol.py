"""Frames can arrive in any pieces, and noise is separated from frames."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.messages.decode import ProtocolError
from dtrain.messages.pieces import KEPT, MAX_NOISE
from dtrain.node.agent.wire import DATA, HEADER, MAX_PAYLOAD, MESSAGE, PREAMBLE
from dtrain.node.protocol import (
    Data,
    FrameDecoder,
    Message,
    encode_command,
)

messages = st.builds(
    lambda kind, value: Message({"type": kind, "value": value}),
    st.text(),
    st.none() | st.integers() | st.text(st.characters(codec=None)),
)
data = st.builds(
    Data,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=300),
)


def encoded(frame: Message | Data) -> bytes:
    if isinstance(frame, Data):
        head = HEADER.pack(DATA, frame.stream, frame.offset, len(frame.payload))
        return head + frame.payload
    payload = json.dumps(frame.body).encode()
    return HEADER.pack(MESSAGE, 0, 0, len(payload)) + payload


def pieces(whole: bytes, cuts: Iterable[int]) -> list[bytes]:
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    return [whole[start:end] for start, end in pairwise(places)]


@given(
    st.binary(max_size=200).filter(lambda noise: PREAMBLE not in noise + PREAMBLE[:-1]),
    st.lists(messages | data, max_size=8),
    st.lists(st.integers(0, 10**6), max_size=20),
)
def test_frames_arrive_whole_however_they_are_cut(
    noise: bytes, frames: list[Message | Data], cuts: list[int]
) -> None:
    whole = noise + PREAMBLE + b"".join(map(encoded, frames))
    decoder = FrameDecoder()
    assert [frame for piece in pieces(whole, cuts) for frame in decoder.feed(piece)] == frames
    assert decoder.noise == noise


def test_a_frame_may_be_read_while_the_next_ones_wait() -> None:
    """A consumer that stops half-way loses nothing."""
    first, second = Data(1, 0, b"a"), Data(1, 1, b"b")
    decoder = FrameDecoder()
    assert next(iter(decoder.feed(PREAMBLE + encoded(first) + encoded(second)))) == first
    assert list(decoder.feed(b"")) == [second]


def test_noise_is_kept_and_read_up_to_a_limit() -> None:
    decoder = FrameDecoder()
    for _ in range(100):
        assert list(decoder.feed(b"motd\n" * 1000)) == []
    assert len(decoder.noise) <= KEPT
    assert list(decoder.feed(PREAMBLE + encoded(Data(1, 2, b"x")))) == [Data(1, 2, b"x")]
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError, match="1 MiB"):
        for _ in range(MAX_NOISE // 4096 + 2):
            list(decoder.feed(b"y" * 4096))


@pytest.mark.parametrize(
    "rubbish",
    [
        b"Connection closed by foreign host.",
        HEADER.pack(3, 0, 0, 0),
        HEADER.pack(DATA, 0, 0, MAX_PAYLOAD + 1),
        HEADER.pack(MESSAGE, 0, 0, 1) + b"{",
        HEADER.pack(MESSAGE, 0, 0, 2) + b"[]",
        HEADER.pack(MESSAGE, 0, 0, 2) + b"{}",
        HEADER.pack(MESSAGE, 0, 0, 10) + b'{"type":1}',
        HEADER.pack(MESSAGE, 0, 0, 2) + b"\xff\xff",
        HEADER.pack(MESSAGE, 0, 0, MAX_PAYLOAD) + b"[" * MAX_PAYLOAD,
        HEADER.pack(MESSAGE, 0, 0, 5000) + b"9" * 5000,
    ],
)
def test_what_no_relay_writes_is_refused(rubbish: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameDecoder().feed(PREAMBLE + rubbish))


@given(st.dictionaries(st.text(), st.text(st.characters(codec=None))))
def test_a_command_is_one_line_that_says_the_same(body: dict[str, str]) -> None:
    line = encode_command(body)
    assert line.count(b"\n") == 1
    assert json.loads(line) == body
