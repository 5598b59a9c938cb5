"""Frames: every message survives every split of the byte stream, and garbage is named, not decoded."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.engine.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Hello,
    Outputs,
    ProtocolError,
    SamplingParams,
    Submit,
    TokenOutput,
    encode_frame,
    take_frames,
)

u64 = st.integers(0, 2**64 - 1)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0, 100),
    seed=u64,
    stop_token_ids=st.tuples(st.integers(0, 2**31)),
)
messages = st.one_of(
    st.builds(Hello, version=st.integers(0, 9), pid=st.integers(1, 2**22)),
    st.builds(Abort, request_id=u64),
    st.builds(Submit, request_id=u64, token_ids=token_ids, num_prompt_tokens=st.integers(0, 20), sampling=sampling),
    st.builds(
        Outputs,
        step=st.integers(0, 2**40),
        items=st.lists(
            st.builds(TokenOutput, request_id=u64, token_id=st.integers(-1, 2**31), logprob=st.floats(-50, 0)),
            max_size=5,
        ),
    ),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(st.lists(messages, max_size=5), st.lists(st.integers(0, 2000), max_size=8))
def test_messages_survive_every_split_of_the_stream(sent, cuts):
    stream = b"".join(map(encode_frame, sent))
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    buffer, received = bytearray(), []
    for begin, end in itertools.pairwise(edges):
        buffer += stream[begin:end]
        received += take_frames(buffer)
    assert received == sent
    assert not buffer


def test_an_oversized_announcement_is_refused_before_its_bytes_arrive():
    with pytest.raises(ProtocolError, match=f"{MAX_FRAME_BYTES + 1} bytes announced"):
        take_frames(bytearray((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


def test_an_oversized_message_is_not_sent():
    with pytest.raises(ProtocolError, match="at most"):
        encode_frame(Submit(1, [2**31] * (MAX_FRAME_BYTES // 4), 1, SamplingParams(max_tokens=1)))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x81\xa4type\xa5other", b"GET / HTTP/1.1"])
def test_an_undecodable_payload_is_named(payload):
    with pytest.raises(ProtocolError, match="undecodable"):
        take_frames(bytearray(len(payload).to_bytes(4, "little") + payload))
