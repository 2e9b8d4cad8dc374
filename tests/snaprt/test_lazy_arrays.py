"""To whoever holds it, a lazy array is what a JAX array is: its type, copies and conversions."""

import copy
import functools
import pickle
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from threads import in_thread

import snaprt


def keys_of(key):
    return jax.random.key_data(key).tolist()


def refusal(key, name):
    """Return the error with which ``key`` refuses an attribute, or a call of it."""
    with pytest.raises(Exception) as refused:  # noqa: PT011
        getattr(key, name)()
    return repr(refused.value)


JAX_ARRAY = jnp.ones(2)

# What is asked of an array and of an array of keys that were computed.
QUESTIONS = {
    "its class": lambda x, key: (x.__class__, key.__class__),
    "whether it is an array": lambda x, key: (
        isinstance(x, jax.Array),
        issubclass(type(x), jax.Array),
        isinstance(key, jax.Array),
        isinstance(x, np.ndarray),
    ),
    "whether others are of its type": lambda x, key: (
        isinstance(JAX_ARRAY, type(x)),
        isinstance(jax.device_put(JAX_ARRAY), type(x)),
        isinstance(np.ones(2), type(x)),
        isinstance(JAX_ARRAY, jax.core.Tracer),
        isinstance(key, type(key)),
    ),
    "whether it is a tracer": lambda x, key: (
        isinstance(x, jax.core.Tracer),
        isinstance(key, jax.core.Tracer),
    ),
    "whether it is committed": lambda x, key: (x._committed, x.committed, key._committed),
    "its weak type": lambda x, key: (x.weak_type, jnp.asarray(2.0).weak_type),
    "a pickle of it": lambda x, key: pickle.loads(pickle.dumps(x)),
    "a pickle of keys": lambda x, key: keys_of(pickle.loads(pickle.dumps(key))),
    "jax.device_get": lambda x, key: (jax.device_get([x]), keys_of(jax.device_get(key))),
    "what it was a copy of": lambda x, key: (
        copy.copy(x) is x,
        copy.deepcopy(x) is x,
        copy.deepcopy({"x": x})["x"].tolist(),
        keys_of(copy.deepcopy(key)),
    ),
    "its bytes": lambda x, key: (bytes(x), x.tobytes(), bytes(x[0, 0].astype(int) + 2)),
    "a key as a float": lambda x, key: float(key[0]),
    "a key as an index": lambda x, key: range(key[0]),
    "the bytes of a key": lambda x, key: bytes(key[0]),
    "DLPack of what it does not know": lambda x, key: np.from_dlpack(x.astype(jnp.int4)),
    "whether numpy may write to it": lambda x, key: (
        np.asarray(x).flags.writeable,
        np.array(x).flags.writeable,
        np.asarray(x, copy=False).flags.writeable,
        np.asarray(x, dtype=np.float64).dtype,
    ),
    "DLPack": lambda x, key: (np.from_dlpack(x), jnp.from_dlpack(x).tolist()),
    "numpy, which takes no keys": lambda x, key: np.asarray(key),
    "its shards": lambda x, key: (x.addressable_data(0), len(x.addressable_shards)),
    "its rows": lambda x, key: (len(x), [row.sum() for row in x], len(list(key))),
    "each key": lambda x, key: (
        [keys_of(each) for each in key],
        keys_of([*key][1]),
        keys_of(key.copy()),
    ),
    "the length of a scalar": lambda x, key: len(x[0, 0]),
    "an assignment": lambda x, key: x.__setitem__(0, 1),
    "whether it is in a set": lambda x, key: {x},
    "attributes of other arrays": lambda x, key: [
        hasattr(x, name)
        for name in ("keys", "update", "__cuda_array_interface__", "__jax_array__", "aval", "numpy")
    ],
    "its priority": lambda x, key: x.__array_priority__,
    "attributes of its value": lambda x, key: (len(x._arrays), x._sharding),
    "attributes of keys": lambda x, key: (
        key._impl.name,
        key._base_array.tolist(),
        key.itemsize,
        str(key.dtype),
        repr(key),
    ),
    "attributes of numbers, which keys refuse": lambda x, key: [
        refusal(key, name)
        for name in ("real", "flat", "mT", "sum", "sort", "astype", "to_device", "view", "clip")
    ],
    "a weak reference": lambda x, key: (weakref.ref(x)() is x, weakref.ref(key)() is key),
    "attributes of the program's own": lambda x, key: (
        [setattr(each, "note", "kept") for each in (x, key)],
        (x.note, key.note, vars(x)),
    ),
    "its implementation": lambda x, key: (
        str(jax.random.key_impl(key)),
        jax.random.wrap_key_data(jax.random.key_data(key)) == key,
    ),
    "its namespace": lambda x, key: x.__array_namespace__(),
    "its text inside of derivatives": lambda x, key: texts_inside_of_derivatives(x),
    "an update": lambda x, key: (x.at[0].set(3), keys_of(key.at[0].set(key[1]))),
    "metadata that holds it": lambda x, key: (x,) == (x,),
    "metadata that holds another": lambda x, key: (x,) == (x + 0,),
}


