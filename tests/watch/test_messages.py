from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpkit.parsing import encode
from ddpkit.rendezvous.failures import Failure
from ddpkit.watch.messages import LONGEST, Lines, Message, Steps, StopRequest, _describe, parse, shows_token

WORLD_SIZE = 4
FAILURE = Failure.of(1, ValueError("boom"))
FIELDS = asdict(FAILURE)
REQUEST = {"rank": 2, "host": "node2", "reason": "got SIGTERM", "signal": 15, "step": 0}
DECISION = REQUEST | {"step": 7}
STEPS = {"rank": 1, "number": 6}
BAD_RANKS = ["1", True, None, -2, 4, 99, 1.0, 10**30, [1], {}, float("nan"), float("inf")]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([1, -1, 99]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def records(valid: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Records with some of these fields, right or wrong."""
    return st.fixed_dictionaries({}, optional={name: values | st.just(value) for name, value in valid.items()})


failures = records(FIELDS)
messages = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["token", "rank", "left", "exiting", "code"], values),
        "failure": values | failures | st.just(FIELDS),
        "wants_stop": values | records(REQUEST) | st.just(REQUEST),
        "steps": values | records(STEPS) | st.just(STEPS),
        "stop": values | records(DECISION) | st.just(DECISION),
        "asks_steps": values,
    },
)


def believable(message: Message | None) -> bool:
    """Whether each field of a message is of the kind that the watch relies on."""
    if message is None:
        return True
    for rank in (message.rank, message.left, message.exiting):
        if rank is not None and (type(rank) is not int or not 0 <= rank < WORLD_SIZE):
            return False
    if message.failure is not None and not believable_failure(message.failure):
        return False
    return message.code is None and believable_stop(message)


def believable_stop(message: Message) -> bool:
    if message.asks_steps not in (None, True):
        return False
    if message.steps is not None and not (0 <= message.steps.rank < WORLD_SIZE and type(message.steps.number) is int):
        return False
    for request in filter(None, [message.wants_stop, message.stop]):
        kinds = list(map(type, asdict(request).values()))
        if kinds != [int, str, str, int, int] or not 0 <= request.rank < WORLD_SIZE:
            return False
    return True


def believable_failure(failure: Failure) -> bool:
    fields = asdict(failure)
    rank = fields.pop("rank")
    return type(rank) is int and -1 <= rank < WORLD_SIZE and all(type(text) is str for text in fields.values())


@given(messages)
def test_no_message_of_wrong_types_is_believed(fields: dict[str, Any]) -> None:
    assert believable(parse(json.dumps(fields).encode(), WORLD_SIZE))


@given(st.binary())
def test_no_garbage_is_believed(line: bytes) -> None:
    assert believable(parse(line, WORLD_SIZE))
    shows_token(line, "secret")


@pytest.mark.parametrize("field", ["rank", "left", "exiting"])
@pytest.mark.parametrize("rank", BAD_RANKS, ids=str)
def test_what_is_no_rank_is_not_believed(field: str, rank: object) -> None:
    assert parse(encode(**{field: rank}), WORLD_SIZE) is None
    assert parse(encode(failure=FIELDS | {"rank": rank}), WORLD_SIZE) is None


@pytest.mark.parametrize("name", ["host", "type", "message", "traceback"])
@pytest.mark.parametrize("value", [None, 1, ["text"], {"a": 1}, True], ids=str)
def test_a_failure_consists_of_text(name: str, value: object) -> None:
    assert parse(encode(failure=FIELDS | {name: value}), WORLD_SIZE) is None
    without = {key: FIELDS[key] for key in FIELDS if key != name}
    assert parse(encode(failure=without), WORLD_SIZE) is None


@pytest.mark.parametrize("record", [None, [], [FIELDS], "lost", 1, True, {}], ids=str)
def test_a_failure_is_a_record(record: object) -> None:
    assert parse(encode(failure=record), WORLD_SIZE) is None


def test_a_failure_arrives_as_it_was_sent() -> None:
    for rank in (-1, 0, 3):
        failure = replace(FAILURE, rank=rank)
        assert parse(encode(failure=failure), WORLD_SIZE) == Message(failure=failure)


def test_the_longest_failure_fits_into_a_line() -> None:
    error = ValueError("\U0001f600" * 20_000)
    failure = replace(Failure.of(1, error), traceback="\U0001f600" * 50_000)
    line = encode(token="t", failure=failure)
    assert len(line) < LONGEST
    assert parse(line, WORLD_SIZE) == Message(failure=failure)


def test_text_that_cannot_be_written_is_escaped() -> None:
    line = encode(failure=FIELDS | {"message": "half a pair: \ud800"})
    message = parse(line, WORLD_SIZE)
    assert message is not None and message.failure is not None
    assert message.failure.message == "half a pair: \\ud800"


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"rank":' * 50_000, b"1" * 100_000, b"\xff\xfe", b'{"rank": 1', b"null", b"[]", b"1"]
)
def test_odd_json_is_no_message(line: bytes) -> None:
    assert parse(line, WORLD_SIZE) is None


@given(st.lists(st.binary(max_size=8).map(lambda line: line.replace(b"\n", b"")), max_size=5), st.data())
def test_lines_are_the_same_wherever_the_stream_is_split(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    splitter, found = Lines(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += splitter.feed(stream[:size])
        stream = stream[size:]
    assert found == lines


def test_a_line_that_is_too_long_is_left_out_and_the_next_is_heard() -> None:
    splitter = Lines()
    half, longest = b"a" * (LONGEST // 2 + 1), b"c" * LONGEST
    pieces = [half, half, half, b"a\nshort\n", b"b" + longest + b"\n", longest + b"\n"]
    assert [splitter.feed(piece) for piece in pieces] == [[], [], [], [b"short"], [], [longest]]


@pytest.mark.parametrize(
    "line", [b"", b"{", b"\xff", b'{"token": "other"}', b'{"rank": 1, "token": "secret"}', b"\x00" * 9]
)
def test_only_a_line_that_begins_with_the_token_is_read(line: bytes) -> None:
    assert not shows_token(line, "secret")
    assert shows_token(encode(token="secret", rank=1), "secret")


def test_a_main_thread_without_frames_is_not_described_by_those_of_the_caller() -> None:
    """As while Python writes the rest of its output at the end."""
    assert _describe(None) == ("", "", [])


def test_what_is_said_of_a_stop_arrives_as_it_was_sent() -> None:
    message = parse(encode(wants_stop=REQUEST), WORLD_SIZE)
    assert message is not None
    assert message.wants_stop == StopRequest(**REQUEST)
    message = parse(encode(steps=STEPS), WORLD_SIZE)
    assert message is not None
    assert message.steps == Steps(**STEPS)
    message = parse(encode(stop=DECISION), WORLD_SIZE)
    assert message is not None
    assert message.stop == StopRequest(**DECISION)


@pytest.mark.parametrize("rank", BAD_RANKS, ids=str)
def test_a_stop_is_of_a_rank_that_there_is(rank: object) -> None:
    assert parse(encode(wants_stop=REQUEST | {"rank": rank}), WORLD_SIZE) is None
    assert parse(encode(steps=STEPS | {"rank": rank}), WORLD_SIZE) is None
    assert parse(encode(stop=DECISION | {"rank": rank}), WORLD_SIZE) is None
