"""``snaprt replay --compile-only``: say whether files compile for a device, there or not.

It knows how the compiler's answer is shown; compiling is `snaprt_replay.run.workers`'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from snaprt_replay.load.load import load
from snaprt_replay.run.jobs import STABLEHLO
from snaprt_replay.run.variants.variants import Variant, with_options
from snaprt_replay.run.workers import Outcome, Workers

from snaprt.cli import output, tables
from snaprt.errors import SnaprtError, UsageError
from snaprt.units import format_duration, format_size

SCHEMA: Final = "snaprt.compile-only"
SCHEMA_VERSION: Final = 1

# XLA's name -> words; what is zero everywhere but on one platform is in the JSON alone.
_MEMORY: Final = {
    "argument_size": "arguments",
    "output_size": "outputs",
    "temp_size": "temporary",
    "generated_code_size": "code",
    "peak_memory": "peak",
}
_COST: Final = {
    "flops": "{:.3g} flops",
    "transcendentals": "{:.3g} transcendentals",
    "bytes accessed": "{:.3g} bytes accessed",
    "optimal_seconds": "{:.3g} s at best",
}


def compile_all(
    files: Sequence[Path],
    variant: Variant,
    timeout: float,
    save_hlo: Path | None,
    *,
    as_json: bool,
) -> int:
    """Compile each file in a process of its own, show what was found, and return the status.

    The status is 0 if all compile, 1 if the compiler refuses one or fails, 2 if one cannot be read
    or there is nothing to compile for.
    """
    if save_hlo is not None and len(files) > 1:
        raise UsageError("--save-hlo takes the HLO of one FILE", hint="compile them one by one")
    status, told = output.EXIT_OK, []
    with Workers(1, timeout) as workers:
        for path in files:
            found = _compile(path, variant, workers, save_hlo)
            status = max(status, found["status"])
            told.append(found)
            if not as_json:
                _show(found)
    if as_json:
        output.emit_json(SCHEMA, SCHEMA_VERSION, {"status": status, "files": told})
    return status


def _compile(
    path: Path, variant: Variant, workers: Workers, save_hlo: Path | None
) -> dict[str, Any]:
    try:
        case = load(path)
        chosen = with_options(variant, case.compiler_options)
        outcome = workers.run(chosen, case.stablehlo, (), form=STABLEHLO, name=case.name)
        if outcome.failure is not None:
            return _failed(path, variant, outcome)
        saved = save_hlo or _default_path(path, variant)
        _save(saved, outcome.report["hlo"])
    except SnaprtError as error:
        output.error(tables.printable(error.message), tables.printable(error.hint))
        return {"path": path, "status": 2, "error": error.message, "hint": error.hint}
    return {
        "path": path,
        "status": output.EXIT_OK,
        "compiles": True,
        "device": outcome.device,
        "compile_seconds": outcome.compile_seconds,
        "memory": outcome.report["memory"],
        "cost": outcome.report["cost"],
        "hlo": saved,
    }


def _failed(path: Path, variant: Variant, outcome: Outcome) -> dict[str, Any]:
    failure = outcome.failure
    assert failure is not None
    if failure.kind in ("unsupported", "missing device"):
        raise UsageError(failure.message, hint=failure.hint)
    return {
        "path": path,
        "status": output.EXIT_MISMATCH,
        "compiles": False,
        "device": variant.text,
        "failure": failure,
        "sentence": f"{failure}: {failure.message}",
    }


def _default_path(path: Path, variant: Variant) -> Path:
    device = re.sub(r"[^\w.-]+", "-", variant.text)
    return Path(f"{path.name}.{device}.hlo.txt")


def _save(path: Path, text: str) -> None:
    hint = "name a file in an existing folder: --save-hlo FILE"
    with output.writing(f"save the HLO to {path}", hint):
        path.write_text(text)


def _show(found: dict[str, Any]) -> None:
    if "error" in found:
        return
    device = tables.printable(found["device"])
    if not found["compiles"]:
        told = tables.printable(found["sentence"])
        output.console.print(f"{found['path']}: DOES NOT COMPILE for {device}: {told}")
        return
    seconds = format_duration(found["compile_seconds"])
    output.console.print(f"{found['path']}: compiles for {device} in {seconds}")
    memory = [
        f"{words} {format_size(found['memory'][name])}"
        for name, words in _MEMORY.items()
        if name in found["memory"]
    ]
    output.console.print(f"memory: {', '.join(memory)}")
    cost = [
        form.format(found["cost"][name]) for name, form in _COST.items() if name in found["cost"]
    ]
    output.console.print(f"cost: {', '.join(cost) or 'the compiler gives no analysis'}")
    output.console.print(f"optimized HLO: {found['hlo']}")
