"""Cases of `jax.lax` and `jax.lax.linalg`; what takes a function is in `table_control_flow`."""

from __future__ import annotations

from collections.abc import Iterator

from breadth_cases import Case, expressions

ONE_OPERAND = """
abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e bitwise_not cbrt ceil clz conj cos cosh
digamma dtype erf erf_inv erfc exp exp2 expm1 floor imag is_finite lgamma log log1p log2 logistic
neg one_minus_square population_count real reciprocal round rsqrt sign sin sinh sqrt square
stop_gradient tan tanh stage dce_sink optimization_barrier
""".split()

TWO_OPERANDS = """
add atan2 bitwise_and bitwise_or bitwise_xor complex div eq ge gt igamma igamma_grad_a igammac le
lt max min mul mulhi ne nextafter polygamma pow rem shift_left shift_right_arithmetic
shift_right_logical sub zeta random_gamma_grad
""".split()

CUMULATIVE = ["cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"]

SHAPES = [
    "lax.argmax(x, 1, jnp.int32)",
    "lax.argmin(x, 0, jnp.int32)",
    "lax.batch_matmul(cube, cube.swapaxes(1, 2))",
    "lax.bitcast_convert_type(x, jnp.int8)",
    "lax.broadcast(x, (2,))",
    "lax.broadcast_in_dim(row, (3, 4), (1,))",
    "lax.broadcast_like(row, x)",
    "lax.broadcast_to_rank(row, 3)",
    "lax.clamp(x, y, x)",
    "lax.clamp(x.dtype.type(0), x, x.dtype.type(2))",
    "lax.collapse(cube, 1)",
    "lax.concatenate([x, y], 0)",
    "lax.convert_element_type(x, jnp.int8)",
    "lax.convert_element_type(x, jnp.float32)",
    "lax.dot(x, square)",
    "lax.dot_general(cube, cube, (((2,), (2,)), ((0,), (0,))))",
    "lax.dot_general(x, square, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)",
    "lax.dynamic_index_in_dim(x, at)",
    "lax.dynamic_slice(x, (at, 1), (1, 2))",
    "lax.dynamic_slice(x, [0, at], (2, 2))",
    "lax.dynamic_slice_in_dim(x, at, 2, axis=1)",
    "lax.dynamic_update_index_in_dim(x, row, at, 0)",
    "lax.dynamic_update_slice(x, col, (0, at))",
    "lax.dynamic_update_slice_in_dim(x, row[None], at, 0)",
    "lax.expand_dims(x, (0,))",
    "lax.full_like(x, 3)",
    "lax.full_like(x, scalar)",
    "lax.index_in_dim(x, 1)",
    "lax.index_take(x, (index, index), (0, 1))",
    "lax.integer_pow(x, 3)",
    "lax.pad(x, x.dtype.type(0), [(1, 0, 1), (0, -1, 0)])",
    "lax.reduce(x, x.dtype.type(0), lax.add, (1,))",
    "lax.reduce(x, x.dtype.type(0), lambda a, b: a + b * 2, (1,))",
    "lax.reduce_max(x, [0])",
    "lax.reduce_min(x, [1])",
    "lax.reduce_prod(x, [0, 1])",
    "lax.reduce_sum(x, [0])",
    "lax.reduce_window(x, x.dtype.type(0), lax.add, (2, 2), (1, 1), 'VALID')",
    "lax.reduce_window(x, x.dtype.type(9), lax.min, (2, 1), (2, 1), 'SAME')",
    "lax.reduce_and(mask, [0])",
    "lax.reduce_or(mask, [1])",
    "lax.reduce_xor(counts, [1])",
    "lax.reshape(x, (4, 3))",
    "lax.rev(x, (1,))",
    "lax.select(mask, x, y)",
    "lax.select_n(mask, x, y)",
    "lax.slice(x, (0, 1), (3, 4), (1, 2))",
    "lax.slice_in_dim(x, 0, 3, 2)",
    "lax.sort(x)",
    "lax.sort([x, y], num_keys=2, dimension=0)",
    "lax.sort_key_val(vec, other)",
    "lax.split(vec, [2, 4])",
    "lax.squeeze(col, (1,))",
    "lax.stack([x, y])",
    "lax.tile(x, (2, 1))",
    "lax.top_k(x, 2)",
    "lax.top_k(cube, 1, axis=0)",
    "lax.transpose(cube, (2, 0, 1))",
    "lax.unstack(x)",
    "lax.gather(x, index[:, None], lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 4))",
    "lax.approx_max_k(vec, 2)",
    "lax.approx_min_k(x, 1, reduction_dimension=0)",
    *(
        f"lax.{name}(x, index[:, None], x, lax.ScatterDimensionNumbers((1,), (0,), (0,)))"
        for name in ("scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul")
    ),
    "lax.scatter_sub(x, index[:, None], x, lax.ScatterDimensionNumbers((1,), (0,), (0,)))",
    "lax.scatter_apply(x, index[:, None], jnp.sin,"
    " lax.ScatterDimensionNumbers((1,), (0,), (0,)), update_shape=(3, 4))",
]

