"""Report how many cases of existing JAX code equal eager JAX when they run lazily.

    python tests/breadth/report.py [--every N] [--jobs N] [--family TABLE ...] [--x64 on|off|both]

Each table runs in processes of its own, on four host devices where it needs them, without the
compile cache. Every case is applied to two samples of values, eagerly, and lazily in two steps; the
second step follows what the first recorded.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

VERDICTS = (
    "bit for bit equal",
    "the same error",
    "the same error, when it runs",
    "as under jax.jit",
    "within rounding",
    "differs",
)
"""As in `breadth_verdicts`, which needs JAX."""


@dataclass(frozen=True)
class Part:
    """What one process runs: every so manieth case of a table, from one on."""

    table: str
    wide: bool
    start: int
    step: int


def run_part(part: Part) -> dict[str, Any]:
    """Run a part in a process of its own and return what it found."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": str(int(part.wide)),
        "SNAPRT_CACHE": "0",
        "SNAPRT_RECOMPILE_LIMIT": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    if part.table == "table_sharded":
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    command = [sys.executable, __file__, "--one", part.table, str(part.start), str(part.step)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"judgements": [], "covers": [], "died": f"{part}: {done.stderr[-2000:]}"}
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def _one(table: str, start: int, step: int) -> None:
    """Run a part in this process and print what was found as JSON."""
    import breadth_families
    import breadth_verdicts
    import jax

    cases = list(breadth_families.cases_of(table))
    judgements, covered = [], set()
    for number, case in enumerate(cases[start::step], 1):
        judgement = breadth_verdicts.judge(case)
        judgements.append(breadth_verdicts.as_row(judgement))
        if judgement.verdict != breadth_verdicts.SAME_ERROR:
            covered |= case.covers
        if number % 100 == 0:  # so that memory does not grow with the programs compiled
            jax.clear_caches()
    print(json.dumps({"judgements": judgements, "covers": sorted(covered)}))


def report(judgements: Sequence[Mapping[str, Any]]) -> str:
    """Return the report of many cases as text."""
    lines = [_table(judgements), ""]
    again = sum(bool(one["compiled_again"]) for one in judgements)
    lines += [f"{again} of them compiled something in the second step.", ""]
    rounded = [one for one in judgements if one["verdict"] in VERDICTS[3:5]]
    lines += ["Largest distances to eager, in representable numbers:"]
    for one in sorted(rounded, key=lambda item: -item["max_ulp"])[:10]:
        lines.append(f"  {one['max_ulp']} ulp, {one['verdict']}: {one['case']}")
    lines += ["", "What differs:"]
    for one in judgements:
        if one["verdict"] == "differs":
            lines.append(f"  {one['case']}: {one['reason']}")
    return "\n".join(lines)


def _table(judgements: Iterable[Mapping[str, Any]]) -> str:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in judgements:
        for family in (one["family"], "all"):
            counts[family][one["verdict"]] += 1
    families = [*sorted(set(counts) - {"all"}), "all"]
    head = f"| | cases | {' | '.join(VERDICTS)} |\n|---|---:|{'---:|' * len(VERDICTS)}"
    rows = [
        f"| {family} | {counts[family].total()} |"
        + "".join(f" {counts[family][verdict] or ''} |" for verdict in VERDICTS)
        for family in families
    ]
    return "\n".join([head, *rows])


def main() -> None:
    """Run the cases that were asked for and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="run every Nth case alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--family", nargs="*", help="the tables to run, by default all")
    parser.add_argument("--x64", choices=("on", "off", "both"), default="both")
    parser.add_argument("--json", type=Path, help="where to write every verdict")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _one(options.one[0], int(options.one[1]), int(options.one[2]))
        return

    import breadth_families

    tables = options.family or breadth_families.TABLES
    wide = {"on": (True,), "off": (False,), "both": (False, True)}[options.x64]
    pieces = 4  # of a table, which then end sooner on several cores
    parts = [
        Part(table, x64, start * options.every, options.every * pieces)
        for table in tables
        for x64 in wide
        for start in range(pieces)
    ]
    print(_machine(), file=sys.stderr)
    started, found = time.monotonic(), []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for part, result in zip(parts, pool.map(run_part, parts), strict=True):
            found.append(result)
            seconds = time.monotonic() - started
            print(f"{seconds:6.0f} s  {part.table} x64={part.wide}", file=sys.stderr)
            if "died" in result:
                print(result["died"], file=sys.stderr)
    judgements = [one for result in found for one in result["judgements"]]
    if options.json:
        options.json.write_text(json.dumps(judgements, indent=0))
    print(report(judgements))
    covered = set().union(*(result["covers"] for result in found))
    if not options.family and options.every == 1:
        missing = breadth_families.without_recipe(covered)
        public = len(breadth_families.public_functions())
        print(f"\n{len(missing)} of {public} public functions end without an error in no case:")
        print(f"  {', '.join(missing)}")
    differs = any(one["verdict"] == "differs" for one in judgements)
    sys.exit(differs or any("died" in result for result in found))


def _machine() -> str:
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax"))
    return ", ".join((f"Python {platform.python_version()}", *versions))


if __name__ == "__main__":
    main()
