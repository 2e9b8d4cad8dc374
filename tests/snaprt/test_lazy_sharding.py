"""Arrays on several devices: values, shardings and commitment equal eager JAX's."""

import subprocess
import sys

PROGRAM = r"""
import jax, jax.numpy as jnp, numpy as np, snaprt
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from snaprt import metrics

mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
split, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

def graphs():
    names = ("UncachedCompile", "CachedCompile")
    return sum(metrics.counter_value(name) or 0 for name in names)

def program(x, w):
    y = x * 2 + w
    in_shards = jax.shard_map(
        lambda a: jax.lax.psum(a, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
    )
    return (
        y,
        jnp.sum(y),
        w * 3,
        jax.lax.with_sharding_constraint(y * 2, whole),
        jax.jit(in_shards)(y),
        jax.jit(lambda a: a + 1, out_shardings=split)(w),
    )

x, w = jax.device_put(jnp.arange(8.0), split), jnp.ones(8)
expected = program(x, w)
with snaprt.lazy():
    before = graphs()
    result = program(x, w)
    snaprt.mark_step()
    assert graphs() - before == 2, graphs() - before  # one committed to the mesh, one not
for ours, eager in zip(result, expected, strict=True):
    np.testing.assert_allclose(ours, eager)
    assert ours.sharding == eager.sharding, (ours.sharding, eager.sharding)
    assert ours.committed == eager.committed

first, second, third, fourth = jax.devices()
pinned = jax.device_put(jnp.ones(2), second)
with snaprt.lazy():
    on_second, on_first = pinned + jnp.ones(2) * 3, jnp.ones(2) * 3
    with jax.default_device(fourth):
        on_fourth = jnp.ones(3) * 2
    arrays = (on_second, on_first, on_fourth)
    for _ in ("pending", "computed"):
        assert [a.devices() for a in arrays] == [{second}, {first}, {fourth}]
        assert [a.committed for a in arrays] == [True, False, False]
        snaprt.mark_step()
    moved = jax.device_put(on_second + 1, third)
    assert moved.devices() == {third}
    try:
        moved + pinned
    except ValueError as error:
        assert "incompatible devices" in str(error)
    else:
        raise AssertionError("operands on two devices were accepted")
    np.testing.assert_array_equal(
        jax.shard_map(lambda a: a * 2, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x + 1),
        np.arange(8.0) * 2 + 2,
    )
print("equal")
"""


def test_sharded_and_pinned_arrays_equal_eager(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "equal\n", done.stderr
