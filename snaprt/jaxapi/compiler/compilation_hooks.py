"""Calls of ours before JAX compiles a program for ``jax.jit``, or loads it from a cache.

Checked with jax 0.10.2 and 0.12.0: each program passes ``compile_or_get_cached`` once before it
first runs, and ``backend_compile_and_load`` where no cache has it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from jax._src import compiler as _compiler

from snaprt.jaxapi.compiler.compilation_cache import _options_of_compilation, _own_cache
from snaprt.jaxapi.compiler.modules import bytecode_without_locations, stablehlo_text
from snaprt.jaxapi.installation import Device

#: What may be the address of an object, in the text of a module.
_ADDRESS: Final = re.compile(r"(?<![\w.])\d{9,20}(?![\w.])")


@dataclass(frozen=True)
class PlannedCompilation:
    """A program that JAX is about to compile or to load."""

    name: str  # the module's, such as ``jit_train_step``
    devices: tuple[Device, ...]
    options: bytes  # serialized compile options, without where to dump or to cache
    module: Any  # MLIR, with source locations


def before_compile_or_load(call: Callable[[PlannedCompilation], None]) -> None:
    """Call ``call`` before each program that JAX compiles or loads.

    What it raises goes to the user. Programs that snaprt compiles for itself are left out.
    """
    original = _compiler.compile_or_get_cached

    @functools.wraps(original)
    def compile_or_get_cached(
        backend: Any, module: Any, devices: Any, options: Any, *arguments: Any, **named: Any
    ) -> Any:
        if not _own_cache.bypassed:
            written = _options_of_compilation(options, backend)
            call(PlannedCompilation(module_name(module), tuple(devices.flat), written, module))
        return original(backend, module, devices, options, *arguments, **named)

    _compiler.compile_or_get_cached = compile_or_get_cached  # type: ignore[assignment]


def before_compile(call: Callable[[Any, bool], None]) -> None:
    """Call ``call`` before XLA compiles a module; what it raises goes to the user.

    Its arguments are the module and whether snaprt compiles it for itself, as for a lazy graph.
    """
    original = _compiler.backend_compile_and_load

    @functools.wraps(original)
    def backend_compile_and_load(backend: Any, module: Any, *arguments: Any, **named: Any) -> Any:
        call(module, _own_cache.bypassed)
        return original(backend, module, *arguments, **named)

    _compiler.backend_compile_and_load = backend_compile_and_load


def module_name(module: Any) -> str:
    """Return the name of a module in MLIR, as in ``jit_train_step``."""
    return str(module.operation.attributes["sym_name"].value)


def content_in_any_process(module: Any, *, names_objects: bool) -> bytes:
    """Return a module's content without source locations.

    Args:
        module: MLIR.
        names_objects: Whether it names objects of this process by their addresses, which are left
            out.
    """
    if not names_objects:
        return bytecode_without_locations(module)
    return _ADDRESS.sub("", stablehlo_text(module)).encode()
