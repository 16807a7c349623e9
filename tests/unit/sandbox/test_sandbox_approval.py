"""The decision about a call, against the table written out case by case."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from trio_agent.sandbox.approval import rule
from trio_agent.sandbox.policy import ApprovalPolicy, Permissions

ASK, ALLOW, ALLOW_NETWORK, FULL_ACCESS = ApprovalPolicy

# (policy, acts inside the sandbox) -> asks when nobody has approved it
ASKS = {
    (ASK, True): True,
    (ASK, False): True,
    (ALLOW, True): False,
    (ALLOW, False): True,
    (ALLOW_NETWORK, True): False,
    (ALLOW_NETWORK, False): True,
    (FULL_ACCESS, True): False,
    (FULL_ACCESS, False): False,
}

CASES = list(itertools.product(ApprovalPolicy, *[(False, True)] * 4))


@pytest.mark.parametrize(("policy", "needs", "sandboxed", "granted", "network"), CASES)
def test_every_case(
    policy: Any, needs: Any, sandboxed: Any, granted: Any, network: Any
) -> None:
    ruling = rule(
        policy,
        needs_approval=needs,
        sandboxed=sandboxed,
        granted=granted,
        network=network,
    )

    asks = needs and not granted and ASKS[policy, sandboxed]
    assert ruling.ask is asks
    runs = needs and not asks
    assert ruling.permissions.mutate is runs
    # A call that is still asked about, or that changes nothing, is given nothing.
    assert not ruling.permissions.network or runs
    assert not ruling.permissions.full_access or runs
    if runs:
        open_policy = policy in (ALLOW_NETWORK, FULL_ACCESS)
        assert ruling.permissions.network is (open_policy or (granted and network))
        assert ruling.permissions.full_access is (policy is FULL_ACCESS)


@pytest.mark.parametrize("policy", ApprovalPolicy)
def test_a_call_that_needs_no_approval_is_given_nothing(policy: Any) -> None:
    ruling = rule(policy, needs_approval=False, sandboxed=True, granted=True, network=True)

    assert ruling.permissions == Permissions()
    assert ruling.ask is False
