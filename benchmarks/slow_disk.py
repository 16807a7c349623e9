"""Run a benchmark as if fsync took longer: ``benchmarks.slow_disk MICROSECONDS MODULE …``.

Needs gcc; the shim is compiled into a temporary directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    microseconds, module, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        shim = Path(directory, "slow_fsync.so")
        source = Path(__file__).with_name("slow_fsync.c")
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(shim), "-ldl"], check=True
        )
        environment = {**os.environ, "LD_PRELOAD": str(shim), "SLOW_FSYNC_US": microseconds}
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], env=environment, check=False
        )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
