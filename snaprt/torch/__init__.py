"""PyTorch modules, losses and optimizers on JAX arrays: lazily, cached, recorded and replayed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from snaprt.torch.lowering.versions import check_installed

if TYPE_CHECKING:
    from snaprt.torch.compiled import jit as jit
    from snaprt.torch.modules import unwrap as unwrap
    from snaprt.torch.modules import wrap as wrap
    from snaprt.torch.scope import device as device
    from snaprt.torch.scope import lazy as lazy
    from snaprt.torch.scope import to_jax as to_jax
    from snaprt.torch.scope import to_torch as to_torch

__all__ = ["device", "jit", "lazy", "to_jax", "to_torch", "unwrap", "wrap"]

# Public name -> the module that defines it.
_WHERE = {
    "device": "scope",
    "jit": "compiled",
    "lazy": "scope",
    "to_jax": "scope",
    "to_torch": "scope",
    "unwrap": "modules",
    "wrap": "modules",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        where = _WHERE.get(name)
        if where is None:
            raise AttributeError(f"module 'snaprt.torch' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"snaprt.torch.{where}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


check_installed()
