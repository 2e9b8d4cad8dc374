"""Write `repro.py`, which shows a failure with JAX and NumPy alone.

The script contains the program as a portable StableHLO artifact, which XLA compiles unchanged:
equivalent JAX code might be lowered to something else that does not fail. It is run like any
exported program, with `jax.export`, so that only public functions are called.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from snaprt import jaxapi
from snaprt_replay import floatbits
from snaprt_replay.compare.tolerance import default_for
from snaprt_replay.export import registering
from snaprt_replay.localize.nonfinite import is_finite
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.checks import Check, Symptom
from snaprt_replay.minify.shrink import Shrunk

_MOST_IN_TEXT: Final = 64  # elements of an array: more of them do not help a reader
_TIMEOUT: Final = 300.0
_WIDTH: Final = 88
_FAILED: Final = 1


def write_and_run(
    path: Path,
    candidate: Candidate,
    shrunk: Shrunk,
    check: Check,
    right: Sequence[np.ndarray] | None,
) -> bool | None:
    """Write the script, run it in a separate process, and return whether it fails.

    Args:
        path: Where to write the script.
        candidate: The program.
        shrunk: What is known about the program.
        check: The check that it fails.
        right: The expected outputs.

    Returns:
        None if a script cannot show this failure: the check is a user's command, or the suspect is
        not a plain compilation.
    """
    text = script(candidate, shrunk, check, right)
    path.write_text(text)
    if not _can_show(candidate, check):
        return None
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        process = subprocess.run(
            [sys.executable, path.name],
            cwd=path.parent,
            env=environment,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    return process.returncode == _FAILED and b"AssertionError" in process.stderr


def _can_show(candidate: Candidate, check: Check) -> bool:
    plain = all(
        variant.kind == "device" and variant.python is None and variant.matmul_precision is None
        for variant in candidate.variants[:1]
    )
    return plain and check.name != "command"


def script(
    candidate: Candidate, shrunk: Shrunk, check: Check, right: Sequence[np.ndarray] | None
) -> str:
    """Return the script's text."""
    stablehlo = jaxapi.parse_module(jaxapi.hlo_to_stablehlo(candidate.content(0)))
    # Without the names of the files and functions that it came from.
    bare = jaxapi.parse_module(jaxapi.bytecode_without_locations(stablehlo))
    artifact = base64.b85encode(jaxapi.portable_artifact(bare)).decode()
    _, results = jaxapi.module_signature(stablehlo)
    options = dict(candidate.variants[0].options) if candidate.variants else {}
    device = candidate.variants[0].device if candidate.variants else None
    platform, _, number = (device or "").partition(":")
    wide = any(dtype.itemsize == 8 and dtype.kind in "fiu" for dtype in _dtypes(candidate, results))
    judge = _JUDGING[check.name]
    holds, though = _promise(candidate, shrunk.symptom)
    body = judge.format(seconds=f"{check.seconds:.3g}", holds=holds, though=though)
    if check.name == "mismatch":
        assert right is not None
        body = _tolerances(right) + body
    parts = [
        _HEAD.format(
            failure=_one_line(str(shrunk.symptom)),
            wide='jax.config.update("jax_enable_x64", True)\n' if wide else "",
            artifact=_in_lines(artifact),
            text=_commented(jaxapi.stablehlo_text(stablehlo)),
            imports="".join(f"import {module}\n" for module in _IMPORTS[check.name]),
            preparation=registering(jaxapi.custom_calls(bare).targets, "    "),
            options=repr(options),
            # A GPU lowers as "cuda" or "rocm", which depends on the machine that runs the script.
            platforms=["cpu"] if platform == "cpu" else None,
            device=f"jax.devices({platform or None!r})[{number or 0}]",
            results=", ".join(f"jnp.zeros({shape}, {dtype.name!r})" for shape, dtype in results),
        ),
        _assigned("inputs", candidate.inputs),
        _assigned("expected", right) if check.name == "mismatch" and right is not None else "",
        body,
    ]
    return "\n".join(filter(None, parts)).rstrip() + "\n"


def _promise(candidate: Candidate, symptom: Symptom) -> tuple[str, str]:
    """Return what should hold for the outputs, and what to say of one for which it does not."""
    if all(map(is_finite, candidate.inputs)):
        return "np.isfinite(wide).all()", "not finite, though all inputs are"
    if symptom.what.startswith("NaN"):
        return "not np.isnan(wide).any()", "NaN, though no input is"
    return "not np.isinf(wide).any()", "infinite, though no input is"


def _in_lines(text: str) -> str:
    return "\n".join(f'    "{text[at : at + _WIDTH]}"' for at in range(0, len(text), _WIDTH))


def _dtypes(candidate: Candidate, results: Sequence[tuple[object, np.dtype]]) -> list[np.dtype]:
    return [array.dtype for array in candidate.inputs] + [dtype for _, dtype in results]


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace('"""', "'''").replace("\\", "/")


def _commented(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.strip().splitlines())


