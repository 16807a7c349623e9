"""What importing the library costs, as a ratio to importing what it depends on.

Prints one JSON line. Child processes take turns, so that both sides see the same
machine; the least CPU time of each counts, since noise only ever adds.
"""

from __future__ import annotations

import json
import subprocess
import sys

ROUNDS = 15
BASE = "import trio, attrs, cattrs, msgspec, sqlite3"
CLOCK = "import time; print(time.process_time())"


def seconds(code: str) -> float:
    """Return the CPU time of a child that runs *code*."""
    child = [sys.executable, "-c", f"{code}\n{CLOCK}"]
    return float(subprocess.run(child, capture_output=True, check=True, text=True).stdout)


def main() -> None:
    """Measure, interleaved, and print."""
    sides = {"empty": "pass", "base": BASE, "ours": f"{BASE}\nimport trio_agent"}
    least = dict.fromkeys(sides, float("inf"))
    for _ in range(ROUNDS):
        for name, code in sides.items():
            least[name] = min(least[name], seconds(code))
    base, ours = (least[name] - least["empty"] for name in ("base", "ours"))
    line = {"benchmark": "import_time", "ratio": round(ours / base, 2), "target": 1.5}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
