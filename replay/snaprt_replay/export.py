"""Write a recorded execution in a form that other programs read; each form is a row of a table.

A file appears whole or not at all.
"""

from __future__ import annotations

import importlib
import importlib.resources
import os
import pprint
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from snaprt import jaxapi
from snaprt.compile.obtain import refuse_objects_of_another_process
from snaprt.errors import SnapshotError, UsageError
from snaprt.hlo.literals import TUPLE, array_to_literal
from snaprt.hlo.proto import (
    PROTOBUF_LIMIT,
    HloModuleProto,
    HloSnapshot,
    XlaMessage,
    parse,
    serialize,
)
from snaprt.host.whole_files import refuse_device, remove_leftovers, temporary_folder
from snaprt.snapshot.share.pack import writing_shared
from snaprt_replay.compare.compare import compare_arrays
from snaprt_replay.compare.tolerance import EXACT, ToleranceRequest
from snaprt_replay.hlo.hlo_module import entry_computation, root_instruction
from snaprt_replay.load.case import Case, NamedArray
from snaprt_replay.load.contents import storable, without_type
from snaprt_replay.load.load import load
from snaprt_replay.load.modules import hlo_of

SCRIPT, MODULE, ARRAYS = "run.py", "module.mlirbc", "arrays.npz"
_TEMPLATE = "export_script.txt"
_TEXT_SUFFIXES = (".mlir", ".txt")


# --- arrays ---


