"""The tools that read and change files. What they may touch is the sandbox's business."""

# ruff: noqa: D417  (these docstrings are for the model, which does not see `ctx`)

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, cast

import trio
from msgspec import Meta

from trio_agent.errors import SandboxError, ToolError
from trio_agent.protocol.limits import MAX_TOOL_OUTPUT_BYTES
from trio_agent.protocol.text import Json, cut_end, cut_middle, utf8_length
from trio_agent.sandbox.base import MAX_TEXT_FILE_BYTES, FileChange, Match
from trio_agent.tools.base import Reconciled, ToolContext
from trio_agent.tools.diff import unified_diff
from trio_agent.tools.function import tool
from trio_agent.tools.patch import FilePatch, apply_patches, parse_patch

MAX_WRITTEN_BYTES: Final = 40_000
"""The text of one write, edit or patch; a model that has more to say says it in parts."""

MAX_DESCRIPTION_BYTES: Final = 2 * MAX_WRITTEN_BYTES
"""What a person sees of a change before deciding; all that is written fits."""

EMPTY_FILE: Final = "[the file is empty]"
MORE_LINES: Final = "[{size:,} bytes in all; read on with offset={line}]"
MORE_BYTES: Final = "[{size:,} bytes in all, this line is long; read on with byte={byte}]"
NOTHING_LISTED: Final = "[nothing here, apart from what .gitignore leaves out]"
MORE_ENTRIES: Final = "[there is more; list a directory below, or search]"
NO_MATCHES: Final = "[no matches]"
MORE_MATCHES: Final = "[there are more matches; narrow the search]"
WRITTEN: Final = "{path}: written, {size:,} bytes"
UNCHANGED: Final = "{path}: has this content already"
LONG_DIFF: Final = "{paths}: changed; the diff is too long to show"

_RESULT_ROOM: Final = MAX_TOOL_OUTPUT_BYTES - 500


@tool(effect="read_only", sandboxed=True)
async def read_file(
    path: str,
    ctx: ToolContext,
    *,
    offset: Annotated[int, Meta(ge=1)] = 1,
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 2_000,
    line_numbers: bool = False,
    byte: Annotated[int, Meta(ge=0)] | None = None,
) -> str:
    r"""Read a text file, or a part of it.

    A note at the end says where to read on if there is more. Bytes that are not
    UTF-8 are shown as \xNN.

    Args:
        path: Relative to the workspace, or the @output/... of a command.
        offset: First line, counted from 1.
        limit: How many lines at most.
        line_numbers: Put the number before each line.
        byte: Begin at this byte instead of a line; for very long lines.
    """
    window = await ctx.require_sandbox().read_window(path, line=offset, lines=limit, byte=byte)
    if not window.size:
        return EMPTY_FILE
    text = window.text
    if line_numbers:
        lines = text.removesuffix("\n").split("\n")
        text = "\n".join(f"{n:>6}\t{line}" for n, line in enumerate(lines, window.first_line))
    if window.next_byte is None:
        return text
    inside = not window.text.endswith("\n")
    note = MORE_BYTES if inside else MORE_LINES
    text = text if text.endswith("\n") else f"{text}\n"
    return text + note.format(size=window.size, line=window.next_line, byte=window.next_byte)


@tool(effect="read_only", sandboxed=True)
async def list_files(
    ctx: ToolContext,
    *,
    path: str = ".",
    depth: Annotated[int, Meta(ge=1, le=20)] = 1,
    limit: Annotated[int, Meta(ge=1, le=5_000)] = 500,
) -> str:
    """List files and directories, with sizes, without what .gitignore leaves out.

    A directory ends with /, a link with @ (links are not followed).

    Args:
        path: The directory, relative to the workspace.
        depth: How many directories deep.
        limit: How many entries at most.
    """
    listing = await ctx.require_sandbox().list(path, depth=depth, limit=limit)
    lines: list[str] = []
    room = _RESULT_ROOM
    for entry in listing.entries:
        name = _printable(entry.path)
        match entry.kind:
            case "file":
                line = f"{name}  {entry.size:,}"
            case "directory":
                line = f"{name}/"
            case "link":
                line = f"{name}@"
            case _:
                line = f"{name}  (not a regular file)"
        room -= utf8_length(line) + 1
        if room < 0:
            return "\n".join([*lines, MORE_ENTRIES])
        lines.append(line)
    if not lines:
        return NOTHING_LISTED
    return "\n".join([*lines, MORE_ENTRIES] if listing.truncated else lines)


