"""Writes an execution as a script that runs with jax and numpy alone; knows no other format.

The script makes no use of snaprt, nor of what is not public in JAX: it exports a function that
takes and returns arrays of the same types, and puts the recorded module in its place.
"""

from __future__ import annotations

import importlib.resources
import pprint
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from snaprt import jaxapi
from snaprt_replay.compare.compare import compare_arrays
from snaprt_replay.compare.tolerance import EXACT, ToleranceRequest
from snaprt_replay.export.arrays import write_members
from snaprt_replay.load.case import Case, NamedArray

SCRIPT, MODULE, ARRAYS = "run.py", "module.mlirbc", "arrays.npz"
_TEMPLATE = "script.txt"


def write_script(case: Case, folder: Path) -> None:
    """Write ``run.py``, the module and the arrays into a new folder."""
    folder.mkdir()
    inputs, outputs = case.inputs or (), case.outputs or ()
    named = [(f"input{number}", one.value) for number, one in enumerate(inputs)]
    named += [(f"output{number}", one.value) for number, one in enumerate(outputs)]
    write_members(named, folder / ARRAYS)
    module = jaxapi.parse_module(case.stablehlo)
    (folder / MODULE).write_bytes(jaxapi.portable_artifact(module))
    _, results = jaxapi.module_signature(module)
    template = importlib.resources.files("snaprt_replay.export").joinpath(_TEMPLATE).read_text()
    filled = {
        "NAME": pprint.pformat(case.name),
        "VERSIONS": pprint.pformat(
            {one: case.environment.get(one, "") for one in ("platform", "jax", "jaxlib")}
        ),
        "INPUTS": pprint.pformat([(one.name, one.dtype.name) for one in inputs]),
        "RESULTS": pprint.pformat([(shape, np.dtype(dtype).name) for shape, dtype in results]),
        "OUTPUTS": pprint.pformat(_expectations(outputs)),
    }
    for word, text in filled.items():
        template = template.replace(f"__{word}__", text)
    (folder / SCRIPT).write_text(template)


def _expectations(outputs: Sequence[NamedArray]) -> list[tuple[str, str, float, float]]:
    """Return name, dtype, rtol and atol of each output: what `snaprt replay` allows."""
    rows = []
    for one in outputs:
        allowed = compare_arrays(one.name, one.value, one.value, ToleranceRequest()).tolerance
        allowed = allowed or EXACT
        rows.append((one.name, one.dtype.name, allowed.rtol, allowed.atol))
    return rows
