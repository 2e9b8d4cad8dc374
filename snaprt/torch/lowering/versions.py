"""Which torch and torchax are installed, whether they fit, and the one import of torchax.

torchax registers lowerings for operators and overloads that newer releases of PyTorch no longer
have. They are given inert stand-ins while it is imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from snaprt.errors import UsageError

TESTED: Final = "torchax 0.0.13 and torch 2.12 to 2.14"

_INSTALL: Final = (
    "install the tested versions: pip install 'snaprt[torch]' "
    "(on a machine without a GPU, add --extra-index-url https://download.pytorch.org/whl/cpu)"
)

_OPERATOR: Final = re.compile(r"\baten\.([A-Za-z_]\w*)(?:\.(\w+))?")


class _Removed:
    """Stands for an operator or an overload that this torch does not have: nothing calls it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> _Removed:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return _Removed(f"{self._name}.{overload}")

    def name(self) -> str:
        """Return the name, as an overload of torch does."""
        return f"aten::{self._name}"

    def __repr__(self) -> str:
        return f"<aten.{self._name}: not in this torch>"


def check_installed() -> None:
    """Check that torch and torchax are installed, without importing them.

    Raises:
        UsageError: One of them is missing.
    """
    missing = [name for name in ("torch", "torchax") if _version(name) is None]
    if missing:
        raise UsageError(
            f"snaprt.torch needs {' and '.join(missing)}, which cannot be found "
            f"({_versions()}); tested with {TESTED}",
            hint=_INSTALL,
        )


@functools.cache
def torchax() -> Any:
    """Import torchax and return it; PyTorch works as before, apart from the device ``jax``.

    Raises:
        UsageError: torchax does not fit the installed torch or JAX.
    """
    import torch

    from snaprt.torch.lowering import corrections

    fastpath = torch.backends.mha.get_fastpath_enabled()
    log = logging.getLogger("torchax")
    try:
        with _stand_ins(torch):
            module = importlib.import_module("torchax")
            importlib.import_module("torchax.decompositions")
            module.default_env()
            module.tensor.Tensor.type_as = corrections.type_as
    except Exception as error:
        raise UsageError(
            f"torchax cannot be used with the installed versions ({_versions()}): "
            f"{type(error).__name__}: {error}",
            hint=f"tested with {TESTED}; {_INSTALL}",
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
    log.setLevel(logging.ERROR)  # it warns of every use of `.data`, which is right in a trace
    return module


@contextmanager
def _stand_ins(torch: Any) -> Iterator[None]:
    """Give what was removed a stand-in for as long as torchax is imported."""
    aten = torch.ops.aten
    given = []
    for name, overload in _named_by_torchax():
        if not hasattr(aten, name):
            setattr(aten, name, _Removed(name))
            given.append((aten, name))
        elif overload and not hasattr(getattr(aten, name), overload):
            packet = getattr(aten, name)
            setattr(packet, overload, _Removed(f"{name}.{overload}"))
            given.append((packet, overload))
    try:
        yield
    finally:
        for place, name in given:
            delattr(place, name)


def _named_by_torchax() -> set[tuple[str, str]]:
    """Return the operators that torchax's code names, as (operator, overload or nothing)."""
    spec = importlib.util.find_spec("torchax")
    folders = () if spec is None else spec.submodule_search_locations or ()
    files = [file for folder in folders for file in Path(folder).rglob("*.py")]
    return {pair for file in files for pair in _OPERATOR.findall(file.read_text("utf-8"))}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> str:
    names = ("torch", "torchax", "jax", "jaxlib")
    return ", ".join(f"{name} {_version(name) or 'not installed'}" for name in names)
