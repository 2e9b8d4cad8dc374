"""The custom calls of modules: which functions they need, and whose objects they name."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jax._src.lax import linalg as _linalg
from jaxlib import cpu_sparse as _cpu_sparse
from jaxlib import gpu_solver as _gpu_solver
from jaxlib import xla_client as _xla_client
from jaxlib.mlir import ir


@dataclass(frozen=True)
class CustomCalls:
    """What the custom calls of a module need."""

    targets: tuple[str, ...] = ()  # the names of the functions that they call, sorted
    # What of the process that lowered the module they name, such as a Python function; empty where
    # the module means the same in every process.
    bound_to: str = ""


#: Targets whose configuration names Python objects by address or by number, and what those are.
#: Sources: jax/_src/callback.py, custom_partitioning.py and debugging.py of 0.10.2 and 0.12.0.
_CALLBACK: Final = r"xla_\w*python\w*callback"
_OBJECTS: Final[Mapping[str, str]] = {
    _CALLBACK: "a Python callback",
    r"CustomSPMDPartitioning": "the Python functions of custom_partitioning",
    r"InspectSharding": "the Python function of inspect_array_sharding",
}
#: A number in a configuration that is large enough for an address.
_NUMBER: Final = re.compile(r"(?<![\w.])(?:0x[0-9a-fA-F]{8,16}|\d{9,20})(?![\w.])")
_HOST_TRANSFER: Final = "is_host_transfer"
_CALLS: Final = re.compile(rb"custom_call|is_host_transfer")
_CONFIGURATION: Final = ("backend_config", "mhlo.backend_config")


def custom_calls(module: Any, bytecode: bytes | None = None) -> CustomCalls:
    """Return what the custom calls of an MLIR module need."""
    if bytecode is not None and not _CALLS.search(bytecode):
        return CustomCalls()
    targets: set[str] = set()
    bound_to: list[str] = []

    def look(operation: Any) -> Any:
        if operation.name.endswith(".custom_call"):
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            targets.add(target)
            bound_to.append(_objects_named_by(target, operation.attributes))
        elif _HOST_TRANSFER in operation.attributes and _is_true(operation):
            bound_to.append("a Python callback")  # as it is on a TPU
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return CustomCalls(tuple(sorted(targets)), next(filter(None, bound_to), ""))


def is_python_callback(target: str) -> bool:
    """Return whether a custom call of this target calls back into Python."""
    return re.fullmatch(_CALLBACK, target) is not None


def _objects_named_by(target: str, attributes: Any) -> str:
    for pattern, description in _OBJECTS.items():
        if re.fullmatch(pattern, target):
            return description
    for name in _CONFIGURATION:
        if name in attributes:
            text = str(attributes[name]).replace(r"\22", '"')  # as MLIR prints a quote in a string
            if any(
                _is_address(int(number, 16 if "x" in number else 10))
                for number in _NUMBER.findall(text)
            ):
                return f"memory addresses of the process, in the configuration of {target}"
    return ""


def _is_true(operation: Any) -> bool:
    return bool(ir.BoolAttr(operation.attributes[_HOST_TRANSFER]).value)


def _is_address(number: int) -> bool:
    """Return whether a number is an address in this process; without procfs, if it could be."""
    try:
        with open("/proc/self/maps") as file:
            areas = [line.partition(" ")[0].partition("-") for line in file]
    except OSError:
        return 1 << 32 <= number < 1 << 48
    return any(int(start, 16) <= number < int(end, 16) for start, _, end in areas)


def functions_of_process(targets: Iterable[str], platform: str) -> tuple[str, ...]:
    """Return those of ``targets`` that are functions of this process, registered with XLA.

    The others are XLA's own. A platform whose plugin keeps its list to itself has all of them.
    """
    registered = _registered(platform)
    return tuple(target for target in sorted(targets) if not registered or target in registered)


def make_available(targets: Iterable[str], platform: str) -> tuple[str, ...]:
    """Have JAX register and initialize the functions that a program calls; return the missing ones.

    JAX does so as it lowers such a call. An executable that is loaded where nothing was lowered
    would call a null pointer, and end the process.
    """
    names = set(targets)
    if not names:
        return ()
    with _lock:
        for applies, initialize, _ in _INITIALIZERS:
            if any(map(applies, names)):
                initialize()
    registered = _registered(platform)
    return tuple(sorted(names - registered)) if registered else ()


def modules_with_functions(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that `make_available` imports for some functions, imported or not."""
    names = set(targets)
    rows = (imports for applies, _, imports in _INITIALIZERS if any(map(applies, names)))
    return tuple(name for imports in rows for name in imports)


def modules_awaited(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that `make_available` would import, or wait for another thread to import.

    Two threads that import parts of one package at a time may wait for each other, and Python then
    raises an error in one of them.
    """
    return tuple(name for name in modules_with_functions(targets) if not _is_imported(name))


def _is_imported(name: str) -> bool:
    while name:  # its packages, too
        specification = getattr(sys.modules.get(name), "__spec__", None)
        if specification is None or getattr(specification, "_initializing", False):
            return False
        name = name.rpartition(".")[0]
    return True


def _registered(platform: str) -> frozenset[str]:
    """Return the names of the functions that are registered for a platform's custom calls."""
    name = "CUDA" if platform in ("gpu", "cuda") else platform
    return frozenset(_xla_client.custom_call_targets(name))


def _initialize_lapack() -> None:
    # The functions are scipy's. Imported first, so that no thread waits for another inside of the
    # call, which holds a lock of its own.
    for name in _OF_SCIPY:
        importlib.import_module(name)
    _linalg.initialize_lapack()


def _registers(registrations: Callable[[], Mapping[str, Any]]) -> Callable[[str], bool]:
    """Return what tells whether a target is one of those that a module of jaxlib registers."""
    return lambda target: any(
        target == registration[0] for row in registrations().values() for registration in row
    )


def _import(name: str) -> None:
    with contextlib.suppress(ImportError):  # the target is then missing, or its plugin says so
        importlib.import_module(name)


_lock = threading.Lock()
_OF_SCIPY: Final = ("scipy.linalg.cython_blas", "scipy.linalg.cython_lapack")
_SPARSE: Final = "jax.experimental.sparse"
_MOSAIC: Final = "jax.experimental.mosaic.gpu"
#: Functions that are not ready once JAX is imported and its plugins are loaded, what makes them so,
#: and the modules which that imports. Sources: jax/_src/lax/linalg.py, jax/experimental/sparse and
#: mosaic/gpu, jaxlib/lapack.py and gpu_solver.py of 0.10.2 and 0.12.0.
_INITIALIZERS: Final[
    tuple[tuple[Callable[[str], bool], Callable[[], None], Sequence[str]], ...]
] = (
    (lambda target: target.startswith("lapack_"), _initialize_lapack, _OF_SCIPY),
    (_registers(_gpu_solver.registrations), _gpu_solver.initialize_hybrid_kernels, _OF_SCIPY),
    (_registers(_cpu_sparse.registrations), lambda: _import(_SPARSE), (_SPARSE,)),
    (lambda name: name.startswith("mosaic_gpu"), lambda: _import(_MOSAIC), (_MOSAIC,)),
)
