"""Writes a recorded execution in a form that other programs read; each form is a row of a table.

It must not know the command line. A file appears whole or not at all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snaprt import jaxapi
from snaprt.errors import UsageError
from snaprt.snapshot.share.pack import not_written
from snaprt_replay.export import arrays, python, xla
from snaprt_replay.load.case import Case
from snaprt_replay.load.load import load

_TEXT_SUFFIXES = (".mlir", ".txt")


def _write_stablehlo(case: Case, path: Path) -> None:
    if path.suffix in _TEXT_SUFFIXES:
        path.write_text(jaxapi.stablehlo_text(jaxapi.parse_module(case.stablehlo)))
    elif case.stablehlo.startswith(b"ML\xefR"):
        path.write_bytes(case.stablehlo)
    else:
        path.write_bytes(jaxapi.portable_artifact(jaxapi.parse_module(case.stablehlo)))


@dataclass(frozen=True)
class Form:
    """One form in which an execution can be written.

    Attributes:
        write: Writes a case to a path that is not there.
        needs_arrays: Whether there is nothing to write of a case without any.
        one_device: Whether programs on several devices cannot be written so.
        help: What it is.
    """

    write: Callable[[Case, Path], None]
    needs_arrays: bool
    one_device: bool
    help: str


FORMS: Final[Mapping[str, Form]] = {
    "hlo-snapshot": Form(
        xla.write_hlo_snapshot, True, True, "XLA's HloSnapshot, for run_hlo_module"
    ),
    "npz": Form(arrays.write_npz, True, False, "the arrays, for numpy.load"),
    "safetensors": Form(arrays.write_safetensors, True, False, "the arrays, as safetensors"),
    "stablehlo": Form(
        _write_stablehlo, False, False, "the module: text into FILE.mlir, else bytecode"
    ),
    "python": Form(
        python.write_script,
        True,
        True,
        "a folder with a script that runs it with jax and numpy alone, and compares",
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
        UsageError: ``out`` is there already, or the form cannot hold it.
    """
    form = FORMS[to]
    if out.is_dir() or (out.exists() and not replace):
        raise UsageError(
            f"{out} is there already", hint="name another path, or say --replace for a file"
        )
    case = load(path)
    if form.needs_arrays and case.inputs is None and case.outputs is None:
        raise UsageError(
            f"{path} holds a module without arrays, of which --to {to} has nothing to write",
            hint=f"--to stablehlo writes the module; `snaprt replay {path} --random 0 --save "
            "FILE.npz` gives it inputs",
        )
    if form.one_device and case.devices > 1:
        raise UsageError(
            f"{path} is of a program on {case.devices} devices, which --to {to} cannot hold",
            hint="npz, safetensors and stablehlo can",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            temporary = Path(folder) / out.name
            form.write(case, temporary)
            temporary.replace(out)
    except OSError as error:
        raise not_written(out, error) from error
    return case
