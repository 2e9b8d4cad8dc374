"""Plain `jax.jit` programs, run once each so that XLA_FLAGS can make XLA dump them.

XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_snapshots" python xla_programs.py [NAME ...]
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import io_callback

_RANDOM = np.random.default_rng(0)
PROGRAMS: dict[str, tuple[Callable, tuple, dict]] = {}


def program(*arguments, **options):
    def keep(function):
        PROGRAMS[function.__name__] = (function, arguments, options)
        return function

    return keep


def normal(*shape, dtype=np.float32):
    return _RANDOM.normal(size=shape).astype(np.float32).astype(dtype)


def integers(low, high, shape, dtype):
    return _RANDOM.integers(low, high, shape).astype(dtype)


@program({"w": normal(20, 32), "b": normal(32), "v": normal(32, 7)}, normal(9, 20), normal(9, 7))
def mlp_gradient(parameters, x, y):
    def loss(p):
        return jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2)

    return jax.value_and_grad(loss)(parameters)


def block(p, x):
    def normalize(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    q, k, v = (jnp.einsum("bsd,dhk->bhsk", normalize(x), p[name]) for name in "qkv")
    scores = jnp.einsum("bhsk,bhtk->bhst", q, k) / 4
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    x = x + jnp.einsum("bhst,bhtk,hkd->bsd", jax.nn.softmax(scores), v, p["o"])
    return x + jax.nn.gelu(normalize(x) @ p["up"]) @ p["down"]


BLOCK = {
    **{name: normal(32, 4, 8) * 0.2 for name in "qkv"},
    "o": normal(4, 8, 32) * 0.2,
    "up": normal(32, 64) * 0.2,
    "down": normal(64, 32) * 0.2,
}


@program(BLOCK, normal(2, 16, 32))
def transformer_block(parameters, x):
    return jax.value_and_grad(lambda p: jnp.sum(block(p, x) ** 2))(parameters)


@program({name: np.stack([value] * 3) for name, value in BLOCK.items()}, normal(2, 16, 32))
def transformer_scan(parameters, x):
    def loss(p):
        layer = jax.checkpoint(block)
        return jnp.sum(jax.lax.scan(lambda x, p: (layer(p, x), None), x, p)[0] ** 2)

    return jax.value_and_grad(loss)(parameters)


@program(normal(2, 12, 12, 3), normal(3, 3, 3, 8))
def convolution_gradient(x, kernel):
    def loss(x, kernel):
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jax.nn.relu(y) ** 2)

    return jax.value_and_grad(loss, (0, 1))(x, kernel)


@program(normal(2, 3, 12, 13), normal(8, 3, 3, 3))
def strided_convolution(x, kernel):
    def loss(x, kernel):
        return jnp.sum(jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME") ** 2)

    return jax.value_and_grad(loss, (0, 1))(x, kernel)


@program(normal(2, 12, 12, 8), normal(3, 3, 1, 8))
def depthwise_convolution(x, kernel):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=8,
    )


@program(normal(2, 12, 12, 3))
def pooling(x):
    def pooled(x):
        window, strides = (1, 2, 2, 1), (1, 2, 2, 1)
        return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "VALID"))

    return jax.value_and_grad(pooled)(x)


@program({"w": normal(8, 8), "u": normal(5, 8)}, normal(11, 3, 5))
def scan_rnn(parameters, xs):
    def loss(p):
        def cell(hidden, x):
            hidden = jnp.tanh(hidden @ p["w"] + x @ p["u"])
            return hidden, hidden

        return jnp.sum(jax.lax.scan(cell, jnp.zeros((3, 8)), xs)[1] ** 2)

    return jax.value_and_grad(loss)(parameters)


@program(normal(17, 5))
def sorting(x):
    return (
        jnp.sort(x, 0),
        jnp.argsort(x, 1),
        jax.lax.top_k(x, 3),
        jnp.cumsum(x, 0),
        jax.lax.cummax(x, 0),
        jnp.median(x),
    )


@program(normal(4, 16), normal(4, 6, 10))
def fourier(x, y):
    return jnp.fft.fft(x), jnp.fft.rfft2(y), jnp.fft.irfft(jnp.fft.rfft(x)), jnp.fft.ifft(x)


@program(np.array([0, 7], np.uint32))
def random_bits(key_data):
    first, second, third = jax.random.split(jax.random.wrap_key_data(key_data), 3)
    return (
        jax.random.normal(first, (5, 6)),
        jax.random.bits(second, (4,)),
        jax.random.permutation(third, 10),
    )


@program(normal(10, 6), np.array([1, 4, 4, 9]), normal(4, 6))
def gather_scatter(x, rows, updates):
    return (
        x[rows],
        x.at[rows].add(updates),
        x.at[rows, 2].set(1.0),
        jax.lax.dynamic_slice(x, (rows[0], 0), (3, 2)),
        jax.lax.dynamic_update_slice(x, updates[:2, :2], (rows[1], rows[2])),
    )


@program(normal(6, 7, dtype=ml_dtypes.bfloat16), normal(7, 5, dtype=ml_dtypes.bfloat16))
def half_precision(x, y):
    return x @ y, jax.nn.softmax(x), jnp.exp(x.astype(jnp.float16)), x.sum()


@program(
    normal(5, 3, dtype=ml_dtypes.float8_e4m3fn),
    normal(5, 3, dtype=ml_dtypes.float8_e5m2),
    normal(5, 3, dtype=ml_dtypes.float8_e4m3b11fnuz),
    normal(5, 3, dtype=ml_dtypes.float8_e5m2fnuz),
    normal(5, 3, dtype=ml_dtypes.float8_e3m4),
    np.abs(normal(5, 3)).astype(ml_dtypes.float8_e8m0fnu),
    normal(5, 3, dtype=ml_dtypes.float4_e2m1fn),
)
def tiny_floats(*arrays):
    return [((x.astype(jnp.float32) * 1.5).astype(x.dtype), x.T) for x in arrays]


@program(
    integers(-8, 8, (5, 7), ml_dtypes.int4),
    integers(0, 16, (5, 7), ml_dtypes.uint4),
    integers(-2, 2, (5, 3), ml_dtypes.int2),
)
def tiny_integers(x, y, z):
    return x + x, y.T, x.astype(jnp.int32).sum(0), z + z


@program((normal(5, 4) + 1j * normal(5, 4)).astype(np.complex64), normal(4, 3))
def complex_numbers(x, y):
    return x @ y, jnp.abs(x), x.real, x.conj().T, jnp.exp(x)


@program(np.float32(3), normal(4))
def while_loop(limit, x):
    return jax.lax.while_loop(
        lambda state: state[0] < 20,
        lambda state: (state[0] * 1.5, state[1] + jnp.sin(state[1])),
        (limit, x),
    )


@program(np.int32(2), normal(4), np.bool_(True))
def branches(which, x, flag):
    chosen = jax.lax.switch(which, [lambda x: x, lambda x: x * 2, lambda x: jnp.sin(x) @ x * x], x)
    return chosen, jax.lax.cond(flag, lambda x: x.sum(), lambda x: x.prod(), x)


_SQUARE = normal(6, 6)


@program(_SQUARE @ _SQUARE.T + 6 * np.eye(6, dtype=np.float32), normal(6, 2))
def linear_algebra(a, b):
    return (
        jnp.linalg.cholesky(a),
        jnp.linalg.solve(a, b),
        jnp.linalg.eigh(a),
        jnp.linalg.svd(b, full_matrices=False),
        jnp.linalg.qr(b),
    )


@program(integers(-128, 127, (9, 16), np.int8), integers(-128, 127, (16, 5), np.int8))
def int8_product(x, y):
    return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


@program(normal(33, 65))
def reinterpreted(x):
    return (
        jax.lax.bitcast_convert_type(x, jnp.int32),
        jax.lax.bitcast_convert_type(x, jnp.uint8),
        jax.lax.bitcast_convert_type(x.reshape(-1, 5), jnp.int16),
    )


@program(normal(3, 4, 5), normal(5, 4, 3))
def transposes(x, y):
    return (x.transpose(2, 1, 0) + y).reshape(10, 6).T, jnp.einsum("abc,cbd->adb", x, y)


@program(normal(4), normal(3))
def scalar_and_unused(x, unused):
    return x.sum()


@program(normal(0, 3), normal(4, 3))
def zero_size(x, y):
    return jnp.concatenate([x, y]), x, x.sum()


@program()
def no_arguments():
    return jnp.arange(12.0).reshape(3, 4)


@program(normal(4))
def passed_through(x):
    return x, x + 1


@program(normal(4), normal(4), donate_argnums=(0,))
def donating(x, y):
    return x + y, y * 2


@program(normal(4))
def printing(x):
    jax.debug.print("sum {}", x.sum())
    return x * 2


@program(normal(4))
def calling_back(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4,), np.float32), x)


@program(np.float32(1), normal(4))
def calling_back_in_a_branch(which, x):
    def call_back(x):
        results = jax.ShapeDtypeStruct((4,), np.float32), jax.ShapeDtypeStruct((3,), np.int32)
        floats, integers = io_callback(
            lambda x: (x, np.ones(3, np.int32)), results, x, ordered=True
        )
        return floats + integers.sum()

    return jax.lax.cond(which < 0, jax.jit(call_back), jnp.sin, x)


def run(programs: dict[str, tuple[Callable, tuple, dict]]) -> None:
    """Run those that the command line names, or all."""
    for name, (function, arguments, options) in programs.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            jax.block_until_ready(jax.jit(function, **options)(*arguments))


if __name__ == "__main__":
    run(PROGRAMS)
