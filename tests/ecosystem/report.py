"""Runs the programs of the ecosystem in every mode and prints how long each took beside plain.

    python tests/ecosystem/report.py [--few] [PROGRAM ...]

`--few` runs them in the modes of the test, which are half as many. Needs
``pip install -e '.[ecosystem]'``. Exits with 1 if a program does not do what it does plainly.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ecosystem_runs import DIFFERS, FEW_MODES, MODES, PROGRAMS, difference, missing_libraries, run


def main(names: list[str]) -> int:
    modes = FEW_MODES if "--few" in names else MODES
    names = [name for name in names if name != "--few"]
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        print(f"error: no such program: {', '.join(unknown)}", file=sys.stderr)
        return 2
    found = []
    others = [mode for mode in modes if mode != "plain"]
    print(f"| program | plain (s) | {' | '.join(others)} |")
    print(f"| --- | ---: | {' | '.join('---:' for _ in others)} |")
    for name in names or PROGRAMS:
        missing = missing_libraries(PROGRAMS[name])
        if missing:
            print(f"| {name} | not installed: {', '.join(missing)} |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            ran = {mode: run(PROGRAMS[name], modes[mode], Path(folder)) for mode in modes}
        plain = ran["plain"]
        cells = []
        for mode in others:
            differs = difference(plain, ran[mode], modes[mode])
            if differs and (name, mode) not in DIFFERS:
                found.append(f"{name}, {mode}: {differs}")
            times = ran[mode].seconds / plain.seconds
            cells.append(f"{times:.2f}x{' **differs**' if differs else ''}")
        if plain.status:
            found.append(f"{name} fails plainly: {plain.errors}")
        print(f"| {name} | {plain.seconds:.1f} | {' | '.join(cells)} |", flush=True)
    print(*found, sep="\n\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
