"""Says what the lazy runtime does, and why: who looks on, and what is told of it.

The package itself can be called, ``snaprt.explain(function, ...)``: ``snaprt.explain`` is both, and
Python makes it the package as soon as any part of it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snaprt.explain.cuts import Explanation


class _CallableModule(ModuleType):
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
        """Run a function lazily, and return what it did; see `snaprt.explain.cuts.explain`."""
        # Here, for it imports JAX; and the parts of the package import the package first.
        from snaprt.explain.cuts import explain

        return explain(function, *args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
