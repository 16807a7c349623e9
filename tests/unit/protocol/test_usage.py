from __future__ import annotations

import attrs
import pytest
from hypothesis import given

from trio_agent.errors import InternalError
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.protocol.usage import TokenUsage
from trio_agent.testing import strategies

PARTS = [field.name for field in attrs.fields(TokenUsage)]


@given(strategies.usages(), strategies.usages(), strategies.usages())
def test_adding_is_by_part_and_in_any_order(
    a: TokenUsage, b: TokenUsage, c: TokenUsage
) -> None:
    for name in PARTS:
        assert getattr(a + b, name) == getattr(a, name) + getattr(b, name)
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + TokenUsage() == a


@pytest.mark.parametrize("name", PARTS)
def test_a_sum_never_leaves_its_range(name: str) -> None:
    most = TokenUsage(**{name: MAX_INTEGER})

    assert most + TokenUsage() == most
    with pytest.raises(InternalError):
        most + TokenUsage(**{name: 1})
    with pytest.raises(InternalError):
        TokenUsage() + TokenUsage(**{name: -1})
