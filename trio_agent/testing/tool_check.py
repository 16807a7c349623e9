"""`check_tool`: does a tool keep what its declared effect promises, wherever a process dies?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trio_agent.protocol.text import Json
from trio_agent.state.recovery import Recovery
from trio_agent.testing.crashes import Crash, Story
from trio_agent.tools.function import as_tool

__all__ = ["check_tool"]


def check_tool(
    tool: object, arguments: Mapping[str, Json], *, world: Callable[[], int]
) -> tuple[Crash, ...]:
    """Kill processes at every moment of one call, and hold the tool to its effect.

    A model asks for the call once. The process is killed (``SIGKILL``) before and after
    each write, where the handler is entered and where it is left; the session is
    opened again under each policy until it is idle. Each time:

    * an ``undeclared`` or ``destructive`` tool is entered at most once;
    * an ``idempotent`` one has at most the effect of one undisturbed call, however
      often it is entered, and always with the same key;
    * a ``read_only`` one has no effect at all;
    * ``finished`` means that the effect is there, ``not_started`` and ``denied`` that
      it is not, also where the tool reconciles.

    Plain function: call it outside of `trio.run`. It forks, and takes seconds.

    Args:
        tool: A tool or a function. It must not need a sandbox or an approval handler.
        arguments: What it is called with.
        world: Counts what the tool did outside of the process, for example the lines
            of a file. It may only grow.

    Returns:
        Every death and what became of it.

    Raises:
        AssertionError: It names the moment of the death, the policy and the promise.
        ConfigError: If this system cannot fork.
    """
    one = as_tool(tool)
    story = Story(tools=(tool,), calls=((one.definition.name, arguments),))
    start = world()
    moments = story.moments()
    effect = world() - start
    if one.effect == "read_only":
        assert effect == 0, f"a read_only tool changed the world by {effect}"
    crashes: list[Crash] = []
    for policy in (Recovery.RESUME, Recovery.ABORT):
        for moment in moments:
            before = world()
            crash = story.crash(moment, policy)
            happened = world() - before
            problem = _problem(crash, one.definition.name, one.effect, happened, effect)
            where = f"killed {moment}, then opened with {policy.name}"
            assert problem is None, f"{where}: {problem}"
            crashes.append(crash)
    return tuple(crashes)


def _problem(crash: Crash, name: str, kind: str, happened: int, once: int) -> str | None:
    entered = crash.entered.get(name, 0)
    outcome = crash.outcomes.get(name)
    if kind in {"undeclared", "destructive"} and entered > 1:
        return f"a call of a {kind} tool was entered {entered} times"
    if len(crash.keys.get(name, ())) > 1:
        return "one call had two idempotency keys"
    if happened > once:
        return f"the effect is {happened} where one call makes {once}"
    if outcome == "finished" and happened != once:
        return f"reported as finished with an effect of {happened}, not {once}"
    if outcome in {"not_started", "denied"} and happened:
        return f"reported as {outcome} with an effect of {happened}"
    if kind == "read_only" and happened:
        return f"a read_only tool changed the world by {happened}"
    return None
