"""Which exception leaves: the caller's own as it came, ours as `SessionBrokenError`."""

from __future__ import annotations

import pytest
import trio

from trio_agent import SessionBrokenError
from trio_agent.agent.boundary import raise_for_caller


def test_the_callers_exception_leaves_as_the_same_object() -> None:
    theirs = KeyError("x")
    with pytest.raises(KeyError) as caught:
        raise_for_caller(ExceptionGroup("nursery", [theirs]), theirs)
    assert caught.value is theirs


def test_the_callers_group_leaves_as_the_same_object() -> None:
    theirs = ExceptionGroup("mine", [ValueError(1), ValueError(2)])
    rebuilt = ExceptionGroup("nursery", [theirs.derive(theirs.exceptions)])
    with pytest.raises(ExceptionGroup) as caught:
        raise_for_caller(rebuilt, theirs)
    assert caught.value is theirs


def test_our_failure_is_the_cause_and_hides_no_half() -> None:
    theirs, ours = KeyError("theirs"), OSError("ours")
    with pytest.raises(SessionBrokenError) as caught:
        raise_for_caller(ExceptionGroup("nursery", [theirs, ours]), theirs)
    assert caught.value.__cause__ is ours
    assert ours.__context__ is theirs


def test_two_real_failures_are_both_shown() -> None:
    group = ExceptionGroup("nursery", [OSError("a"), OSError("b")])
    with pytest.raises(SessionBrokenError) as caught:
        raise_for_caller(group, None)
    assert caught.value.__cause__ is group


def test_an_echo_of_the_failure_does_not_hide_it() -> None:
    ours = OSError("disk")
    echo = SessionBrokenError("an earlier write failed")
    echo.__cause__ = ours
    with pytest.raises(SessionBrokenError) as caught:
        raise_for_caller(ExceptionGroup("nursery", [echo, ours]), None)
    assert caught.value.__cause__ is ours


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_keyboard_interrupt_comes_before_everything(kind: type[BaseException]) -> None:
    stop = kind()
    with pytest.raises(kind) as caught:
        raise_for_caller(BaseExceptionGroup("nursery", [OSError("ours"), stop]), None)
    assert caught.value is stop


async def test_no_cancellation_is_reported_beside_a_failure() -> None:
    ours = OSError("disk")
    cancelled: BaseException | None = None
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as exc:
            cancelled = exc
            raise
    assert cancelled is not None
    with pytest.raises(SessionBrokenError) as caught:
        raise_for_caller(BaseExceptionGroup("nursery", [cancelled, ours]), None)
    assert caught.value.__cause__ is ours
