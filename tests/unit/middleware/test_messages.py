from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import ConfigError
from trio_agent.middleware.contexts import Deliver, Refuse, RouteContext, Routing
from trio_agent.middleware.messages import Messages
from trio_agent.protocol.limits import MAX_QUEUED_MESSAGES
from trio_agent.protocol.ops import UserInput
from trio_agent.state.checkpoint import QueuedMessage


def waiting(*boundaries: Any) -> tuple[QueuedMessage, ...]:
    return tuple(
        QueuedMessage(owner="messages", id=str(i), boundary=boundary, text="x")
        for i, boundary in enumerate(boundaries)
    )


def route(
    handler: Messages,
    *,
    active: str | None = None,
    queue: tuple[QueuedMessage, ...] = (),
    **op: Any,
) -> Routing | None:
    return handler.route_message(
        RouteContext(
            submission_id="s",
            op=UserInput(text="hello", **op),
            active_turn_id=active,
            queue=queue,
        )
    )


def code(routing: Routing | None) -> str | None:
    return routing.code if isinstance(routing, Refuse) else None


def test_an_idle_session_starts_a_turn_whatever_the_message_asks() -> None:
    for delivery in (None, "steer", "queue"):
        assert route(Messages(), delivery=delivery) == Deliver(boundary="turn")


@pytest.mark.parametrize("boundary", ["turn", "queue"])
def test_an_idle_session_keeps_the_order_of_those_that_wait(boundary: str) -> None:
    assert route(Messages(), queue=waiting(boundary)) == Deliver(boundary="queue")


def test_a_message_for_a_turn_is_stale_while_none_runs() -> None:
    assert code(route(Messages(), target_turn_id="t")) == "stale_turn"


def test_a_message_for_another_turn_is_stale() -> None:
    assert code(route(Messages(), active="t", target_turn_id="u")) == "stale_turn"


@pytest.mark.parametrize("default", ["steer", "queue"])
@pytest.mark.parametrize("target", [None, "t"])
def test_a_running_turn_gets_what_the_message_asks_or_the_default(
    default: Any, target: str | None
) -> None:
    handler = Messages(default_delivery=default)

    for delivery in (None, "steer", "queue"):
        routing = route(handler, active="t", target_turn_id=target, delivery=delivery)
        assert routing == Deliver(boundary=delivery or default)


@pytest.mark.parametrize("active", [None, "t"])
def test_only_so_many_may_wait(active: str | None) -> None:
    handler = Messages(max_pending=2)

    assert code(route(handler, active=active, queue=waiting("queue"))) is None
    assert code(route(handler, active=active, queue=waiting("queue", "steer"))) == "queue_full"


def test_a_stale_message_is_stale_even_if_the_queue_is_full() -> None:
    full = waiting("queue")

    assert code(route(Messages(max_pending=1), queue=full, target_turn_id="t")) == "stale_turn"


@pytest.mark.parametrize(
    "options",
    [
        {"max_pending": 0},
        {"max_pending": MAX_QUEUED_MESSAGES + 1},
        {"max_pending": True},
        {"max_pending": 1.0},
        {"default_delivery": "turn"},
        {"default_delivery": None},
    ],
)
def test_options_outside_their_bounds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Messages(**options)


def test_options_at_their_bounds_are_accepted() -> None:
    assert code(route(Messages(max_pending=1))) is None
    assert code(route(Messages(max_pending=MAX_QUEUED_MESSAGES))) is None


@given(
    active=st.sampled_from([None, "t"]),
    target=st.sampled_from([None, "t", "u"]),
    delivery=st.sampled_from([None, "steer", "queue"]),
    queue=st.lists(st.sampled_from(["turn", "steer", "queue"]), max_size=4),
)
def test_a_steer_always_joins_a_turn_that_runs(
    active: str | None, target: str | None, delivery: Any, queue: list[str]
) -> None:
    routing = route(
        Messages(max_pending=3),
        active=active,
        queue=waiting(*queue),
        target_turn_id=target,
        delivery=delivery,
    )

    if isinstance(routing, Deliver):
        assert len(queue) < 3
        assert target in {None, active}
        assert (routing.boundary == "turn") <= (active is None)
        assert (routing.boundary == "steer") <= (active is not None)
