"""`TokenMeter`: how large a session's context is, kept up as it grows."""

from __future__ import annotations

from trio_agent.state.checkpoint import Checkpoint
from trio_agent.state.context import estimate_tokens


class TokenMeter:
    """The size of a context in tokens; asking costs what was added since it was last asked.

    What a provider counted at its last answer is taken for the items up to there;
    only what came later is estimated.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._length = 0
        self._tokens = 0

    def tokens(self, checkpoint: Checkpoint) -> int:
        """Return the estimated size of the context, in tokens."""
        if self._epoch != checkpoint.context_epoch or self._length > len(checkpoint.context):
            self._epoch, self._length, self._tokens = checkpoint.context_epoch, 0, 0
        self._tokens += estimate_tokens(checkpoint.context.since(self._length))
        self._length = len(checkpoint.context)
        return self._tokens

    def measured(self, checkpoint: Checkpoint, tokens: int) -> None:
        """Take *tokens* for the size of the whole context of *checkpoint*."""
        self._epoch, self._length = checkpoint.context_epoch, len(checkpoint.context)
        self._tokens = tokens
