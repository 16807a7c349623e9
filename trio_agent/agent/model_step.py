"""One model request: streaming, silence, normalisation. Retries are the turn's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import attrs
import msgspec
import trio

from trio_agent.agent.opening import Opening
from trio_agent.agent.session import Session
from trio_agent.errors import (
    InternalError,
    ProtocolError,
    ProviderError,
    StreamInterruptedError,
)
from trio_agent.model.base import Emit, ModelCall, ModelOutput, ModelRequest
from trio_agent.protocol import limits, texts
from trio_agent.protocol.codec import parse_json
from trio_agent.protocol.events import AgentMessageDelta, AgentReasoningDelta, EventMsg
from trio_agent.protocol.items import AssistantItem, Item, Phase, ReasoningItem, ToolCallItem
from trio_agent.protocol.text import Json, cut_end, replace_surrogates, utf8_length
from trio_agent.protocol.usage import TokenUsage
from trio_agent.state.checkpoint import ToolCall


class _Stream:
    """The `Emit` of one attempt, and the watch on its silence."""

    def __init__(
        self,
        session: Session,
        turn_id: str,
        step_id: str,
        cause: str,
        idle: float,
    ) -> None:
        self._session = session
        self._turn_id = turn_id
        self._step_id = step_id
        self._cause = cause
        self._idle = idle
        self.scope = trio.CancelScope()
        self._size = 0
        self._over = False

    async def emit(self, text: str, phase: Phase = "final_answer") -> None:
        if self._over:
            raise InternalError("a model emitted text after its answer")
        text = replace_surrogates(text)
        self._size += utf8_length(text)
        if self._size > limits.MAX_MODEL_OUTPUT_BYTES:
            raise ProviderError(_too_large())
        if text:
            self._session.append(self._delta(text, phase), self._cause)
        self.scope.deadline = float("inf")  # waiting for the disk is not the model's silence
        try:
            await self._session.wait_written()
        finally:
            self.wind_up()

    def wind_up(self) -> None:
        self.scope.deadline = trio.current_time() + self._idle

    def close(self) -> None:
        self._over = True

    def _delta(self, text: str, phase: Phase) -> EventMsg:
        if phase == "reasoning":
            return AgentReasoningDelta(turn_id=self._turn_id, step_id=self._step_id, text=text)
        return AgentMessageDelta(
            turn_id=self._turn_id, step_id=self._step_id, text=text, phase=phase
        )


async def ask(
    opening: Opening, request: ModelRequest, *, turn_id: str, cause: str
) -> ModelOutput:
    """Ask the model of the request's route once, and return its complete answer.

    `Cancelled` leaves what was streamed in the journal and nothing in the context.

    Raises:
        StreamInterruptedError: If the stream broke, or was silent for too long.
        ProviderError: If the model could not answer, or its answer breaks a limit.
    """
    idle = opening.config.model_idle_timeout
    stream = _Stream(opening.session, turn_id, request.step_id, cause, idle)
    emit: Emit = stream.emit
    model = opening.router.model(request.route)
    output: ModelOutput | None = None
    try:
        with stream.scope:
            stream.wind_up()
            output = await model.respond(request, emit)
    finally:
        stream.close()
    if output is None or stream.scope.cancelled_caught:
        raise StreamInterruptedError(f"the model was silent for {idle:g} s")
    check_output(output)
    return output


def _too_large() -> str:
    return f"the model's answer is over {limits.MAX_MODEL_OUTPUT_BYTES:,} bytes"


def check_output(output: object) -> None:
    """Check what a model returned against the bounds that hold for every provider.

    Raises:
        ProviderError: It names the bound. Asking again would not help.
    """
    if not isinstance(output, ModelOutput):
        raise ProviderError(f"the model returned {type(output).__name__}, not a ModelOutput")
    calls = sum(isinstance(item, ModelCall) for item in output.items)
    if calls > limits.MAX_TOOL_CALLS:
        raise ProviderError(f"{calls} tool calls; at most {limits.MAX_TOOL_CALLS} are allowed")
    try:
        _ = TokenUsage() + output.usage  # checks the range of every part
        size = len(msgspec.json.encode(output))
    except UnicodeEncodeError:
        size = 0  # half characters are replaced later
    except (InternalError, TypeError) as exc:
        raise ProviderError(f"the model's answer is not usable: {exc}") from exc
    if size > limits.MAX_MODEL_OUTPUT_BYTES:
        raise ProviderError(_too_large())


class Answer:
    """A model's answer in the engine's terms.

    ``faults`` explains, by call id, the calls that can only fail.
    """

    def __init__(self) -> None:
        self.items = list[Item]()
        self.calls = list[ToolCall]()
        self.faults = dict[str, str]()


def normalise(output: ModelOutput, new_id: Callable[[], str]) -> Answer:
    """Turn a model's output into items that are legal for every provider.

    Calls get ids of our own; arguments that are no JSON object are replaced by an
    empty one and the call is at fault; so is a call that the output limit cut off.
    Texts that are blank are dropped, and so is reasoning that stands alone, unless the
    model has only paused.
    """
    answer = Answer()
    visible = False
    for place, item in enumerate(output.items):
        if isinstance(item, ModelCall):
            cut = output.finish_reason == "length" and place == len(output.items) - 1
            _add_call(answer, item, new_id(), cut=cut)
            visible = True
        elif isinstance(item, AssistantItem):
            text = replace_surrogates(item.text)
            if text.strip():
                answer.items.append(attrs.evolve(item, text=text))
                visible = True
        else:
            answer.items.append(_reasoning(item))
    if not visible and output.end_turn:  # what a paused answer has is needed to go on
        answer.items.clear()
    return answer


def _reasoning(item: ReasoningItem) -> ReasoningItem:
    return attrs.evolve(item, text=replace_surrogates(item.text))


def _add_call(answer: Answer, item: ModelCall, call_id: str, *, cut: bool) -> None:
    fault: str | None = None
    parsed: Json = {}
    if cut:
        fault = texts.CUT_ARGUMENTS
    elif len(item.arguments.encode(errors="replace")) > limits.MAX_ARGUMENT_BYTES:
        most = f"over {limits.MAX_ARGUMENT_BYTES:,} bytes"
        fault = texts.BAD_ARGUMENTS.format(problem=most)
    else:
        try:
            parsed = parse_json(item.arguments.strip() or "{}", name="arguments")
        except ProtocolError as exc:
            fault = texts.BAD_ARGUMENTS.format(problem=exc)
    if not isinstance(parsed, dict):
        fault = texts.BAD_ARGUMENTS.format(problem=f"a {type(parsed).__name__}")
        parsed = {}
    arguments = cast("dict[str, Json]", parsed)
    name = cut_end(replace_surrogates(item.name), limits.MAX_NAME_BYTES)
    provider_id = cut_end(replace_surrogates(item.call_id), limits.MAX_IDENTIFIER_BYTES)
    answer.items.append(
        ToolCallItem(
            call_id=call_id,
            name=name,
            arguments=arguments,
            provider_call_id=provider_id or None,
            sealed=item.sealed,
        )
    )
    call = ToolCall(call_id=call_id, name=name, arguments=arguments, status="admitted")
    answer.calls.append(call)
    if fault is not None:
        answer.faults[call_id] = fault
