"""`trio-agent chat`: a line, an answer, and again."""

from __future__ import annotations

import trio

from trio_agent.cli.conversation import Conversation
from trio_agent.cli.exits import Exit
from trio_agent.cli.terminal import Lines, is_interactive
from trio_agent.errors import SubmissionRejectedError

PROMPT = "you> "


async def chat(conversation: Conversation, lines: Lines) -> Exit:
    """Talk until the input ends; returns how the last turn ended.

    A turn that failed does not end the talk. At a terminal it is OK in the end all
    the same: the user has seen it.
    """
    interactive = is_interactive()
    await conversation.agent.wait_idle()  # what was cut off or queued comes first
    while True:
        await trio.lowlevel.checkpoint()
        if interactive:
            conversation.renderer.prompt(PROMPT)
        line = await lines.read()
        if line is None:
            break
        if not line.strip():
            continue
        try:
            await conversation.send(line)
        except SubmissionRejectedError as exc:
            conversation.renderer.line("bad", f"[refused] {exc.code}: {exc}")
    return Exit.OK if interactive else conversation.last_ending
