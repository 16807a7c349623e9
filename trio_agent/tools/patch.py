r"""Patches as models write them: read, placed and applied to texts. Pure.

Two forms are understood. The envelope names files and leaves line numbers out::

    *** Begin Patch
    *** Update File: src/app.py
    *** Move to: src/main.py
    @@ def main():
     a line of context
    -a line that goes
    +a line that comes
    *** Add File: notes.txt
    +its first line
    *** Delete File: old.txt
    *** End Patch

The other is the plain unified diff, whose line numbers are hints: a hunk is placed
where its lines are, nearest to where it says.

All of a hunk must match, context and removed lines, apart from ``\r`` at the ends
of lines, which stay as they are in the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeAlias

import attrs

from trio_agent.errors import ConfigError, ToolError
from trio_agent.record import Record

MAX_COMPARISONS: Final = 2_000_000
"""Lines compared to place all hunks of one patch; a patch that needs more is refused."""

FORMAT_HINT: Final = (
    "Write it as: *** Begin Patch / *** Update File: PATH / @@ / lines that begin with a space,"
    " '-' or '+' / *** End Patch (also *** Add File: PATH, *** Delete File: PATH, and *** Move"
    " to: PATH below an update); or as a unified diff with --- and +++ headers."
)
"""What every complaint about the form of a patch ends with."""

Action: TypeAlias = Literal["add", "update", "delete"]

_BEGIN, _END = "*** Begin Patch", "*** End Patch"
_ADD, _UPDATE, _DELETE = "*** Add File: ", "*** Update File: ", "*** Delete File: "
_MOVE, _END_OF_FILE = "*** Move to: ", "*** End of File"


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Hunk(Record):
    """One place of a file.

    ``lines`` are pairs of ``" "``, ``"-"`` or ``"+"`` and the text. ``anchors``
    are lines to look for first, ``near`` is the line (from 0) where a unified
    diff expects it, ``at_end`` ties it to the end of the file. ``newline`` says whether
    the new text ends with one, if the hunk says.
    """

    lines: tuple[tuple[str, str], ...]
    anchors: tuple[str, ...] = ()
    near: int | None = None
    at_end: bool = False
    newline: bool | None = None

    @property
    def old(self) -> list[str]:
        """The lines that must be there."""
        return [text for sign, text in self.lines if sign != "+"]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class FilePatch(Record):
    """What a patch does to one file; ``content`` is the text of one that is added."""

    action: Action
    path: str
    move_to: str | None = None
    hunks: tuple[Hunk, ...] = ()
    content: str = ""


def parse_patch(text: str) -> tuple[FilePatch, ...]:
    """Read a patch in either form.

    Raises:
        ToolError: It says which line is wrong, and how a patch is written.
    """
    lines = text.strip("\n").split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    if lines and lines[0].strip() == _BEGIN:
        patches = tuple(_parse_envelope(lines))
    elif any(line.startswith("--- ") for line in lines):
        patches = _parse_unified(text)
    else:
        raise ToolError(f"this is no patch. {FORMAT_HINT}")
    if not patches:
        raise ToolError(f"the patch names no file. {FORMAT_HINT}")
    return patches


# --- the envelope


def _parse_envelope(lines: list[str]) -> Iterator[FilePatch]:
    while lines and not lines[-1].strip():
        lines.pop()
    if lines[-1].strip() != _END:
        raise ToolError(f"the patch does not end with {_END!r}. {FORMAT_HINT}")
    position, end = 1, len(lines) - 1
    while position < end:
        line = lines[position]
        stop = position + 1
        while stop < end and not _is_header(lines[stop]):
            stop += 1
        body = lines[position + 1 : stop]
        if line.startswith(_ADD):
            yield _parse_added(line[len(_ADD) :].strip(), body, position)
        elif line.startswith(_DELETE):
            if any(text.strip() for text in body):
                raise _bad_line(position + 1, body[0], "a deletion has no lines")
            yield FilePatch(action="delete", path=line[len(_DELETE) :].strip())
        elif line.startswith(_UPDATE):
            yield _parse_updated(line[len(_UPDATE) :].strip(), body, position)
        elif line.strip():
            raise _bad_line(position, line, "expected a file header")
        position = stop


def _is_header(line: str) -> bool:
    return line.startswith((_ADD, _UPDATE, _DELETE))


def _parse_added(path: str, body: list[str], position: int) -> FilePatch:
    for offset, line in enumerate(body, 1):
        if not line.startswith("+"):
            raise _bad_line(
                position + offset, line, "each line of an added file begins with '+'"
            )
    content = "".join(f"{line[1:]}\n" for line in body)
    return FilePatch(action="add", path=path, content=content)


def _parse_updated(path: str, body: list[str], position: int) -> FilePatch:
    move_to: str | None = None
    start = 0
    if body and body[0].startswith(_MOVE):
        move_to, start = body[0][len(_MOVE) :].strip(), 1
    hunks: list[Hunk] = []
    anchors: list[str] = []
    lines: list[tuple[str, str]] = []

    def finish(*, at_end: bool) -> None:
        if lines:
            hunks.append(Hunk(lines=tuple(lines), anchors=tuple(anchors), at_end=at_end))
            anchors.clear()
            lines.clear()

    for offset, line in enumerate(body[start:], start + 1):
        if line.startswith("@@"):
            finish(at_end=False)
            if anchor := line[2:].strip():
                anchors.append(anchor)
        elif line.strip() == _END_OF_FILE:
            finish(at_end=True)
        elif line == "":
            lines.append((" ", ""))  # an empty line of context whose space got lost
        elif line[0] in " -+":
            lines.append((line[0], line[1:]))
        else:
            raise _bad_line(position + offset, line, "a line begins with ' ', '-', '+' or '@@'")
    finish(at_end=False)
    if not hunks and move_to is None:
        raise ToolError(f"{path}: the update has no lines. {FORMAT_HINT}")
    return FilePatch(action="update", path=path, move_to=move_to, hunks=tuple(hunks))


def _bad_line(position: int, line: str, why: str) -> ToolError:
    return ToolError(f"line {position + 1} of the patch, {line[:80]!r}: {why}. {FORMAT_HINT}")


# --- the unified diff


def _parse_unified(text: str) -> tuple[FilePatch, ...]:
    try:
        from unidiff.errors import UnidiffParseError  # noqa: PLC0415  (an extra, imported when used)
        from unidiff.patch import PatchSet  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            "unified diffs need unidiff: pip install 'trio-agent[tools]'"
        ) from None
    try:
        files = PatchSet(text if text.endswith("\n") else f"{text}\n")
    except (UnidiffParseError, ValueError) as exc:
        raise ToolError(f"the unified diff cannot be read: {exc}. {FORMAT_HINT}") from None
    patches: list[FilePatch] = []
    for file in files:
        hunks = tuple(
            Hunk(
                lines=tuple(
                    (line.line_type, line.value.removesuffix("\n"))
                    for line in hunk
                    if line.line_type in (" ", "-", "+")
                ),
                near=max(0, hunk.source_start - 1),
                newline=_ends_with_newline([(line.line_type, line.value) for line in hunk]),
            )
            for hunk in file
        )
        source, target = _plain_name(file.source_file), _plain_name(file.target_file)
        if source is None and target is not None:
            content = "".join(f"{text}\n" for hunk in hunks for _, text in hunk.lines)
            if hunks and hunks[-1].newline is False:
                content = content.removesuffix("\n")
            patches.append(FilePatch(action="add", path=target, content=content))
        elif target is None and source is not None:
            patches.append(FilePatch(action="delete", path=source, hunks=hunks))
        elif source is not None and target is not None:
            move_to = target if target != source else None
            patches.append(
                FilePatch(action="update", path=source, move_to=move_to, hunks=hunks)
            )
        else:
            raise ToolError(f"a file of the unified diff has no name. {FORMAT_HINT}")
    return tuple(patches)


def _ends_with_newline(lines: list[tuple[str, str]]) -> bool | None:
    """Say whether the new text ends with a newline, where the hunk tells."""
    verdict: bool | None = None
    for (sign, _), (following, _) in itertools.pairwise(lines):
        if following == "\\":
            verdict = sign == "-" and verdict is not False
            if sign in ("+", " "):
                verdict = False
    return verdict


def _plain_name(name: str) -> str | None:
    name = name.partition("\t")[0]
    if name == "/dev/null":
        return None
    return name[2:] if name.startswith(("a/", "b/")) else name


# --- placing and applying


class _Work:
    """Counts comparisons over all hunks of a patch."""

    def __init__(self) -> None:
        self.left = MAX_COMPARISONS

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ToolError(
                "the patch takes too long to place, since its lines occur too often: give more"
                " context or an '@@' line with a line that occurs once"
            )


def apply_patches(
    patches: tuple[FilePatch, ...], texts: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the new text of every path that changes, None for one that goes.

    Args:
        patches: What to do.
        texts: The present texts, for each path that is updated or deleted.

    Raises:
        ToolError: If a hunk does not match or nothing would change; it says which.
    """
    work = _Work()
    results: dict[str, str | None] = {}
    for patch in patches:
        if patch.path in results or patch.move_to in results:
            raise ToolError(
                f"{patch.path}: is named twice in the patch; write one section each"
            )
        if patch.action == "add":
            results[patch.path] = patch.content
            continue
        text = texts[patch.path]
        new = _apply_hunks(patch, text, work)
        if patch.action == "delete":
            results[patch.path] = None
        elif patch.move_to is not None:
            results[patch.path] = None
            results[patch.move_to] = new
        elif new == text:
            raise ToolError(f"{patch.path}: the patch changes nothing")
        else:
            results[patch.path] = new
    return results


