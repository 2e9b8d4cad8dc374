"""Write the output folder of a minified program.

It contains every form of the program: snaprt's snapshot, which `snaprt replay` takes, XLA's own
snapshot, the module as text in both languages, a bug report, and a script that needs only JAX.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt.hlo.proto import HloModuleProto, parse, serialize
from snaprt.host.whole_files import remedy, writing
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.write import write_snapshot
from snaprt.snapshot.recorder import describe
from snaprt_replay.export import hlo_snapshot
from snaprt_replay.load.case import Case
from snaprt_replay.minify import script
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.checks import Check
from snaprt_replay.minify.shrink import Shrunk, Start
from snaprt_replay.run.devices import find_device
from snaprt_replay.run.workers import Outcome

SNAPSHOT: Final = "minified"
SCRIPT: Final = "repro.py"
ISSUE: Final = "ISSUE.md"
NEIGHBOR: Final = "neighbor"
AGAINST: Final = "against"
_ELSEWHERE: Final = "name another folder with --output"


def write(folder: Path, case: Case, shrunk: Shrunk, check: Check, start: Start) -> bool | None:
    """Write all files about a minified program.

    Args:
        folder: Created if missing; files of an earlier run are replaced.
        case: Where the program came from.
        shrunk: The program.
        check: The failure that was searched for.
        start: Runs a side, for the expected and the actual outputs.

    Returns:
        Whether `repro.py` fails when it is run; None if it cannot show the failure.

    Raises:
        SnapshotError: The folder cannot be written.
    """
    candidate = shrunk.candidate
    actual, expected = _outputs(candidate, start)
    with writing(f"write {folder}", _ELSEWHERE, kind=SnapshotError, hint=remedy):
        folder.mkdir(parents=True, exist_ok=True)
        _write_program(folder, SNAPSHOT, candidate, 0, expected)
        if len(candidate.modules) > 1:
            _write_program(folder, AGAINST, candidate, 1, expected)
        if shrunk.neighbor is not None:
            _write_program(folder, NEIGHBOR, shrunk.neighbor, 0, None)
        if actual is not None:
            module = parse(HloModuleProto, candidate.content(0), SNAPSHOT)
            content = hlo_snapshot(module, jax.default_backend(), candidate.inputs, actual)
            (folder / f"{SNAPSHOT}.snapshot.pb").write_bytes(serialize(content))
        surrounding = {
            "versions": dict(describe.versions()),
            "recorded": dict(case.environment),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "sides": [variant.text for variant in candidate.variants],
            "options": [dict(variant.options) for variant in candidate.variants],
        }
        (folder / "versions.json").write_text(json.dumps(surrounding, indent=1) + "\n")
        fails = script.write_and_run(folder / SCRIPT, candidate, shrunk, check, expected)
        text = issue(case, shrunk, check, surrounding, fails)
        (folder / ISSUE).write_text(text)
    return fails


def write_candidate(candidate: Candidate, folder: Path) -> Path:
    """Write a candidate as a snapshot for a user's command, and return its path."""
    path = folder / f"candidate{schema.SUFFIXES['inputs']}"
    _write_snapshot(path, "inputs", candidate, 0, candidate.inputs, time.time())
    return path


def _outputs(
    candidate: Candidate, start: Start
) -> tuple[Sequence[np.ndarray] | None, Sequence[np.ndarray] | None]:
    """Return the suspect's actual and expected outputs; None for those that are not known."""

    def run(side: int) -> Future[Outcome]:
        return start(side, candidate.variants[side], candidate.content(side), candidate.inputs)

    running = [run(side) for side in range(len(candidate.variants))]
    actual = running[0].result().outputs
    if candidate.expected is not None:
        return actual, candidate.expected
    if len(running) < 2:
        return actual, None
    expected = running[1].result().outputs
    if expected is None or actual is None:
        return actual, expected
    with np.errstate(all="ignore"):  # a more precise reference, cast to the program's own dtypes
        return actual, [
            array.astype(own.dtype) for array, own in zip(expected, actual, strict=True)
        ]


def _write_program(
    folder: Path,
    name: str,
    candidate: Candidate,
    side: int,
    right: Sequence[np.ndarray] | None,
) -> None:
    now = time.time()
    inputs = folder / f"{name}{schema.SUFFIXES['inputs']}"
    _write_snapshot(inputs, "inputs", candidate, side, candidate.inputs, now)
    if right is not None:
        outputs = folder / f"{name}{schema.SUFFIXES['outputs']}"
        _write_snapshot(outputs, "outputs", candidate, side, right, now)
    for suffix, text in module_texts(candidate.content(side)).items():
        (folder / f"{name}{suffix}").write_text(text)


def module_texts(hlo: bytes) -> Mapping[str, str]:
    """Return a module as text, keyed by the suffix of the file to write it to."""
    return {suffix: text(hlo) for suffix, text in _TEXTS.items()}


def _stablehlo_text(hlo: bytes) -> str:
    return jaxapi.stablehlo_text(jaxapi.parse_module(jaxapi.hlo_to_stablehlo(hlo)))


_TEXTS: Final[Mapping[str, Callable[[bytes], str]]] = {
    ".hlo.txt": jaxapi.hlo_text,
    ".stablehlo.mlir": _stablehlo_text,
}


