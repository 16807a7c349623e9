"""Every bound on size and count, each with its reason.

Sizes are bytes of UTF-8, never characters: providers, disks and sockets count
bytes, and a limit in characters can be exceeded fourfold.
"""

from __future__ import annotations

from typing import Final

INBOX_CAPACITY: Final = 64
"""Ops waiting in memory; more is `BusyError`. A frontend that far ahead is not listening."""

MAX_IDENTIFIER_BYTES: Final = 4_096
"""Ids of submissions, turns, approvals, calls and routes."""

MAX_SESSION_ID_BYTES: Final = 255
"""Session ids, so that one fits a file name if a user wants it to."""

MAX_NAME_BYTES: Final = 256
"""Names of capabilities, commands, tools and middlewares."""

MAX_USER_INPUT_BYTES: Final = 1_048_576
"""The text of one user message."""

MAX_CAPABILITY_INPUT_BYTES: Final = 65_536
"""Arguments and input of a command, texts and reasons given by hooks, edits of the queue."""

MAX_METADATA_BYTES: Final = 65_536
"""The session's metadata as JSON; it is part of the head that every save rewrites."""

MAX_STATE_BYTES: Final = 65_536
"""One capability's durable state as JSON; the same reason."""

MAX_ATTACHMENTS: Final = 16
MAX_ATTACHMENT_NAME_BYTES: Final = 255
MAX_MEDIA_TYPE_BYTES: Final = 127
MAX_ATTACHMENT_BYTES: Final = 52_428_800

MAX_QUEUED_MESSAGES: Final = 1_024
"""What a checkpoint may hold; the shipped messages middleware stops at 64."""

MAX_PENDING_DEFAULT: Final = 64

MAX_MODEL_STEPS_DEFAULT: Final = 256
CONTEXT_WINDOW_DEFAULT: Final = 272_000
REPLAY_BATCHES_DEFAULT: Final = 100

MAX_STREAM_RETRIES: Final = 5
"""So a request is made at most six times on one route."""

MAX_TOOL_CALLS: Final = 128
"""Calls in one model output."""

MAX_ARGUMENT_BYTES: Final = 4 * 1_048_576
MAX_MODEL_OUTPUT_BYTES: Final = 16 * 1_048_576
MAX_TOOL_OUTPUT_BYTES: Final = 40_000
"""What the model reads of one result; longer texts lose their middle.

In a window of fewer tokens than that, one result has as many bytes as the window has
tokens: about a quarter of it.
"""

MIN_TOOL_OUTPUT_BYTES: Final = 1_024
"""What it reads at least, however small the window."""

MAX_ERROR_MESSAGE_BYTES: Final = 2_048
"""What a user sees of a foreign error text."""

MAX_SESSION_GRANTS: Final = 1_024
"""Approvals remembered for one session; beyond it `ApprovedForSession` acts as `Approved`."""

MAX_INTEGER: Final = 2**63 - 1
"""SQLite's largest integer."""
