"""What stands before a model request: steers, hooks, limits; then the step begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trio_agent.agent.ending import Ending
from trio_agent.agent.opening import Opening, parts_of
from trio_agent.agent.request import build_request, check_size, request_digest
from trio_agent.agent.session import Part, told
from trio_agent.agent.steering import steers_of, take_steers
from trio_agent.errors import StepLimitError
from trio_agent.middleware.contexts import Effects
from trio_agent.model.base import ModelRequest
from trio_agent.protocol.events import Warning  # noqa: A004  # the wire's word
from trio_agent.state.changes import StepBegan
from trio_agent.state.checkpoint import ActiveExecution, Checkpoint
from trio_agent.state.machine import Phase, phase_of

if TYPE_CHECKING:
    from trio_agent.agent.turn import Turn


def opening_parts(turn: Turn, checkpoint: Checkpoint) -> list[Part]:
    """Return the beginning of the next step, if nothing stands between.

    Pure, but for the request that *turn* keeps. A steer that waits, hooks on the
    request, the step limit or a request that is too large stand between: then
    `prepare` deals with it.
    """
    opening, active = turn.opening, checkpoint.active_execution
    if opening.stack.has("pre_model") or opening.stack.has("model_request"):
        return []
    if phase_of(checkpoint) is not Phase.READY or steers_of(checkpoint):
        return []
    if active is None or active.interrupted is not None or _over_limit(opening, active):
        return []
    route = opening.route_of(checkpoint)
    if _size(opening, checkpoint) > opening.window(route):
        return []
    request = build_request(opening, checkpoint, route, opening.new_id())
    return [_begun(turn, checkpoint, request, replaced=False)]


async def prepare(turn: Turn) -> None:
    """Take in steers, run the hooks on the request, and begin the step."""
    opening, session, active = turn.opening, turn.opening.session, turn.active()
    if active is not None and _over_limit(opening, active):
        most = opening.config.max_model_steps
        raise StepLimitError(
            f"the turn took {most} model steps; max_model_steps allows no more"
        )
    await take_steers(turn)
    if opening.stack.has("pre_model") and await _pre_model(turn):
        return
    checkpoint = session.checkpoint
    route = opening.route_of(checkpoint)
    check_size(_size(opening, checkpoint), opening.window(route), route)
    request = build_request(opening, checkpoint, route, opening.new_id())
    replaced = False
    if opening.stack.has("model_request"):
        turn.activity = "a model_request hook"
        request, replaced = await opening.stack.model_request(
            opening.runtime, turn.turn_id, request
        )

    def begin(checkpoint: Checkpoint) -> Sequence[Part]:
        if steers_of(checkpoint):
            return []  # one has come meanwhile: take it in first
        return [_begun(turn, checkpoint, request, replaced=replaced)]

    await session.transact(begin, cause=turn.submission_id)


def _begun(
    turn: Turn, checkpoint: Checkpoint, request: ModelRequest, *, replaced: bool
) -> StepBegan:
    turn.request = request
    return StepBegan(
        step_id=request.step_id,
        started_at_ms=turn.opening.now_ms(),
        route=request.route,
        request_digest=request_digest(checkpoint, request, replaced=replaced),
    )


def _over_limit(opening: Opening, active: ActiveExecution) -> bool:
    return active.next_model_step >= opening.config.max_model_steps


def _size(opening: Opening, checkpoint: Checkpoint) -> int:
    return opening.meter.tokens(checkpoint) + opening.fixed_tokens


async def _pre_model(turn: Turn) -> bool:
    """Run the hooks before a request; return whether it must not be made now."""
    opening, session, active = turn.opening, turn.opening.session, turn.active()
    checkpoint, effects = session.checkpoint, Effects()
    turn.activity = "a pre_model hook"
    failure: Exception | None = None
    try:
        await opening.stack.pre_model(
            opening.runtime,
            turn.turn_id,
            effects,
            checkpoint.states,
            items=tuple(checkpoint.context),
            step_index=0 if active is None else active.next_model_step,
            context_window=opening.window(opening.route_of(checkpoint)),
            estimated_input_tokens=_size(opening, checkpoint),
        )
    except Exception as exc:
        failure = exc
    reason = effects.stop_reason
    if failure is None and reason is not None and not steers_of(session.checkpoint):
        await turn.run_end_hooks(Ending("completed", "hook"))

        def stop(checkpoint: Checkpoint) -> Sequence[Part]:
            if not turn.may_end(checkpoint):
                return parts_of(effects)
            warning = told(Warning(code="stopped_by_hook", message=reason))
            return [*parts_of(effects), warning, turn.completed("hook", reason)]

        await session.transact(stop, cause=turn.submission_id)
        return True
    if effects:  # also before a failure: earlier hooks must not pay for a later one
        await session.commit(*parts_of(effects), cause=turn.submission_id)
    if failure is not None:
        raise failure
    return bool(steers_of(session.checkpoint))
