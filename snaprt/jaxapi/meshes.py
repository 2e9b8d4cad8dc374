"""The mesh that a thread computes under, as `jax.set_mesh` sets it; must not know programs.

Checked with jax 0.10.2 and 0.12.0: a program runs on the devices of the concrete mesh, and its
types name the axes of the abstract one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import config as _config
from jax._src import mesh as _mesh

# Where JAX 0.12 keeps them, and where JAX 0.10 does.
_at: Any = _mesh if hasattr(_mesh, "device_context") else _config
_concrete: Any = _at.device_context
_abstract: Any = _at.abstract_mesh_context_manager


def concrete_mesh() -> jax.sharding.Mesh | None:
    """Return the mesh that `jax.set_mesh` has set for this thread, ``None`` if there is none."""
    mesh = _mesh.get_concrete_mesh()
    return None if mesh.empty else mesh


def trace_context() -> tuple[Any, ...]:
    """Return all settings of JAX that may change what a call records.

    They are dtypes and their promotion, precision, meshes, default device, compute type, ...
    """
    return _config.trace_context(), _concrete.value


@contextmanager
def under_mesh(mesh: jax.sharding.Mesh | None) -> Iterator[None]:
    """Compute under ``mesh`` inside, or under none, as `jax.set_mesh` has it.

    JAX's own function refuses to where it traces.
    """
    concrete = _mesh.empty_concrete_mesh if mesh is None else mesh
    abstract = _mesh.empty_abstract_mesh if mesh is None else mesh.abstract_mesh
    before = _concrete.swap_local(concrete), _abstract.swap_local(abstract)
    try:
        yield
    finally:
        _concrete.set_local(before[0])
        _abstract.set_local(before[1])
