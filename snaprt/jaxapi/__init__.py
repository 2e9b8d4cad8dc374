"""The one place that touches names of JAX which are not public API.

Everything here was checked with jax 0.10.2 and 0.12.0; a function that leans on something newer or
older says so. Others write ``from snaprt import jaxapi`` and ``jaxapi.NAME``, for any name below
without an underscore in front. The files import each other in one direction, which
``.importlinter`` lays down.

When a new JAX breaks snaprt, the change belongs here and nowhere else:

- A name that is gone raises, and the error's cause ends in the file to change. Let it work with the
  versions before, too, and say of which versions what it does is true.
- A function of JAX's that is replaced may no longer be asked, which fails without a word. That is
  done in `tracing.teaching`, `tracing.host_memory`, `tracing.transforms`, `tracing.effects`,
  `jit.entry`, `jit.executions`, `jit.watch`, `compilation_cache`, `known_lowerings`,
  `executables` and `frames`; `tracing.teaching` also knows functions of JAX by their names.
- Then run the tests with each version, and move the bounds of jax and jaxlib in pyproject.toml and
  in the error below.
"""

from __future__ import annotations

import importlib.metadata

from snaprt.errors import UsageError

try:
    from snaprt.jaxapi.compiler.compilation_cache import *
    from snaprt.jaxapi.compiler.custom_calls import *
    from snaprt.jaxapi.compiler.executables import *
    from snaprt.jaxapi.compiler.known_lowerings import *
    from snaprt.jaxapi.compiler.lowered import *
    from snaprt.jaxapi.compiler.module_changes import *
    from snaprt.jaxapi.compiler.modules import *
    from snaprt.jaxapi.coordination import *
    from snaprt.jaxapi.frames import *
    from snaprt.jaxapi.installation import *
    from snaprt.jaxapi.jit.calls import *
    from snaprt.jaxapi.jit.entry import *
    from snaprt.jaxapi.jit.executions import *
    from snaprt.jaxapi.jit.modules import *
    from snaprt.jaxapi.jit.watch import *
    from snaprt.jaxapi.profiles import *
    from snaprt.jaxapi.settings import *
    from snaprt.jaxapi.tracing.arrays import *
    from snaprt.jaxapi.tracing.effects import *
    from snaprt.jaxapi.tracing.functions import *
    from snaprt.jaxapi.tracing.host_memory import *
    from snaprt.jaxapi.tracing.operations import *
    from snaprt.jaxapi.tracing.shardings import *
    from snaprt.jaxapi.tracing.teaching import *
    from snaprt.jaxapi.tracing.traces import *
    from snaprt.jaxapi.tracing.transforms import *
except (ImportError, AttributeError) as error:
    _installed = " and ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "jaxlib"))
    raise UsageError(
        f"snaprt works with JAX 0.10.2 to 0.12, but {_installed} are installed ({error})",
        hint="install another JAX: pip install 'jax>=0.10.2,<0.13' 'jaxlib>=0.10.2,<0.13'",
    ) from error
