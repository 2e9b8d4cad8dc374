"""``snaprt doctor``: tries every part of the pipeline here, and says what to do where one fails."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from rich.text import Text
from snaprt_cache.errors import CacheError

import snaprt
from snaprt import settings
from snaprt.cli import output, progress
from snaprt.errors import SnaprtError
from snaprt.host.interruptions import interrupted_at_once

OK: Final = "ok"
FAILED: Final = "failed"
NOT_TRIED: Final = "not tried"


@dataclass(frozen=True)
class DoctorCheck:
    """One thing to try."""

    name: str  # what it is, in a word or two
    # Tries it in the folder given, and returns what it found; raises where it fails.
    run: Callable[[Path], str]
    hint: str  # what to do where it fails and the error itself does not say
    needs: tuple[str, ...] = ()  # the checks without which it makes no sense


@dataclass(frozen=True)
class CheckResult:
    """What came of a check: its state (ok, failed, not tried), what was found, what to do."""

    name: str
    state: str
    detail: str
    hint: str


def _versions(_: Path) -> str:
    packages = ("jax", "jaxlib", "numpy", "blake3", "zstandard", "sqlite-utils")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"snaprt {snaprt.__version__}, Python {platform.python_version()}, {versions}"


def _settings(_: Path) -> str:
    settings.places_written()
    names = [row.name for row in settings.SETTINGS if os.environ.get(row.name, "").strip()]
    return f"set: {', '.join(names)}" if names else "none is set"


def _write_access(folder: Path) -> str:
    """Write where the variables that are set want files, beside where all of this is tried."""
    places = {f"temporary files in {folder.parent}": folder.parent}
    for name, (path, kind) in settings.places_written().items():
        if name != "SNAPRT_CACHE_DIR":  # which has a check of its own
            path = path.absolute()
            existing = next(place for place in (path, *path.parents) if place.exists())
            places[f"{name} in {path}"] = existing if kind == "folder" else path.parent
    for what, place in places.items():
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"snaprt")
        except OSError as error:
            raise SnaprtError(f"cannot write {what}: {error.strerror or error}") from error
    return "; ".join(places)


def _devices(_: Path) -> str:
    import jax

    from snaprt.snapshot.recorder import flags

    flags.take_over()  # XLA would end the process over a flag that it does not know.
    kinds: dict[str, int] = {}
    for device in jax.devices():
        kind = f"{device.platform} ({device.device_kind})"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _cache_directory(_: Path) -> str:
    from snaprt_cache.store import Cache

    if not settings.get("SNAPRT_CACHE"):
        return "disabled by SNAPRT_CACHE"
    path = Cache.open(settings.get("SNAPRT_CACHE_DIR")).path
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(b"snaprt")
    return f"{path}, writable"


def _sqlite(_: Path) -> str:
    from snaprt_cache.index import journal_mode
    from snaprt_cache.store import Cache

    path = Cache.open(settings.get("SNAPRT_CACHE_DIR")).path
    return f"SQLite {sqlite3.sqlite_version}, journal mode {journal_mode(path)}"


# Doubles four numbers.
_MODULE: Final = """
module @doctor {
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %y = stablehlo.add %x, %x : tensor<4xf32>
    return %y : tensor<4xf32>
  }
}
"""


def _compile(_: Path) -> str:
    import jax

    from snaprt.compile.module import compile_module

    module = compile_module(_MODULE, device=jax.local_devices()[0], name="doctor")
    how = "loaded from the cache" if module.from_cache else "compiled"
    return f"a small module, {how} in {1000 * module.compile_seconds:.0f} ms"


def _execution(_: Path) -> str:
    import jax
    import numpy as np

    from snaprt.compile.module import compile_module

    device = jax.local_devices()[0]
    numbers = np.arange(4, dtype=np.float32)
    (result,) = compile_module(_MODULE, device=device, name="doctor").run([numbers])
    if not np.array_equal(result, 2 * numbers):
        raise SnaprtError(f"the module that doubles {numbers} returned {result} on {device}")
    return f"the same module on {device}, correct result"


_PROGRAM: Final = """
import jax.numpy as jnp
import snaprt
x = jnp.arange(12.0).reshape(3, 4)
with snaprt.lazy():
    y = jnp.tanh(x @ x.T) * 2
    snaprt.mark_step(wait=True)