def named_arrays(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """Yield ``inputs/NAME`` and ``outputs/NAME`` with their values, in C order."""
    for side, arrays in (("inputs", case.inputs), ("outputs", case.outputs)):
        for array in arrays or ():
            yield f"{side}/{array.name}", np.ascontiguousarray(array.value).reshape(array.shape)


def write_npz(case: Case, path: Path) -> None:
    """Write an ``.npz``, not compressed; bfloat16 and the like as unsigned integers."""
    write_members(named_arrays(case), path)


def write_members(
    arrays: Iterable[tuple[str, np.ndarray]], file: Path | BinaryIO, *, bits: bool = True
) -> None:
    """Write named arrays as ``numpy.savez`` does, which takes not every name.

    Args:
        arrays: Names and values.
        file: Where to.
        bits: Write bfloat16 and the like as unsigned integers, not as bytes without a type.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in arrays:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                stored = storable(value) if bits else without_type(value)
                np.lib.format.write_array(member, stored, allow_pickle=False)


# How what is written in Rust names the system's errors.
_SYSTEM_ERROR: Final = re.compile(r"\(os error (\d+)\)")


def write_safetensors(case: Case, path: Path) -> None:
    """Write a ``.safetensors``.

    Raises:
        UsageError: The package safetensors is not installed, or has no name for a dtype.
    """
    try:
        safetensors: Any = importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise UsageError(
            "--to safetensors needs the package safetensors",
            hint="pip install 'snaprt[safetensors]'",
        ) from error
    arrays = dict(named_arrays(case))
    notes = {"format": "np", "snaprt": case.name}
    path.touch()
    mode = path.stat().st_mode  # the package makes a file that only its user can read
    try:
        safetensors.save_file(arrays, path, metadata=notes)
        path.chmod(mode)
    except OSError:
        raise
    except Exception as error:  # of its own kind, which changed between versions
        if refusal := _SYSTEM_ERROR.search(str(error)):
            raise OSError(int(refusal[1]), os.strerror(int(refusal[1]))) from error
        refused = [
            f"{name} ({value.dtype})"
            for name, value in arrays.items()
            if not _is_known_to(safetensors, value.dtype)
        ]
        why = f"it has no name for the dtype of {', '.join(refused)}" if refused else str(error)
        raise UsageError(
            f"safetensors cannot hold the arrays of {case.path}: {why}", hint="use --to npz"
        ) from error


def _is_known_to(safetensors: Any, dtype: np.dtype) -> bool:
    try:
        safetensors.save({"": np.zeros(0, dtype)})
    except Exception:  # of its own kind, as above
        return False
    return True


# --- the module ---


def _write_stablehlo(case: Case, path: Path) -> None:
    if path.suffix in _TEXT_SUFFIXES:
        path.write_text(jaxapi.stablehlo_text(jaxapi.parse_module(case.stablehlo)))
    elif case.stablehlo.startswith(b"ML\xefR"):
        path.write_bytes(case.stablehlo)
    else:
        path.write_bytes(_portable(case))


def _portable(case: Case) -> bytes:
    try:
        return jaxapi.portable_artifact(jaxapi.parse_module(case.stablehlo))
    except ValueError as error:
        raise SnapshotError(
            f"cannot convert the module of {case.path} to a portable artifact: {error}",
            hint="write text: --to stablehlo -o FILE.mlir",
        ) from error


def write_hlo_snapshot(case: Case, path: Path) -> None:
    """Write the module before optimization, the arguments and the result as XLA's HloSnapshot.

    Source: ``xla/service/hlo.proto``; XLA's own tools (``run_hlo_module``) read such files.

    Raises:
        UsageError: It would be more than protobuf can hold, which is 2 GB.
        SnapshotError: XLA has no HLO for the module, or no element type for an array.
    """
    size = sum(array.value.nbytes for array in (*(case.inputs or ()), *(case.outputs or ())))
    if size > PROTOBUF_LIMIT:
        raise _too_large(case, size)
    snapshot = hlo_snapshot(
        parse(HloModuleProto, hlo_of(case), case.path),
        case.environment.get("platform", ""),
        [array.value for array in case.inputs or ()],
        None if case.outputs is None else [array.value for array in case.outputs],
    )
    if snapshot.ByteSize() > PROTOBUF_LIMIT:
        raise _too_large(case, snapshot.ByteSize())
    path.write_bytes(serialize(snapshot))


def hlo_snapshot(
    module: XlaMessage,
    platform: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray] | None,
) -> XlaMessage:
    """Return XLA's HloSnapshot of an HloModuleProto that was given these arrays, and gave these."""
    snapshot = HloSnapshot(execution_platform=platform)
    snapshot.hlo.hlo_module.CopyFrom(module)
    snapshot.arguments.extend(map(array_to_literal, inputs))
    if outputs is not None:
        literals = list(map(array_to_literal, outputs))
        if root_instruction(entry_computation(module)).shape.element_type != TUPLE:
            snapshot.result.CopyFrom(literals[0])
            return snapshot
        snapshot.result.shape.element_type = TUPLE
        snapshot.result.shape.tuple_shapes.extend(literal.shape for literal in literals)
        snapshot.result.tuple_literals.extend(literals)
    return snapshot


def _too_large(case: Case, size: int) -> UsageError:
    return UsageError(
        f"{case.path} holds {size:,} bytes, more than XLA's HloSnapshot can hold (2 GiB)",
        hint="XLA would write an empty file; --to npz and --to python have no such limit",
    )


# --- a script ---


def registering(targets: Iterable[str], indent: str) -> str:
    """Return the lines with which JAX registers the functions that custom calls name; maybe none.

    JAX registers some only as it lowers a call of them, which no script does that runs a module as
    it was recorded. LAPACK needs no line: JAX loads it for what `jax.export` calls (checked with
    0.10.2 and 0.12.0).
    """
    return "".join(
        f"{indent}import {name}  # registers its functions\n"
        for name in jaxapi.modules_with_functions(targets)
        if name.startswith("jax.")
    )


def write_script(case: Case, folder: Path) -> None:
    """Write ``run.py``, the module and the arrays into a new folder.

    The script uses neither snaprt nor what is not public in JAX: it exports a function that takes
    and returns arrays of the same types, and puts the recorded module in its place.

    Raises:
        CompileError: The module needs an object of the process that recorded it.
    """
    artifact = _portable(case)
    module = jaxapi.parse_module(artifact)
    calls = jaxapi.custom_calls(module)
    refuse_objects_of_another_process(calls)
    folder.mkdir()
    inputs, outputs = case.inputs or (), case.outputs or ()
    named = [(f"input{number}", array.value) for number, array in enumerate(inputs)]
    named += [(f"output{number}", array.value) for number, array in enumerate(outputs)]
    write_members(named, folder / ARRAYS)
    (folder / MODULE).write_bytes(artifact)
    _, results = jaxapi.module_signature(module)
    template = importlib.resources.files("snaprt_replay").joinpath(_TEMPLATE).read_text()
    filled = {
        "PREPARATION": registering(calls.targets, "    "),
        "NAME": pprint.pformat(case.name),
        "VERSIONS": pprint.pformat(
            {key: case.environment.get(key, "") for key in ("platform", "jax", "jaxlib")}
        ),
        "INPUTS": pprint.pformat([(array.name, array.dtype.name) for array in inputs]),
        "RESULTS": pprint.pformat([(shape, np.dtype(dtype).name) for shape, dtype in results]),
        "OUTPUTS": pprint.pformat(_expectations(outputs)),
    }
    for word, text in filled.items():
        template = template.replace(f"__{word}__", text)
    (folder / SCRIPT).write_text(template)


def _expectations(outputs: Sequence[NamedArray]) -> list[tuple[str, str, float, float]]:
    """Return name, dtype, rtol and atol of each output: what `snaprt replay` allows."""
    rows = []
    for output in outputs:
        allowed = compare_arrays(
            output.name, output.value, output.value, ToleranceRequest()
        ).tolerance
        allowed = allowed or EXACT
        rows.append((output.name, output.dtype.name, allowed.rtol, allowed.atol))
    return rows


# --- the table of forms ---


@dataclass(frozen=True)
class ExportFormat:
    """One form in which an execution can be written."""

    write: Callable[[Case, Path], None]  # writes a case to a path that is not there
    needs_arrays: bool  # whether there is nothing to write of a case without any
    one_device: bool  # whether programs on several devices cannot be written so
    help: str  # what it is


FORMS: Final[Mapping[str, ExportFormat]] = {
    "hlo-snapshot": ExportFormat(
        write_hlo_snapshot, True, True, "XLA's HloSnapshot, for run_hlo_module"
    ),
    "npz": ExportFormat(write_npz, True, False, "the arrays, for numpy.load"),
    "safetensors": ExportFormat(write_safetensors, True, False, "the arrays, as safetensors"),
    "stablehlo": ExportFormat(
        _write_stablehlo, False, False, "the module: text for FILE.mlir, else bytecode"
    ),
    "python": ExportFormat(
        write_script,
        True,
        True,
        "a folder with a script that runs and compares it, using only jax and numpy",
    ),
}


def export(path: Path, to: str, out: Path, *, replace: bool = False) -> Case:
    """Write a recorded execution in another form.

    Args:
        path: Any file that can be replayed.
        to: One of ``FORMS``.
        out: The file; for ``python`` the folder.
        replace: Whether a file may be there already.

    Returns:
        What was written.

    Raises:
        SnapshotError: The file cannot be read, or has not what the form needs, or cannot be
            written.
        UsageError: ``out`` is there already, or is no file, or the form cannot hold it.
    """
    form = FORMS[to]
    refuse_device(out)
    if out.is_dir() or (out.exists() and not replace):
        raise UsageError(
            f"{out} already exists", hint="name another path, or pass --replace to overwrite a file"
        )
    case = load(path)
    if form.needs_arrays and case.inputs is None and case.outputs is None:
        raise UsageError(
            f"{path} holds a module without arrays, so --to {to} has nothing to write",
            hint=f"use --to stablehlo for the module; `snaprt replay {path} --random 0 --save "
            "FILE.npz` creates inputs",
        )
    if form.one_device and case.devices > 1:
        raise UsageError(
            f"{path} is part of a program on {case.devices} devices, which --to {to} does not "
            "support",
            hint="use npz, safetensors or stablehlo",
        )
    with writing_shared(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out.parent)
        with temporary_folder(out.parent, "export") as folder:
            temporary = folder / out.name
            form.write(case, temporary)
            temporary.replace(out)
    return case
