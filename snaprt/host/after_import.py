"""Calls a function as soon as a module has been imported; does not know what the function does.

What an import sees is as without it: the module has its own loader and spec when its code runs.
Python's garbage collector is paused meanwhile. An import makes objects that stay, hundreds of
thousands of them for JAX, and each full collection would visit them all and free nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from snaprt.host.collector import collector_paused


def call_after_import(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` once, when the module ``name`` has been imported: now, if it has been.

    It is called in the thread that imports the module, before that import returns; what it raises
    comes out of the import. An import that fails does not count. Where a module of snaprt imports
    it, the function is called when that one is complete, for it may need it.
    """
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Finds one module as the finders after it do, and has its loader call ``action``."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loaded = self._loaded if fullname == self._name else None
        if loaded is None and not fullname.startswith(_OWN):
            return None
        # Others may have put finders before this one since; those have had their turn.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                # The specs of namespace packages have no loader, and nothing to execute.
                if spec.loader is not None:
                    wrapped: Any = _Loader(spec.loader, loaded)
                    spec.loader = wrapped
                return spec
        return None

    def _loaded(self) -> None:
        # Twice if two threads imported it at once, or an action raised and the import is tried
        # again: the first has taken the finder away.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _own_imports.actions.append(self._action)
            _own_imports.act()


class _OwnImports(threading.local):
    """How many modules of snaprt this thread is importing, and what it is to do after that."""

    depth = 0

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []

    def act(self) -> None:
        """Do what is to be done, unless a module of snaprt is not complete."""
        while self.actions and not self.depth:
            self.actions.pop(0)()


_OWN: Final = ("snaprt.", "snaprt_cache.", "snaprt_replay.")
_own_imports: Final = _OwnImports()


class _Loader:
    """The module's own loader in all but that ``loaded`` is called after the module's code."""

    def __init__(self, own: Any, loaded: Callable[[], None] | None) -> None:
        self._own = own
        self._loaded = loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        if self._loaded is None:
            self._exec_own(module)
            return
        with collector_paused():
            self._own.exec_module(module)
            self._loaded()

    def _exec_own(self, module: ModuleType) -> None:
        _own_imports.depth += 1
        try:
            self._own.exec_module(module)
        finally:
            _own_imports.depth -= 1
            _own_imports.act()
