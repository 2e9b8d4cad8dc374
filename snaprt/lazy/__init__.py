"""The lazy runtime: records eager JAX operations into a graph and cuts it.

The package itself can be called, ``snaprt.lazy()``, and is then the scope of `snaprt.lazy.scope`:
``snaprt.lazy`` is both, and Python makes it the package as soon as any part of it is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snaprt.lazy import scope


class _CallableModule(ModuleType):
    def __call__(self, *, fullgraph: bool = False) -> scope.lazy:
        """Run eager JAX code lazily: ``with snaprt.lazy(): ...`` or ``@snaprt.lazy()``.

        Args:
            fullgraph: Whether a cut other than `snaprt.mark_step` raises `snaprt.GraphBreakError`.
        """
        # Here, for it imports JAX; and the parts of the package import the package first.
        from snaprt.lazy.scope import lazy

        return lazy(fullgraph=fullgraph)


sys.modules[__name__].__class__ = _CallableModule
