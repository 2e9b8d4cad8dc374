"""Bare modules: whether they can be read, which inputs they take, and arrays for them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from snaprt import jaxapi
from snaprt.errors import SnapshotError, UsageError
from snaprt.host.regular_files import open_file
from snaprt_replay import floatbits
from snaprt_replay.child import child_environment
from snaprt_replay.load.case import Case, NamedArray, Signature

# Integers are drawn below this: they are mostly indices, labels and counts, and must stay in the
# bounds of arrays that may be small.
_RANDOM_BELOW = 8


def read_inputs(path: Path, parameters: Sequence[Signature]) -> tuple[NamedArray, ...]:
    """Read a module's inputs from an ``.npz`` file.

    Args:
        path: Its arrays are called ``arg0``, ``arg1``, ...; with any other names they are taken in
            the file's order. bfloat16 etc. may be saved as NumPy saves them, as raw bytes.
        parameters: What the module expects.

    Raises:
        SnapshotError: The file cannot be read.
        UsageError: The arrays do not match what the module expects.
    """
    arrays = _read_npz(path)
    names = [f"arg{index}" for index in range(len(parameters))]
    if set(arrays) != set(names):
        names = list(arrays)
    if len(names) != len(parameters):
        raise UsageError(
            f"{path} holds {len(names)} arrays, but the module takes {len(parameters)} inputs",
            hint=f"it takes: {', '.join(map(str, parameters)) or 'none'}",
        )
    return tuple(
        NamedArray(name, _as_expected(arrays[name], expected, f"{name} of {path}"))
        for name, expected in zip(names, parameters, strict=True)
    )


def read_outputs(path: Path, stablehlo: bytes) -> tuple[NamedArray, ...]:
    """Read the recorded outputs of a module from an ``.npz`` file.

    They keep the file's order and names. Arrays that do not match what the module returns are kept
    as they are: comparing them shows how they differ.

    Args:
        path: bfloat16 etc. may be saved as NumPy saves them, as raw bytes.
        stablehlo: The module.

    Raises:
        SnapshotError: The file cannot be read.
    """
    _, results = jaxapi.module_signature(jaxapi.parse_module(stablehlo))
    dtypes = [np.dtype(dtype) for _, dtype in results]
    arrays = _read_npz(path, "check --outputs")
    return tuple(
        NamedArray(name, _named(value, dtype))
        for (name, value), dtype in itertools.zip_longest(arrays.items(), dtypes[: len(arrays)])
    )


def _named(value: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    """Return an array with its original dtype if NumPy saved it as raw bytes."""
    if dtype is not None and value.dtype.kind == "V" and value.itemsize == dtype.itemsize:
        return value.view(dtype)
    return value


def _read_npz(path: Path, check: str = "check --inputs") -> Mapping[str, np.ndarray]:
    hint = "write an .npz file with numpy.savez(FILE, arg0=..., arg1=...)"
    reason: object
    try:
        with open_file(path) as file:
            start = file.read(len(np.lib.format.MAGIC_PREFIX))
            if start == np.lib.format.MAGIC_PREFIX:
                raise SnapshotError(f"{path} is one .npy array, not an .npz file", hint=hint)
            if not start.startswith(b"PK"):  # or NumPy takes it for a pickle
                raise SnapshotError(f"{path} is not an .npz file", hint=hint)
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)
            return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError as error:
        raise SnapshotError(f"there is no file {path}", hint=check) from error
    except OSError as error:
        reason = error.strerror or error
        raise SnapshotError(f"cannot read arrays from {path}: {reason}", hint=hint) from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        holds_objects = "allow_pickle" in str(error)
        reason = "it holds Python objects, not numbers" if holds_objects else error
        raise SnapshotError(f"cannot read arrays from {path}: {reason}", hint=hint) from error


def _as_expected(value: np.ndarray, expected: Signature, what: str) -> np.ndarray:
    value = _named(value, expected.dtype)
    if value.shape != expected.shape or value.dtype.newbyteorder("=") != expected.dtype:
        raise UsageError(
            f"{what} is {Signature(value.shape, value.dtype)}, but the module takes {expected}",
            hint=f"convert it: array.astype('{expected.dtype.name}').reshape({expected.shape})",
        )
    return np.ascontiguousarray(value.astype(expected.dtype, copy=False)).reshape(expected.shape)


def random_inputs(seed: int, parameters: Sequence[Signature]) -> tuple[NamedArray, ...]:
    """Draw a module's inputs; the same seed gives the same values on every machine.

    Floats are standard normal, integers 0 to 7, bools true or false.
    """
    return tuple(
        NamedArray(f"arg{index}", _draw(np.random.default_rng([seed, index]), expected))
        for index, expected in enumerate(parameters)
    )


def _draw(generator: np.random.Generator, expected: Signature) -> np.ndarray:
    shape, dtype = expected.shape, expected.dtype
    if floatbits.is_float(dtype):
        return np.asarray(generator.standard_normal(shape)).astype(dtype)
    if floatbits.is_complex(dtype):
        parts = generator.standard_normal((2, *shape))
        return np.asarray(parts[0] + 1j * parts[1]).astype(dtype)
    below = 2 if dtype.kind == "b" else min(_RANDOM_BELOW, floatbits.largest_integer(dtype) + 1)
    return np.asarray(generator.integers(0, below, shape)).astype(dtype)


def load_module_file(path: Path, form: str) -> Case:
    """Load a file that contains one StableHLO module, as text or bytecode.

    Raises:
        SnapshotError: The module cannot be parsed.
    """
    alone = without_effects(path.read_bytes())
    return Case(
        path=path,
        format=form,
        name=path.name.partition(".")[0],
        stablehlo=alone.stablehlo,
        inputs=None,
        outputs=None,
        parameters=module_parameters(alone.stablehlo, path),
        notes=alone.notes,
        with_branches_that_call=alone.with_branches_that_call,
    )


@dataclasses.dataclass(frozen=True)
class ModuleAlone:
    """A module without what only its own process can do."""

    stablehlo: bytes
    notes: tuple[str, ...] = ()  # on what was left out
    with_branches_that_call: bytes = b""  # see `Case`


def without_effects(stablehlo: bytes, *, second: bool = False) -> ModuleAlone:
    """Return a module without what only its own process can do.

    Python functions that return nothing are not called. Neither are those in the branches of
    conditionals, in place of whose results there are others. ``main`` neither takes nor returns
    tokens, which order effects and cannot be arrays. A module that cannot be parsed remains
    unchanged.

    Args:
        stablehlo: The module.
        second: Whether to take other values than usual for the results of Python functions.
    """
    try:
        module = jaxapi.parse_module(stablehlo)
        taken_out = jaxapi.without_callbacks(module, *_INSTEAD_OF_RESULTS[second])
        has_changed = jaxapi.without_tokens(module) or any(dataclasses.astuple(taken_out))
    except ValueError:
        return ModuleAlone(stablehlo)
    if not has_changed:
        return ModuleAlone(stablehlo)
    notes = itertools.compress(_LEFT_OUT, (taken_out.printing, taken_out.in_branches))
    return ModuleAlone(
        jaxapi.portable_artifact(module),
        tuple(notes),
        stablehlo if taken_out.in_branches else b"",
    )


_LEFT_OUT = (
    "Python callbacks that return nothing, such as jax.debug.print, were left out",
    "Python callbacks in branches were left out: a branch that calls one returns NaN for floats "
    "and 0 for integers",
)
# For floats and integers: as the note says, and different from that.
_INSTEAD_OF_RESULTS = ((math.nan, 0), (1.0, 1))


def module_parameters(stablehlo: bytes, path: Path) -> tuple[Signature, ...]:
    """Return what a module's ``main`` expects.

    Raises:
        SnapshotError: The module cannot be parsed, or takes something that cannot be an array.
    """
    try:
        module = jaxapi.parse_module(stablehlo)
        parameters, _ = jaxapi.module_signature(module)
    except ValueError as error:
        raise SnapshotError(
            f"cannot read the module in {path}: {error}",
            hint="the file was edited or is damaged, or needs another version of jaxlib",
        ) from error
    return tuple(Signature(tuple(shape), np.dtype(dtype)) for shape, dtype in parameters)


def hlo_of(case: Case) -> bytes:
    """Return a case's module as a serialized HloModuleProto.

    Raises:
        SnapshotError: XLA has no HLO for it.
    """
    try:
        return jaxapi.stablehlo_to_hlo(case.stablehlo)
    except ValueError as error:
        raise SnapshotError(f"the module in {case.path} has no HLO: {error}") from error


# A valid module of any size is read in seconds; damaged bytecode can make MLIR loop forever. This
# limits processor time, because a busy machine is slow too; the wall time may be _WAITED times as
# long.
_PARSE_SECONDS = 20
_WAITED = 6


def check_parses(path: Path) -> None:
    """Raise SnapshotError if reading the module in a file crashes the process, or hangs.

    Some damaged bytecode has this effect in MLIR; bytecode that raises an error passes this check.
    """
    hint = "get the file again from its source"
    status = _parse_alone(path)
    if status == -signal.SIGXCPU:
        raise SnapshotError(
            f"{path} seems to be damaged: reading it took longer than {_PARSE_SECONDS} seconds",
            hint=hint,
        )
    if status < 0:
        name = signal.Signals(-status).name
        raise SnapshotError(
            f"{path} is damaged: reading it crashed the process ({name})", hint=hint
        )


def can_parse(module: bytes) -> bool:
    """Return whether a module can be read here, without showing what MLIR prints if it cannot."""
    with tempfile.NamedTemporaryFile(prefix="snaprt-replay-") as file:
        file.write(module)
        file.flush()
        return _parse_alone(Path(file.name)) == 0


def _parse_alone(path: Path) -> int:
    """Return the status of a process that reads a module: -SIGXCPU if that took too long.

    It is a separate process, because reading damaged bytecode may crash it.
    """
    script = [
        sys.executable,
        "-P",
        str(jaxapi.PARSE_ALONE),
        str(path),
        str(math.ceil(_PARSE_SECONDS)),
    ]
    try:
        return subprocess.run(
            script,
            capture_output=True,
            env=child_environment(),
            check=False,
            timeout=_PARSE_SECONDS * _WAITED,
        ).returncode
    except subprocess.TimeoutExpired:
        return -signal.SIGXCPU