def texts_inside_of_derivatives(x):
    texts = []

    def noted(v):
        texts.append(repr(v))
        return v.sum()

    jax.grad(noted)(x)
    jax.jvp(noted, (x,), (x,))
    jax.vmap(noted)(x)
    return texts


def arrays():
    return jnp.arange(4.0).reshape(2, 2) * 2 + 1, jax.random.split(jax.random.key(1), 2)


def answer(question, x, key):
    try:
        return repr(question(x, key))
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_a_lazy_array_answers_as_an_eager_one(question):
    expected = answer(question, *arrays())
    with snaprt.lazy():
        assert answer(question, *arrays()) == expected


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_an_array_from_outside_answers_in_a_scope_as_ever(question):
    expected = answer(question, *arrays())
    x, key = arrays()
    with snaprt.lazy():
        assert answer(question, x, key) == expected


def test_what_asks_for_the_type_alone_cuts_nothing():
    with snaprt.lazy():
        x = jnp.ones(3) * 2
        assert isinstance(x, jax.Array)
        assert not isinstance(x, (np.ndarray, jax.core.Tracer))
        assert not hasattr(x, "keys")
        assert not hasattr(x, "__cuda_array_interface__")
        assert not x._committed
        assert not x.weak_type
        copy.deepcopy(x)
    assert not [name for name in snaprt.metrics.counter_names() if name.startswith("host::")]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python classes have no buffers before 3.12")
def test_the_buffer_of_the_value_is_there_to_read():
    with snaprt.lazy():
        x = jnp.arange(3.0) * 2
        with memoryview(x) as buffer:
            assert buffer.readonly
            assert np.frombuffer(buffer, np.float32).tolist() == [0.0, 2.0, 4.0]


def test_a_function_that_dispatches_on_types_takes_a_lazy_array_for_an_array():
    kind = functools.singledispatch(lambda value: "other")
    kind.register(jax.Array, lambda value: "array")
    with snaprt.lazy():
        assert kind(jnp.ones(2) * 2) == "array"


@pytest.mark.parametrize("kind", [sparse.BCOO, sparse.BCSR])
def test_sparse_matrices_print_as_they_do_eagerly(kind):
    def texts():
        matrix = kind.fromdense(jnp.eye(3) * 2)
        return repr(matrix), str([matrix])

    expected = texts()
    with snaprt.lazy():
        assert texts() == expected


def test_a_traced_array_is_still_a_tracer():
    seen = []
    with snaprt.lazy():
        jax.jit(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or x)(jnp.ones(2) * 2)
    assert seen == [True]


def test_a_pickle_is_read_where_there_is_no_snaprt():
    with snaprt.lazy():
        assert b"snaprt." not in pickle.dumps(
            [jnp.ones(2) * 2, jax.random.split(jax.random.key(0))]
        )


def test_a_jitted_function_is_pickled_in_and_after_a_scope_as_before_it():
    cloudpickle = pytest.importorskip("cloudpickle")

    @jax.jit
    def doubled(x):
        return x * 2

    with snaprt.lazy():
        pickles = [cloudpickle.dumps(doubled)]
    pickles.append(cloudpickle.dumps(doubled))
    for one in pickles:
        assert b"snaprt.jaxapi" not in one
        assert b"snaprt.lazy" not in one
        assert cloudpickle.loads(one)(3) == 6


def test_a_copy_outlives_what_it_was_copied_from():
    with snaprt.lazy():
        x = jnp.arange(3.0) * 2
        kept = [copy.copy(x), copy.deepcopy(x), x.copy()]
        snaprt.mark_step()
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert [one.tolist() for one in kept] == 3 * [[0.0, 2.0, 4.0]]


def test_a_deleted_array_is_refused_where_it_is_used():
    for make in (lambda: jnp.ones(3), lambda: jnp.ones(3) * 2, lambda: jax.random.key(0)):
        with snaprt.lazy():
            array = make()
            array.delete()
            with pytest.raises(RuntimeError, match="deleted"):
                jnp.stack([array, array])


