"""Runs the examples of the reference, as a program: they install caches and set modes.

Writes into the current folder. Takes the names of objects, and exits with 1 if an example fails.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import sys
from pathlib import Path


def resolve(name: str) -> object:
    """Return the object of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


def main(names: list[str]) -> int:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import snaprt

    def step(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * 2

    with snaprt.record(when="name=step", folder="recorded"):
        jax.jit(step)(jnp.arange(4.0))
    snaprt.dump_now()
    for path in Path("recorded").iterdir():  # name.PLACE.inputs.snap: as the examples call it
        path.rename("step." + ".".join(path.name.split(".")[-2:]))
    known = {"jax": jax, "jnp": jnp, "np": np, "snaprt": snaprt, "Path": Path}
    if any(name.startswith("snaprt.torch.xla.") for name in names):
        known["torch"] = importlib.import_module("torch")
        known["xm"] = importlib.import_module("snaprt.torch.xla")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    for name in names:
        text = inspect.getdoc(resolve(name)) or ""
        runner.run(doctest.DocTestParser().get_doctest(text, dict(known), name, None, 0))
    print(runner.summarize(verbose=False))
    return 1 if runner.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
