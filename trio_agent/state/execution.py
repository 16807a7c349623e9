"""What is counted of turns: the record that each leaves, and the sums over all of them."""

from __future__ import annotations

from trio_agent.errors import InternalError
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.state.changes import TurnEnded
from trio_agent.state.checkpoint import Checkpoint, ExecutionRecord, ExecutionStats


def record_of(checkpoint: Checkpoint, ended: TurnEnded) -> ExecutionRecord:
    """Return what the running turn leaves behind when it ends so.

    A clock that ran backwards gives a turn of no duration, never a negative one.
    """
    active = checkpoint.active_execution
    if active is None:
        raise InternalError("no turn is active")
    return ExecutionRecord(
        session_id=checkpoint.session_id,
        submission_id=active.submission_id,
        turn_id=active.turn_id,
        started_at_ms=active.started_at_ms,
        finished_at_ms=max(active.started_at_ms, ended.finished_at_ms),
        outcome=ended.outcome,
        finish_reason=ended.finish_reason,
        model_calls=active.model_calls,
        tool_calls=active.tool_calls,
        failed_tool_calls=active.failed_tool_calls,
        usage=active.usage,
    )


def stats_with(stats: ExecutionStats, record: ExecutionRecord) -> ExecutionStats:
    """Return *stats* with one turn more; all of it is counted or, on overflow, nothing."""
    sums = ExecutionStats(
        run_count=stats.run_count + 1,
        failed_run_count=stats.failed_run_count + (record.outcome == "failed"),
        aborted_run_count=stats.aborted_run_count + (record.outcome == "aborted"),
        model_calls=stats.model_calls + record.model_calls,
        tool_calls=stats.tool_calls + record.tool_calls,
        failed_tool_calls=stats.failed_tool_calls + record.failed_tool_calls,
        elapsed_ms=stats.elapsed_ms + record.elapsed_ms,
        usage=stats.usage + record.usage,
    )
    if max(sums.model_calls, sums.tool_calls, sums.elapsed_ms) > MAX_INTEGER:
        raise InternalError("execution statistics out of range")
    return sums
