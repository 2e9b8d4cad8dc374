"""Compares arrays bit for bit where they lie, each device its own parts; no values reach the host.

Differences and digests of a program's outputs come back as one row for each of its devices, those
of other processes included: the rows of all are gathered by a program over the same devices.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from snaprt import jaxapi

# Odd constants whose bits look drawn at random: of the golden ratio, and of MurmurHash3's end.
_STEP: Final = 0x9E3779B9
_MIX: Final = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_SEEDS: Final = (0x243F6A88, 0xB7E15162)

Devices = tuple[jaxapi.Device, ...]


def comparable(outputs: Sequence[Any], devices: Devices) -> list[int]:
    """Return the places of the outputs that are arrays with a part on each of the devices."""
    everywhere = frozenset(devices)
    return [
        place
        for place, array in enumerate(outputs)
        if isinstance(array, jax.Array) and array.sharding.device_set == everywhere
    ]


def differences(first: Sequence[Any], second: Sequence[Any], devices: Devices) -> np.ndarray:
    """Tell where arrays differ in any bit, those of NaN and the sign of zero included.

    Args:
        first: Arrays with a part on each device.
        second: Others of the same types and shardings.
        devices: Of the program that computed them, in its order.

    Returns:
        A bool for each device and array.
    """
    return _of_devices(_differing, (first, second), devices).astype(bool)


def deviating_copies(arrays: Sequence[Any], devices: Devices) -> dict[int, tuple[int, ...]]:
    """Tell which devices hold another copy than most of what several devices hold alike.

    Copies are compared by a digest of 64 bits: a difference in one word of 32 bits is always seen,
    one in several is missed with a probability of 2**-62.

    Args:
        arrays: With a part on each device.
        devices: Of the program that computed them, in its order.

    Returns:
        For the place of each array whose copies differ, the places of the devices that deviate
        from the majority, or, where there is none, of all that hold the copies.
    """
    copied = {
        place: groups for place, array in enumerate(arrays) if (groups := _copies(array, devices))
    }
    if not copied:
        return {}
    table = _of_devices(_digests, ([arrays[place] for place in copied],), devices)
    deviations: dict[int, tuple[int, ...]] = {}
    for column, (place, groups) in enumerate(copied.items()):
        deviating: list[int] = []
        for group in groups:
            digests = [tuple(table[device, column]) for device in group]
            digest, count = Counter(digests).most_common(1)[0]
            if count == len(group):
                continue
            has_majority = 2 * count > len(group)
            deviating += [
                device
                for device, own in zip(group, digests, strict=True)
                if not has_majority or own != digest
            ]
        if deviating:
            deviations[place] = tuple(sorted(deviating))
    return deviations


def _copies(array: Any, devices: Devices) -> list[list[int]]:
    """Return the places of devices that hold one part of an array alike, where several do."""
    if len(devices) == 1 or not isinstance(array, jax.Array):
        return []
    places = jaxapi.places_of_sharding(array.sharding, array.shape)
    groups: dict[str, list[int]] = {}
    for number, device in enumerate(devices):
        groups.setdefault(str(places[device]), []).append(number)
    return [group for group in groups.values() if len(group) > 1]


def _of_devices(
    function: Callable[..., jax.Array], sides: Sequence[Sequence[Any]], devices: Devices
) -> np.ndarray:
    """Run a function on each device of this process, on its parts; return the results of all."""
    with _alone():
        parts: dict[jaxapi.Device, list[list[jax.Array]]] = {}
        for number, side in enumerate(sides):
            for array in side:
                for device, _, part in jaxapi.parts_of_array(jaxapi.data_of_keys(array)):
                    lists = parts.setdefault(device, [[] for _ in sides])
                    lists[number].append(_on_device(part, device))
        rows = {device: function(*lists) for device, lists in parts.items()}
        if len(rows) == len(devices):
            return np.stack([np.asarray(rows[device]) for device in devices])
        gather, spread = _gathering(devices)
        own = [rows[device][None] for device in devices if device in rows]
        shape = (len(devices), *own[0].shape[1:])
        table = jax.make_array_from_single_device_arrays(shape, spread, own)
        return np.asarray(gather(table).addressable_data(0))


@contextmanager
def _alone() -> Iterator[None]:
    """Run what is inside as JAX does by itself, unseen, whatever the program has set."""
    jaxapi.pause_watch()
    try:
        with (
            jaxapi.evaluating_compiled(),
            jaxapi.under_mesh(None),
            jaxapi.x64(True),
            jax.transfer_guard("allow"),
        ):
            yield
    finally:
        jaxapi.resume_watch()


def _on_device(part: jax.Array, device: jaxapi.Device) -> jax.Array:
    """Return a part that lies in another memory than the device's own in the latter."""
    if jaxapi.is_plain_sharding(part.sharding):
        return part
    return jax.device_put(part, jax.sharding.SingleDeviceSharding(device))


@functools.lru_cache(maxsize=64)
def _gathering(devices: Devices) -> tuple[Callable[[Any], jax.Array], jax.sharding.Sharding]:
    """Return what gathers the rows of all devices on each, and how they must lie before."""
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    spec = jax.sharding.PartitionSpec
    on_all = jax.sharding.NamedSharding(mesh, spec())

    def snaprt_gather(table: jax.Array) -> jax.Array:
        return table

    return (
        jax.jit(snaprt_gather, out_shardings=on_all),
        jax.sharding.NamedSharding(mesh, spec("device")),
    )


@jax.jit
def _differing(first: Sequence[jax.Array], second: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(
        [
            jnp.any(_words(left) != _words(right)).astype(np.uint32)
            for left, right in zip(first, second, strict=True)
        ]
    )


@jax.jit
def _digests(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([_digest(array) for array in arrays])


def _digest(array: jax.Array) -> jax.Array:
    """Return two sums of the words of an array, each word times an odd number of its place."""
    words = _words(array).reshape(-1)
    if words.dtype == np.uint64:
        words = jax.lax.bitcast_convert_type(words, np.uint32).reshape(-1)
    words = words.astype(np.uint32)
    places = jax.lax.iota(np.uint32, words.size) * np.uint32(_STEP)
    return jnp.stack(
        [
            jnp.sum(words * (_mixed(places ^ np.uint32(seed)) | np.uint32(1)), dtype=np.uint32)
            for seed in _SEEDS
        ]
    )


def _mixed(numbers: jax.Array) -> jax.Array:
    for shift, factor in _MIX:
        numbers = (numbers ^ (numbers >> np.uint32(shift))) * np.uint32(factor)
    return numbers ^ (numbers >> np.uint32(16))


def _words(array: jax.Array) -> jax.Array:
    """Return the bits of an array as unsigned integers of 8 bits or more."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([_words(array.real), _words(array.imag)])
    if array.dtype == np.bool_:
        return array.astype(np.uint8)
    bits = jnp.iinfo(array.dtype).bits if _is_integer(array) else jnp.finfo(array.dtype).bits
    words = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))
    return words.astype(np.uint8) if bits < 8 else words


def _is_integer(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.integer))
