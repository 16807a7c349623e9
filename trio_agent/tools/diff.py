"""What a change of a text looks like to a person: a unified diff, made in linear time.

A minimal diff of two long texts can take minutes. Only what lies between the first
and the last line that differ is compared, and only if that is short.
"""

from __future__ import annotations

import difflib
from typing import Final

CONTEXT_LINES: Final = 3

MAX_COMPARED_LINES: Final = 400
"""Beyond it the changed part is shown as removed and added as a whole."""

NO_NEWLINE: Final = "\\ No newline at end of file"


def unified_diff(
    path: str, before: str | None, after: str | None, *, source: str | None = None
) -> str:
    """Return the difference between two texts, "" if there is none.

    Args:
        path: Named in the header.
        before: The old text, None if there was no file.
        after: The new text, None if there will be no file.
        source: The old path, if it was another.
    """
    header = [
        "--- /dev/null" if before is None else f"--- a/{source or path}",
        "+++ /dev/null" if after is None else f"+++ b/{path}",
    ]
    old, new = (_lines(text or "") for text in (before, after))
    if old == new:
        moved = source is not None and source != path
        return "\n".join([*header, ""]) if moved or before is None or after is None else ""
    top = 0
    while top < min(len(old), len(new)) and old[top] == new[top]:
        top += 1
    bottom = 0
    while bottom < min(len(old), len(new)) - top and old[-1 - bottom] == new[-1 - bottom]:
        bottom += 1
    first = max(0, top - CONTEXT_LINES)
    ending = max(0, bottom - CONTEXT_LINES)
    old_part, new_part = old[first : len(old) - ending], new[first : len(new) - ending]
    if max(len(old_part), len(new_part)) <= MAX_COMPARED_LINES:
        body = _compared(old_part, new_part, first)
    else:
        lead = top - first
        trail = bottom - ending
        body = [
            _range(first, len(old_part), len(new_part)),
            *(f" {line}" for line in old_part[:lead]),
            *(f"-{line}" for line in old_part[lead : len(old_part) - trail]),
            *(f"+{line}" for line in new_part[lead : len(new_part) - trail]),
            *(f" {line}" for line in old_part[len(old_part) - trail :]),
        ]
    return "\n".join([*header, *body, ""])


def _lines(text: str) -> list[str]:
    r"""Split at ``\n`` alone; a last line without one carries a note that says so."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    else:
        lines[-1] += f"\n{NO_NEWLINE}"
    return lines


def _compared(old: list[str], new: list[str], offset: int) -> list[str]:
    body: list[str] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        start, end = group[0], group[-1]
        count_old, count_new = end[2] - start[1], end[4] - start[3]
        body.append(_range(offset + start[1], count_old, count_new, offset + start[3]))
        for kind, old_from, old_to, new_from, new_to in group:
            if kind == "equal":
                body += [f" {line}" for line in old[old_from:old_to]]
                continue
            body += [f"-{line}" for line in old[old_from:old_to]]
            body += [f"+{line}" for line in new[new_from:new_to]]
    return body


def _range(old: int, count_old: int, count_new: int, new: int | None = None) -> str:
    start_new = old if new is None else new
    return (
        f"@@ -{old + bool(count_old)},{count_old} +{start_new + bool(count_new)},{count_new} @@"
    )
