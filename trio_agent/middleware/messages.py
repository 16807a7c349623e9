"""`Messages`: how a user's message enters a session, idle or busy."""

from __future__ import annotations

from typing import Literal

from trio_agent.errors import ConfigError
from trio_agent.middleware.base import Middleware
from trio_agent.middleware.contexts import Deliver, Refuse, RouteContext, Routing
from trio_agent.protocol.limits import MAX_PENDING_DEFAULT, MAX_QUEUED_MESSAGES


class Messages(Middleware):
    """Deliver messages: start a turn, join the running one, or wait for the next.

    While the session is idle a message starts a turn, behind those that already
    wait for one. While a turn runs, the message's own ``delivery`` decides, else
    *default_delivery*: ``"steer"`` joins this turn at its next model request,
    ``"queue"`` starts a turn of its own afterwards. A message that names a turn is
    refused as ``stale_turn`` unless exactly that turn runs.

    Args:
        default_delivery: For messages that do not say.
        max_pending: How many may wait; one more is refused as ``queue_full``. 1 to
            1,024.

    Raises:
        ConfigError: If an argument is none of these.
    """

    def __init__(
        self,
        *,
        default_delivery: Literal["steer", "queue"] = "steer",
        max_pending: int = MAX_PENDING_DEFAULT,
    ) -> None:
        if default_delivery not in {"steer", "queue"}:
            raise ConfigError(
                f"default_delivery is {default_delivery!r}; it must be 'steer' or 'queue'"
            )
        if type(max_pending) is not int or not 1 <= max_pending <= MAX_QUEUED_MESSAGES:
            raise ConfigError(
                f"max_pending is {max_pending!r}; it must be 1 to {MAX_QUEUED_MESSAGES:,}"
            )
        self._default_delivery: Literal["steer", "queue"] = default_delivery
        self._max_pending = max_pending

    def route_message(self, ctx: RouteContext) -> Routing:
        """See `Middleware.route_message`."""
        target, active = ctx.op.target_turn_id, ctx.active_turn_id
        if target is not None and target != active:
            running = "no turn runs" if active is None else f"turn {active!r} runs"
            return Refuse(
                code="stale_turn", message=f"the message is for turn {target!r}; {running}"
            )
        if len(ctx.queue) >= self._max_pending:
            return Refuse(
                code="queue_full",
                message=(
                    f"{len(ctx.queue)} messages wait already; at most {self._max_pending} are "
                    "allowed: wait for the turn to end, or cancel one"
                ),
            )
        if active is not None:
            return Deliver(boundary=ctx.op.delivery or self._default_delivery)
        ahead = any(message.boundary != "steer" for message in ctx.queue)
        return Deliver(boundary="queue" if ahead else "turn")
