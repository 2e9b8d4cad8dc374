"""Programs on several devices, recorded in processes of their own; and snapshots written anew."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from programs import start_program

from snaprt.snapshot.format import schema
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.format.write import write_snapshot

PROGRAM = """
import sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np, snaprt
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def put(mesh, value, *spec):
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
x = put(mesh, np.arange(64, dtype=np.float32).reshape(8, 8) / 9, "data", "model")
w = put(mesh, np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), None, "model")
scale = put(mesh, np.float32(3))
key = put(mesh, jax.random.key(3))
with snaprt.lazy():
    y = jnp.tanh(x @ w) * scale + jax.random.normal(key, (8, 8))
    z = y.sum(0).astype(jnp.bfloat16)
    snaprt.mark_step(wait=True)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    def unequal_copies(part):
        return part * jax.lax.axis_index("data")

    copies = unequal_copies(x)
    snaprt.mark_step(wait=True)
    more = copies + 1
    snaprt.mark_step(wait=True)
odd = Mesh(np.array(jax.devices()[:3]), ("odd",))
o = put(odd, np.arange(27, dtype=np.int8).reshape(9, 3), "odd")
with snaprt.lazy():
    doubled = jnp.concatenate([o, o]) * 2
    snaprt.mark_step(wait=True)
"""
"""Four executions: of a mesh of 4 x 2 devices, two with copies that differ, of a mesh of 3."""

TWO_PROCESSES = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
import snaprt
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
whole = np.arange(32, dtype=np.float32).reshape(8, 4)
x = jax.make_array_from_callback((8, 4), NamedSharding(mesh, P("data")), lambda at: whole[at])
with snaprt.lazy():
    total = jnp.tanh(x).sum(0)
    doubled = x * 2
    snaprt.mark_step(wait=True)
snaprt.metrics.clear_all()
"""


def record(program: str, folder: Path, devices: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a program in a process that shows itself ``devices`` devices and records all."""
    return start_program(
        program,
        *arguments,
        devices=devices,
        errors=subprocess.STDOUT,
        JAX_PLATFORMS="cpu",
        SNAPRT_DUMP_DIR=folder,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def of_executable(folder: Path, number: int, role: schema.Role = "inputs") -> list[Path]:
    """Return the files of one executable, one for each device, in their order."""
    return sorted(folder.glob(f"*-executable{number:06d}-*{schema.SUFFIXES[role]}"))


def write_anew(
    source: Path,
    target: Path,
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, value: value,
    execution: dict[str, Any] | None = None,
    **contents: Any,
) -> Path:
    """Write a snapshot again, with other arrays, or other words in its manifest."""
    file = open_snapshot(source)
    manifest = file.manifest

    def again(record: schema.ArrayRecord) -> schema.ArrayContent:
        value = change(record.name, file.array(record.name))
        key_dtype = record.dtype if record.key_impl else ""
        traits = record.traits()
        return schema.ArrayContent(
            record.name, lambda: value, value.nbytes, key_dtype=key_dtype, **traits
        )

    fields: dict[str, Any] = {
        "execution": dataclasses.replace(manifest.execution, **(execution or {})),
        "module": file.module,
        "arrays": [again(record) for record in manifest.arrays],
        "shardings": manifest.shardings,
        "proof": manifest.proof,
        "trace_error": manifest.trace_error,
        **contents,
    }
    write_snapshot(target, schema.Contents(**fields))
    return target