"""


def _plain_environment() -> dict[str, str]:
    """Return the environment without what would have a program recorded or run otherwise."""
    prefixes = ("SNAPRT_CACHE", "XLA_FLAGS")
    ours = {row.name for row in settings.SETTINGS if not row.name.startswith(prefixes)}
    return {name: value for name, value in os.environ.items() if name not in ours}


def _snapshot(folder: Path) -> str:
    program = folder / "program.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    # A process of its own: recording is switched on at its start, and its flags stay its own.
    process = subprocess.run(
        [sys.executable, str(program)],
        env={
            **_plain_environment(),
            "SNAPRT_DUMP_DIR": str(folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    files = _snapshots(folder)
    if process.returncode != 0 or not files:
        words = process.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise SnaprtError(
            f"a program that should record a snapshot ended with status {process.returncode} and "
            f"wrote {len(files)} files: {words[0]}"
        )
    size = sum(path.stat().st_size for path in files)
    return f"{len(files)} files, {size:,} bytes, recorded from a lazy step"


def _replay(folder: Path) -> str:
    from snaprt import replay

    path = next(path for path in _snapshots(folder) if path.name.endswith(".inputs.snap"))
    result = replay.replay(path)
    if result.comparison is None:
        raise SnaprtError(f"{path.name} has no recorded outputs to compare with")
    if result.mismatch:
        raise SnaprtError(f"the replay differs from the recording: {result.comparison.summary}")
    return f"the same step on {result.played.device}: {result.comparison.summary}"


def _snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.snap"))


_REPORT: Final = "This should work wherever JAX works. Please report it with the lines above."
_CACHE_HINT: Final = "Set SNAPRT_CACHE_DIR to a directory of your own on a local disk."

CHECKS: Final[tuple[DoctorCheck, ...]] = (
    DoctorCheck(
        "versions", _versions, hint="Install snaprt with pip, which installs its dependencies too."
    ),
    DoctorCheck("settings", _settings, hint="See `snaprt help environment`."),
    DoctorCheck(
        "write access",
        _write_access,
        hint="Use an existing, writable directory with free space; set TMPDIR for temporary files.",
        needs=("settings",),
    ),
    DoctorCheck(
        "devices",
        _devices,
        hint="Check JAX_PLATFORMS, and that the jaxlib plugin for your accelerator is installed.",
    ),
    DoctorCheck("cache directory", _cache_directory, hint=_CACHE_HINT, needs=("settings",)),
    DoctorCheck("sqlite", _sqlite, hint=_CACHE_HINT, needs=("cache directory",)),
    DoctorCheck("compile", _compile, hint=_REPORT, needs=("devices", "settings")),
    DoctorCheck("execution", _execution, hint=_REPORT, needs=("compile",)),
    DoctorCheck("snapshot", _snapshot, hint=_REPORT, needs=("execution",)),
    DoctorCheck("replay", _replay, hint=_REPORT, needs=("snapshot",)),
)


def examine(folder: Path, tell: Callable[[int, int], None] = lambda *_: None) -> list[CheckResult]:
    """Run all checks, in ``folder`` where they need one, and return what came of each."""
    findings: dict[str, CheckResult] = {}
    for check in CHECKS:
        tell(len(findings), len(CHECKS))
        missing = [name for name in check.needs if findings[name].state != OK]
        if missing:
            finding = CheckResult(check.name, NOT_TRIED, f"needs: {', '.join(missing)}", "")
        else:
            finding = _try(check, folder)
        findings[check.name] = finding
    return list(findings.values())


def _try(check: DoctorCheck, folder: Path) -> CheckResult:
    try:
        return CheckResult(check.name, OK, check.run(folder), "")
    except (SnaprtError, CacheError) as error:
        return CheckResult(check.name, FAILED, error.message, error.hint or check.hint)
    except Exception as error:  # Whatever is wrong here, the other checks are still worth trying.
        return CheckResult(check.name, FAILED, f"{type(error).__name__}: {error}", check.hint)


@click.command("doctor")
@output.json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Check that everything works on this machine, from the versions to a replay.

    Test each part once: versions, settings, write access, devices, the cache directory and its
    index, a compilation, an execution, a snapshot and its replay. The exit status is 0 if all
    checks pass, else 1.

    \b
    Example:
      snaprt doctor
      snaprt doctor --json
    """
    with contextlib.suppress(Exception), interrupted_at_once():
        import jax  # noqa: F401 - before there is a folder to remove; a check says why it fails
    with (
        tempfile.TemporaryDirectory(prefix="snaprt-doctor-") as folder,
        progress.showing("checking") as line,
    ):
        findings = examine(Path(folder), line.done)
    is_well = all(finding.state == OK for finding in findings)
    if as_json:
        output.emit_json("snaprt.doctor", {"ok": is_well, "checks": findings})
    else:
        _print(findings)
    context.exit(output.EXIT_OK if is_well else output.EXIT_MISMATCH)


_STYLES: Final = {OK: "green", FAILED: "bold red", NOT_TRIED: "yellow"}


def _print(findings: list[CheckResult]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text.assemble(
            (f"{finding.state:<9}", _STYLES[finding.state]),
            f"  {finding.name:<{width}}  {finding.detail}",
        )
        output.console.print(line)
        if finding.hint:
            output.console.print(
                Text.assemble(" " * 11, ("hint:", "bold cyan"), f" {finding.hint}")
            )
