"""Computes each case eagerly and lazily on four devices, and prints the cases that differ.

`test_lazy_sharding.py` runs it as a program, for the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import io_callback
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding, reshard
from jax.sharding import PartitionSpec as P

import snaprt

devices = jax.devices()
auto = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
explicit = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
reverse = Mesh(np.array(devices[::-1]), ("d",))
alone = Mesh(np.array(devices[:1]), ("d",))
meshes = {"auto": auto, "explicit": explicit, "reverse": reverse, "alone": alone}

places = {
    "auto": NamedSharding(auto, P("d")),
    "explicit": NamedSharding(explicit, P("d")),
    "alone": NamedSharding(alone, P("d")),
    "third device": SingleDeviceSharding(devices[2]),
    "pinned": NamedSharding(auto, P("d"), memory_kind="pinned_host"),
}
free = jnp.arange(8.0)
square = jnp.arange(64.0).reshape(8, 8)
placed = {name: jax.device_put(free, place) for name, place in places.items()}
split = placed["auto"]
keys = jax.random.split(jax.random.key(0), 4)


def constrain(array: Any, spec: P) -> Any:
    axis = "e" if "e" in spec else "d"
    mesh = jax.make_mesh((4,), (axis,), axis_types=(AxisType.Auto,))
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh.abstract_mesh, spec))


exported = export.export(jax.jit(lambda v: jnp.sin(v) * 2))(split)

Case = Callable[[], Any]
cases: dict[str, Case] = {}


def under(mesh: Mesh, case: Case) -> Case:
    def run() -> Any:
        with jax.set_mesh(mesh):
            return case()

    return run


def on_devices(function: Case, default: Any) -> Any:
    with jax.default_device(default):
        return function()


for name, place in places.items():
    cases |= {
        f"zeros at {name}": lambda place=place: jnp.zeros(8, device=place),
        f"full at {name}": lambda place=place: jnp.full(8, free[1] * 2, device=place),
        f"device_put to {name}": lambda place=place: jax.device_put(free * 2, place) + 0,
        f"out_shardings {name}": lambda place=place: jax.jit(jnp.sin, out_shardings=place)(free),
        f"in_shardings {name}": lambda place=place: jax.jit(jnp.cos, in_shardings=place)(free + 1),
        f"in_shardings {name} of sharded": lambda place=place: jax.jit(jnp.cos, in_shardings=place)(
            split
        ),
        f"from a callback at {name}": lambda place=place: jax.make_array_from_callback(
            (8,), place, lambda index: (free * 2)[index]
        ),
    }
for name, array in placed.items():
    cases |= {
        f"zeros_like {name}": lambda array=array: jnp.zeros_like(array),
        f"full_like {name}": lambda array=array: jnp.full_like(array, 2, dtype=jnp.int8),
        f"ones_like pending {name}": lambda array=array: jnp.ones_like(array * 2),
        f"with a free one {name}": lambda array=array: array + (free * 2),
        f"shards of {name}": lambda array=array: jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, [s.data for s in (array * 2).addressable_shards]
        ),
        f"another mesh than {name}": under(reverse, lambda array=array: array * 2),
    }
for name, mesh in meshes.items():
    cases |= {
        f"under {name}": under(mesh, lambda: (jnp.ones(8), free * 2, jnp.ones(()))),
        f"under {name} and not": lambda mesh=mesh: (
            under(mesh, lambda: free * 2)(),
            free * 2,
            under(mesh, lambda: free * 2)() + free,
        ),
        f"an array of numpy to be split under {name}": under(
            mesh,
            lambda mesh=mesh: jax.jit(jnp.sin, in_shardings=NamedSharding(mesh, P("d")))(
                np.arange(8.0)
            ),
        ),
        f"made of host values under {name}": under(
            mesh, lambda: (jnp.array(2), jnp.asarray(np.arange(8.0)))
        ),
        f"like another under {name}": under(mesh, lambda: jnp.zeros_like(split)),
        f"reshard under {name}": under(mesh, lambda: reshard(np.arange(8.0), P("d")) * 2),
        f"shard_map under {name}": under(
            mesh,
            lambda: jax.shard_map(lambda v: v * 2, in_specs=P("d"), out_specs=P("d"))(free * 2),
        ),
    }


def closing_over(array: Any, mesh: Mesh) -> Any:
    factor = (free * 2).sum()
    return jax.shard_map(lambda v: v * factor, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(array)


def composite() -> Any:
    factor = free * 3
    return jax.lax.composite(lambda v: v * factor, "test.scaled")(free * 2)


def switched() -> Any:
    branches = [lambda pair: pair[0] + pair[1]] * 3
    switch = jax.vmap(lambda v, i: jax.lax.switch(i, branches, (v, i)), in_axes=(None, 0))
    return switch(jnp.ones(()), reshard(jnp.array([0, 1, 2, 4]), P("d")))


def sampled() -> Any:
    key = jax.random.key(3)  # on one device, so that what runs on four is cut where it is used
    with jax.set_mesh(explicit), jax.enable_checks(True):
        return jax.block_until_ready(
            jax.random.randint(key, (8,), 0, 99, out_sharding=places["explicit"])
        )


def callbacks_on_two_devices() -> Any:
    log: list[float] = []
    for number in range(6):
        x = jax.device_put(jnp.ones(()) * number, devices[number % 2])
        io_callback(lambda v: log.append(float(v)), None, x * 2, ordered=True)
    jax.effects_barrier()
    return jnp.array(log)


def mean_of_two_axes() -> Any:
    x = jnp.ones((2, 2, 4))
    means = []
    for outer, inner in ((jax.pmap, jax.vmap), (jax.vmap, jax.pmap)):
        mean = inner(lambda v: jax.lax.pmean(v, ("i", "j")), axis_name="j")
        means.append(outer(mean, axis_name="i")(x).sum())
    return jnp.stack(means)


cases |= {
    "callbacks on two devices": callbacks_on_two_devices,
    "the same constant under two meshes": mean_of_two_axes,
    "pmap": lambda: jax.pmap(lambda v: v * 2)(jnp.arange(4.0) * 2) + 1,
    "keys from a callback": lambda: jax.random.key_data(
        jax.make_array_from_callback((4,), split.sharding, lambda index: keys[index])
    ),
    "keys of shards": lambda: jax.random.key_data(
        jax.make_array_from_single_device_arrays(
            (4,), split.sharding, [jax.device_put(keys[i : i + 1], devices[i]) for i in range(4)]
        )
    ),
    "pmap over devices in reverse": lambda: jax.pmap(jnp.sin, devices=devices[::-1])(free[:4] * 2),
    "arange over explicit axes": under(explicit, lambda: jnp.arange(8, out_sharding=P("d"))),
    "arange with no mesh": lambda: jnp.arange(8, out_sharding=places["explicit"]),
    "reshard an array of numpy": lambda: reshard(np.arange(8.0), places["explicit"]) + 1,
    "named twice": lambda: jax.jit(jnp.sin, out_shardings=places["explicit"])(free) * 2,
    "a spec of two": lambda: jax.jit(jnp.sin, out_shardings=NamedSharding(auto, P("d", None)))(
        square
    ),
    "eager shard_map that closes over one": lambda: closing_over(split, auto),
    "the same over explicit axes": lambda: closing_over(placed["explicit"], explicit),
    "a composite that closes over one": composite,
    "sampled over axes that are automatic inside": sampled,
    "switch over explicit axes": under(explicit, switched),
    "the gradient of host values over explicit axes": under(
        explicit, lambda: jax.grad(lambda v: (v * placed["explicit"]).sum())(jnp.array([1.0] * 8))
    ),
    "rows of a sharded array": lambda: [row * 1 for row in split * 2],
    "to the host's memory": lambda: jax.device_put(free * 2, jax.memory.Space.Host),
    "to it inside jit": lambda: jax.jit(lambda v: jax.device_put(v, jax.memory.Space.Host))(free),
    "another layout": lambda: jax.device_put(square * 2, Format(Layout((1, 0)), places["auto"])),
    "two default devices": lambda: on_devices(lambda: free * 2, devices[3]) + jnp.ones(8),
    "lowered": lambda: jax.jit(jnp.sin).lower(split * 2).compile()(split * 2),
    "compiled for several devices, called with what lies on one": lambda: (
        jax.jit(jnp.sin, in_shardings=places["auto"]).lower(free).compile()(free * 2)
    ),
    "axes of the operand's mesh": lambda: constrain(constrain(split * 2, P()) + 1, P("d")),
    "axes where the operand has none": lambda: constrain(free * 2, P("d")),
    "axes of another mesh": lambda: constrain(split * 2, P("e")),
    "axes of what is no array": lambda: constrain(np.arange(8.0), P("d")),
    "axes of the ambient mesh": under(auto, lambda: constrain(np.arange(8.0), P("d"))),
    "exported": lambda: exported.call(split * 2),
    "exported for other devices": lambda: exported.call(free * 2),
}


def description(array: Any) -> dict[str, Any]:
    """Return what can be asked of an array, its value last."""
    return {
        "committed": array.committed,
        "_committed": array._committed,
        "devices": sorted(device.id for device in array.devices()),
        "sharding": array.sharding,
        "is_fully_replicated": array.is_fully_replicated,
        "type": str(jax.typeof(array)),
        "layout": str(array.format.layout),
        "value": np.asarray(array).tolist(),
        "sharding once computed": array.sharding,
        "shards": [(s.device.id, str(s.index)) for s in array.addressable_shards],
    }


def outcome(case: Case, scope: contextlib.AbstractContextManager[Any]) -> Any:
    """Return the descriptions of the results, or the type of the error."""
    try:
        with scope:
            return [description(leaf) for leaf in jax.tree.leaves(case())]
    except Exception as error:
        return type(error).__name__


def differences(eager: Any, lazy: Any) -> Iterator[str]:
    """Yield what differs; two shardings may name one and the same distribution."""
    if isinstance(eager, str) or isinstance(lazy, str):
        if eager != lazy:
            yield f"eagerly {eager}, lazily {lazy}"
        return
    for ours, theirs in zip(lazy, eager, strict=True):
        ndim = np.ndim(ours["value"])
        for question, expected in theirs.items():
            found = ours[question]
            is_equal = found == expected
            if isinstance(expected, jax.sharding.Sharding):
                is_equal = (
                    type(found) is type(expected)
                    and found.memory_kind == expected.memory_kind
                    and found.is_equivalent_to(expected, ndim)
                )
            if not is_equal:
                yield f"{question}: eagerly {expected}, lazily {found}"


found = {
    name: list(differences(outcome(case, contextlib.nullcontext()), outcome(case, snaprt.lazy())))
    for name, case in cases.items()
}
print(json.dumps(found))
