"""Building one model request: its contents, its digest and its size."""

from __future__ import annotations

import hashlib

import msgspec

from trio_agent.agent.opening import Opening
from trio_agent.errors import ContextOverflowError
from trio_agent.model.base import ModelRequest
from trio_agent.protocol.codec import unstructure
from trio_agent.state.checkpoint import Checkpoint


def cache_key(session_id: str) -> str:
    """Return what a provider may key its prompt cache by: stable, and tells nothing."""
    return hashlib.sha256(f"trio_agent prompt cache\0{session_id}".encode()).hexdigest()


def build_request(
    opening: Opening, checkpoint: Checkpoint, route: str, step_id: str
) -> ModelRequest:
    """Return the request that the context of *checkpoint* makes on *route*."""
    return ModelRequest(
        instructions=opening.instructions,
        items=checkpoint.context,
        tools=opening.definitions,
        route=route,
        reasoning_effort=opening.router.resolve(route).reasoning_effort,
        cache_key=cache_key(checkpoint.session_id),
        context_epoch=checkpoint.context_epoch,
        step_id=step_id,
    )


def request_digest(checkpoint: Checkpoint, request: ModelRequest, *, replaced: bool) -> str:
    """Return a digest that names exactly this request.

    The stored context never changes under its session, epoch and length, and the
    instructions and tools are stored by their own digests; so these few words name
    it all. What a hook replaced for one request is hashed whole.
    """
    named = [
        checkpoint.session_id,
        checkpoint.context_epoch,
        len(checkpoint.context),
        checkpoint.instructions_digest,
        checkpoint.tools_digest,
        request.route,
        request.reasoning_effort,
    ]
    if replaced:
        named += [request.instructions, *(unstructure(item) for item in request.items)]
    return hashlib.sha256(msgspec.json.encode(named)).hexdigest()[:32]


def check_size(tokens: int, window: int, route: str) -> None:
    """Check that a request of *tokens* fits the window of *route*.

    Raises:
        ContextOverflowError: It names both, and the remedy.
    """
    if tokens > window:
        raise ContextOverflowError(
            f"the request has about {tokens:,} tokens and route {route!r} takes {window:,};"
            " rewind the session, or use a route with a larger window"
        )
