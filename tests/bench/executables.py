"""Makes executables for the executor to run, with no recorded graph behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from snaprt.compile.executable import Executable


def executable_of(function: Callable[[Any], list[Any]], x: jax.Array) -> Executable:
    """Compile a function of one array that returns a list of one."""
    lowered = jax.jit(function).lower(x)
    return Executable(
        name="small",
        graph_id="0" * 16,
        number=-1,
        devices=(jax.devices()[0],),
        input_names=("x",),
        output_names=("y",),
        donated=(),
        from_cache=False,
        call=lowered.compile(),
        lowered=lambda: lowered,
    )
