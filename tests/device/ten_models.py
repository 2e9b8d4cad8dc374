"""Runs one step of ten models with `jax.jit`: what the device check records on the device."""

from __future__ import annotations

import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

COUNT = 10


def main() -> None:
    """Run each model's step once, under a name that begins with ``model_``."""
    import text_models

    for name, make in list(text_models.MODELS.items())[:COUNT]:
        function, arguments = make()

        def step(*arguments, function=function):
            return function(*arguments)

        step.__name__ = f"model_{name.replace(' ', '_')}"
        jax.block_until_ready(jax.jit(step)(*arguments))
        print(name)


if __name__ == "__main__":
    main()
