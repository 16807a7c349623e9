"""What importing the library costs, as a ratio to importing what it depends on.

Prints one JSON line. Child processes take turns, so that both sides see the same
machine; the least CPU time of each counts, since noise only ever adds. All of them read
compiled modules, as an installed library does: the first round writes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

ROUNDS = 15
BASE = "import trio, attrs, cattrs, msgspec, sqlite3"
CLOCK = "import time; print(time.process_time())"


def seconds(code: str, compiled: str) -> float:
    """Return the CPU time of a child that runs *code*, with its modules *compiled* there."""
    child = [sys.executable, "-c", f"{code}\n{CLOCK}"]
    env = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(child, capture_output=True, check=True, env=env, text=True)
    return float(done.stdout)


def main() -> None:
    """Measure, interleaved, and print."""
    sides = {"empty": "pass", "base": BASE, "ours": f"{BASE}\nimport trio_agent"}
    least = dict.fromkeys(sides, float("inf"))
    with tempfile.TemporaryDirectory() as compiled:
        for _ in range(ROUNDS):
            for name, code in sides.items():
                least[name] = min(least[name], seconds(code, compiled))
    base, ours = (least[name] - least["empty"] for name in ("base", "ours"))
    line = {"benchmark": "import_time", "ratio": round(ours / base, 2), "target": 1.5}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
