"""What a provider's refusal means, in our words; pure.

Whatever form a refusal has (a status, an event in a stream that began with
status 200, a page that some proxy made up), it becomes one of our errors: it is
bounded to 2 KiB, free of credentials, and says whether asking again may help.
"""

from __future__ import annotations

import email.utils
import json  # a body that is not UTF-8 or not quite JSON must not fail here
import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

from trio_agent.errors import AuthError, ContextOverflowError, ProviderError
from trio_agent.model.wire import list_member, member, text_member
from trio_agent.protocol.limits import MAX_ERROR_MESSAGE_BYTES
from trio_agent.protocol.text import Json, cut_end, replace_surrogates

_RETRYABLE: Final = frozenset({408, 409, 429})

_STATUS_OF_TYPE: Final[Mapping[str, int]] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "api_error": 500,
    "server_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""What an error inside a stream would have had as its status."""

_OVERFLOW_CODES: Final = frozenset(
    {
        "context_length_exceeded",
        "context_window_exceeded",
        "exceed_context_size_error",
        "model_context_window_exceeded",
        "request_too_large",
        "string_above_max_length",
    }
)

_OVERFLOW_WORDS: Final = re.compile(
    r"""
      context[\s_-]*(length|window|size|limit)
    | (prompt|input|request|messages?)\b.{0,40}\b(is|are|were)?\s*too\s+(long|large)\b
    | too\s+(many|large)\b.{0,40}\btokens\b
    | \btoo\s+large\s+for\s+(the\s+)?model
    | maximum\s+(prompt|input|sequence|context|number\s+of)\s*\w*\s*(length|tokens?)
    | (prompt|input|request)\b.{0,60}\bexceed(s|ed|ing)?\b.{0,60}\b(token|limit|maximum|length)
    | \btoken\s+(limit|count)\b.{0,40}\bexceed
    | exceed(s|ed)?\b.{0,60}\b(token\s+limit|max(imum)?\s+(input\s+)?tokens|max_model_len)
    | reduce\s+the\s+length\s+of\s+(the|your)
    | \bmax_(new_)?tokens`?\s+must\s+be\s*<=
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
"""How providers say that a request is larger than their window."""

_NO_OVERFLOW: Final = re.compile(
    r"per\s+(minute|day|hour)|rate[\s_-]*limit|quota|max_(completion_|output_)?tokens\s*(:|is\s+too|>)",
    re.IGNORECASE,
)
"""Words that make it a limit of another kind: a rate, or a bad parameter."""

_CREDENTIAL: Final = re.compile(
    r"(?i)((?:\bx-api-key\b|\bauthorization\b)[\"':=\s]+(?:(?:bearer|basic)\s+)?"
    r"|\b(?:bearer|basic)\s+)\S+"
    r"|\b(?:sk|pk|rk|xai|gsk|key|api)[-_][A-Za-z0-9*._-]{8,}"
)


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """Return *text* without *secrets* and whatever looks like a credential, in 2 KiB."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "[secret]")
    text = _CREDENTIAL.sub(lambda found: (found[1] or "") + "[secret]", text)
    return cut_end(replace_surrogates(text), MAX_ERROR_MESSAGE_BYTES)


def retry_after_seconds(headers: Mapping[str, str], *, now: float) -> float | None:
    """Return how many seconds a provider asks us to wait, or None if it does not.

    Understands ``retry-after-ms``, and ``retry-after`` as seconds (also with a
    fraction) or as a date; a date is compared with the answer's own ``date``
    if it has one, so a wrong clock here or there does not matter.

    Args:
        headers: Of the answer, with lower-case names.
        now: The wall clock in seconds since 1970.
    """
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after", "").strip()
    seconds = _number(value)
    if seconds is not None:
        return seconds
    when = _date(value)
    if when is None:
        return None
    return max(0.0, when - (_date(headers.get("date", "")) or now))


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _date(value: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def is_overflow(status: int | None, code: str, message: str) -> bool:
    """Return whether a refusal says that the request is larger than the window."""
    if code in _OVERFLOW_CODES or status == 413:
        return True
    if status == 429 or _NO_OVERFLOW.search(message):
        return False
    return _OVERFLOW_WORDS.search(message) is not None


def refusal(
    label: str,
    status: int,
    body: str,
    *,
    retry_after: float | None = None,
    secrets: Iterable[str] = (),
) -> ProviderError:
    """Return the error for an answer with an HTTP error *status*.

    Args:
        label: Who refused; the message begins with it.
        status: The HTTP status.
        body: As it came; the provider's own message is preferred, if there is one.
        retry_after: Seconds the provider asked for.
        secrets: What must not be shown.
    """
    try:
        found: Json = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    message, code = _words(found)
    message = message or body.strip() or "no reason given"
    text = scrub(f"{label}: {message} (status {status})", secrets)
    return _error(text, status, is_overflow(status, code, message), retry_after)


def event_refusal(label: str, error: Json, *, secrets: Iterable[str] = ()) -> ProviderError:
    """Return the error for an error that came inside a stream with status 200.

    It may be asked again unless it says that the request itself is wrong.
    """
    message, code = _words(error)
    status = _STATUS_OF_TYPE.get(code)
    if status is None:
        status = next((n for n in _codes(error) if 400 <= n <= 599), 500)
    text = scrub(f"{label}: {message or 'no reason given'} (status {status})", secrets)
    return _error(text, status, is_overflow(status, code, message), None)


def _codes(error: Json) -> list[int]:
    found = [member(error, "code"), member(error, "error", "code"), member(error, "status")]
    numbers = [n for n in found if isinstance(n, int) and not isinstance(n, bool)]
    return numbers + [int(n) for n in found if isinstance(n, str) and n.isdecimal()]


def _words(error: Json) -> tuple[str, str]:
    """Return a provider's message and its stable word, from any of the usual forms."""
    found = list_member({"": error}, "")
    error = found[0] if found else error
    inner = member(error, "error")
    if isinstance(inner, str):
        return inner, text_member(error, "code") or text_member(error, "type")
    if isinstance(error, str):
        return error, ""
    error = error if inner is None else inner
    message = text_member(error, "message")
    if not message:
        detail = member(error, "detail")
        message = detail if isinstance(detail, str) else json.dumps(detail) if detail else ""
    codes = [text_member(error, "code"), text_member(error, "type")]
    known = [code for code in codes if code in _OVERFLOW_CODES or code in _STATUS_OF_TYPE]
    return message, next(iter([*known, *filter(None, codes)]), "")


def _error(text: str, status: int, overflow: bool, retry_after: float | None) -> ProviderError:
    if overflow:
        return ContextOverflowError(text, status=status)
    if status in {401, 403}:
        return AuthError(text, status=status)
    return ProviderError(
        text,
        retryable=status in _RETRYABLE or status >= 500,
        status=status,
        retry_after=retry_after,
    )
