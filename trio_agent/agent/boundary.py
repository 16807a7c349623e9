"""The one place that decides which exception leaves `create_agent`.

What the caller's block raised, and what the start-up raised, leaves as it came: the
same object, in no group. All else is the session's, and leaves as
`SessionBrokenError`, its cause kept.

A group that passes a cancel scope may be rebuilt, so exceptions are told apart by
their leaves. An exception is never rebuilt here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn, cast

import trio

from trio_agent.errors import SessionBrokenError


def raise_for_caller(raised: BaseException, theirs: BaseException | None) -> NoReturn:
    """Raise what the caller of `create_agent` should see in place of *raised*.

    Args:
        raised: What came out of the session's nursery.
        theirs: What the caller's block raised, if it did.
    """
    own = [] if theirs is None else list(_leaves(theirs))
    known = {id(leaf) for leaf in own}
    ours = [leaf for leaf in _leaves(raised) if id(leaf) not in known]
    failures = [leaf for leaf in ours if not isinstance(leaf, trio.Cancelled)]
    for leaf in own + failures:
        if not isinstance(leaf, (Exception, trio.Cancelled)):
            _reraise(leaf)  # KeyboardInterrupt and its kind come before anything else
    if failures:
        cause = _first_cause(failures, raised)
        if theirs is not None and not isinstance(theirs, trio.Cancelled):
            cause.__context__ = cause.__context__ or theirs  # neither half is hidden
        raise SessionBrokenError(f"the session failed: {cause}") from cause
    _reraise(ours[0] if theirs is None else theirs)


def raise_for_opener(raised: BaseException, failure: BaseException | None) -> NoReturn:
    """Raise what the caller should see of an opening that failed: the plain error.

    Args:
        raised: What came out of the opening, perhaps wrapped by a middleware's nursery.
        failure: What went wrong, as it was raised, if it was seen inside of one.
    """
    inside = {id(leaf) for leaf in _leaves(raised)}
    if failure is not None and inside == {id(leaf) for leaf in _leaves(failure)}:
        _reraise(failure)
    _reraise(raised)


def _first_cause(failures: list[BaseException], raised: BaseException) -> BaseException:
    """Return the failure, or the group if there are several that are not each other's echo."""
    causes: list[BaseException] = []
    for failure in failures:
        cause = failure
        while isinstance(cause, SessionBrokenError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if all(cause is not known for known in causes):
            causes.append(cause)
    return causes[0] if len(causes) == 1 else raised


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for child in cast("BaseExceptionGroup[BaseException]", exc).exceptions:
            yield from _leaves(child)
    else:
        yield exc


def _reraise(exc: BaseException) -> NoReturn:
    context = exc.__context__
    try:
        raise exc
    finally:
        exc.__context__ = context
        del exc, context