def _write_snapshot(
    path: Path,
    role: schema.Role,
    candidate: Candidate,
    side: int,
    arrays: Sequence[np.ndarray],
    when: float,
) -> None:
    hlo = candidate.content(side)
    device = find_device("cpu")
    variant = candidate.variants[side] if side < len(candidate.variants) else None
    options = jaxapi.compile_options([device], dict(variant.options) if variant else None)
    stablehlo = jaxapi.portable_artifact(jaxapi.parse_module(jaxapi.hlo_to_stablehlo(hlo)))
    described = describe.describe_device(device)
    root_count = candidate.size[1]
    execution = schema.ExecutionRecord(
        role=role,
        name=candidate.modules[min(side, len(candidate.modules) - 1)].name,
        graph_id=hashlib.blake2b(hlo, digest_size=8).hexdigest(),
        process=0,
        executable=0,
        device_index=0,
        execution_count=0,
        step=-1,
        time=when,
        device=described,
        devices=(described,),
        platform_version=describe.platform_version(device),
        versions=describe.versions(),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        environment=describe.environment(),
        jax_config=describe.jax_config(),
        input_names=tuple(f"arg{number}" for number in range(len(candidate.inputs))),
        output_names=tuple(f"out{number}" for number in range(root_count)),
        donated=(),
        source_locations=(),
    )
    names = execution.input_names if role == "inputs" else execution.output_names
    contents = [
        schema.ArrayContent(name, _fetching(array), array.nbytes)
        for name, array in zip(names, arrays, strict=True)
    ]
    module = schema.ModuleBytes(stablehlo, hlo, options.SerializeAsString())
    write_snapshot(path, schema.Contents(execution, module, contents), elsewhere=_ELSEWHERE)


def _fetching(array: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: array


_LONGEST_MODULE: Final = 20_000  # characters: the reader of an issue looks at no more

_TITLES: Final[Mapping[str, str]] = {
    "mismatch": "XLA: wrong values from {opcodes}",
    "nan": "XLA: {failure} from {opcodes} on inputs without one",
    "crash": "XLA: {failure} on {opcodes}",
    "slow-compile": "XLA: {failure} for {opcodes}",
    "command": "XLA: {opcodes}: {failure}",
}


def issue(
    case: Case, shrunk: Shrunk, check: Check, surrounding: Mapping[str, Any], fails: bool | None
) -> str:
    """Return the text of a bug report, in Markdown."""
    candidate = shrunk.candidate
    failure = str(shrunk.symptom)
    opcodes = ", ".join(f"`{opcode}`" for opcode in opcodes_of(candidate)[:4])
    title = _TITLES[check.name].format(opcodes=opcodes or "a program", failure=failure)
    sides = [str(text) for text in surrounding["sides"]]
    program = "the program below on " if len(candidate.modules) > 1 else ""
    against = f", compared with {program}`{sides[1]}`" if len(sides) > 1 else ""
    passing = shrunk.neighbor
    neighbor = "" if passing is None else f"It passes with one change: {passing.change}."
    parts = [
        f"# {title}",
        f"A program of {candidate.length} fails on `{sides[0]}`{against}: {failure}.",
        _how_to_see(fails),
        "## The program",
        _fenced(_stablehlo_text(candidate.content(0))),
        _against(candidate),
        "## What it is like",
        neighbor,
        f"It was minified from `{Path(case.path).name}` with "
        f"{shrunk.original.length}, where the failure was: {shrunk.first}.",
        "## Versions and flags",
        _fenced("\n".join(f"{name}: {value}" for name, value in _versions(surrounding))),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def opcodes_of(candidate: Candidate) -> list[str]:
    """Return the opcodes of a program's entry, without duplicates."""
    silent = ("parameter", "constant", "tuple", "get-tuple-element")
    entry = candidate.modules[0].computations[-1]
    return list(
        dict.fromkeys(
            instruction.opcode
            for instruction in entry.instructions
            if instruction.opcode not in silent
        )
    )


def _how_to_see(fails: bool | None) -> str:
    if fails:
        return "`python repro.py`, attached, fails with an AssertionError; it needs jax and numpy."
    if fails is None:
        return "`python repro.py`, attached, runs it; it needs jax and numpy."
    return (
        "`python repro.py`, attached, runs it with only jax and numpy. It did not fail where "
        "this was written: the failure needs what the variant of the snapshot sets up."
    )


def _against(candidate: Candidate) -> str:
    if len(candidate.modules) < 2:
        return ""
    return "The program to compare with:\n\n" + _fenced(_stablehlo_text(candidate.content(1)))


def _versions(surrounding: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flags = [("XLA_FLAGS", surrounding["xla_flags"])] if surrounding["xla_flags"] else []
    recorded = [
        (f"recorded with {name}", value) for name, value in surrounding["recorded"].items() if value
    ]
    return [*surrounding["versions"].items(), *flags, *recorded]


def _fenced(text: str) -> str:
    text = text.strip()
    if len(text) > _LONGEST_MODULE:
        text = text[:_LONGEST_MODULE] + "\n... (the rest is in the attached file)"
    fence = "```"
    while fence in text:  # names inside a file are not trusted
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
