"""First calls that run before they are traced: used where nothing has changed, else dropped."""

import json

from programs import run_program

SCRIPT = """
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import snaprt
from snaprt.compile.cached import prefetch

VARIANT = int(os.environ["VARIANT"])
snaprt.cache.install()
ones = jnp.ones((64, 64))


def wait_for_executables():
    if prefetch._state.thread is not None:
        prefetch._state.thread.join()


@jax.jit
def while_it_loads(x, key):
    wait_for_executables()  # so it runs while this is traced
    return jnp.tanh(x @ x) + jax.random.uniform(key, x.shape)


SCALE = 2.0 + VARIANT


@jax.jit
def of_global(x):
    time.sleep(0.03)
    return jnp.tanh(x @ x) * SCALE


def of_closure(bias):
    def closure(x):
        time.sleep(0.03)  # a call that takes less is not worth it
        return jnp.tanh(x @ x) + bias

    return jax.jit(closure)


class Model:
    depth = 2 + VARIANT

    def __call__(self, x):
        for _ in range(self.depth):
            x = jnp.tanh(x @ x)
        return x


@jax.jit
def of_attribute(x):
    time.sleep(0.03)
    return Model()(x)


@jax.jit
def of_configuration(x):
    time.sleep(0.03)
    return jnp.tanh(x @ x) - 1


@jax.jit
def of_constants(x):
    time.sleep(0.03)
    return jnp.tanh(x @ x) + np.arange(64.0, dtype=np.float32) * (1 + VARIANT)


def of_donation(x, y):
    time.sleep(0.03)
    return jnp.tanh(x @ y) * 3


@jax.jit
def of_mesh(x):
    time.sleep(0.03)
    return jax.lax.with_sharding_constraint(
        jnp.tanh(x @ x) * 5, jax.sharding.NamedSharding(mesh, jax.P("x"))
    )


def donating(weights, x):
    return {"w": weights["w"] - 0.1 * (x @ x), "unused": weights["unused"]}


@jax.jit
def of_numpy(x, batch):
    scratch[0] = 5.0  # a caller's array that is written to while JAX traces
    return x @ x + batch


@jax.jit
def with_effect(x):
    jax.debug.print("effect {}", x[0, 0])
    return jnp.tanh(x @ x)


values = {}
values["while_it_loads"] = while_it_loads(ones, jax.random.key(7))
values["of_global"] = of_global(ones)
values["of_closure"] = of_closure(3.0 + VARIANT)(ones)
values["of_attribute"] = of_attribute(ones)
precision = "float32" if VARIANT else "bfloat16"
with jax.default_matmul_precision(precision):
    values["of_configuration"] = of_configuration(ones)
values["of_constants"] = of_constants(ones)
given = ones + 4
values["of_donation"] = jax.jit(of_donation, donate_argnums=(0,) if VARIANT else ())(given, ones)
assert given.is_deleted() == bool(VARIANT)
mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
if VARIANT:
    mesh = jax.make_mesh((1, 1), ("y", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
values["of_mesh"] = of_mesh(ones)
weights = {"w": ones + 1, "unused": ones + 2}
again = weights["w"] + 0
values["donating"] = jax.jit(donating, donate_argnums=0)(weights, ones)["w"]
assert weights["w"].is_deleted() and not again.is_deleted()
scratch = np.zeros(64, np.float32)
values["of_numpy"] = of_numpy(ones, scratch)
values["with_effect"] = with_effect(ones)
jax.effects_barrier()

with jax.disable_jit():
    expected = {
        "of_global": of_global(ones),
        "of_closure": of_closure(3.0 + VARIANT)(ones),
        "of_attribute": of_attribute(ones),
        "of_constants": of_constants(ones),
        "of_donation": of_donation(ones + 4, ones),
        "donating": donating({"w": ones + 1, "unused": ones + 2}, ones)["w"],
        "of_numpy": ones @ ones + scratch,
    }
for name, value in expected.items():
    np.testing.assert_allclose(values[name], value, rtol=1e-6, err_msg=name)
print(json.dumps({
    "values": {name: float(jnp.sum(value)) for name, value in values.items()},
    **{name: snaprt.metrics.counter_value("Speculation" + name) or 0
       for name in ("Used", "Unused", "Wrong")},
    "Skipped": snaprt.metrics.counter_value("LoweringSkipped") or 0,
}))
# A program that was not lowered is lowered where somebody asks for its module.
if snaprt.metrics.counter_value("LoweringSkipped"):
    lowered = while_it_loads.lower(ones, jax.random.key(7))
    assert "stablehlo.tanh" in lowered.as_text()
    assert (lowered.compile()(ones, jax.random.key(7)) == values["while_it_loads"]).all()
    assert (while_it_loads(ones.copy(), jax.random.key(7)) == values["while_it_loads"]).all()
"""

IDENTIFIED = (
    *("of_global", "of_closure", "of_attribute", "of_configuration"),
    *("of_constants", "of_donation"),
)
CHANGED = (*IDENTIFIED, "of_mesh")  # which is lowered at every start
UNCHANGED = ("while_it_loads", "donating")


def start(folder, variant):
    done = run_program(
        folder / "train.py",
        SNAPRT_CACHE_DIR=folder / "cache",
        SNAPRT_SPECULATE=1,
        VARIANT=variant,
    )
    *printed, counted = done.stdout.splitlines()
    assert printed == ["effect 1.0"]
    return json.loads(counted), done.stderr


def test_first_calls_run_ahead_where_nothing_changed_and_never_give_a_wrong_value(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    first, _ = start(tmp_path, 0)
    assert (first["Used"], first["Unused"], first["Wrong"]) == (0, 0, 0)

    second, told = start(tmp_path, 0)
    assert second["values"] == first["values"]
    assert second["Used"] == len(CHANGED) + len(UNCHANGED)
    assert second["Unused"] == 1  # of_numpy
    assert second["Wrong"] == 0
    assert second["Skipped"] == len(IDENTIFIED) + len(UNCHANGED) + 1  # of_numpy is the same program
    assert "dropped" not in told

    changed, told = start(tmp_path, 1)
    assert changed["Used"] == len(UNCHANGED)
    assert changed["Wrong"] == len(CHANGED)
    assert changed["Skipped"] == len(UNCHANGED) + 1
    assert told.count("What ran ahead was dropped") == len(CHANGED)
    assert "of_attribute at" in told

    forgotten, told = start(tmp_path, 1)
    assert forgotten["values"] == changed["values"]
    assert (forgotten["Used"], forgotten["Wrong"]) == (len(UNCHANGED), 0)

    learned, _ = start(tmp_path, 1)
    assert learned["values"] == changed["values"]
    assert learned["Used"] == len(CHANGED) + len(UNCHANGED)


PLACES = """
import jax
import snaprt
from snaprt import jaxapi

snaprt.cache.install()


@jax.jit
def places(x):
    print({frame.file for frame in jaxapi.user_frames()} == {__file__})
    return x


places(1.0)
"""


def test_frames_of_the_call_are_the_users_alone(tmp_path):
    script = tmp_path / "places.py"
    script.write_text(PLACES)
    done = run_program(script, SNAPRT_CACHE_DIR=tmp_path / "cache", SNAPRT_SPECULATE=1)
    assert done.stdout == "True\n"
