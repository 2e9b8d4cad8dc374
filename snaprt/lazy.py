"""The lazy runtime: records eager JAX operations into a graph and cuts it.

The package itself can be called, ``snaprt.lazy()``, and is then the scope of `snaprt.runtime.lazy_scope`:
``snaprt.lazy`` is both, and Python makes it the package as soon as any part of it is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from snaprt.errors import UsageError

if TYPE_CHECKING:
    from snaprt.runtime import lazy_scope


class _CallableModule(ModuleType):
    def __call__(self, *words: object, fullgraph: bool = False) -> lazy_scope.lazy:
        """Run eager JAX code lazily: ``with snaprt.lazy(): ...`` or ``@snaprt.lazy()``.

        Args:
            words: Nothing is taken without a name.
            fullgraph: Whether a cut other than `snaprt.mark_step` raises `snaprt.GraphBreakError`.

        Raises:
            UsageError: It is given a function: ``@snaprt.lazy`` for ``@snaprt.lazy()``.
        """
        if words:
            raise UsageError(
                "snaprt.lazy takes no function and no other arguments without a name",
                hint="write @snaprt.lazy() above a function, or with snaprt.lazy(): ...",
            )
        # Here, for it imports JAX; and the parts of the package import the package first.
        from snaprt.runtime.lazy_scope import lazy

        return lazy(fullgraph=fullgraph)


sys.modules[__name__].__class__ = _CallableModule
