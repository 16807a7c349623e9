"""Which call needs whose consent; pure."""

from __future__ import annotations

from msgspec import Struct

from trio_agent.sandbox.policy import ApprovalPolicy, Permissions


class Ruling(Struct, frozen=True, kw_only=True):
    """Whether a call must be asked about, and what it may do once it runs."""

    ask: bool
    permissions: Permissions


def rule(
    policy: ApprovalPolicy,
    *,
    needs_approval: bool,
    sandboxed: bool,
    granted: bool,
    network: bool = False,
) -> Ruling:
    """Decide about one call.

    Args:
        policy: The session's.
        needs_approval: Whether the tool says that its calls change something.
        sandboxed: Whether the tool acts only inside the sandbox.
        granted: Whether a person has approved this call, now or for the session.
        network: Whether that approval included the network.

    A call that needs no approval runs at once and is granted nothing, whatever the
    policy; nor is one that is still asked about. ``ALLOW`` and ``ALLOW_NETWORK``
    wave a call through only if it is ``sandboxed``: what acts outside is not theirs
    to allow.
    """
    full = policy is ApprovalPolicy.FULL_ACCESS
    waved = full or (policy is not ApprovalPolicy.ASK and sandboxed)
    acts = needs_approval and (granted or waved)
    reaches = (granted and network) or full or policy is ApprovalPolicy.ALLOW_NETWORK
    return Ruling(
        ask=needs_approval and not acts,
        permissions=Permissions(
            mutate=acts,
            network=acts and reaches,
            full_access=acts and full,
        ),
    )
