"""A step under PyTorch/XLA's names: scopes, waiting, optimizers, devices, seeds, processes."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import counting
from flax import nnx

import snaprt

pytestmark = pytest.mark.usefixtures("no_persistent_cache")


def _scope_of(array):
    return str(array._result.point.source.name_stack)


def test_a_step_ends_the_scopes_that_are_open_unless_told_otherwise():
    with snaprt.lazy():
        with jax.named_scope("outer"):
            with jax.named_scope("inner"):
                first = jnp.ones(5) * 3
                assert _scope_of(first) == "outer/inner"
                snaprt.mark_step(reset_scope=False)
                assert _scope_of(first - 1) == "outer/inner"
                snaprt.sync()
                assert _scope_of(first / 7) == ""
            assert _scope_of(first / 9) == "outer"
        assert _scope_of(first / 11) == ""


@pytest.mark.parametrize("wait", [True, False])
def test_a_step_waits_for_the_device_where_it_is_told_to(monkeypatch, wait):
    monkeypatch.setenv("XLA_SYNC_WAIT", "1" if wait else "0")
    seen = []

    def slow(x):
        seen.append("computed")
        return x

    with snaprt.lazy():
        x = jnp.ones(3)
        x = jax.pure_callback(slow, jax.ShapeDtypeStruct((3,), jnp.float32), x) + 1
        snaprt.mark_step()
        if wait:
            assert seen == ["computed"]
        x.block_until_ready()
    assert seen == ["computed"]


def test_an_optax_transformation_is_stepped_and_the_step_is_marked():
    transformation = optax.adamw(1e-2)
    params = {"w": jnp.arange(4.0), "b": jnp.ones(())}
    grads = {"w": jnp.ones(4), "b": jnp.full((), 2.0)}
    state = transformation.init(params)
    updates, expected_state = transformation.update(grads, state, params)
    expected = optax.apply_updates(params, updates)
    with snaprt.lazy(), counting() as counts:
        new, new_state = snaprt.optimizer_step(transformation, grads, state, params)
        assert new["w"]._value is not None
        again, _ = snaprt.optimizer_step(transformation, grads, new_state, new, barrier=False)
        assert again["w"]._value is None
    assert counts.graphs == 1
    assert counts.reads == {}
    jax.tree.map(np.testing.assert_allclose, new, expected)
    assert jax.tree.structure(new_state) == jax.tree.structure(expected_state)


def test_an_optax_transformation_takes_what_it_needs_by_name():
    transformation = optax.contrib.reduce_on_plateau(patience=1)
    params = jnp.ones(3)
    state = transformation.init(params)
    new, _ = snaprt.optimizer_step(transformation, params, state, params, value=1.0)
    np.testing.assert_array_equal(new, [2, 2, 2])


def test_an_nnx_optimizer_is_stepped_in_place():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    with snaprt.lazy(), counting() as counts:
        grads = nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(model)
        snaprt.optimizer_step(optimizer, model, grads)
    assert counts.graphs == 1
    np.testing.assert_allclose(model.kernel[...], before - 0.5)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(snaprt.UsageError, match="str is not an optimizer") as caught:
        snaprt.optimizer_step("sgd")
    assert "optax" in caught.value.hint
    with pytest.raises(snaprt.UsageError, match="needs parameters"):
        snaprt.optimizer_step(optax.sgd(0.1), jnp.ones(3))


def test_devices_are_found_by_number_and_kind():
    assert snaprt.xla_device() == jax.devices()[0]
    assert snaprt.xla_device(0) == jax.local_devices()[0]
    with jax.default_device(jax.local_devices()[0]):
        assert snaprt.xla_device() == jax.local_devices()[0]
    with pytest.raises(snaprt.DeviceError, match="no device 99"):
        snaprt.xla_device(99)
    assert snaprt.get_xla_supported_devices() == jax.local_devices()
    assert snaprt.get_xla_supported_devices("CPU", max_devices=1) == jax.local_devices()[:1]
    assert snaprt.get_xla_supported_devices("abacus") == []


def test_waiting_for_devices_waits_for_work_and_effects_and_runs_nothing_pending():
    seen = []
    with snaprt.lazy(), counting() as counts:
        x = jnp.ones(3) * 2
        jax.debug.callback(seen.append, x.sum())
        snaprt.mark_step()
        pending = x + 1
        snaprt.wait_device_ops()
        assert len(seen) == 1
        snaprt.wait_device_ops(jax.devices()[0])
        snaprt.wait_device_ops([])
    assert counts.graphs == 1
    assert pending._value is None


def test_keys_follow_from_the_seed_alone():
    snaprt.manual_seed(7)
    drawn = [jax.random.key_data(snaprt.next_key()) for _ in range(3)]
    snaprt.manual_seed(7)
    with snaprt.lazy():
        again = [jax.random.key_data(snaprt.next_key()) for _ in range(3)]
        np.testing.assert_array_equal(np.asarray(drawn), [np.asarray(key) for key in again])
    assert len({tuple(np.asarray(key)) for key in drawn}) == 3
    expected = jax.random.fold_in(jax.random.key(7), 1)
    np.testing.assert_array_equal(drawn[1], jax.random.key_data(expected))


def test_drawing_a_key_at_each_step_compiles_nothing_once_it_repeats():
    snaprt.manual_seed(1)
    values = []
    with snaprt.lazy(), counting() as counts:
        for _ in range(5):
            noise = jax.random.normal(snaprt.next_key(), (4,))
            snaprt.mark_step()
            values.append(noise)
    assert counts.graphs == 5
    assert counts.compiled <= 2
    assert counts.reads == {}
    assert len({float(value[0]) for value in values}) == 5


def test_the_state_of_the_keys_is_stored_restored_and_forked():
    snaprt.manual_seed(3)
    snaprt.next_key()
    state = snaprt.get_rng_state()
    assert state == (3, 1)
    with snaprt.fork_rng():
        inside = jax.random.key_data(snaprt.next_key())
    after = jax.random.key_data(snaprt.next_key())
    np.testing.assert_array_equal(inside, after)
    snaprt.set_rng_state(tuple(state))
    np.testing.assert_array_equal(jax.random.key_data(snaprt.next_key()), after)
    device = jax.devices()[0]
    snaprt.manual_seed(4, device)
    assert snaprt.next_key(device).committed
    assert snaprt.get_rng_state(device) == (4, 1)
    assert snaprt.get_rng_state() == (3, 2)


def test_a_key_is_refused_to_a_function_that_is_traced_once():
    with pytest.raises(snaprt.UsageError, match="same key each time"):
        jax.jit(lambda x: x + jax.random.normal(snaprt.next_key()))(1.0)
    gradient = jax.grad(lambda x: x * jax.random.uniform(snaprt.next_key()))(1.0)
    assert 0 <= gradient < 1


def test_nnx_modules_are_made_of_a_key():
    snaprt.manual_seed(0)
    first = nnx.Linear(3, 2, rngs=nnx.Rngs(snaprt.next_key()))
    second = nnx.Linear(3, 2, rngs=nnx.Rngs(params=snaprt.next_key()))
    assert not np.array_equal(first.kernel[...], second.kernel[...])


@pytest.mark.parametrize(
    ("rank", "local_rank", "is_master", "is_local_master"),
    [(None, None, True, True), ("0", "0", True, True), ("4", "0", False, True), ("1", "1", 0, 0)],
)
def test_the_first_process_prints(monkeypatch, rank, local_rank, is_master, is_local_master):
    for name, text in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(name, text)
    assert snaprt.is_master_ordinal(local=False) == is_master
    assert snaprt.is_master_ordinal() == is_local_master
    written = io.StringIO()
    snaprt.master_print("loss", 1.5, fd=written)
    snaprt.master_print("here", fd=written, local=True)
    assert written.getvalue() == "loss 1.5\n" * is_master + "here\n" * is_local_master


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: snaprt.manual_seed("seven"),
        lambda: snaprt.set_rng_state((7, -1)),
        lambda: snaprt.add_step_closure("loss"),
        lambda: snaprt.xla_device("cpu"),
        lambda: snaprt.xla_device(-1),
        lambda: snaprt.wait_device_ops(["cpu:0"]),
        lambda: snaprt.wait_device_ops("cpu:0"),
        lambda: snaprt.lazy(jnp.sin),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once_with_a_hint(misuse):
    with pytest.raises((snaprt.UsageError, snaprt.DeviceError)) as refused:
        misuse()
    assert refused.value.hint
