"""Cases with effects: callbacks, printing, references, transfers, pickling, sparse arrays."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from breadth_cases import Case, expressions, programs
from jax.experimental import io_callback, sparse

SHORT = [
    "jax.pure_callback(np.sort, jax.ShapeDtypeStruct(x.shape, x.dtype), x)",
    "jax.vmap(lambda v: jax.pure_callback(np.sort, jax.ShapeDtypeStruct(v.shape, v.dtype), v,"
    " vmap_method='sequential'))(x)",
    "jax.pure_callback(lambda v: 1 / 0, jax.ShapeDtypeStruct((), x.dtype), x)",
    "dlpack.from_dlpack(x * 2)",
    "dlpack.is_supported_dtype(x.dtype)",
    "np.from_dlpack(x * 2)",
    "jax.new_ref(x)[...]",
    "jax.freeze(jax.new_ref(x * 2))",
    "jax.experimental.multihost_utils.process_allgather(x * 2)"
    " if hasattr(jax.experimental, 'multihost_utils') else x",
]


def _text_of(act: Any) -> str:
    """Return what is printed while ``act`` runs and its effects happen."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        float(act())
        jax.effects_barrier()
    return out.getvalue()


def debug_print(x: Any, number: Any) -> Any:
    def act() -> Any:
        jax.debug.print("sum {} of {n}", x.sum(), n=number)
        jax.jit(lambda v: jax.debug.print("inside {}", v[0]))(x)
        return (x * 2).sum()

    return sorted(_text_of(act).splitlines())  # in one program, they are in no order


def debug_print_in_a_loop(row: Any) -> Any:
    def act() -> Any:
        def body(i: Any, carry: Any) -> Any:
            jax.debug.print("{i}: {c}", i=i, c=carry, ordered=True)
            return carry + row[i]

        return jax.lax.fori_loop(0, 3, body, row[0])

    return _text_of(act)


def debug_callback(x: Any) -> Any:
    seen: list[Any] = []
    jax.debug.callback(lambda v: seen.append(np.asarray(v)), x * 2)
    jax.debug.callback(lambda v: seen.append(np.asarray(v)), x.sum(), ordered=True)
    total = float((x * 2).sum())
    jax.effects_barrier()
    return sorted(seen, key=lambda v: v.ndim), total


def debug_log(x: Any) -> Any:
    jax.debug.log("the sum is {}", x.sum())
    total = float(x.sum())
    jax.effects_barrier()
    return total


def inspected_shardings(x: Any) -> Any:
    seen: list[Any] = []
    jax.debug.inspect_array_sharding(x * 2, callback=lambda s: seen.append(type(s).__name__))
    total = float(x.sum())
    return total, len(seen)