def _apply_hunks(patch: FilePatch, text: str, work: _Work) -> str:
    lines = text.split("\n")
    ends_with_newline = lines[-1] == ""
    if ends_with_newline:
        lines.pop()
    carriage = "\r" if sum(line.endswith("\r") for line in lines) * 2 > len(lines) else ""
    bare = [line.removesuffix("\r") for line in lines]
    result: list[str] = []
    done = 0
    for number, hunk in enumerate(patch.hunks, 1):
        at = _place(hunk, bare, done, work)
        if at is None:
            raise ToolError(_no_match(patch.path, number, hunk, bare))
        result += lines[done:at]
        for sign, content in hunk.lines:
            if sign == "+":
                result.append(content.removesuffix("\r") + carriage)
            else:
                if sign == " ":
                    result.append(lines[at])
                at += 1
        done = at
        if hunk.newline is not None and at == len(lines):
            ends_with_newline = hunk.newline
    result += lines[done:]
    if not result:
        return ""
    return "\n".join(result) + ("\n" if ends_with_newline or not lines else "")


def _place(hunk: Hunk, lines: list[str], start: int, work: _Work) -> int | None:
    """Find where the whole of *hunk* stands, at *start* or below."""
    for anchor in hunk.anchors:
        found = next(
            (n for n in range(start, len(lines)) if _is_anchor(anchor, lines[n], work)), None
        )
        if found is None:
            return None
        start = found + 1
    old = [text.removesuffix("\r") for text in hunk.old]
    last = len(lines) - len(old)
    if hunk.at_end:
        return last if last >= start and _matches(old, lines, last, work) else None
    if not old:
        if hunk.near is not None:  # a diff's insertion stands behind the line it names
            return min(max(start, hunk.near + (1 if lines else 0)), len(lines))
        return start if hunk.anchors else len(lines)
    # The line with an anchor may itself be the first line of the context.
    begin = start - 1 if hunk.anchors and _matches(old, lines, start - 1, work) else start
    if hunk.near is None:
        return next((n for n in range(begin, last + 1) if _matches(old, lines, n, work)), None)
    places = sorted(range(start, last + 1), key=lambda n: abs(n - (hunk.near or 0)))
    return next((n for n in places if _matches(old, lines, n, work)), None)


def _is_anchor(anchor: str, line: str, work: _Work) -> bool:
    work.spend()
    return line.strip() == anchor


def _matches(old: list[str], lines: list[str], at: int, work: _Work) -> bool:
    if at + len(old) > len(lines):
        return False
    for offset, text in enumerate(old):
        work.spend()
        if lines[at + offset] != text:
            return False
    return True


def _no_match(path: str, number: int, hunk: Hunk, lines: list[str]) -> str:
    missing = next((text for text in hunk.old if text.removesuffix("\r") not in lines), None)
    if missing is not None:
        why = f"this line is not in the file: {missing[:200]!r}"
    elif hunk.anchors:
        why = f"its lines do not follow {hunk.anchors[-1][:200]!r} in this order"
    else:
        why = "its lines do not stand together in this order, below the hunk before it"
    return f"{path}: hunk {number} does not match, nothing was changed: {why}. Read it again."
