"""What importing the library costs, as a ratio to importing what it depends on.

Prints one JSON line. Child processes take turns, so that both sides see the same
machine; the median CPU time of each counts: the least one is luck, and moved the ratio by a
fifth. All of them read compiled modules, as an installed library does: a round that does
not count writes them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

ROUNDS = 40
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
    times: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as compiled:
        for _ in range(ROUNDS + 1):
            for name, code in sides.items():
                times[name].append(seconds(code, compiled))
    cost = {name: statistics.median(found[1:]) for name, found in times.items()}
    base, ours = (cost[name] - cost["empty"] for name in ("base", "ours"))
    line = {"benchmark": "import_time", "ratio": round(ours / base, 2), "target": 1.5}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