@tool(effect="read_only", sandboxed=True)
async def search(
    pattern: str,
    ctx: ToolContext,
    *,
    path: str = ".",
    regex: bool = False,
    glob: str | None = None,
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100,
) -> str:
    """Find the lines that hold a text, without files that .gitignore leaves out.

    Args:
        pattern: The text, on one line; case counts.
        path: A directory or file, relative to the workspace.
        regex: Take the pattern as a regular expression.
        glob: Only files that match this, such as *.py or src/**/*.ts.
        limit: How many lines at most.
    """
    result = await ctx.require_sandbox().search(
        pattern, path=path, regex=regex, glob=glob, limit=limit
    )
    lines: list[str] = []
    room = _RESULT_ROOM
    for match in result.matches:
        line = _match_line(match)
        room -= utf8_length(line) + 1
        if room < 0:
            return "\n".join([*lines, MORE_MATCHES])
        lines.append(line)
    if not lines:
        return NO_MATCHES
    return "\n".join([*lines, MORE_MATCHES] if result.truncated else lines)


def _match_line(match: Match) -> str:
    return f"{_printable(match.path)}:{match.line}: {match.text}"


# --- changes


async def _describe_write(arguments: Mapping[str, Json], ctx: ToolContext) -> str:
    path, content = _text(arguments, "path"), _text(arguments, "content")
    before = await _present(ctx, path)
    old = None if before is None else _shown(before)
    return _bounded(unified_diff(path, old, content) or UNCHANGED.format(path=path))


@tool(effect="idempotent", needs_approval=True, sandboxed=True, describe=_describe_write)
async def write_file(path: str, content: str, ctx: ToolContext) -> str:
    """Write a whole text file; makes it, and its directories, or replaces it.

    To change a part of a file use edit_file or apply_patch.

    Args:
        path: Relative to the workspace.
        content: The whole text, at most 40,000 bytes.
    """
    _check_size("content", content)
    await ctx.require_sandbox().write_text(path, content)
    return WRITTEN.format(path=path, size=utf8_length(content))


async def _describe_edit(arguments: Mapping[str, Json], ctx: ToolContext) -> str:
    path = _text(arguments, "path")
    data = await ctx.require_sandbox().read_bytes(path, limit=MAX_TEXT_FILE_BYTES)
    new = _edited(path, data, _text(arguments, "old"), _text(arguments, "new"))
    return _bounded(unified_diff(path, _shown(data), _shown(new)))


async def _reconcile_edit(arguments: Mapping[str, Json], ctx: ToolContext) -> Reconciled:
    """Tell whether an edit was made, where the file leaves no doubt.

    The old text stood there once. If it still does, and the new one does not bring
    it along, the edit was not made; if only the new one is there, it was.
    """
    old, new = _text(arguments, "old"), _text(arguments, "new")
    data = await ctx.require_sandbox().read_bytes(
        _text(arguments, "path"), limit=MAX_TEXT_FILE_BYTES
    )
    old_bytes, new_bytes = _with_line_ends(data, old), _with_line_ends(data, new)
    if old_bytes in data:
        untouched = data.count(old_bytes) == 1 and old_bytes not in new_bytes
        return Reconciled(outcome="not_started" if untouched else "unknown")
    if new_bytes and data.count(new_bytes) == 1:
        output = WRITTEN.format(path=_text(arguments, "path"), size=len(data))
        return Reconciled(outcome="finished", output=output)
    return Reconciled(outcome="unknown")


@tool(
    effect="destructive",
    needs_approval=True,
    sandboxed=True,
    describe=_describe_edit,
    reconcile=_reconcile_edit,
)
async def edit_file(path: str, old: str, new: str, ctx: ToolContext) -> str:
    """Replace a text in a file that occurs there exactly once; returns the diff.

    Args:
        path: Relative to the workspace.
        old: The text as it stands in the file, with enough lines to be unique.
        new: What stands there afterwards; may be empty.
    """
    sandbox = ctx.require_sandbox()
    data = await sandbox.read_bytes(path, limit=MAX_TEXT_FILE_BYTES)
    changed = _edited(path, data, old, new)
    await sandbox.change([FileChange(path=path, before=data, after=changed)])
    return _result([path], unified_diff(path, _shown(data), _shown(changed)))


def _edited(path: str, data: bytes, old: str, new: str) -> bytes:
    _check_size("new", new)
    if not old:
        raise ToolError("old must not be empty; write_file makes a new file")
    old_bytes, new_bytes = _with_line_ends(data, old), _with_line_ends(data, new)
    if old_bytes == new_bytes:
        raise ToolError("old and new are the same; there is nothing to change")
    count = data.count(old_bytes)
    if count == 0:
        raise ToolError(
            f"{path}: old does not occur in the file, nothing was changed; read the file and"
            " copy the text exactly, with its spaces"
        )
    if count > 1 or data.find(old_bytes, data.index(old_bytes) + 1) >= 0:
        raise ToolError(
            f"{path}: old occurs {max(count, 2)} times, nothing was changed; add lines around"
            " it until it is unique"
        )
    changed = data.replace(old_bytes, new_bytes)
    _check_result(path, changed)
    return changed


