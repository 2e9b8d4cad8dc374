"""Parse a module; run as a script, parse the one in a file in a process of its own, and end.

It imports jaxlib alone: JAX takes some seconds more, which is most of what looking at a file takes.
The context has the dialects of JAX's own (jax/_src/interpreters/mlir.py, `make_ir_context`; jaxlib
0.10 and 0.12). Damaged bytecode can end the process, or send MLIR round in circles until its time
is over.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo


def parse(module: bytes | str, context: ir.Context) -> Any:
    """Parse StableHLO text, MLIR bytecode or a portable artifact; raise whatever MLIR answers."""
    if isinstance(module, bytes) and module.startswith(b"ML\xefR"):
        try:
            return _jaxlib.mlir.deserialize_portable_artifact(module, context)
        except Exception:  # not portable: plain bytecode
            pass
    with context:
        return ir.Module.parse(module)


def _context() -> ir.Context:
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
