"""Parse a module; run as a script, parse the one in a file in a process of its own, and end.

It imports jaxlib alone: JAX takes some seconds more, which is most of what looking at a file takes.
The context has the dialects of JAX's own (jax/_src/interpreters/mlir.py, `make_ir_context`; jaxlib
0.10 and 0.12). Damaged bytecode can end the process, or send MLIR round in circles until its time
is over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mpmd, sdy, stablehlo


def parse(module: bytes | str, context: ir.Context) -> Any:
    """Parse StableHLO text, MLIR bytecode or a portable artifact; print nothing.

    Raises:
        ir.MLIRError: MLIR refuses it.
        ValueError: It is a portable artifact that this version of StableHLO cannot convert.
    """
    why_not_portable: list[str] = []
    if isinstance(module, bytes) and module.startswith(b"ML\xefR"):
        handler: Any = context.attach_diagnostic_handler(_collect_into(why_not_portable))
        try:
            # The function of that name in jaxlib._jax calls handlers without the GIL in 0.12.
            return stablehlo.deserialize_portable_artifact(context, module)
        except ValueError:  # plain bytecode, or damaged
            pass
        finally:
            handler.detach()
    with context:
        parsed = ir.Module.parse(module)
    if any(view.operation.name.startswith("vhlo.") for view in parsed.body.operations):
        raise ValueError("; ".join(why_not_portable))
    return parsed


def _collect_into(messages: list[str]) -> Callable[[ir.Diagnostic], bool]:
    def collect(diagnostic: ir.Diagnostic) -> bool:
        messages.append(diagnostic.message)
        return True

    return collect


def _context() -> ir.Context:
    from jaxlib.mlir.dialects import mhlo  # for the script alone: JAX does not import it

    context, registry = ir.Context(), ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    sdy.register_dialect(context)
    mpmd.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    chlo.register_dialect(context)
    stablehlo.register_dialect(context)
    return context


if __name__ == "__main__":
    try:
        import resource

        seconds = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):  # not there, or less is allowed already
        pass
    parse(Path(sys.argv[1]).read_bytes(), _context())
