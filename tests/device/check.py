"""Runs the steps of `steps.py` on this machine's device, and writes what came of them.

Called by check.sh, in an environment that has snaprt. Each step runs and fails alone. Writes
``check.json`` and ``check.md``; the exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform as machine
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from steps import STEPS, Ended, Figures, Step, UnexpectedError

SCHEMA, VERSION = "snaprt.device-check", 1
PACKAGES = ("snaprt", "jax", "jaxlib", "numpy")


@dataclasses.dataclass(frozen=True)
class Row:
    """What came of a step: ``ok``, ``failed`` or ``timeout``, with figures or the reason."""

    name: str
    command: str
    expected: str
    result: str
    seconds: float
    figures: Figures
    reason: str = ""


def run(step: Step, folder: Path, values: Mapping[str, str | int]) -> Row:
    """Run a step and judge it."""
    name, command = step.name.format(**values), step.command.format(**values)
    started = time.perf_counter()

    def row(result: str, reason: str = "", figures: Figures | None = None) -> Row:
        seconds = round(time.perf_counter() - started, 1)
        return Row(name, command, step.expected, result, seconds, figures or {}, reason)

    try:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=step.seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return row("timeout", f"not done after {step.seconds:.0f} s")
    if done.returncode not in step.statuses:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return row("failed", f"status {done.returncode}: {' '.join(lines[-3:])[-500:]}")
    ended = Ended(done.returncode, done.stdout, done.stderr, folder, str(values["platform"]))
    try:
        return row("ok", figures=step.judge(ended))
    except UnexpectedError as error:
        return row("failed", str(error))
    except (KeyError, TypeError, ValueError, OSError, IndexError) as error:
        return row("failed", f"its output cannot be read: {type(error).__name__}: {error}")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment with this Python's commands first, and a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SNAPRT_")}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SNAPRT_CACHE_DIR": str(folder / "cache"),
        # Variants run in processes of their own, and each would take most of a GPU's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def device() -> tuple[str, str]:
    """Return the platform of JAX's default device, and its devices in words."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import jax; d = jax.devices(); print(d[0].platform); "
            "print(f'{len(d)} x {d[0].device_kind}')",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    platform, kind = done.stdout.splitlines()[-2:]
    return platform, kind


def as_markdown(about: Mapping[str, object], rows: Sequence[Row]) -> str:
    """Return the table for the documents."""
    versions = about["versions"]
    assert isinstance(versions, dict)
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    device = f"{about['device']} ({about['platform']})"
    lines = [
        f"{device}, {about['machine']}, {packages}, {about['date']}:",
        "",
        "| step | expected | result | seconds | figures |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
        cells = (row.name, row.expected, row.result, f"{row.seconds:.1f}", row.reason or figures)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all steps, or those that are named; write the two files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--platform", help="cpu, gpu or tpu; it must be JAX's default")
    parser.add_argument("--out", type=Path, default=Path("device-check"), help="for the two files")
    parser.add_argument("--megabytes", type=int, nargs=2, default=(512, 3072), metavar="N")
    parser.add_argument("--only", help="only the steps whose names contain this")
    arguments = parser.parse_args()
    if shutil.which("snaprt", path=environment(Path())["PATH"]) is None:
        print(
            f"error: the command snaprt is neither next to {sys.executable} nor on PATH\n"
            f"hint: install snaprt[demo] with {sys.executable} -m pip, or add its folder to PATH",
            file=sys.stderr,
        )
        return 2
    if arguments.platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    platform, kind = device()
    if arguments.platform not in (None, platform):
        print(f"error: JAX's device is a {platform}, not a {arguments.platform}", file=sys.stderr)
        return 2
    small, large = arguments.megabytes
    system = f"{machine.machine()}, {os.cpu_count()} cores, Python {machine.python_version()}"
    about = {
        "schema": SCHEMA,
        "version": VERSION,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "platform": platform,
        "device": kind,
        "machine": system,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    import snaprt

    values = {
        "platform": platform,
        "tests": str(Path(__file__).resolve().parents[1]),
        "package": str(Path(snaprt.__file__).parent),
        "small": small,
        "large": large,
        "width": 384 if platform == "cpu" else 4096,  # for steps of 10 ms in few operations
    }
    rows = []
    with tempfile.TemporaryDirectory(prefix="snaprt-device-check-") as folder:
        for step in STEPS:
            if arguments.only and arguments.only not in step.name:
                continue
            rows.append(run(step, Path(folder), values))
            last = rows[-1]
            print(f"{last.result:8}{last.seconds:6.1f} s  {last.name}  {last.reason}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {**about, "steps": [dataclasses.asdict(row) for row in rows]}
    (arguments.out / "check.json").write_text(json.dumps(content, indent=1) + "\n")
    (arguments.out / "check.md").write_text(as_markdown(about, rows))
    failed = [row.name for row in rows if row.result != "ok"]
    seconds = sum(row.seconds for row in rows)
    print(f"{len(rows) - len(failed)} of {len(rows)} steps passed in {seconds:.0f} s")
    print(f"{arguments.out}/check.json, {arguments.out}/check.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
