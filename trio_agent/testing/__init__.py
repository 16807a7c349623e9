"""Fakes and checks, for your tests and ours.

Fakes of models and stores need nothing else. What checks with Hypothesis
(`AgentMachine`, `StoreMachine`, `strategies`) needs the extra ``testing`` and is
loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trio_agent.errors import ConfigError
from trio_agent.testing.models import ScriptedModel, StrictModel
from trio_agent.testing.mortal import MortalStore, ProcessDied

if TYPE_CHECKING:
    from trio_agent.testing import strategies
    from trio_agent.testing.agent_machine import AgentMachine
    from trio_agent.testing.middleware_check import check_middleware
    from trio_agent.testing.model_check import check_model
    from trio_agent.testing.store_check import check_store
    from trio_agent.testing.store_machine import StoreMachine
    from trio_agent.testing.tool_check import check_tool

_WHERE = {
    "AgentMachine": "agent_machine",
    "StoreMachine": "store_machine",
    "check_middleware": "middleware_check",
    "check_model": "model_check",
    "check_store": "store_check",
    "check_tool": "tool_check",
    "strategies": "strategies",
}

__all__ = [
    "AgentMachine",
    "MortalStore",
    "ProcessDied",
    "ScriptedModel",
    "StoreMachine",
    "StrictModel",
    "check_middleware",
    "check_model",
    "check_store",
    "check_tool",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """Load a check when it is first asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    except ModuleNotFoundError as exc:
        if exc.name != "hypothesis":
            raise
        remedy = "pip install 'trio-agent[testing]'"
        raise ConfigError(f"{name} needs Hypothesis: {remedy}") from exc
    value = module if name == _WHERE[name] == "strategies" else getattr(module, name)
    globals()[name] = value
    return value
