"""Load any file that can be replayed into a `Case`.

`sniff` detects the format from the content, and the table `_LOADERS` has the loader for each. If a
format has no inputs, they come from an ``.npz`` file or from a seeded random generator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from snaprt.errors import UsageError
from snaprt.snapshot.share.executions import only_execution
from snaprt_replay.load import modules, sniff, xla_files
from snaprt_replay.load.case import Case
from snaprt_replay.load.modules import check_parses
from snaprt_replay.load.snapshots import load_snapshot


def load(
    path: str | Path,
    inputs: str | Path | None = None,
    random_seed: int | None = None,
    outputs: str | Path | None = None,
) -> Case:
    """Load a file for replay.

    Args:
        path: A snapshot of snaprt or XLA, or a bare module in any form.
        inputs: An ``.npz`` file to take the inputs from instead of the recorded ones.
        random_seed: Draw random inputs from this seed instead.
        outputs: An ``.npz`` file with the recorded results of ``inputs``.

    Returns:
        The case. Its inputs are None if the file has none and none were requested. Recorded outputs
        are dropped if the inputs are not the recorded ones, unless ``outputs`` provides others.

    Raises:
        SnapshotError: The file cannot be read, is damaged, or has an unknown format.
        UsageError: The given inputs do not match the module.

    Examples:
        >>> from snaprt import replay
        >>> case = replay.load("step.inputs.snap")
        >>> [(array.name, array.shape) for array in case.inputs]
        [('x', (4,))]
    """
    if inputs is not None and random_seed is not None:
        raise UsageError(
            "inputs can come from a file or a seed, not both", hint="leave one of the two out"
        )
    if outputs is not None and inputs is None:
        raise UsageError(
            f"the outputs in {outputs} need the inputs that they were computed from",
            hint="pass both files: --inputs IN.npz --outputs OUT.npz",
        )
    path = Path(path)
    case = _LOADERS[sniff.sniff(path)](path)
    if inputs is None and random_seed is None:
        return case
    parameters = modules.module_parameters(case.stablehlo, path)
    dynamic = next((parameter for parameter in parameters if -1 in parameter.shape), None)
    if dynamic is not None:
        raise UsageError(
            f"{path} cannot run: its module takes {dynamic}, and XLA runs only fixed shapes",
            hint="set the sizes in the module (jax.export.Exported.call does this for a program "
            "with symbolic shapes)",
        )
    if inputs is not None:
        arrays = modules.read_inputs(Path(inputs), parameters)
        source = f"the inputs are from {inputs}"
    else:
        assert random_seed is not None
        arrays = modules.random_inputs(random_seed, parameters)
        source = f"the inputs are random, with seed {random_seed}"
    recorded = None
    if outputs is not None:
        recorded = modules.read_outputs(Path(outputs), case.stablehlo)
        source += f", the recorded outputs from {outputs}"
    elif case.outputs:
        source += ", not the recorded ones: there is nothing to compare with"
    return dataclasses.replace(
        case,
        inputs=arrays,
        outputs=recorded,
        input_parts={},
        output_parts=(),
        second_outputs=None,
        parameters=parameters,
        notes=(*case.notes, source),
    )


def _load_bytecode(path: Path) -> Case:
    check_parses(path)
    return modules.load_module_file(path, sniff.MLIR_BYTECODE)


_LOADERS: Final[Mapping[str, Callable[[Path], Case]]] = {
    sniff.SNAPSHOT: load_snapshot,
    sniff.PACK: lambda path: load_snapshot(only_execution(path)),
    sniff.MLIR_TEXT: lambda path: modules.load_module_file(path, sniff.MLIR_TEXT),
    sniff.MLIR_BYTECODE: _load_bytecode,
    sniff.HLO_TEXT: xla_files.load_hlo_text,
    sniff.HLO_MODULE: xla_files.load_hlo_module,
    sniff.HLO_SNAPSHOT: xla_files.load_hlo_snapshot,
    sniff.HLO_UNOPTIMIZED_SNAPSHOT: xla_files.load_unoptimized_snapshot,
}
