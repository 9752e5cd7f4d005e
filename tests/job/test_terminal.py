"""Texts of other ranks are shown so that a terminal takes nothing in them for a command."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from processes import free_port, platform_env, run

import ddpkit
from ddpkit.errors import printable
from ddpkit.job import lifecycle
from ddpkit.parsing import parse
from ddpkit.watch import messages as monitor_messages

ODD = "\x1b]0;title\x07\x1b[31mred\x9b1m\r\x08"
SHOWN = r"\x1b]0;title\x07\x1b[31mred\x9b1m\r\x08"


def is_shown(text: str) -> bool:
    return SHOWN in text and not set(text) & set(ODD[0:1] + "\x07\x9b\r\x08")


def test_lines_and_letters_of_all_languages_stay() -> None:
    text = "line 1\n\tline 2: größer, 损失\u3000\u200d"
    assert printable(text + ODD + "\udc80") == text + SHOWN + r"\udc80"


@pytest.mark.ranks(2, 3)
def test_a_text_of_another_rank_is_escaped(rank: int) -> None:
    size = ddpkit.get_world_size()
    assert lifecycle.exchange(f"{rank}{ODD}\n") == [f"{other}{SHOWN}\n" for other in range(size)]
    with pytest.raises(ddpkit.MismatchError) as different:
        ddpkit.all_reduce_mean({ODD if rank == 1 else "loss": 1.0})
    assert is_shown(str(different.value).replace(repr(ODD), SHOWN))
    with pytest.raises((ddpkit.PeerError, ValueError)) as raised, ddpkit.together():
        if rank == 1:
            raise ValueError(ODD)
    if rank != 1:
        assert is_shown(str(raised.value))


def test_what_the_watch_hears_and_the_store_holds_is_escaped() -> None:
    fields = {"rank": 1, "host": ODD, "type": ODD, "message": f"{ODD}\n", "traceback": ODD}
    message = monitor_messages.parse(monitor_messages.encode(failure=fields), 2)
    assert message is not None and message.failure is not None
    assert is_shown(str(message.failure.to_error()))
    request = {"rank": 1, "reason": ODD}
    found = parse(monitor_messages.encode(request=request), "key", {"request": {"rank": int, "reason": str}})
    assert found["request"]["reason"] == SHOWN


def raise_odd() -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=30)):
        if os.environ["RANK"] == "1":
            raise ValueError(f"{ODD}\nsecond line")
        ddpkit.barrier(ODD)


def test_the_terminal_of_one_rank_takes_no_commands_of_another() -> None:
    port = free_port()
    ended = run(raise_odd, [platform_env(rank, 2, port) for rank in range(2)], timeout=60)
    assert is_shown(ended[0].output) and "\nsecond line" in ended[0].output.replace("[rank0]: ", ""), ended[0].output
