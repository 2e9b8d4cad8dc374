"""How long `import snaprt` takes above `import jax`; run it: python tests/bench/bench_import.py.

Each figure is the fastest of several fresh processes, which shared machines disturb the least.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

REPEATS = 7
LIMIT_MS = 50
CODE = """
import time
started = time.perf_counter()
import jax
between = time.perf_counter()
import snaprt
ended = time.perf_counter()
print(between - started, ended - between)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Compiled modules, as an installed package has them, whatever this machine's settings.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)

        def measure() -> list[float]:
            shown = subprocess.check_output([sys.executable, "-c", CODE], env=environment)
            return [1000 * float(word) for word in shown.split()]

        measure()
        rows = [measure() for _ in range(REPEATS)]
    print(f"import jax      {min(row[0] for row in rows):7.1f} ms")
    print(f"import snaprt   {min(row[1] for row in rows):7.1f} ms above it (limit {LIMIT_MS} ms)")


if __name__ == "__main__":
    main()
