"""What refusals mean, whatever form and words a provider chooses."""

from __future__ import annotations

import email.utils
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import AuthError, ContextOverflowError, ProviderError
from trio_agent.model.failure import (
    event_refusal,
    is_overflow,
    refusal,
    retry_after_seconds,
    scrub,
)
from trio_agent.protocol.limits import MAX_ERROR_MESSAGE_BYTES

OVERFLOWS = [
    "This model's maximum context length is 128000 tokens. However, you asked for 1",
    "prompt is too long: 213000 tokens > 200000 maximum",
    "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
    "request (4031 tokens) exceeds the available context size (1024 tokens), try increasing it",
    "Your input exceeds the context window of this model. Please adjust your input",
    "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
    "Input is too long for requested model.",
    "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum",
    "This model's maximum prompt length is 131072 but the request contains 140000 tokens.",
    "too many tokens: total number of tokens in the prompt cannot exceed 4081",
    "Please reduce the length of the messages or completion.",
    "the prompt token count of 99999 exceeds the limit of 64000",
    "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000",
    "input length exceeds maximum context length",
]

OTHERS = [
    "Rate limit reached for gpt on tokens per min (TPM): Limit 30000, Requested 40000",
    "Request too large for model on tokens per minute (TPM): Limit 30000",
    "max_tokens: 64000 > 32000, which is the maximum allowed number of output tokens",
    "You exceeded your current quota, please check your plan",
    "Invalid value for 'temperature'",
    "tools.0.name: string too long",
    "no reason given",
]


@pytest.mark.parametrize("message", OVERFLOWS)
def test_every_way_to_say_that_a_request_is_too_large(message: Any) -> None:
    assert is_overflow(400, "", message)
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error"}})
    assert isinstance(refusal("p", 400, body), ContextOverflowError)
    assert not is_overflow(429, "rate_limit_exceeded", message)


@pytest.mark.parametrize("message", OTHERS)
def test_limits_of_other_kinds_are_no_overflow(message: Any) -> None:
    assert not is_overflow(400, "invalid_request_error", message)


SHAPES = [
    {"error": {"message": "what", "type": "t", "code": None}},
    {"error": "what"},
    {"message": "what"},
    {"detail": "what"},
    {"type": "error", "error": {"type": "invalid_request_error", "message": "what"}},
    [{"error": {"code": 400, "message": "what", "status": "INVALID_ARGUMENT"}}],
    "what",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_providers_own_message_is_found_in_every_shape(shape: Any) -> None:
    error = refusal("p", 400, json.dumps(shape))

    assert "what" in str(error)
    assert "{" not in str(error)
    assert "[" not in str(error)


EVENTS = [
    ({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, 529, True),
    ({"type": "error", "error": {"type": "api_error", "message": "x"}}, 500, True),
    ({"type": "error", "error": {"type": "rate_limit_error", "message": "x"}}, 429, True),
    ({"type": "error", "error": {"type": "invalid_request_error", "message": "x"}}, 400, False),
    ({"type": "error", "code": "rate_limit_exceeded", "message": "x"}, 429, True),
    ({"code": "server_error", "message": "x"}, 500, True),
    ({"error": {"code": 503, "message": "x"}}, 503, True),
    ({"error": {"code": "502", "message": "x"}}, 502, True),
    ({"error": {"message": "x", "type": "strange"}}, 500, True),
    (None, 500, True),
]


@pytest.mark.parametrize(("event", "status", "retryable"), EVENTS)
def test_an_error_in_a_stream_has_the_status_it_would_have_had(
    event: Any, status: Any, retryable: Any
) -> None:
    error = event_refusal("p", event)

    assert (error.status, error.retryable) == (status, retryable)


def test_refused_credentials_in_a_stream_are_that() -> None:
    event = {"type": "error", "error": {"type": "authentication_error", "message": "x"}}

    assert isinstance(event_refusal("p", event), AuthError)


DATE = "Mon, 30 Nov 2026 10:00:00 GMT"
NOW = email.utils.parsedate_to_datetime(DATE).timestamp()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": " 7 "}, 7.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "86400"}, 86_400.0),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "1e999"}, None),
        ({"retry-after": "Mon, 30 Nov 2026 10:00:30 GMT"}, 30.0),
        ({"retry-after": "Mon, 30 Nov 2026 11:00:30 +0100"}, 30.0),
        ({"retry-after": "Mon, 30 Nov 2026 09:00:00 GMT"}, 0.0),
        ({"retry-after": "Mon, 99 Nov 2026 09:00:00 GMT"}, None),
        (
            {
                "retry-after": "Tue, 01 Dec 2026 10:00:05 GMT",
                "date": "Tue, 01 Dec 2026 10:00:00 GMT",
            },
            5.0,
        ),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "x", "retry-after": "9"}, 9.0),
    ],
)
def test_a_wait_is_understood_as_seconds_or_as_a_date(headers: Any, expected: Any) -> None:
    assert retry_after_seconds(headers, now=NOW) == expected


@given(st.dictionaries(st.sampled_from(["retry-after", "date", "retry-after-ms"]), st.text()))
def test_no_header_breaks_the_reading_of_a_wait(headers: Any) -> None:
    found = retry_after_seconds(headers, now=NOW)

    assert found is None or found >= 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "message", "type", "code", "detail", "status", "x"]),
            inner,
        )
    ),
    max_leaves=8,
)


@given(json_values, st.sampled_from([400, 401, 413, 429, 500]))
def test_every_body_becomes_one_short_error(value: Any, status: Any) -> None:
    for error in (
        refusal("p", status, json.dumps(value)),
        refusal("p", status, str(value)),
        event_refusal("p", value),
    ):
        assert isinstance(error, ProviderError)
        assert str(error)
        assert len(str(error).encode()) <= MAX_ERROR_MESSAGE_BYTES


SECRETS = [
    "sk-proj-abcdefghijklmnop",
    "sk-ant-REDACTED",
    "AIzaSyD-something-secret",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "text",
    ["bad key {}", "Authorization: Bearer {}", '"x-api-key": "{}"', "bearer {}", "{}", "({})"],
)
def test_no_credential_is_shown(secret: Any, text: Any) -> None:
    assert secret not in scrub(text.format(secret), [secret, ""])
    if secret.startswith("sk-") or ":" in text or "bearer" in text:
        assert secret not in scrub(text.format(secret))


def test_ordinary_words_are_kept() -> None:
    text = "the key-value store api-docs say: sk is too short"

    assert scrub(text) == text