def test_what_takes_an_operand_that_an_eager_thread_has_donated_fails_alone():
    kept = jnp.ones(3)
    donated = jnp.ones(3)
    with snaprt.lazy():
        failed, other = donated * 2 + 1, kept * 3
        in_thread(jax.jit(jnp.negative, donate_argnums=0), donated)
        with pytest.raises(snaprt.ExecutionError, match="deleted"):
            snaprt.mark_step()
        np.testing.assert_array_equal(other, [3, 3, 3])
        with pytest.raises(snaprt.ExecutionError, match="deleted"):
            np.asarray(failed)


@pytest.mark.parametrize("device", [None, jax.devices()[0]], ids=["nowhere", "a device"])
def test_device_put_takes_lazy_arrays_outside_of_the_scope_and_in_other_threads(device):
    with snaprt.lazy():
        tree = {"x": jnp.arange(3.0) * 2, "key": jax.random.split(jax.random.key(0), 3)}
        other = jnp.arange(3.0) * 3
    put = jax.device_put(tree, device)
    assert put["x"].tolist() == [0.0, 2.0, 4.0]
    assert keys_of(put["key"]) == keys_of(jax.random.split(jax.random.key(0), 3))
    assert in_thread(jax.device_put, other, device).tolist() == [0.0, 3.0, 6.0]


def test_equinox_loads_leaves_in_place_of_lazy_ones(tmp_path):
    equinox = pytest.importorskip("equinox")
    with snaprt.lazy():
        tree = {"weights": jnp.arange(3.0) * 2}
        equinox.tree_serialise_leaves(tmp_path / "tree.eqx", tree)
        loaded = equinox.tree_deserialise_leaves(tmp_path / "tree.eqx", tree)
    assert loaded["weights"].tolist() == [0.0, 2.0, 4.0]


def test_equinox_compares_lazy_arrays_with_others_where_types_must_match():
    equinox = pytest.importorskip("equinox")
    x = jnp.arange(3.0)
    with snaprt.lazy():
        assert equinox.tree_equal(jnp.arange(3.0) + 0, x, typematch=True)
        assert not equinox.tree_equal(jnp.arange(3.0) + 0, np.arange(3.0), typematch=True)


def test_orbax_saves_and_restores_lazy_arrays_inside_and_outside_of_the_scope(tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint")
    with snaprt.lazy(), orbax.StandardCheckpointer() as checkpointer:
        tree = {"weights": jnp.arange(3.0) * 2, "steps": jnp.int32(3) + 1}
        checkpointer.save(tmp_path / "inside", tree)
        checkpointer.wait_until_finished()
        inside = checkpointer.restore(tmp_path / "inside", tree)
        tree["weights"] += 1
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "outside", tree)
        checkpointer.wait_until_finished()
        outside = checkpointer.restore(tmp_path / "outside")
    assert inside["weights"].tolist() == [0.0, 2.0, 4.0]
    assert outside["weights"].tolist() == [1.0, 3.0, 5.0]
    assert inside["steps"] == outside["steps"] == 4


def test_who_asks_whether_an_array_can_be_iterated_computes_nothing():
    sliced = snaprt.metrics.counter_value("xla::slice")
    with snaprt.lazy():
        x = jnp.arange(3.0) * 2
        assert np.iterable(x)
        assert not np.iterable(jnp.float32(1) * 2)
        snaprt.mark_step()
        assert snaprt.metrics.counter_value("xla::slice") == sliced
        assert [float(element) for element in x] == [0, 2, 4]


def test_shapes_are_known_without_values():
    def run():
        x = jnp.arange(6.0) + 1
        w = x * 2

        def closes_over():
            return jnp.outer(w, x)

        shapes = [jax.eval_shape(jnp.sin, x), jax.eval_shape(closes_over)]
        values = closes_over(), jax.jit(closes_over)()
        return shapes, closes_over, values

    with snaprt.lazy(fullgraph=True):
        shapes, closes_over, values = run()
        snaprt.mark_step()
    assert [(shape.shape, shape.dtype) for shape in shapes] == [
        ((6,), jnp.float32),
        ((6, 6), jnp.float32),
    ]
    expected = np.outer(np.arange(1, 7) * 2, np.arange(1, 7))
    compiled = jax.jit(closes_over).lower().compile()
    for value in (*values, closes_over(), jax.jit(closes_over)(), compiled()):
        np.testing.assert_array_equal(value, expected)