def visualized_shardings(x: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        jax.debug.visualize_array_sharding(x * 2)
        jax.debug.visualize_sharding((3, 4), x.sharding)
    return x * 2


def ordered_io_callbacks(x: Any) -> Any:
    log: list[Any] = []

    def note(name: str) -> Any:
        def write(value: Any) -> Any:
            log.append((name, value.item()))
            return np.asarray(value) * 2

        return write

    shape = jax.ShapeDtypeStruct((), x.dtype)
    first = io_callback(note("a"), shape, x.sum(), ordered=True)
    second = io_callback(note("b"), shape, first + 1, ordered=True)
    result = float(second)
    jax.effects_barrier()
    return log, result, first


def io_callback_under_grad(x: Any) -> Any:
    log: list[float] = []

    def loss(v: Any) -> Any:
        jax.debug.callback(lambda w: log.append(float(w)), v.sum())
        return (v**2).sum()

    gradient = jax.grad(loss)(x)
    total = float(gradient.sum())
    jax.effects_barrier()
    return gradient, total, log


def references(x: Any, row: Any) -> Any:
    ref = jax.new_ref(x)
    ref[0] += row
    before = ref[...]
    ref[1, 2] = 7
    ref[...] = ref[...] * 2

    @jax.jit
    def bump(r: Any, v: Any) -> Any:
        r[...] += v
        return r[0]

    first = bump(ref, row)
    return before, first, ref[...], jax.freeze(ref)


def references_in_a_scan(x: Any) -> Any:
    total = jax.new_ref(jnp.zeros_like(x[0]))

    def body(carry: Any, value: Any) -> Any:
        total[...] += value
        return carry + 1, total[...].sum()

    return jax.lax.scan(body, 0, x), total[...]


def references_and_gradients(x: Any) -> Any:
    seen = jax.new_ref(jnp.zeros((), x.dtype))

    def loss(v: Any) -> Any:
        seen[...] = jax.lax.stop_gradient(v).sum()
        return (v**2).sum()

    return jax.grad(loss)(x), seen[...]


def pickled_and_copied(x: Any) -> Any:
    y = x * 2
    return pickle.loads(pickle.dumps(y)), copy.copy(y), copy.deepcopy({"a": y + 1})


def another_thread(x: Any) -> Any:
    found: list[Any] = []
    y = x * 2
    thread = threading.Thread(target=lambda: found.append(y + 1))
    thread.start()
    thread.join()
    return found[0] * y


def device_transfers(x: Any) -> Any:
    host = jax.device_get([x * 2, {"a": x.sum()}])
    back = jax.device_put(host)
    return back, jax.device_put(x + 1, jax.devices()[0]), jax.device_put_replicated is not None


def deleted_arrays(x: Any) -> Any:
    y = x * 2
    y.delete()
    return y.is_deleted(), y + 1


def settings_in_the_middle(x: Any) -> Any:
    with jax.default_matmul_precision("float32"):
        product = x @ x.T
    with jax.numpy_dtype_promotion("strict"):
        try:
            x + np.int8(1)
        except Exception as error:
            product = product + len(type(error).__name__)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(x), float) * 2
    with jax.disable_jit():
        plain = jax.jit(lambda v: v * 2)(x)
    return product, wide, plain


def debugging_switches(x: Any) -> Any:
    with jax.debug_nans(False), jax.check_tracer_leaks(False), jax.log_compiles(False):
        return jnp.log(x - 9), jax.numpy_rank_promotion("allow") and x


def sparse_matrices(x: Any, row: Any) -> Any:
    dense = jnp.where(x > 0, x, 0)
    matrix = sparse.BCOO.fromdense(dense)
    product = matrix @ row
    sums = (matrix * 2).sum(axis=1).todense()
    return (
        matrix.todense(),
        product,
        sums,
        matrix.T.todense(),
        sparse.sparsify(jnp.add)(matrix, matrix).todense(),
    )


def sparse_gradients(x: Any, row: Any) -> Any:
    matrix = sparse.BCOO.fromdense(jnp.where(x > 0, x, 0), nse=12)

    def loss(entries: Any) -> Any:
        return ((sparse.BCOO((entries, matrix.indices), shape=x.shape) @ row) ** 2).sum()

    return jax.grad(loss)(matrix.data), jax.jit(lambda m: m @ row)(matrix)


def checkified(x: Any) -> Any:
    from jax.experimental import checkify

    def checked(v: Any) -> Any:
        checkify.check(v.sum() > -1000, "too small")
        return jnp.log(v)

    error, result = checkify.checkify(checked, errors=checkify.all_checks)(abs(x) + 1)
    return error.get(), result


def ordinary_differential_equation(three: Any) -> Any:
    from jax.experimental.ode import odeint

    return odeint(lambda y, t: -y * t, three, jnp.linspace(0.0, 1.0, 4))


def exported_and_called(x: Any) -> Any:
    from jax import export

    exported = export.export(jax.jit(lambda v: jnp.sin(v) * 2))(x)
    return export.deserialize(exported.serialize()).call(x * 2)


PROGRAMS = [
    debug_print,
    debug_print_in_a_loop,
    debug_callback,
    debug_log,
    inspected_shardings,
    visualized_shardings,
    ordered_io_callbacks,
    io_callback_under_grad,
    references,
    references_in_a_scan,
    references_and_gradients,
    pickled_and_copied,
    another_thread,
    device_transfers,
    deleted_arrays,
    settings_in_the_middle,
    debugging_switches,
    sparse_matrices,
    sparse_gradients,
    checkified,
    ordinary_differential_equation,
    exported_and_called,
]


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    yield from expressions("effects and the host", {"fi": SHORT})
    yield from programs("effects and the host", PROGRAMS)
