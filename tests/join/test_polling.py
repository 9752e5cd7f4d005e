"""Calls that may never return, asked of processes that may be stopped."""

from __future__ import annotations

import threading
import time

from ddpkit.join.store import Question


def test_a_question_is_asked_again_until_it_was_answered_by_yes_once() -> None:
    answers = iter([False, True, False])
    question = Question(lambda: next(answers), 60.0)
    assert [question.is_yes() for _ in range(3)] == [False, True, True]


def test_an_error_is_no_yes() -> None:
    def ask() -> bool:
        raise RuntimeError("connection reset")

    question = Question(ask, 60.0)
    assert not question.is_yes() and not question.is_yes()


def test_nothing_is_asked_while_an_answer_is_open_and_a_late_one_counts() -> None:
    asked = []
    goes_on = threading.Event()

    def ask() -> bool:
        asked.append(time.monotonic())
        return goes_on.wait(60.0)

    question = Question(ask, 0.01)
    assert not question.is_yes() and not question.is_yes()
    assert len(asked) == 1
    goes_on.set()
    while not question.is_yes():
        time.sleep(0.01)
