"""What was recorded lazily does not see what is written to arrays of the host afterwards."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.literals import TypedNdArray

import snaprt
from snaprt.jaxapi.tracing.host_memory import _shared_copy

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _filled(value, count=256):
    """Return an array whose memory XLA on the CPU would take as it is."""
    memory = np.zeros(4 * count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + 4 * count].view(np.float32)
    array[:] = value
    return array


@jax.custom_vjp
def _doubled(x, weight):
    return x * weight


_doubled.defvjp(lambda x, w: (x * w, w), lambda w, g: (g * w, None))

USES = {
    "device_put": lambda a: jax.device_put(a) + 1,
    "device_put to a device": lambda a: jax.device_put(a, jax.devices()[0]) + 1,
    "device_put of a tree": lambda a: jax.device_put({"a": a})["a"] + 1,
    "device_put over devices": lambda a: jax.device_put(a, SHARDING) + 1,
    "asarray": lambda a: jnp.asarray(a) + 1,
    "asarray of a buffer": lambda a: jnp.asarray(memoryview(a)) + 1,
    "from_dlpack": lambda a: jnp.from_dlpack(a) + 1,
    "make_array_from_callback": lambda a: (
        jax.make_array_from_callback(a.shape, SHARDING, lambda index: a[index]) + 1
    ),
    "make_array_from_process_local_data": lambda a: (
        jax.make_array_from_process_local_data(SHARDING, a) + 1
    ),
    "argument": lambda a: jax.jit(lambda x: x + 1)(a),
    "operand": lambda a: jnp.ones(256) + a,
    "mask": lambda a: jnp.where(a > 0, jnp.ones(256), 0.0) + a[0],
    "fill value": lambda a: jnp.full(256, a[:1].reshape(())),
    "constant": lambda a: jax.jit(lambda x: x + a)(jnp.ones(256)),
    "constant scalar": lambda a: jax.jit(lambda x: x + a[:1].reshape(()))(jnp.ones(256)),
    "constant of an inner function": lambda a: jax.jit(
        lambda x: jax.jit(partial(jnp.add, a))(x) + 1
    )(jnp.ones(256)),
    "constant of vmap": lambda a: jax.vmap(jax.jit(lambda x: x + a))(jnp.ones((2, 256))),
    "constant of a derivative": lambda a: jax.jit(jax.grad(lambda x: _doubled(x, a).sum()))(
        jnp.ones(256)
    ),
    "constant of scan": lambda a: jax.lax.scan(
        lambda c, _: (c + a, None), jnp.ones(256), None, length=2
    )[0],
}


@pytest.mark.parametrize("name", USES)
def test_what_is_written_after_an_operation_is_not_seen_by_it(name):
    host = _filled(1)
    with snaprt.lazy():
        result = USES[name](host)
        host[:] = 9
        lazily = np.asarray(result)
    np.testing.assert_array_equal(lazily, np.asarray(USES[name](_filled(1))))


@pytest.mark.parametrize("name", USES)
def test_what_is_written_before_an_operation_is_seen_by_it(name):
    host = _filled(0)
    with snaprt.lazy():
        for value in range(4):
            host[:] = value
            lazily = np.asarray(USES[name](host))
            np.testing.assert_array_equal(lazily, np.asarray(USES[name](_filled(value))))


def test_a_traced_function_keeps_its_constants():
    host = _filled(1)
    with snaprt.lazy():
        add = jax.jit(lambda x: x + host)
        first = add(jnp.ones(256))
        host[:] = 9
        second = add(jnp.ones(256))
        np.testing.assert_array_equal(second, np.full(256, 2.0))
        np.testing.assert_array_equal(first, second)


def _scans(x, a):
    for _ in range(2):
        x, _ = jax.lax.scan(lambda c, _: (c * a, None), x, None, length=2)
    return x


@pytest.mark.parametrize(
    "use",
    [
        lambda x, a: x * a + a,
        lambda x, a: jax.lax.cond(x[0] > 0, lambda y: y * a, lambda y: y - a, x),
        lambda x, a: jax.grad(lambda y: (y * a * a).sum())(x),
        _scans,
    ],
    ids=["twice", "cond", "derivative", "scans"],
)
def test_an_array_that_is_used_again_is_one_constant(use):
    host = np.array([0.0, -0.0, np.nan, 1.0], np.float32)

    def constants():
        return jax.make_jaxpr(lambda x: use(x, host))(jnp.ones(4)).consts

    with snaprt.lazy():
        (constant,) = constants()
    assert constant.tobytes() == host.tobytes()
    assert len(constants()) == 1  # as in eager JAX


def test_an_array_that_is_written_to_between_two_uses_is_two_constants():
    host = np.zeros(4, np.float32)

    def add(x):
        for value in (0.0, -0.0, 1.0):
            host[:] = value
            x = x + host
        return x

    with snaprt.lazy():
        constants = jax.make_jaxpr(add)(jnp.ones(4)).consts
    assert [str(constant[0]) for constant in constants] == ["0.0", "-0.0", "1.0"]


def test_the_same_memory_under_another_mesh_is_another_constant():
    memory = np.full(8, 4.0, np.float32)
    copies = []
    for name in "ij":
        mesh = jax.make_mesh((1,), (name,), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            aval = jax.typeof(jnp.zeros(8))
        copies.append(_shared_copy(TypedNdArray(memory, aval)))
        assert copies[-1].aval == aval
        assert _shared_copy(TypedNdArray(memory, aval)) is copies[-1]
    assert copies[0].aval != copies[1].aval


def test_equal_constants_are_one_program():
    host = _filled(1)
    with snaprt.lazy():
        np.asarray(jax.jit(lambda x: x + host)(jnp.ones(256)))
        before = snaprt.metrics.counter_value("UncachedCompile") or 0
        np.asarray(jax.jit(lambda x: x + host)(jnp.ones(256)))
    assert (snaprt.metrics.counter_value("UncachedCompile") or 0) == before
