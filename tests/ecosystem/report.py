"""Runs the programs of the ecosystem in every mode and prints how long each took beside plain.

    python tests/ecosystem/report.py [--few] [PROGRAM ...]

`--few` runs them in the modes of the test, which are half as many. PROGRAM is the name of one of
ours, a file (a program, or a notebook of Jupyter or MyST), or a folder of notebooks, as ``docs`` of
a checkout of JAX, flax, optax, ...; by default each of ours. Needs
``pip install -e '.[ecosystem]'``. Exits with 1 if a program does not do what it does plainly.

What a notebook prints of times, of samples without a seed, and of its callbacks differs without
being wrong.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ecosystem_runs import DIFFERS, FEW_MODES, MODES, PROGRAMS, difference, missing_libraries, run
from notebook_cells import SUFFIXES, cells_of


def programs_of(name: str) -> dict[str, Path]:
    """Return what ``name`` stands for: programs, and what each is called."""
    if name in PROGRAMS:
        return {name: PROGRAMS[name]}
    path = Path(name).resolve()
    if path.is_dir():
        notebooks = (file for suffix in SUFFIXES for file in path.rglob(f"*{suffix}"))
        return {str(file.relative_to(path)): file for file in sorted(notebooks) if cells_of(file)}
    return {name: path} if path.is_file() else {}


def main(names: list[str]) -> int:
    modes = FEW_MODES if "--few" in names else MODES
    names = [name for name in names if name != "--few"]
    chosen = {name: programs_of(name) for name in names or PROGRAMS}
    unknown = [name for name, programs in chosen.items() if not programs]
    if unknown:
        print(f"error: no such program: {', '.join(unknown)}", file=sys.stderr)
        return 2
    found = []
    others = [mode for mode in modes if mode != "plain"]
    print(f"| program | plain (s) | {' | '.join(others)} |")
    print(f"| --- | ---: | {' | '.join('---:' for _ in others)} |")
    for name, program in (pair for programs in chosen.values() for pair in programs.items()):
        missing = missing_libraries(program)
        if missing:
            print(f"| {name} | not installed: {', '.join(missing)} |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            plain = run(program, modes["plain"], Path(folder))
            if plain.status:
                found.append(f"{name} fails plainly: {plain.errors}")
                print(f"| {name} | status {plain.status} |", flush=True)
                continue
            ran = {mode: run(program, modes[mode], Path(folder)) for mode in others}
        cells = []
        for mode in others:
            differs = difference(plain, ran[mode], modes[mode])
            if differs and (name, mode) not in DIFFERS:
                found.append(f"{name}, {mode}: {differs}")
            times = ran[mode].seconds / plain.seconds
            cells.append(f"{times:.2f}x{' **differs**' if differs else ''}")
        print(f"| {name} | {plain.seconds:.1f} | {' | '.join(cells)} |", flush=True)
    print(*found, sep="\n\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
