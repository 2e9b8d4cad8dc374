"""A seed for the process, and the keys derived from it; JAX itself has no global generator."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from snaprt import jaxapi
from snaprt.errors import UsageError


class RngState(NamedTuple):
    """The state of a stream of keys.

    Attributes:
        seed: The seed.
        drawn: How many keys have been drawn since.
    """

    seed: int
    drawn: int


class _Stream:
    """The keys of one device, or those without a device; guarded by `_lock`."""

    def __init__(self, state: RngState, device: Any) -> None:
        self.state = state
        with jaxapi.evaluating():
            root = jax.random.key(state.seed)
            self.root = root if device is None else jax.device_put(root, device)

    def draw(self) -> tuple[jax.Array, int]:
        """Return the root and the number of the next key."""
        number = self.state.drawn
        self.state = self.state._replace(drawn=number + 1)
        return self.root, number


_FIRST: Final = RngState(0, 0)
_streams: Final[dict[Any, _Stream]] = {}
_lock: Final = threading.Lock()


def manual_seed(seed: int, device: Any = None) -> None:
    """Seed the keys that `next_key` returns from here on, in the whole process.

    Nothing else is seeded, because JAX draws only from the keys that it is given. The default seed
    is 0. Processes with the same seed draw the same keys, as programs over several processes need;
    add `jax.process_index` to the seed for different keys.

    Args:
        seed: Any integer that `jax.random.key` accepts.
        device: A `jax.Device`, to seed a separate stream for it; None for the stream without a
            device.

    Examples:
        >>> snaprt.manual_seed(7)
        >>> first = jax.random.normal(snaprt.next_key(), (2,))
        >>> snaprt.manual_seed(7)
        >>> again = jax.random.normal(snaprt.next_key(), (2,))
        >>> bool((first == again).all())
        True
    """
    set_rng_state(seed, device)


def next_key(device: Any = None) -> jax.Array:
    """Return a key that was not returned before: key ``n`` is ``fold_in(key(seed), n)``.

    Use it wherever JAX takes a key: ``jax.random.normal(snaprt.next_key(), (3,))``,
    ``flax.nnx.Rngs(snaprt.next_key())``, ``model.init(snaprt.next_key(), x)``. Inside `lazy`, it is
    recorded like any operation, and a repeated step compiles nothing. If several threads draw, the
    assignment of keys to threads is undefined.

    Args:
        device: The device whose stream to use, see `manual_seed`; its keys are committed to it.

    Raises:
        UsageError: It is called while `jax.jit` or another staging transformation traces a
            function: every call of that function would then use this one key.

    Examples:
        >>> snaprt.manual_seed(0)
        >>> keys = [snaprt.next_key() for _ in range(3)]
        >>> bool(keys[2] == jax.random.fold_in(jax.random.key(0), 2))
        True
    """
    if jaxapi.is_staging():
        raise UsageError(
            "next_key() was called while JAX traces a function, so it would return the same key "
            "each time",
            hint="call it outside the function and pass the key as an argument",
        )
    with _lock:
        root, number = _stream(device).draw()
    return jax.random.fold_in(root, np.uint32(number))


def get_rng_state(device: Any = None) -> RngState:
    """Return the state of the keys as plain integers, to be stored with a checkpoint.

    Args:
        device: The device whose stream to use, see `manual_seed`.

    Examples:
        >>> snaprt.manual_seed(7)
        >>> key = snaprt.next_key()
        >>> snaprt.get_rng_state()
        RngState(seed=7, drawn=1)
    """
    with _lock:
        return _stream(device).state


def set_rng_state(state: Sequence[int] | int, device: Any = None) -> None:
    """Continue with the keys from ``state``.

    Args:
        state: The result of `get_rng_state`, or a seed.
        device: The device whose stream to use, see `manual_seed`.

    Raises:
        UsageError: ``state`` is neither.

    Examples:
        >>> state = snaprt.get_rng_state()
        >>> key = snaprt.next_key()
        >>> snaprt.set_rng_state(state)
        >>> bool(snaprt.next_key() == key)
        True
    """
    try:
        numbers = state if isinstance(state, Sequence) else (state, 0)
        seed, drawn = map(operator.index, numbers)
        if drawn < 0:
            raise ValueError(drawn)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"cannot set the state of random keys to {state!r}",
            hint="pass an integer seed, or a result of snaprt.get_rng_state()",
        ) from error
    stream = _Stream(RngState(seed, drawn), device)
    with _lock:
        _streams[device] = stream


@contextmanager
def fork_rng(device: Any = None, enabled: bool = True) -> Iterator[None]:
    """Draw keys inside, and continue afterwards as if none had been drawn.

    Args:
        device: The device whose stream to use, see `manual_seed`.
        enabled: False to do nothing.

    Examples:
        >>> snaprt.manual_seed(0)
        >>> with snaprt.fork_rng():
        ...     noise = jax.random.normal(snaprt.next_key())  # for a look at the model, for example
        >>> snaprt.get_rng_state().drawn
        0
    """
    state = get_rng_state(device)
    try:
        yield
    finally:
        if enabled:
            set_rng_state(state, device)


def _stream(device: Any) -> _Stream:
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = _Stream(_FIRST, device)
    return stream
