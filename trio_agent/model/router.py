"""Named routes to models, and where to go when one of them is out of retries."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import attrs
import trio

from trio_agent.errors import (
    AuthError,
    ConfigError,
    ContextOverflowError,
    DuplicateError,
    ProviderError,
    UnknownError,
)
from trio_agent.model.base import Model, NamedModel, OpenableModel
from trio_agent.protocol.limits import MAX_IDENTIFIER_BYTES
from trio_agent.protocol.text import check_text
from trio_agent.record import Record


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ModelChoice(Record):
    """One route as a frontend shows it. Routes of one ``group`` differ in their effort."""

    route: str
    group: str
    model: str
    reasoning_effort: str | None = None
    context_window: int | None = None


def out_of_retries(error: ProviderError) -> bool:
    """Return whether another route may do better: all but overflow and bad requests."""
    return error.retryable or isinstance(error, AuthError)


class ModelRouter:
    """Maps route names to models. The first route is the default.

    Register every route before the router is used. One router may serve many
    sessions of one `trio.run`; what its models hold open is opened with the first
    of them and closed with the last.
    """

    def __init__(
        self,
        default_route: str,
        model: Model,
        *,
        group: str | None = None,
        reasoning_effort: str | None = None,
        context_window: int | None = None,
    ) -> None:
        self._models: dict[str, Model] = {}
        self._choices: dict[str, ModelChoice] = {}
        self._fallbacks: dict[str, tuple[tuple[str, ...], Callable[[ProviderError], bool]]] = {}
        self._users = 0
        self._opened = AsyncExitStack()
        self._lock: trio.Lock | None = None
        self.default_route: Final = default_route
        self.register(
            default_route,
            model,
            group=group,
            reasoning_effort=reasoning_effort,
            context_window=context_window,
        )

    def register(
        self,
        route: str,
        model: Model,
        *,
        group: str | None = None,
        reasoning_effort: str | None = None,
        context_window: int | None = None,
    ) -> None:
        """Add a route.

        Args:
            route: Its name, unique in this router.
            model: Who answers on it.
            group: Routes that differ only in effort share one; default: the route.
            reasoning_effort: Passed to the model with every request.
            context_window: In tokens; wins over the configuration's.

        Raises:
            DuplicateError: If the route exists.
            ConfigError: If a name is blank or a window is not positive.
        """
        group = route if group is None else group
        for name, value in (("route", route), ("group", group)):
            try:
                check_text(value, name=name, limit=MAX_IDENTIFIER_BYTES, blank=False)
            except ValueError as exc:
                raise ConfigError(str(exc)) from None
        if route in self._models:
            raise DuplicateError(f"route {route!r} is registered twice")
        if context_window is not None and context_window <= 0:
            raise ConfigError(f"route {route!r}: context_window must be positive")
        self._models[route] = model
        self._choices[route] = ModelChoice(
            route=route,
            group=group,
            model=model.name if isinstance(model, NamedModel) else route,
            reasoning_effort=reasoning_effort,
            context_window=context_window,
        )

    def fallback(
        self,
        route: str,
        *others: str,
        on: Callable[[ProviderError], bool] = out_of_retries,
    ) -> None:
        """Go on with *others*, in order, when *route* is out of retries.

        Args:
            route: The route that may fail.
            others: Where to go, each tried once a step.
            on: Which errors count; by default all that are retryable, and refused
                credentials. A request that is too large never falls back.

        Raises:
            UnknownError: If a route is not registered.
            ConfigError: If *others* are none, or lead back to a route already tried.
        """
        for name in (route, *others):
            self.resolve(name)
        if not others or len({route, *others}) <= len(others):
            raise ConfigError(
                f"the fallback of {route!r} must be other routes, each once; not {others!r}"
            )
        self._fallbacks[route] = (others, on)

    def next_route(self, route: str, error: ProviderError, tried: frozenset[str]) -> str | None:
        """Return where a step that failed on *route* goes on, or None if nowhere.

        A route that was reached as a fallback without having one of its own goes on
        with the rest of the list that led to it.
        """
        if isinstance(error, ContextOverflowError):
            return None
        origins = [route]
        if route not in self._fallbacks:
            origins = [
                name
                for name, (others, _) in self._fallbacks.items()
                if name in tried and route in others
            ]
        for origin in origins:
            others, on = self._fallbacks.get(origin, ((), out_of_retries))
            for other in others:
                if other not in tried and on(error):
                    return other
        return None

    def choices(self) -> tuple[ModelChoice, ...]:
        """Return all routes in the order of registration."""
        return tuple(self._choices.values())

    def resolve(self, route: str, reasoning_effort: str | None = None) -> ModelChoice:
        """Return the choice of a route, or of its sibling with that effort.

        Raises:
            UnknownError: If there is none; a near one is never picked silently.
        """
        choice = self._choices.get(route)
        if choice is None:
            known = ", ".join(self._choices)
            raise UnknownError(f"no route is called {route!r}; registered: {known}")
        if reasoning_effort is None or choice.reasoning_effort == reasoning_effort:
            return choice
        for other in self._choices.values():
            if other.group == choice.group and other.reasoning_effort == reasoning_effort:
                return other
        raise UnknownError(
            f"group {choice.group!r} has no route with effort {reasoning_effort!r}"
        )

    def has(self, route: str) -> bool:
        """Return whether *route* is registered."""
        return route in self._choices

    def model(self, route: str) -> Model:
        """Return who answers on *route*; `UnknownError` if there is no such route."""
        self.resolve(route)
        return self._models[route]

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Hold open what the models need, for the length of the block.

        May be entered by many sessions at once. Entering and leaving are
        checkpoints; leaving closes even when cancelled.
        """
        if self._lock is None:
            self._lock = trio.Lock()
        async with self._lock:
            if self._users == 0:
                async with AsyncExitStack() as stack:
                    for model in dict.fromkeys(self._models.values()):
                        if isinstance(model, OpenableModel):
                            await stack.enter_async_context(model.open())
                    self._opened = stack.pop_all()
            self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                opened, self._opened, self._lock = self._opened, AsyncExitStack(), None
                await opened.aclose()