def _with_line_ends(data: bytes, text: str) -> bytes:
    r"""Return *text* with the file's line ends, if it has ``\r\n`` throughout."""
    encoded = text.encode()
    if b"\r\n" in data and data.count(b"\n") == data.count(b"\r\n") and b"\r" not in encoded:
        return encoded.replace(b"\n", b"\r\n")
    return encoded


async def _describe_patch(arguments: Mapping[str, Json], ctx: ToolContext) -> str:
    _, changes = await _prepare_patch(_text(arguments, "patch"), ctx)
    return _bounded(_diff_of(changes))


@tool(effect="destructive", needs_approval=True, sandboxed=True, describe=_describe_patch)
async def apply_patch(patch: str, ctx: ToolContext) -> str:
    """Change several places or files at once: all of it, or nothing if a part does not fit.

    Takes '*** Begin Patch' ... '*** End Patch' with '*** Update File: PATH' ('@@' and
    lines that begin with a space, '-' or '+'; '*** Move to: PATH' renames), '*** Add
    File: PATH' ('+' lines) and '*** Delete File: PATH'; or a unified diff.

    Args:
        patch: The patch, at most 40,000 bytes.
    """
    paths, changes = await _prepare_patch(patch, ctx)
    await ctx.require_sandbox().change(changes)
    return _result(paths, _diff_of(changes))


async def _prepare_patch(text: str, ctx: ToolContext) -> tuple[list[str], list[FileChange]]:
    """Read, place and check a whole patch; nothing is changed."""
    await trio.lowlevel.checkpoint()
    _check_size("patch", text)
    patches = parse_patch(text)
    before: dict[str, bytes] = {}
    for patch in patches:
        if patch.action != "add":
            before[patch.path] = await ctx.require_sandbox().read_bytes(
                patch.path, limit=MAX_TEXT_FILE_BYTES
            )
    texts = {path: _exact(data) for path, data in before.items()}
    # In a thread: to place the hunks in long files can take a second.
    after = await trio.to_thread.run_sync(apply_patches, patches, texts)
    sources = {patch.move_to: patch.path for patch in patches if patch.move_to is not None}
    changes = [
        FileChange(
            path=path,
            before=before.get(path),
            after=None if new is None else new.encode(errors="surrogateescape"),
            mode_from=sources.get(path),
        )
        for path, new in after.items()
    ]
    for change in changes:
        _check_result(change.path, change.after or b"")
    return [_name(patch) for patch in patches], changes


def _name(patch: FilePatch) -> str:
    return patch.path if patch.move_to is None else f"{patch.path} -> {patch.move_to}"


def _diff_of(changes: list[FileChange]) -> str:
    texts = {
        change.path: _shown(cast("bytes", change.before))
        for change in changes
        if change.before is not None
    }
    moved = {change.mode_from for change in changes} - {None}
    parts = [
        unified_diff(
            change.path,
            texts.get(change.mode_from or change.path),
            None if change.after is None else _shown(change.after),
            source=change.mode_from,
        )
        for change in changes
        if change.path not in moved
    ]
    return "".join(parts)


# --- shared by the changes


async def _present(ctx: ToolContext, path: str) -> bytes | None:  # noqa: ASYNC910
    """Return the file as it is, None if it cannot be read (the call itself will say why)."""
    try:
        return await ctx.require_sandbox().read_bytes(path, limit=MAX_TEXT_FILE_BYTES)
    except SandboxError:
        return None  # noqa: ASYNC910


def _text(arguments: Mapping[str, Json], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"{name} must be text")
    return value


def _check_size(name: str, text: str) -> None:
    size = utf8_length(text)
    if size > MAX_WRITTEN_BYTES:
        raise ToolError(
            f"{name} has {size:,} bytes; at most {MAX_WRITTEN_BYTES:,} are allowed in one call:"
            " write the file in parts"
        )


def _check_result(path: str, data: bytes) -> None:
    if len(data) > MAX_TEXT_FILE_BYTES:
        raise ToolError(
            f"{path}: would have {len(data):,} bytes; at most {MAX_TEXT_FILE_BYTES:,} can be"
            " read again, so nothing was changed"
        )


def _exact(data: bytes) -> str:
    """Decode so that encoding gives the same bytes, whatever they are."""
    return data.decode(errors="surrogateescape")


def _shown(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _printable(name: str) -> str:
    """Return a file's name on one line, bytes and control characters shown by their codes."""
    shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def _bounded(text: str) -> str:
    return cut_middle(text, MAX_DESCRIPTION_BYTES)


def _result(paths: list[str], diff: str) -> str:
    if utf8_length(diff) <= _RESULT_ROOM:
        return diff
    return LONG_DIFF.format(paths=cut_end(", ".join(paths), 4_000))
