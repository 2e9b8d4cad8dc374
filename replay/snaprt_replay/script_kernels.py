"""Make scripts register the functions that their modules call; knows only the functions' names.

JAX registers some functions only as it lowers a call of them. A script that runs a module as it was
recorded lowers no such call, and XLA then fails or ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

#: What the name of a function starts with, and a statement that makes JAX register it, which uses
#: only public names. `snaprt.jaxapi.make_available` does the same within snaprt.
_STATEMENTS: Final[Mapping[str, str]] = {
    "lapack_": "jnp.linalg.eigvalsh(jnp.eye(1)).block_until_ready()  # makes JAX load LAPACK",
    "cpu_csr_sparse_dense": "import jax.experimental.sparse  # registers its functions",
    "mosaic_gpu": "import jax.experimental.mosaic.gpu  # registers its functions",
}


def statements_for(targets: Iterable[str], indent: str) -> str:
    """Return the lines that register the functions that custom calls name; maybe none.

    They need the name ``jnp``.
    """
    names = tuple(targets)
    return "".join(
        f"{indent}{statement}\n"
        for start, statement in _STATEMENTS.items()
        if any(name.startswith(start) for name in names)
    )
