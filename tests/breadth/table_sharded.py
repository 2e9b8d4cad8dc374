"""Cases on four devices: sharded arrays, `shard_map`, collectives. Elsewhere there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from breadth_cases import Case, programs
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

DEVICES = 4


def _mesh() -> Mesh:
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))


def _over(values: Any, *spec: Any) -> Any:
    return jax.device_put(values, NamedSharding(_mesh(), P(*spec)))


def _placed(value: Any) -> Any:
    """Return a value with where it lies, which is to be equal as well."""
    return value, str(value.sharding), value.committed


def _collective(act: Callable[[Any], Any], out: P, values: Any) -> Any:
    @jax.jit
    @partial(jax.shard_map, mesh=_mesh(), in_specs=P("d"), out_specs=out, check_vma=False)
    def run(part: Any) -> Any:
        return act(part)

    return run(_over(values, "d"))


def elementwise(square: Any) -> Any:
    x = _over(square, "d")
    return _placed(x * 2), _placed(jnp.sin(x) + x), _placed(x > 0)


def sums(square: Any) -> Any:
    x = _over(square, "d")
    return _placed(x.sum()), _placed(x.sum(0)), _placed(x.mean(1)), _placed(jnp.max(x))


def products(square: Any) -> Any:
    x, w = _over(square, "d"), _over(square, None, "d")
    return x @ w, x @ x.T, jnp.einsum("ij,kj->ik", x, w)


def with_uncommitted(square: Any, row: Any) -> Any:
    return _placed(_over(square, "d") * row + 1)


def replicated(square: Any) -> Any:
    return _placed(_over(square) * 2)


def two_axes(square: Any) -> Any:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(square, NamedSharding(mesh, P("a", "b")))
    w = jax.device_put(square, NamedSharding(mesh, P(None, "b")))
    return x @ w, jnp.tanh(x).sum()


def constrained(square: Any) -> Any:
    x = _over(square, "d") * 2
    whole = NamedSharding(_mesh(), P())
    return _placed(lax.with_sharding_constraint(x, whole))


def out_shardings(square: Any) -> Any:
    split = NamedSharding(_mesh(), P("d"))
    return _placed(jax.jit(lambda v: v + 1, out_shardings=split)(square))


def moved(square: Any) -> Any:
    x = _over(square, "d") * 2
    return (
        _placed(jax.device_put(x, NamedSharding(_mesh(), P(None, "d")))),
        _placed(jax.device_put(x, jax.devices()[2])),
    )


def pinned(row: Any) -> Any:
    third = jax.device_put(row, jax.devices()[2])
    with jax.default_device(jax.devices()[1]):
        second = jnp.ones(4) * 2
    return _placed(third * 2), second + 1, third.device.id, (third * 2).device.id


def two_devices_at_once(row: Any) -> Any:
    first, second = (jax.device_put(row, d) for d in jax.devices()[:2])
    return first * 2, second * 3


def operands_that_contradict(row: Any) -> Any:
    first, second = (jax.device_put(row, d) for d in jax.devices()[:2])
    return first + second


def single_device_sharding(row: Any) -> Any:
    return _placed(jax.device_put(row, SingleDeviceSharding(jax.devices()[3])) + 1)


def gradient(square: Any, row: Any) -> Any:
    x, w = _over(square, "d"), _over(row)
    return jax.value_and_grad(lambda v: jnp.tanh(x @ v).mean())(w)


def training(batch: Any, labels: Any) -> Any:
    data, targets = _over(batch, "d"), _over(labels, "d")
    weights = _over(jnp.zeros((6, 4), batch.dtype))

    def loss(w: Any) -> Any:
        logs = jax.nn.log_softmax(data @ w)
        return -jnp.take_along_axis(logs, targets[:, None], 1).mean()

    losses = []
    for _ in range(3):
        value, change = jax.value_and_grad(loss)(weights)
        weights = weights - 0.1 * change
        losses.append(float(value))
    return weights, losses


def eager_shard_map(square: Any) -> Any:
    double = jax.shard_map(lambda v: v * 2, mesh=_mesh(), in_specs=P("d"), out_specs=P("d"))
    return _placed(double(_over(square, "d") + 1))


def psum(square: Any) -> Any:
    return _collective(lambda v: lax.psum(v, "d"), P(), square)


def pmean_pmax_pmin(square: Any) -> Any:
    return _collective(
        lambda v: lax.pmean(v, "d") + lax.pmax(v, "d") * lax.pmin(v, "d"), P(), square
    )


def all_gather(square: Any) -> Any:
    return _collective(lambda v: lax.all_gather(v, "d", tiled=True), P(), square)


def all_to_all(square: Any) -> Any:
    return _collective(lambda v: lax.all_to_all(v, "d", 1, 0), P("d"), square)


def ppermute(square: Any) -> Any:
    ring = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    return _collective(lambda v: lax.ppermute(v, "d", ring), P("d"), square)


def psum_scatter(square: Any) -> Any:
    return _collective(lambda v: lax.psum_scatter(v[0], "d", tiled=True), P("d"), square)


def axis_index_and_size(square: Any) -> Any:
    return _collective(lambda v: v * lax.axis_index("d") / lax.axis_size("d"), P("d"), square)


def pbroadcast(square: Any) -> Any:
    return _collective(lambda v: lax.pbroadcast(v, "d", 1), P("d"), square)


def pcast(square: Any) -> Any:
    run = jax.shard_map(
        lambda v: lax.pcast(lax.psum(v, "d"), "d", to="varying") + v,
        mesh=_mesh(),
        in_specs=P("d"),
        out_specs=P("d"),
    )
    return jax.jit(run)(_over(square, "d"))


def ragged_all_to_all(square: Any) -> Any:
    def act(v: Any) -> Any:
        each = jnp.arange(DEVICES)
        ones = jnp.ones(DEVICES, int)
        return lax.ragged_all_to_all(v[0], v[0] * 0, each, ones, each, ones, axis_name="d")

    return _collective(act, P("d"), square)


def pipelined(square: Any) -> Any:
    def act(v: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, c: lax.ppermute(c * 2, "d", [(0, 1), (1, 0)]), v)

    return _collective(act, P("d"), square)


def shard_map_under_grad(square: Any) -> Any:
    total = jax.shard_map(
        lambda v: lax.psum((v**2).sum(), "d"), mesh=_mesh(), in_specs=P("d"), out_specs=P()
    )
    return jax.grad(jax.jit(total))(_over(square, "d"))


def explicit_axes(square: Any) -> Any:
    mesh = jax.make_mesh((DEVICES,), ("e",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(square, NamedSharding(mesh, P("e")))
        y = jnp.sin(x) * 2
        return _placed(y), str(jax.typeof(y)), jax.sharding.reshard(y, P(None, "e"))


def keys_on_a_mesh(keys: Any) -> Any:
    key = _over(keys[0])
    return jax.random.normal(key, (4,)), jax.random.split(key, 2)


def addressable_shards(square: Any) -> Any:
    x = _over(square, "d") * 2
    return [np.asarray(shard.data) for shard in x.addressable_shards], x.is_fully_replicated


def made_from_callback(number: Any) -> Any:
    whole = np.arange(8, dtype=np.float32) * number
    sharding = NamedSharding(_mesh(), P("d"))
    return _placed(jax.make_array_from_callback((8,), sharding, lambda at: whole[at]) * 2)


def printed(square: Any) -> Any:
    return str(_over(square, "d") * 2)


def inspected_and_reshaped(square: Any) -> Any:
    x = _over(square, "d")
    return jnp.concatenate([x, x]), x.reshape(2, 8), x.T, x[1], x[:, ::2], jnp.sort(x, axis=0)


PROGRAMS = [
    elementwise,
    sums,
    products,
    with_uncommitted,
    replicated,
    two_axes,
    constrained,
    out_shardings,
    moved,
    pinned,
    two_devices_at_once,
    operands_that_contradict,
    single_device_sharding,
    gradient,
    training,
    eager_shard_map,
    psum,
    pmean_pmax_pmin,
    all_gather,
    all_to_all,
    ppermute,
    psum_scatter,
    axis_index_and_size,
    pbroadcast,
    pcast,
    ragged_all_to_all,
    pipelined,
    shard_map_under_grad,
    explicit_axes,
    keys_on_a_mesh,
    addressable_shards,
    made_from_callback,
    printed,
    inspected_and_reshaped,
]


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    if jax.device_count() >= DEVICES:
        yield from programs("four devices", PROGRAMS, "fi")
