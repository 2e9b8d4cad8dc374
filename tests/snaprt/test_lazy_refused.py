"""What cannot be compiled, or fails while it runs, fails alone and once; all else goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir

import snaprt

pytestmark = pytest.mark.usefixtures("no_persistent_cache")


def refused(x, **options):
    """Record a call of a function that XLA does not know."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("no_such_target", shape, **options)(x)


def _boom(*_):
    raise ValueError("boom")


def test_a_step_raises_for_what_cannot_be_compiled_once_and_then_runs_the_rest():
    with snaprt.lazy():
        x = jnp.ones(3) * 2
        failed = refused(x)
        dependent = failed + 1
        other = x * 5
        with pytest.raises(snaprt.CompileError, match="no_such_target"):
            snaprt.mark_step()
        snaprt.mark_step()
        np.testing.assert_array_equal(other, [10, 10, 10])
        for array in (failed, dependent, dependent * 2):
            with pytest.raises(snaprt.CompileError, match="no_such_target"):
                np.asarray(array)
        np.testing.assert_array_equal(x + other, [12, 12, 12])


def test_an_effect_that_cannot_be_compiled_fails_one_read():
    with snaprt.lazy():
        x = jnp.ones(3) * 2
        refused(x, has_side_effect=True)
        with pytest.raises(snaprt.CompileError, match="no_such_target"):
            np.asarray(x + 1)
        np.testing.assert_array_equal(x + 1, [3, 3, 3])


def test_what_jax_refuses_to_lower_fails_alone():
    with snaprt.lazy():
        x = jnp.ones(3) * 2
        failed = jax.lax.platform_dependent(x, tpu=jnp.sin, cuda=jnp.cos) + 1
        other = x * 5
        with pytest.raises(snaprt.CompileError, match="platform"):
            snaprt.mark_step()
        np.testing.assert_array_equal(other, [10, 10, 10])
        with pytest.raises(snaprt.CompileError, match="platform"):
            np.asarray(failed)


def test_what_cannot_be_lowered_is_no_obstacle_where_nothing_needs_it():
    @jax.jit
    def vain(x):
        jax.lax.platform_dependent(x, tpu=jnp.sin, cuda=jnp.cos)
        return x + 1

    with snaprt.lazy():
        x = jnp.ones(3) * 2
        jax.lax.platform_dependent(x, tpu=jnp.sin, cuda=jnp.cos)
        np.testing.assert_array_equal(vain(vain(x)), [4, 4, 4])


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap], ids=["", "jit", "vmap"])
def test_a_custom_vjp_refuses_forward_mode_in_the_words_of_jax(transform, steady):
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, cotangent: (2 * cotangent,))
    with snaprt.lazy(steady=steady), pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(transform(doubled), (jnp.ones(3),), (jnp.ones(3),))


@pytest.mark.parametrize(
    "function", [jnp.sin, jax.lax.sin, lambda x: jax.lax.add(jnp.ones(x.shape), x)]
)
@pytest.mark.parametrize("shape", [(3,), ()])
def test_what_is_no_array_is_refused_in_the_words_of_jax(function, shape):
    described = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(TypeError, match="is not a valid JAX type") as eager:
        function(described)
    with snaprt.lazy(), pytest.raises(TypeError) as lazy:
        function(described)
    assert str(lazy.value) == str(eager.value)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_callback_that_raises_takes_with_it_only_what_needs_its_result(ordered):
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    with snaprt.lazy():
        x = jnp.ones(3) * 2
        failed = io_callback(_boom, shape, x, ordered=ordered) + 1
        other = x * 5
        with pytest.raises(jax.errors.JaxRuntimeError, match="boom"):
            snaprt.mark_step(wait=True)
        snaprt.mark_step(wait=True)
        np.testing.assert_array_equal(other, [10, 10, 10])
        with pytest.raises(snaprt.ExecutionError, match="boom"):
            np.asarray(failed)


def test_a_primitive_that_calls_back_by_what_it_is_lowered_to_takes_no_more_with_it():
    def check(x):
        return jax.pure_callback(_boom, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    hiding = Primitive("hiding")  # as `equinox.error_if` inside a primitive of lineax
    hiding.def_impl(jax.jit(hiding.bind))
    hiding.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(hiding, mlir.lower_fun(check, multiple_results=False))
    with snaprt.lazy():
        x = jnp.ones(3) * 2
        y = x + 1
        failed = hiding.bind(y)
        with pytest.raises(jax.errors.JaxRuntimeError, match="boom"):
            np.asarray(failed)
        np.testing.assert_array_equal(x * y, [6, 6, 6])


def test_the_error_of_a_callback_leaves_the_statement_that_waits_for_it():
    with snaprt.lazy():
        x = jnp.ones(3) * 2
        jax.debug.callback(_boom, x)
        with pytest.raises(jax.errors.JaxRuntimeError, match="boom"):
            jax.effects_barrier()
        jax.effects_barrier()
        jax.debug.callback(_boom, x)
        with pytest.raises(jax.errors.JaxRuntimeError, match="boom"):
            np.asarray(x * 3)
        np.testing.assert_array_equal(x * 3, [6, 6, 6])


def test_closures_of_a_step_that_cannot_be_compiled_wait_for_the_next():
    seen = []
    with snaprt.lazy():
        x = jnp.ones(()) * 2
        failed = refused(x)
        snaprt.add_step_closure(lambda a: seen.append(float(a)), (failed,))
        snaprt.add_step_closure(lambda a: seen.append(float(a)), (x,))
        with pytest.raises(snaprt.CompileError):
            snaprt.mark_step()
        assert seen == []
        snaprt.mark_step()
    assert seen == [2.0]
