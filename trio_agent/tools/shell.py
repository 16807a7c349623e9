"""The tools that run commands, in the foreground and in the background."""

# ruff: noqa: D417  (these docstrings are for the model, which does not see `ctx`)

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import trio
from msgspec import Meta

from trio_agent.errors import ToolError
from trio_agent.protocol.limits import MAX_TOOL_OUTPUT_BYTES
from trio_agent.protocol.text import Json, cut_middle, replace_surrogates, utf8_length
from trio_agent.sandbox.base import (
    COMMAND_TIMEOUT,
    BackgroundOutput,
    CommandOutput,
    StreamOutput,
)
from trio_agent.tools.base import ToolContext, ToolResult
from trio_agent.tools.function import tool

TIMED_OUT: Final = (
    "timed out after {seconds:g} s; the command and all that it had started were killed"
    " (start_command runs one that takes longer)"
)
EXIT_CODE: Final = "exit code {code}"
KILLED: Final = "killed by signal {signal}"
NO_OUTPUT: Final = "(no output)"
STARTED: Final = (
    "started in the background as {id}; poll_command tells what it writes, stop_command ends it"
)
CUT_OUTPUT: Final = (
    "[{name} was cut: {missing:,} bytes are missing above; everything is in {file}, which"
    " read_file reads in parts]"
)
CUT_OUTPUT_UNKEPT: Final = (
    "[{name} was cut: {missing:,} bytes are missing above; {file}, which read_file reads in"
    " parts, has all but the last {unkept:,} bytes]"
)
CUT_OUTPUT_LOST: Final = (
    "[{name} was cut: {missing:,} bytes are missing above and were not kept]"
)

_RESULT_ROOM: Final = MAX_TOOL_OUTPUT_BYTES - 1_000


async def _describe_command(arguments: Mapping[str, Json], ctx: ToolContext) -> str:
    del ctx
    await trio.lowlevel.checkpoint()
    return _command(arguments)


def _grant_command(arguments: Mapping[str, Json]) -> str:
    """One approval for the session covers the same command, whatever time it is given."""
    return _command(arguments)


def _command(arguments: Mapping[str, Json]) -> str:
    command = arguments.get("command")
    if not isinstance(command, str):
        raise ToolError("command must be text")
    return command


@tool(
    effect="destructive",
    needs_approval=True,
    sandboxed=True,
    describe=_describe_command,
    grant_key=_grant_command,
)
async def run_command(
    command: str,
    ctx: ToolContext,
    *,
    timeout: Annotated[float, Meta(gt=0, le=3_600)] = COMMAND_TIMEOUT,  # noqa: ASYNC109
) -> ToolResult:
    """Run a shell command in the workspace; returns its exit code and output.

    It reads no input. Long outputs lose their middle; the result says where the whole is.

    Args:
        command: For bash; at most 8,000 bytes.
        timeout: Seconds after which it is killed.
    """
    output = await ctx.require_sandbox().run(command, timeout=timeout)
    return ToolResult(output=_render(output, timeout), is_error=output.timed_out)


def _render(output: CommandOutput, timeout: float) -> str:
    if output.timed_out:
        head = TIMED_OUT.format(seconds=timeout)
    elif output.exit_code < 0:
        head = KILLED.format(signal=-output.exit_code)
    else:
        head = EXIT_CODE.format(code=output.exit_code)
    sizes = [utf8_length(stream.text) for stream in (output.stdout, output.stderr)]
    half = _RESULT_ROOM // 2
    # What one stream leaves of its half, the other may have.
    rooms = [half + max(0, half - sizes[1]), half + max(0, half - sizes[0])]
    parts = [head]
    streams = (("stdout", output.stdout), ("stderr", output.stderr))
    for (name, stream), room in zip(streams, rooms, strict=True):
        if stream.text:
            parts += [f"{name}:", _fit(name, stream, room)]
    return "\n".join(parts if len(parts) > 1 else [head, NO_OUTPUT])


def _fit(name: str, stream: StreamOutput, room: int) -> str:
    text = cut_middle(replace_surrogates(stream.text), room)
    missing = stream.missing + utf8_length(stream.text) - utf8_length(text)
    if not stream.missing and missing <= 0:
        return text.removesuffix("\n")
    if stream.file is None:
        note = CUT_OUTPUT_LOST if stream.missing else ""
    else:
        note = CUT_OUTPUT_UNKEPT if stream.unkept else CUT_OUTPUT
    if not note:
        return text
    return f"{text}\n" + note.format(
        name=name, missing=missing, file=stream.file, unkept=stream.unkept
    )


@tool(
    effect="destructive",
    needs_approval=True,
    sandboxed=True,
    describe=_describe_command,
    grant_key=_grant_command,
)
async def start_command(command: str, ctx: ToolContext) -> str:
    """Start a shell command in the background, such as a server, and return its id.

    It ends with the session at the latest. A few can run at the same time.

    Args:
        command: For bash; at most 8,000 bytes.
    """
    return STARTED.format(id=await ctx.require_sandbox().start(command))


@tool(effect="read_only", sandboxed=True)
async def poll_command(command_id: str, ctx: ToolContext) -> str:
    """Tell what a background command wrote since last time, and whether it still runs.

    Args:
        command_id: From start_command.
    """
    return _render_background(await ctx.require_sandbox().poll(command_id))


@tool(effect="idempotent", sandboxed=True)
async def stop_command(command_id: str, ctx: ToolContext) -> str:
    """End a background command with all that it started; returns the rest of its output.

    Args:
        command_id: From start_command.
    """
    return _render_background(await ctx.require_sandbox().stop(command_id))


def _render_background(told: BackgroundOutput) -> str:
    if told.exit_code is not None:
        head = f"{told.status}, " + EXIT_CODE.format(code=told.exit_code)
    elif told.error is not None:
        head = f"{told.status}: {told.error}"
    else:
        head = told.status
    if not told.output.text:
        return f"{head}\n{NO_OUTPUT}"
    return f"{head}\n" + _fit("output", told.output, _RESULT_ROOM)
