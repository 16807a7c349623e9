"""Routes that are named by a string, such as ``"openai-chat:qwen3"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trio_agent.errors import ConfigError, UnknownError
from trio_agent.model.base import Model
from trio_agent.model.router import ModelRouter

DEFAULT_ROUTE: Final = "default"
"""The name of the route that a single model gets."""


def _demo(_model: str) -> Model:
    from trio_agent.model.demo import DemoModel  # noqa: PLC0415  # only if asked for

    return DemoModel()


def _openai(model: str) -> Model:
    from trio_agent.model.openai import OpenAIResponses  # noqa: PLC0415  # only if asked for

    return OpenAIResponses(model)


def _openai_chat(model: str) -> Model:
    from trio_agent.model.openai import OpenAIChat  # noqa: PLC0415  # only if asked for

    return OpenAIChat(model)


def _anthropic(model: str) -> Model:
    from trio_agent.model.anthropic import Anthropic  # noqa: PLC0415  # only if asked for

    return Anthropic(model)


_PROVIDERS: Final[dict[str, Callable[[str], Model]]] = {
    "openai": _openai,
    "openai-chat": _openai_chat,
    "anthropic": _anthropic,
}

KNOWN_ROUTES: Final = ("demo", *(f"{provider}:<model>" for provider in _PROVIDERS))
"""Every form of string that `as_router` understands."""


def as_router(model: Model | ModelRouter | str) -> ModelRouter:
    """Return *model* as a router; a single model gets the one route ``"default"``.

    A string is ``"demo"``, ``"openai:<model>"`` (Responses), ``"openai-chat:<model>"``
    (any server that speaks Chat Completions) or ``"anthropic:<model>"``. Keys and
    addresses come from ``OPENAI_API_KEY``, ``OPENAI_BASE_URL``, ``ANTHROPIC_API_KEY``
    and ``ANTHROPIC_BASE_URL``. Nothing is opened yet.

    Raises:
        UnknownError: If no provider has that name.
        ConfigError: If a string is malformed, a key is missing, or the package
            that the provider needs is not installed.
    """
    if isinstance(model, ModelRouter):
        return model
    if isinstance(model, str):
        model = _named(model)
    elif not callable(getattr(model, "respond", None)):
        raise ConfigError(
            f"model= takes a Model, a ModelRouter or one of {', '.join(KNOWN_ROUTES)};"
            f" not {type(model).__name__}"
        )
    return ModelRouter(DEFAULT_ROUTE, model)


def _named(text: str) -> Model:
    if text == "demo":
        return _demo("")
    provider, colon, name = text.partition(":")
    known = ", ".join(KNOWN_ROUTES)
    if provider not in _PROVIDERS:
        raise UnknownError(f"no model is called {text!r}; known: {known}")
    if not colon or not name.strip() or name != name.strip():
        raise ConfigError(f"{text!r} names no model: write {provider}:<model>")
    return _PROVIDERS[provider](name)
