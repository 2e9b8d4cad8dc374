"""Batches as arrays of all processes' devices, loaded ahead of the step that takes them."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final

import jax
import numpy as np

from snaprt.runtime.step import mark_step

# How often a full queue is looked at again: the loop that takes the batches may have been left.
_SECONDS: Final = 0.1

# How long the process waits at its exit for a thread that may be inside JAX.
_END_SECONDS: Final = 5.0


class MpDeviceLoader:
    """Gives the batches of a loader as arrays on devices, and marks a step after each.

    A thread loads ahead. Each batch is a tree; its NumPy arrays, tensors and numbers become arrays,
    anything else stays what it is. The next batch marks the step, and so does the last one's end.

    Args:
        loader: Gives the batches that this process loads: a grain loader, a PyTorch DataLoader, any
            iterable. Each iteration of this loader iterates over it once.
        sharding: Where the arrays lie, for all leaves or as a tree that the batches begin with.
            Each process gives its part of an array (``jax.make_array_from_process_local_data``).
            None: the first device of this process.
        prefetch: How many batches may wait on the devices.

    Raises:
        ValueError: ``prefetch`` is less than 1.

    Examples:
        >>> batches = [{"x": np.full(2, n, np.float32)} for n in range(3)]
        >>> with snaprt.lazy():
        ...     for batch in snaprt.MpDeviceLoader(batches):
        ...         total = batch["x"].sum()
        >>> print(total)
        4.0
    """

    def __init__(self, loader: Iterable[Any], sharding: Any = None, *, prefetch: int = 2) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch is {prefetch}; at least one batch must be loaded ahead")
        self._loader = loader
        self._sharding = sharding
        self._prefetch = prefetch

    def __len__(self) -> int:
        """Return the number of batches, where the loader knows it."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} does not say how many batches it has")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Give the batches in their order; what the loader raises is raised in its place."""
        loaded: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(self._prefetch)
        is_left = threading.Event()
        thread = threading.Thread(
            target=self._load, args=(loaded, is_left), name="snaprt-loader", daemon=True
        )
        thread.start()
        unregister = atexit.unregister  # globals are gone when Python has ended
        wait: Callable[..., object] = thread.join

        def end() -> None:
            nonlocal wait
            is_left.set()
            wait(_END_SECONDS)
            wait = bool  # the thread goes no further

        # A thread that is inside JAX when Python ends takes the whole process down.
        atexit.register(end)
        try:
            while True:
                batch, error = loaded.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield batch
                mark_step()
        finally:
            unregister(end)
            is_left.set()
            wait()

    def _load(
        self, loaded: queue.Queue[tuple[Any, BaseException | None]], is_left: threading.Event
    ) -> None:
        def give(batch: Any, error: BaseException | None) -> bool:
            while not is_left.is_set():
                try:
                    loaded.put((batch, error), timeout=_SECONDS)
                except queue.Full:
                    continue
                return True
            return False

        try:
            for batch in self._loader:
                if is_left.is_set() or not give(self._on_devices(batch), None):
                    return
            give(None, StopIteration())
        except BaseException as error:
            give(None, error)

    def _on_devices(self, batch: Any) -> Any:
        sharding = self._sharding
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        leaves, tree = jax.tree.flatten(batch)
        shardings = jax.tree.broadcast(sharding, batch)
        placed = [
            jax.make_array_from_process_local_data(where, array) if array is not None else leaf
            for leaf, where, array in zip(
                leaves, jax.tree.leaves(shardings), map(_as_array, leaves), strict=True
            )
        ]
        return jax.tree.unflatten(tree, placed)


def _as_array(leaf: Any) -> np.ndarray | None:
    """Return a leaf as a NumPy array, or None where it is none: text, or an array of JAX."""
    if isinstance(leaf, (str, bytes, jax.Array)) or leaf is None:
        return None
    array = np.asarray(leaf)
    return None if array.dtype == object or array.dtype.kind in "US" else array
