"""Chips that compute wrong, in a process: through a callback, or by what is compiled for them.

To be imported by programs that tests start, or inside of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def faulty(
    is_wrong: Callable[[int, int], bool], *, varies: bool = True
) -> Callable[..., jax.Array]:
    """Return a function of an array and a device's place that is the identity, mostly.

    Args:
        is_wrong: Is asked at each call: of the place, and how many calls there were before.
        varies: Whether each call that is wrong gives another value.
    """
    calls: Counter[int] = Counter()

    def callback(array: np.ndarray, place: np.ndarray) -> np.ndarray:
        number = calls[int(place)]
        calls[int(place)] += 1
        array = np.array(array)
        if is_wrong(int(place), number):
            bits = array.reshape(-1)[:1].view(np.uint32)
            bits ^= np.uint32((1 + number if varies else 1) << 14)
        return array

    def apply(array: jax.Array, place: Any = 0) -> jax.Array:
        like = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return jax.pure_callback(callback, like, array, jnp.int32(place))

    return apply


def permanent(device: int, constant: str, wrong: str) -> Callable[[], None]:
    """Let XLA compile what one device runs alone with another constant; return what undoes that."""
    client: Any = type(jax.devices()[0].client)
    compile_and_load = client.compile_and_load

    def edited(value: Any) -> Any:
        text = str(value)
        return text.replace(constant, wrong) if constant in text else value

    def compile_for(self: Any, *args: Any, **named: Any) -> Any:
        devices = next(one for one in (*args, *named.values()) if _is_devices(one))
        if [one.id for one in devices] == [device]:
            args = tuple(map(edited, args))
            named = {name: edited(value) for name, value in named.items()}
        return compile_and_load(self, *args, **named)

    def undo() -> None:
        client.compile_and_load = compile_and_load

    client.compile_and_load = compile_for
    return undo


def _is_devices(value: Any) -> bool:
    return type(value).__name__ == "DeviceList" or (
        isinstance(value, Sequence) and not isinstance(value, str | bytes)
    )
