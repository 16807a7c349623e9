"""What is kept of an output does not depend on the pieces in which it came."""

from __future__ import annotations

import os

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_agent.protocol.text import CUT_NOTICE
from trio_agent.sandbox import capture as module
from trio_agent.sandbox.capture import Capture, OutputFiles

PIECE = st.one_of(
    st.binary(max_size=30),
    st.text("aé€𝄞", max_size=20).map(str.encode),
)


def kept(files: OutputFiles, path: str) -> bytes:
    with files.open(path) as descriptor:
        return os.read(descriptor, 1_000_000)


@settings(max_examples=60)
@given(st.lists(PIECE, max_size=20), st.integers(8, 64))
def test_all_is_in_memory_or_in_the_file(pieces: list[bytes], limit: int) -> None:
    async def main() -> None:
        files = OutputFiles()
        try:
            sink = Capture(files, "out", limit=limit)
            for piece in pieces:
                await sink.write(piece)
            sink.close()
            whole, output = b"".join(pieces), sink.output()
            if len(whole) <= limit:
                assert output.text == whole.decode(errors="replace")
                assert (output.missing, output.file) == (0, None)
                return
            assert output.file is not None
            assert kept(files, output.file) == whole
            assert output.unkept == 0
            notice = CUT_NOTICE.format(f"{output.missing:,}")
            head, _, tail = output.text.partition(notice)
            assert whole.decode(errors="replace").startswith(head.rstrip("\ufffd"))
            assert whole.decode(errors="replace").endswith(tail.lstrip("\ufffd"))
        finally:
            files.close()

    trio.run(main)


@settings(max_examples=60)
@given(st.lists(st.lists(st.binary(max_size=10), max_size=5), max_size=6))
def test_drains_give_each_byte_once_and_the_file_goes_on(rounds: list[list[bytes]]) -> None:
    async def main() -> None:
        files = OutputFiles()
        try:
            sink = Capture(files, "out", limit=12)
            path = None
            since = b""
            for pieces in rounds:
                came = b"".join(pieces)
                for piece in pieces:
                    await sink.write(piece)
                output = sink.drain()
                if output.missing == 0:
                    assert output.text == came.decode(errors="replace")
                if path is not None or output.missing:
                    since += came
                path = path or output.file
            assert sink.drain().text == ""
            sink.close()
            if path is not None:
                assert kept(files, path) == since
        finally:
            files.close()

    trio.run(main)


async def test_the_file_is_bounded_and_says_so() -> None:
    files = OutputFiles()
    sink = Capture(files, "out", limit=10)
    piece = bytes(1 << 20)
    for _ in range(module.MAX_KEPT_BYTES // len(piece) + 2):
        await sink.write(piece)
    sink.close()
    output = sink.output()
    assert output.unkept == 2 * len(piece)
    files.close()


async def test_the_oldest_file_goes_first() -> None:
    files = OutputFiles()
    paths = []
    for _ in range(module.MAX_KEPT_FILES + 1):
        sink = Capture(files, "out", limit=8)
        await sink.write(b"123456789")
        sink.close()
        paths.append(sink.output().file)
    assert files._directory is not None
    assert len(list(files._directory.iterdir())) == module.MAX_KEPT_FILES
    assert kept(files, str(paths[-1])) == b"123456789"
    files.close()