FLOATS = [
    "lax.betainc(positive, positive + 1, unit)",
    "lax.polynomial(x, three)",
    "lax.reduce_precision(x, 5, 4)",
    "lax.rng_uniform(-1.0, 1.0, (2, 3)).shape",
    "lax.conv(image.transpose(0, 3, 1, 2), filters.transpose(3, 2, 0, 1), (1, 1), 'SAME')",
    "lax.conv_general_dilated(image, filters, (2, 2), 'SAME',"
    " dimension_numbers=('NHWC', 'HWIO', 'NHWC'))",
    "lax.conv_general_dilated(image, filters, (1, 1), ((0, 1), (1, 0)), lhs_dilation=(2, 1),"
    " rhs_dilation=(1, 2), dimension_numbers=('NHWC', 'HWIO', 'NHWC'))",
    "lax.conv_general_dilated(image, jnp.ones((3, 3, 1, 6), image.dtype), (1, 1), 'VALID',"
    " dimension_numbers=('NHWC', 'HWIO', 'NHWC'), feature_group_count=3)",
    "lax.conv_general_dilated_local(image.transpose(0, 3, 1, 2), jnp.ones((4, 27, 6, 6),"
    " image.dtype), (1, 1), 'VALID', (3, 3))",
    "lax.conv_general_dilated_patches(image.transpose(0, 3, 1, 2), (2, 2), (2, 2), 'VALID')",
    "lax.conv_transpose(image, filters, (2, 2), 'SAME')",
    "lax.conv_with_general_padding(image.transpose(0, 3, 1, 2), filters.transpose(3, 2, 0, 1),"
    " (1, 1), ((1, 1), (0, 0)), None, None)",
    "lax.ragged_dot(batch, jnp.ones((3, 6, 2), batch.dtype), jnp.array([2, 0, 6]))",
    "lax.ragged_dot_general(batch, jnp.ones((3, 6, 2), batch.dtype), jnp.array([2, 0, 6]),"
    " lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]))",
    "lax.fft(x, 'rfft', (4,))",
    "lax.composite(lambda v: jnp.sin(v) * 2, name='a.b')(x)",
    "lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)",
    "lax.with_sharding_constraint(x * 2, jax.sharding.SingleDeviceSharding(jax.devices()[0]))",
    *(f"lax.{name}(x, reverse=True, axis=1)" for name in CUMULATIVE),
]

CONSTANTS = [
    "lax.after_all(lax.create_token())",
    "lax.broadcast_shapes((2, 1), (3,))",
    "lax.broadcasted_iota(jnp.int32, (2, 3), 1)",
    "lax.conv_dimension_numbers((1, 2, 3, 4), (4, 3, 2, 1), ('NHWC', 'HWIO', 'NHWC'))",
    "lax.conv_general_permutations(('NHWC', 'HWIO', 'NHWC'))",
    "lax.conv_general_shape_tuple((1, 8, 8, 3), (3, 3, 3, 4), (1, 1), 'SAME',"
    " ('NHWC', 'HWIO', 'NHWC'))",
    "lax.conv_shape_tuple((1, 3, 8, 8), (4, 3, 3, 3), (1, 1), [(0, 0), (0, 0)])",
    "lax.conv_transpose_shape_tuple((1, 8, 8, 3), (3, 3, 3, 4), (1, 1), 'SAME',"
    " ('NHWC', 'HWIO', 'NHWC'))",
    "lax.empty((2, 3), jnp.float32).shape",
    "lax.full((2, 3), number)",
    "lax.full((2, 3), scalar, jnp.int32)",
    "lax.iota(jnp.float32, 4)",
    "lax.padtype_to_pads((8, 8), (3, 3), (2, 2), 'SAME')",
    "lax.reduce_window_shape_tuple((4, 4), (2, 2), (1, 1), ((0, 0), (0, 0)))",
    "lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), (2, 3))",
    "lax.shape_as_value((2, 3))",
]

LINALG = [
    "lax.linalg.cholesky(spd)",
    "lax.linalg.cholesky_update(jnp.linalg.cholesky(spd).T, row)",
    "lax.linalg.eig(square)",
    "lax.linalg.eigh(spd)",
    "lax.linalg.hessenberg(square)",
    "lax.linalg.householder_product(tall, three)",
    "lax.linalg.lu(square)",
    "lax.linalg.lu_pivots_to_permutation(index, 3)",
    "lax.linalg.ormqr(tall, three, tall)",
    "lax.linalg.qdwh(square)",
    "lax.linalg.qr(tall, full_matrices=False)",
    "lax.linalg.schur(square)",
    "lax.linalg.svd(x)",
    "lax.linalg.symmetric_product(x, square[:3, :3])",
    "lax.linalg.triangular_solve(lower, rhs, left_side=True, lower=True)",
    "lax.linalg.triangular_solve(lower, rhs.T, transpose_a=True, lower=True)",
    "lax.linalg.tridiagonal(spd)",
    "lax.linalg.tridiagonal_solve(row, row * 0 + 9, row, rhs)",
]


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    yield from expressions(
        "jax.lax",
        {
            "fhibc": [f"lax.{name}(x)" for name in ONE_OPERAND]
            + [f"lax.{name}(x, y)" for name in TWO_OPERANDS],
            "fi": [f"lax.{name}(positive, positive)" for name in ("igamma", "igammac", "zeta")]
            + [f"lax.{name}(x, 2)" for name in TWO_OPERANDS]
            + [f"lax.{name}(x)" for name in CUMULATIVE],
            "fibc": SHAPES,
            "fh": FLOATS,
            "f": CONSTANTS,
        },
    )
    yield from expressions("jax.lax.linalg", {"fc": LINALG})
