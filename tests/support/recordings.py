"""Real executions as snapshots: those that the recorder wrote; and some with our own names, run
by JAX and written by parts of the recorder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from snaprt import jaxapi
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.content import array_content, source_locations
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot
from snaprt.snapshot.format.store import ArrayStore
from snaprt.snapshot.format.write import write_file
from snaprt.snapshot.recorder import describe
from snaprt.snapshot.recorder.record import process_recorder


def record(
    folder: Path,
    function: Callable[..., Any],
    arguments: Mapping[str, jax.Array],
    *,
    output_names: tuple[str, ...] = (),
    store: ArrayStore | None = None,
    **fields: Any,
) -> Path:
    """Run a function under ``jax.jit`` and write both snapshots; return the one of the inputs.

    Args:
        folder: Where to.
        function: Takes the arguments by place; returns a tree of arrays.
        arguments: The arrays by the names that the snapshot gives them.
        output_names: Names of the results; by default out0, out1, ...
        store: Keeps the arrays.
        fields: Of ``schema.ExecutionRecord``, in place of the usual ones.
    """
    inputs = list(arguments.values())
    lowered = jax.jit(function, keep_unused=True).lower(*inputs)
    outputs = jax.tree.leaves(lowered.compile()(*inputs))
    device = jax.devices()[0]
    described = describe.describe_device(device)
    module = schema.ModuleBytes(
        jaxapi.portable_stablehlo(lowered),
        jaxapi.hlo_proto(lowered),
        jaxapi.compile_options([device]).SerializeAsString(),
    )
    execution = schema.ExecutionRecord(
        role="inputs",
        name=getattr(function, "__name__", "function"),
        graph_id="0123456789abcdef",
        process=0,
        executable=0,
        device_index=0,
        execution_count=0,
        step=0,
        time=1_795_265_970.25,
        device=described,
        devices=(described,),
        platform_version=describe.platform_version(device),
        versions=describe.versions(),
        xla_flags="",
        environment={},
        jax_config=describe.jax_config(),
        input_names=tuple(arguments),
        output_names=output_names or tuple(f"out{number}" for number in range(len(outputs))),
        donated=(),
        source_locations=source_locations(module.hlo),
    )
    execution = dataclasses.replace(execution, **fields)
    sides: Mapping[schema.Role, tuple[tuple[str, ...], list[Any]]] = {
        "inputs": (execution.input_names, inputs),
        "outputs": (execution.output_names, outputs),
    }
    for role, (names, arrays) in sides.items():
        own = dataclasses.replace(execution, role=role)
        contents = [array_content(n, a, device) for n, a in zip(names, arrays, strict=True)]
        write_file(folder / schema.file_name(own), schema.Contents(own, module, contents), store)
    return folder / schema.file_name(execution)


def recorded(folder: Path, role: schema.Role = "inputs") -> list[SnapshotFile]:
    """Return what the recorder has written into a folder, oldest first."""
    assert process_recorder().flush(60)
    files = map(open_snapshot, folder.glob(f"*.{role}.snap"))
    return sorted(files, key=_order)


def _order(file: SnapshotFile) -> tuple[float, int]:
    return file.manifest.execution.time, file.manifest.execution.run_number
