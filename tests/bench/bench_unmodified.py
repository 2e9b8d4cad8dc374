"""How long programs take that know nothing of snaprt, plainly and under `snaprt run --lazy`.

Run it: python tests/bench/bench_unmodified.py [--rounds N] [PROGRAM ...]

The programs stand in the folder `unmodified`, beside this file. Each runs plainly, lazily with an
empty compile cache (cold), and once more with that cache (warm), and these take turns; the least of
each is kept. A plain run has no compile cache. `net` leaves out what a program takes that only
imports JAX and adds two numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import measuring

FOLDER = Path(__file__).parent / "unmodified"
NOTHING = "nothing"
PLAIN, COLD, WARM = "plain", "cold", "warm"


@dataclass(frozen=True)
class Cost:
    """What a run took.

    Attributes:
        seconds: From its start to its end.
        processor: Seconds of all processors.
        megabytes: The most memory it had at one time.
    """

    seconds: float
    processor: float
    megabytes: float

    def least(self, other: Cost | None) -> Cost:
        """Return the smaller of each."""
        if other is None:
            return self
        return Cost(
            min(self.seconds, other.seconds),
            min(self.processor, other.processor),
            min(self.megabytes, other.megabytes),
        )


def run(program: Path, cache: Path | None, bytecode: Path) -> tuple[Cost, str]:
    """Run a program, lazily where there is a cache for it; return its cost and what it prints."""
    command = [sys.executable, str(program)]
    environment = {
        **measuring.clean_environment(bytecode),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    }
    if cache is not None:
        command = [sys.executable, "-m", "snaprt", "run", "--lazy", "--", str(program)]
        environment["SNAPRT_CACHE_DIR"] = str(cache)
    with tempfile.TemporaryFile() as output:
        actions = [(os.POSIX_SPAWN_DUP2, output.fileno(), 1)]
        started = time.perf_counter()
        child = os.posix_spawn(command[0], command, environment, file_actions=actions)
        _, status, usage = os.wait4(child, 0)
        seconds = time.perf_counter() - started
        output.seek(0)
        text = output.read().decode()
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024), text


def measure(program: Path, rounds: int, bytecode: Path) -> dict[str, Cost]:
    """Return the least cost of each way."""
    costs: dict[str, Cost] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            texts = set()
            for way, cache in ((PLAIN, None), (COLD, Path(folder)), (WARM, Path(folder))):
                cost, text = run(program, cache, bytecode)
                costs[way] = cost.least(costs.get(way))
                texts.add(text)
        if len(texts) != 1:
            raise SystemExit(f"{program.name} prints otherwise when it runs lazily: {texts}")
    return costs


def row(name: str, costs: dict[str, Cost], start: dict[str, Cost]) -> list[str]:
    """Return the cells of a program: seconds plainly, then ratios to it."""
    plain, cold, warm = (costs[way] for way in (PLAIN, COLD, WARM))

    def net(way: str, *, processor: bool) -> float:
        if processor:
            return max(costs[way].processor - start[way].processor, 0.01)
        return max(costs[way].seconds - start[way].seconds, 0.01)

    return [
        name,
        f"{plain.seconds:.1f}",
        f"{cold.seconds:.1f}",
        f"{cold.seconds / plain.seconds:.2f}",
        f"{net(COLD, processor=False) / net(PLAIN, processor=False):.2f}",
        f"{warm.seconds / plain.seconds:.2f}",
        f"{plain.processor:.1f}",
        f"{cold.processor:.1f}",
        f"{cold.processor / plain.processor:.2f}",
        f"{net(COLD, processor=True) / net(PLAIN, processor=True):.2f}",
        f"{warm.processor / plain.processor:.2f}",
        f"{plain.megabytes:.0f}",
        f"{cold.megabytes:.0f}",
    ]


def main() -> None:
    every = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != NOTHING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(every))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(measuring.machine())
    folder = tempfile.TemporaryDirectory()
    bytecode = Path(folder.name)
    measure(FOLDER / f"{NOTHING}.py", 1, bytecode)  # compiles the sources of JAX and of snaprt
    start = measure(FOLDER / f"{NOTHING}.py", options.rounds, bytecode)
    rows = [row(NOTHING, start, start)]
    for name in options.programs or every:
        rows.append(row(name, measure(FOLDER / f"{name}.py", options.rounds, bytecode), start))
        print("done:", *rows[-1], file=sys.stderr, flush=True)
    measuring.show_table(
        [
            *("program", "plain s", "cold s", "ratio", "net", "warm"),
            *("plain CPU s", "cold CPU s", "ratio", "net", "warm", "plain MB", "cold MB"),
        ],
        rows,
    )


if __name__ == "__main__":
    main()
