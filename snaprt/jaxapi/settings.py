"""JAX's settings as a thread has them, with the mesh that `jax.set_mesh` sets.

A program runs on the devices of the concrete mesh, and its types name the axes of the abstract one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax._src import mesh as _mesh

#: The types that JAX narrows where 64-bit types are off.
WITH_64_BITS = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def x64_enabled() -> bool:
    """Return whether 64-bit types are enabled for this thread."""
    return bool(_config.enable_x64.value)


@contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """Enable or disable 64-bit types for this thread inside the context."""
    with _config.enable_x64(enabled):
        yield


def key_reuse_is_checked() -> bool:
    """Return whether JAX looks, at each operation that it runs, for keys that are used twice."""
    return bool(_config.debug_key_reuse.value)


def default_device() -> Any:
    """Return the device that `jax.default_device` names, or ``None`` for JAX's own choice."""
    return _config.default_device.value


def before_checks_end(run: Callable[[], None]) -> None:
    """Call ``run`` as if `jax_debug_nans` or `jax_debug_infs` were on, where that is turned off.

    A context that turns it off counts, and so does leaving one that has turned it on: ``run`` is
    called in the thread that does. Checked with jax 0.10.2 and 0.12.0, whose own hooks let C++ look
    for NaNs as well: they come first.
    """
    checks: tuple[Any, ...] = (_config.debug_nans, _config.debug_infs)
    everywhere = [check.get_global() for check in checks]
    known = threading.local()  # what JAX tells comes too late to ask for the values before

    def changed() -> None:
        if getattr(known, "is_running", False):  # the contexts below
            return
        before = getattr(known, "values", everywhere)
        known.values = after = [check.value for check in checks]
        everywhere[:] = [check.get_global() for check in checks]
        if any(was and not now for was, now in zip(before, after, strict=True)):
            known.is_running = True
            try:
                with ExitStack() as contexts:
                    for check, value in zip(checks, before, strict=True):
                        contexts.enter_context(check(value))
                    run()
            finally:
                known.is_running = False

    def and_then(hook: Callable[[Any], None]) -> Callable[[Any], None]:
        def call_both(value: Any) -> None:
            hook(value)
            changed()

        return call_both

    known.values = [check.value for check in checks]
    for check in checks:
        check._update_global_hook = and_then(check._update_global_hook)
        check._update_thread_local_hook = and_then(check._update_thread_local_hook)


def option_count() -> int:
    """Return how many options JAX has: others than JAX may add some."""
    return len(_config.config._value_holders)


# Settings of JAX that take no part in what an operation is lowered to: by the start of their name.
_UNRELATED_SETTINGS = (
    *("check_vma", "jax_check", "jax_compilation_cache", "jax_cpu_get", "jax_cross_host"),
    *("jax_debug_log", "jax_default_device", "jax_dump", "jax_enable_compilation_cache"),
    *("jax_explain", "jax_log", "jax_persistent_cache", "jax_platform", "jax_pprint"),
    *("jax_raise", "jax_traceback", "jax_tracer", "jax_transfer_guard"),
    # Another value in each process of a job; the key has the devices themselves.
    *("jax_cuda_visible_devices", "jax_oneapi_visible_devices", "jax_rocm_visible_devices"),
)


def configuration() -> list[tuple[str, str]]:
    """Return JAX's settings as this thread has them, but for those that lowering ignores."""
    return [
        (name, repr(getattr(jax.config, name, value)))
        for name, value in sorted(jax.config.values.items())
        if not name.startswith(_UNRELATED_SETTINGS)
    ]


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
