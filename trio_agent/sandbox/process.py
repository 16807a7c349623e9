"""One child process: started, read, and never left behind.

The only module that starts processes. Four rules, each learnt from a way to lose one:

1. Started on trio's own thread. The kernel ties "die with your parent" to the
   parent *thread*; a worker thread goes away when idle, and the child with it.
2. Its end is seen by a pidfd, and it is reaped only after its process group was
   killed: until then nothing else can get its number.
3. Its output is read by tasks of our own while it runs, and for a short grace after
   its end; a helper that still holds the pipe delays nobody.
4. Whatever the way out, the group gets SIGKILL and the child is waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Final

import trio

from trio_agent.errors import SandboxError
from trio_agent.sandbox.base import Sink

OUTPUT_GRACE: Final = 0.25
"""Seconds that output is read on after the command itself has ended."""

KILL_GRACE: Final = 5.0
"""Seconds that the kernel gets to end a killed process; one stuck in a device takes longer."""

_POLL_INTERVAL: Final = 0.02
_READ_SIZE: Final = 65_536

_LOGGER = logging.getLogger(__name__)


async def run_process(
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    stdout: Sink,
    stderr: Sink,
    stdin: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Run *argv* as the leader of a group of its own and return its exit code.

    Args:
        argv: The program (an absolute path) and its arguments.
        cwd: Where it starts.
        env: All of its environment.
        stdout: Takes what it writes there, like *stderr*.
        stderr: See *stdout*.
        stdin: A descriptor to read from; nothing by default.
        pass_fds: Descriptors that it inherits.
        task_status: ``started()`` is called when it runs.

    Returns:
        The exit code, or minus the number of the signal that ended it.

    Raises:
        SandboxError: If it could not be started.

    When this is left by `Cancelled` or any error, the group has been killed.
    """
    with contextlib.ExitStack() as stack:
        streams: list[trio.lowlevel.FdStream] = []
        with contextlib.ExitStack() as ends:
            writing: list[int] = []
            for _ in range(2):
                reader, writer = os.pipe()
                ends.callback(os.close, writer)
                writing.append(writer)
                stream = trio.lowlevel.FdStream(reader)
                stack.callback(stream.close)
                streams.append(stream)
            child = _spawn(argv, cwd=cwd, env=env, stdin=stdin, out=writing, pass_fds=pass_fds)
        with _exit_watch(child) as pidfd:
            try:
                async with trio.open_nursery() as nursery:
                    task_status.started()
                    drained = trio.Event()
                    nursery.start_soon(_pump_both, streams, (stdout, stderr), drained)
                    await _wait_exit(child, pidfd)
                    with trio.move_on_after(OUTPUT_GRACE):
                        await drained.wait()
                    nursery.cancel_scope.cancel(reason="the command has ended")
            finally:
                _kill_group(child)
                with trio.move_on_after(KILL_GRACE, shield=True):  # a moment: it was killed
                    await _wait_exit(child, pidfd)
                _reap(child)
    return child.returncode


def _spawn(
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    stdin: int,
    out: Sequence[int],
    pass_fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603  (what to run is the caller's business)
            list(argv),
            cwd=cwd,
            env=dict(env),
            stdin=stdin,
            stdout=out[0],
            stderr=out[1],
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    except (OSError, ValueError) as exc:
        raise SandboxError(f"{argv[0]} could not be started: {exc}") from exc


async def _pump_both(
    streams: Sequence[trio.lowlevel.FdStream], sinks: Sequence[Sink], drained: trio.Event
) -> None:
    async with trio.open_nursery() as nursery:
        for stream, sink in zip(streams, sinks, strict=True):
            nursery.start_soon(_pump, stream, sink)
    drained.set()


async def _pump(stream: trio.lowlevel.FdStream, sink: Sink) -> None:
    while data := await stream.receive_some(_READ_SIZE):
        await sink.write(bytes(data))


@contextlib.contextmanager
def _exit_watch(child: subprocess.Popen[bytes]) -> Generator[int | None]:
    if sys.platform != "linux":
        yield None
        return
    pidfd = os.pidfd_open(child.pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


async def _wait_exit(child: subprocess.Popen[bytes], pidfd: int | None) -> None:
    if pidfd is not None:
        await trio.lowlevel.wait_readable(pidfd)
        return
    await trio.lowlevel.checkpoint()
    while child.poll() is None:  # noqa: ASYNC110  (no event tells it on this system)
        await trio.sleep(_POLL_INTERVAL)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in it
        os.killpg(child.pid, signal.SIGKILL)


def _reap(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        _LOGGER.error("process %d did not end within %s s of SIGKILL", child.pid, KILL_GRACE)
        child.returncode = -signal.SIGKILL