def _assigned(name: str, arrays: Sequence[np.ndarray]) -> str:
    lines = "".join(f"    {_array_text(array)},\n" for array in arrays)
    return f"{name} = [\n{lines}]\n"


def _array_text(array: np.ndarray) -> str:
    """Return an expression that recreates an array exactly."""
    dtype = f"jnp.dtype({array.dtype.name!r})"
    plain = array.dtype.kind in "fiub" and array.dtype.isbuiltin == 1
    finite = not floatbits.is_float(array.dtype) or bool(np.isfinite(array).all())
    if plain and finite and array.size <= _MOST_IN_TEXT:
        # The shortest decimal form of a float32 is exact when it is read as float32 again.
        numbers = np.array2string(
            array, separator=", ", floatmode="unique", threshold=sys.maxsize, max_line_width=88
        )
        if array.dtype.kind == "b":
            numbers = str(array.tolist())
        return f"np.array({re.sub(chr(10), chr(10) + '    ', numbers)}, {dtype})"
    content = base64.b85encode(np.ascontiguousarray(array).tobytes()).decode()
    return f'np.frombuffer(base64.b85decode("{content}"), {dtype}).reshape({array.shape})'


def _tolerances(right: Sequence[np.ndarray]) -> str:
    relative = []
    for array in right:
        inexact = floatbits.is_float(array.dtype)
        epsilons = default_for(array.dtype).epsilons if inexact else 0
        relative.append(float(epsilons * floatbits.epsilon(array.dtype)) if inexact else 0.0)
    return f"tolerances = {relative}\n"


_HEAD: Final = '''"""{failure}

Needs jax and numpy alone. Fails with an AssertionError where the failure shows.
Written by `snaprt minify`.
"""

import base64
import dataclasses
{imports}
import jax
import jax.numpy as jnp
import numpy as np

{wide}
{text}
PROGRAM = base64.b85decode(
{artifact}
)
OPTIONS = {options}  # XLA's, beyond the defaults


def compile_program(inputs):
    """Compile the program above for these inputs."""
{preparation}
    def signature(*arguments):
        return ({results},)

    shaped = jax.export.export(jax.jit(signature, keep_unused=True), platforms={platforms})
    exported = dataclasses.replace(shaped(*inputs), mlir_module_serialized=PROGRAM)
    with jax.default_device({device}):
        lowered = jax.jit(lambda *arguments: exported.call(*arguments)).lower(*inputs)
        return lowered.compile(compiler_options=OPTIONS)

'''

_MISMATCH: Final = """
outputs = [np.asarray(output) for output in compile_program(inputs)(*inputs)]
for number, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
    exact = not jnp.issubdtype(wanted.dtype, jnp.inexact)
    wide = "complex128" if jnp.issubdtype(wanted.dtype, jnp.complexfloating) else "float64"
    left, right = (array if exact else array.astype(wide) for array in (got, wanted))
    finite = np.where(np.isfinite(right), np.abs(right), 0)
    allowed = tolerances[number] * (finite + np.sqrt(np.mean(finite**2))) + 1e-37
    near = np.isclose(left, right, rtol=0, atol=allowed, equal_nan=not exact)
    same = left == right if exact else near
    assert same.all(), (
        f"output {{number}} is\\n{{got}}\\nand should be\\n{{wanted}}\\n"
        f"({{np.count_nonzero(~same)}} of {{same.size}} elements are wrong)"
    )
print("right here")
"""

_NOT_FINITE: Final = """
outputs = [np.asarray(output) for output in compile_program(inputs)(*inputs)]
for number, got in enumerate(outputs):
    wide = got.astype("complex128")
    assert {holds}, f"output {{number}} is {though}:\\n{{got}}"
print("no failure here")
"""

_CRASH: Final = """
if sys.argv[1:] == ["child"]:  # XLA may end the process: see it from outside
    jax.block_until_ready(compile_program(inputs)(*inputs))
    sys.exit()
done = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True)
assert done.returncode == 0, (
    f"XLA fails (status {{done.returncode}}):\\n{{done.stderr[-2000:]}}"
)
print("no failure here")
"""

_SLOW: Final = """
started = time.perf_counter()
compile_program(inputs)
seconds = time.perf_counter() - started
assert seconds <= {seconds}, f"compiling took {{seconds:.1f}} s"
print(f"compiled in {{seconds:.1f}} s here")
"""

_RUN: Final = """
print([np.asarray(output) for output in compile_program(inputs)(*inputs)])
"""

_JUDGING: Final[Mapping[str, str]] = {
    "mismatch": _MISMATCH,
    "nan": _NOT_FINITE,
    "crash": _CRASH,
    "slow-compile": _SLOW,
    "command": _RUN,
}
_IMPORTS: Final[Mapping[str, Sequence[str]]] = {
    "mismatch": (),
    "nan": (),
    "crash": ("subprocess", "sys"),
    "slow-compile": ("time",),
    "command": (),
}
