"""Operators that torchax 0.0.13 lacks or computes wrongly, as JAX functions of arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

from snaprt.errors import UsageError
from snaprt.torch.lowering import randomness, slopes, versions, windows

_NEVER: Final = -1e30
"""The logarithm of a probability of zero, finite so that gradients are."""


def _transposed(matrices: Any) -> Any:
    """Return the conjugate transposes of matrices."""
    return jnp.swapaxes(matrices, -1, -2).conj()


def _factors(matrices: Any) -> tuple[Any, Any]:
    """Return the LU factors and the pivots, counted from 1 as LAPACK does."""
    factors, pivots, _ = jax.lax.linalg.lu(matrices)
    return factors, pivots + 1


def _first_zero_pivot(factors: Any) -> Any:
    """Return the first diagonal entry of zero, counted from 1, and 0 where there is none."""
    is_zero = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    return jnp.where(is_zero.any(-1), is_zero.argmax(-1) + 1, 0).astype(jnp.int32)


def _is_vector(matrices: Any, right: Any) -> bool:
    return right.ndim == 1 or (
        right.ndim == matrices.ndim - 1 and right.shape == matrices.shape[:-1]
    )


def _solve(matrices: Any, right: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    factors, pivots = _factors(matrices)
    is_vector = _is_vector(matrices, right)
    columns = right[..., None] if is_vector else right
    if left:
        solution = _broadcast_solve(matrices, columns)
    else:
        solution = jnp.swapaxes(
            _broadcast_solve(jnp.swapaxes(matrices, -1, -2), jnp.swapaxes(columns, -1, -2)), -1, -2
        )
    solution = solution[..., 0] if is_vector else solution
    return solution, factors, pivots, _first_zero_pivot(factors)


def _broadcast_solve(matrices: Any, columns: Any) -> Any:
    return jnp.linalg.solve(*_broadcast_batches(matrices, columns))


def _broadcast_batches(*matrices: Any) -> list[Any]:
    batch = jnp.broadcast_shapes(*[matrix.shape[:-2] for matrix in matrices])
    return [jnp.broadcast_to(matrix, (*batch, *matrix.shape[-2:])) for matrix in matrices]


def _solve_triangular(
    matrices: Any, right: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    matrices, right = _broadcast_batches(matrices, right)
    return jax.lax.linalg.triangular_solve(
        matrices, right, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


def _solve_factored(
    factors: Any, pivots: Any, right: Any, *, left: bool = True, adjoint: bool = False
) -> Any:
    if not left:  # X A = B is A* X* = B*
        solution = _solve_factored(factors, pivots, _transposed(right), adjoint=not adjoint)
        return _transposed(solution)
    factors, right = _broadcast_batches(factors, right)
    order = jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, factors.shape[-1])[..., None]
    order = jnp.broadcast_to(order, right.shape)
    if not adjoint:
        right = jnp.take_along_axis(right, order, -2)
        lower = _solve_triangular(factors, right, upper=False, unitriangular=True)
        return _solve_triangular(factors, lower, upper=True)
    factors = _transposed(factors)
    lower = _solve_triangular(factors, right, upper=False)
    solution = _solve_triangular(factors, lower, upper=True, unitriangular=True)
    return jnp.take_along_axis(solution, order.argsort(-2), -2)


def _solve_cholesky(right: Any, factors: Any, upper: bool = False) -> Any:
    lower = _transposed(factors) if upper else factors
    solution = _solve_triangular(lower, right, upper=False)
    return _solve_triangular(_transposed(lower), solution, upper=True)


def _inverse_cholesky(factors: Any, upper: bool = False) -> Any:
    return _solve_cholesky(jnp.eye(factors.shape[-1], dtype=factors.dtype), factors, upper)


def _inverse(matrices: Any, *, check_errors: bool = False) -> Any:
    return jnp.linalg.inv(matrices), _first_zero_pivot(_factors(matrices)[0])


def _least_squares(
    matrices: Any, right: Any, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """Return the solution, the squared residuals, the rank and the singular values."""
    rows, columns = matrices.shape[-2:]
    singular = jnp.linalg.svd(matrices, compute_uv=False)
    default = float(jnp.finfo(matrices.dtype).eps) * max(rows, columns)
    cutoff = default if rcond is None else rcond
    rank = (singular > cutoff * singular[..., :1]).sum(-1)
    is_vector = _is_vector(matrices, right)
    right = right[..., None] if is_vector else right
    solution = jnp.linalg.pinv(matrices, rtol=cutoff) @ right
    nothing = jnp.zeros(0, singular.dtype)
    residuals = nothing
    if rows > columns and driver in ("gels", "gelsd", "gelss"):
        residuals = jnp.square(jnp.abs(matrices @ solution - right)).sum(-2)
        residuals = residuals[..., 0] if is_vector else residuals
    return (
        solution[..., 0] if is_vector else solution,
        residuals,
        rank if driver != "gels" else jnp.zeros(0, jnp.int32),
        singular if driver in ("gelsd", "gelss") else nothing,
    )


def _determinant(matrices: Any) -> Any:
    return jnp.linalg.det(matrices), *_factors(matrices)


def _log_determinant(matrices: Any) -> Any:
    return *jnp.linalg.slogdet(matrices), *_factors(matrices)


def _unpack(factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """Return the permutation, the lower and the upper matrix that LU factors stand for."""
    rows, columns = factors.shape[-2:]
    size = min(rows, columns)
    permutation = lower = upper = jnp.zeros(0, factors.dtype)
    if unpack_pivots:
        order = jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)
        permutation = jnp.swapaxes(jnp.eye(rows, dtype=factors.dtype)[order], -1, -2)
    if unpack_data:
        lower = jnp.tril(factors[..., :size], -1) + jnp.eye(rows, size, dtype=factors.dtype)
        upper = jnp.triu(factors[..., :size, :])
    return permutation, lower, upper


def _lu(matrices: Any, *, pivot: bool = True) -> Any:
    _check_pivot(pivot)
    return _unpack(*_factors(matrices))


def _lu_factors(matrices: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    _check_pivot(pivot)
    factors, pivots = _factors(matrices)
    return factors, pivots, _first_zero_pivot(factors)


def _check_pivot(pivot: bool) -> None:
    if not pivot:
        raise UsageError(
            "LU factors without pivots are not available on this device",
            hint="leave out pivot=False",
        )


def _orthogonal(matrices: Any, mode: str = "reduced") -> Any:
    if mode == "r":
        return jnp.zeros(0, matrices.dtype), jnp.linalg.qr(matrices, mode="r")
    return tuple(jnp.linalg.qr(matrices, mode=mode))


def _householder_product(vectors: Any, factors: Any) -> Any:
    """Return the first columns of a product of reflections; JAX's own has no gradient."""
    rows, columns = vectors.shape[-2:]
    identity = jnp.eye(rows, columns, dtype=vectors.dtype)
    below = jnp.tril(vectors, -1) + identity  # of which LAPACK leaves out the ones

    def reflect(product: Any, reflection: Any) -> tuple[Any, None]:
        vector, factor = reflection
        along = vector.conj()[..., None, :] @ product
        return product - factor[..., None, None] * vector[..., None] * along, None

    reflections = (
        jnp.moveaxis(below[..., : factors.shape[-1]], -1, 0),
        jnp.moveaxis(factors, -1, 0),
    )
    start = jnp.broadcast_to(identity, vectors.shape)
    return jax.lax.scan(reflect, start, reflections, reverse=True)[0]


def _angle(values: Any) -> Any:
    if jnp.iscomplexobj(values):
        return slopes.angle_of(values.imag, values.real)
    is_nan = jnp.isnan(values)
    angles = jnp.where(values < 0, np.float32(np.pi), np.float32(0))
    return jnp.where(is_nan, jnp.nan, angles).astype(_floating(values.dtype))


def _floating(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def _search(
    ordered: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Return where values belong in ordered rows."""
    if sorter is not None:
        ordered = jnp.take_along_axis(ordered, sorter, -1)
    side = side or ("right" if right else "left")
    values = jnp.asarray(values)
    if ordered.ndim == 1:
        return jnp.searchsorted(ordered, values, side=side)

    def row(ordered: Any, values: Any) -> Any:
        return jnp.searchsorted(ordered, values, side=side)

    positions = jax.vmap(row)(
        ordered.reshape(-1, ordered.shape[-1]),
        values.reshape(math.prod(values.shape[:-1]), values.shape[-1]),
    )
    return positions.reshape(values.shape)


def _bucketize(
    values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    return _search(boundaries, values, right=right)


def _take_along(values: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return values.reshape(-1)[indices.reshape(-1)]
    axis = dim % values.ndim
    return jnp.take_along_axis(values, indices, axis)


def _bags(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Return the sum (mode 0), mean (1) or maximum (2) of rows of ``weight``, in bags."""
    count = offsets.shape[0] - include_last_offset
    bag = jnp.searchsorted(offsets, jnp.arange(len(indices)), side="right") - 1
    bag = jnp.where(indices == padding_idx, count, bag)  # which is none of the bags
    rows = weight[indices]
    if scale_grad_by_freq:
        rows = _by_frequency(rows, indices, len(weight))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    sizes = jax.ops.segment_sum(jnp.ones_like(bag), bag, count)
    if mode == 2:
        result = jax.ops.segment_max(rows, bag, count)
        result = jnp.where(sizes[:, None] > 0, result, 0)
    else:
        result = jax.ops.segment_sum(rows, bag, count)
    if mode == 1:
        result = result / jnp.maximum(sizes, 1)[:, None].astype(result.dtype)
    return result, bag, sizes, jnp.zeros(0, bag.dtype)


def _full_like(values: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    return jnp.full_like(values, fill_value, name)


def _embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    rows = jnp.take(weight, indices, axis=0)
    if scale_grad_by_freq:
        rows = _by_frequency(rows, indices, len(weight))
    if padding_idx < 0:
        return rows
    is_padding = (indices == padding_idx)[..., None]
    return jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)


def _renormalize(weight: Any, indices: Any, max_norm: float, norm_type: float = 2.0) -> Any:
    """Return rows of which those that are used have no larger norm than ``max_norm``."""
    is_used = jnp.zeros(len(weight), bool).at[indices].set(True)
    sizes = slopes.norm(weight, norm_type, 1)
    factors = jnp.where(is_used & (sizes > max_norm), max_norm / (sizes + 1e-7), 1)
    return weight * factors[:, None].astype(weight.dtype)


def _distances(first: Any, second: Any, p: float, compute_mode: int | None = None) -> Any:
    """Return the distance of each row of ``first`` to each row of ``second``."""
    return slopes.norm(first[..., :, None, :] - second[..., None, :, :], p, -1)


def _own_distances(rows: Any, p: float = 2.0) -> Any:
    first, second = np.triu_indices(len(rows), 1)
    return slopes.norm(rows[first] - rows[second], p, -1)


def _fill_diagonal(values: Any, fill_value: Any, wrap: bool = False) -> Any:
    if values.ndim > 2:
        steps = np.arange(min(values.shape))
        return values.at[(steps,) * values.ndim].set(fill_value)
    rows, columns = values.shape
    places = np.arange(0, values.size if wrap else min(rows, columns) * columns, columns + 1)
    return values.reshape(-1).at[places].set(fill_value).reshape(values.shape)


def _frequencies(make: Callable[..., np.ndarray]) -> Callable[..., Any]:
    def frequencies(n: int, d: float = 1.0, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
        name = str(dtype or torch.get_default_dtype()).removeprefix("torch.")
        return jnp.asarray(make(n, d), name)

    return frequencies


def _add(first: Any, second: Any, *, alpha: Any = 1) -> Any:
    """Return the sum, which for two booleans is whether one of them is true."""
    if all(getattr(value, "dtype", None) == jnp.bool_ for value in (first, second)):
        return first | (second & bool(alpha))
    return versions.torchax().ops.jaten._aten_add(first, second, alpha=alpha)


def _by_frequency(rows: Any, indices: Any, count: int) -> Any:
    """Return rows whose gradients are divided by how often the index of each is given."""
    often = jnp.zeros(count, rows.dtype).at[indices].add(1)[indices][..., None]
    fixed = jax.lax.stop_gradient(rows)
    return fixed + (rows - fixed) / often


def _cosines(*coefficients: float) -> Callable[[int], np.ndarray]:
    """Return a window that is a sum of cosines, with alternating signs."""

    def window(length: int) -> np.ndarray:
        angles = 2 * np.pi * np.arange(length) / max(length - 1, 1)
        terms = [(-1) ** k * a * np.cos(k * angles) for k, a in enumerate(coefficients)]
        return np.ones(1) if length == 1 else np.sum(terms, 0)

    return window


def _window(kind: Callable[..., Callable[[int], np.ndarray]]) -> Callable[..., Any]:
    def make(
        window_length: int,
        periodic: bool = True,
        *parameters: float,
        dtype: torch.dtype | None = None,
        **named: Any,
    ) -> Any:
        options = {name: named[name] for name in ("alpha", "beta") if name in named}
        window = kind(*parameters, **options)
        is_longer = periodic and window_length > 1
        values = window(window_length + is_longer)[:window_length] if window_length else np.zeros(0)
        name = str(dtype or torch.get_default_dtype()).removeprefix("torch.")
        return jnp.asarray(values, name)

    return make


def _ctc(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """Return the loss of connectionist temporal classification.

    Graves et al., "Connectionist Temporal Classification" (2006), by logarithms.

    Args:
        log_probs: Logarithms of probabilities, of shape (time, batch, classes), or (time, classes).
        targets: Classes, of shape (batch, longest), or all one after another.
        input_lengths: How many times each of the batch has.
        target_lengths: How many classes each of the batch has.
        blank: The class of blanks.
        reduction: 1 for the mean, 2 for the sum, 0 for neither.
        zero_infinity: Whether impossible targets have a loss of zero.
    """
    is_single = log_probs.ndim == 2
    dtype = log_probs.dtype
    log_probs = log_probs.astype(jnp.promote_types(dtype, jnp.float32))
    log_probs = log_probs[:, None] if is_single else log_probs
    times, batch, _ = log_probs.shape
    input_lengths = jnp.broadcast_to(jnp.asarray(input_lengths), (batch,))
    target_lengths = jnp.broadcast_to(jnp.asarray(target_lengths), (batch,))
    targets = targets[None] if is_single and targets.ndim == 1 else targets
    if targets.ndim == 1:
        starts = jnp.cumsum(target_lengths) - target_lengths
        places = starts[:, None] + jnp.arange(len(targets))
        targets = targets[jnp.minimum(places, len(targets) - 1)] if len(targets) else targets[None]
    longest = targets.shape[-1]
    labels = jnp.full((batch, 2 * longest + 1), blank).at[:, 1::2].set(targets)
    differs = (labels[:, 2:] != labels[:, :-2]) & (labels[:, 2:] != blank)
    may_skip = jnp.pad(differs, ((0, 0), (2, 0)))[:, : labels.shape[1]]

    def before(scores: Any, by: int) -> Any:
        return jnp.pad(scores, ((0, 0), (by, 0)), constant_values=_NEVER)[:, : scores.shape[1]]

    def step(scores: Any, given: Any) -> tuple[Any, None]:
        time, emitted = given
        skipped = jnp.where(may_skip, before(scores, 2), _NEVER)
        paths = jnp.stack([scores, before(scores, 1), skipped])
        new = jax.nn.logsumexp(paths, 0) + jnp.take_along_axis(emitted, labels, -1)
        new = jnp.maximum(new, _NEVER)
        return jnp.where((time < input_lengths)[:, None], new, scores), None

    first = jnp.full(labels.shape, _NEVER, log_probs.dtype).at[:, 0].set(0)
    scores, _ = jax.lax.scan(step, first, (jnp.arange(times), log_probs))
    last = 2 * target_lengths[:, None]
    ends = jnp.concatenate([last, jnp.maximum(last - 1, 0)], 1)
    final = jnp.take_along_axis(scores, ends, 1)
    final = final.at[:, 1].set(jnp.where(target_lengths > 0, final[:, 1], _NEVER))
    losses = -jax.nn.logsumexp(final, 1)
    is_possible = losses < -_NEVER / 2
    # PyTorch's gradient is that of the scores before `log_softmax`, from which they come.
    is_given = jnp.arange(times)[:, None] < input_lengths
    surplus = jnp.where(is_given[..., None], jnp.exp(log_probs), 0).sum((0, 2))
    losses = losses + (surplus - jax.lax.stop_gradient(surplus))
    losses = jnp.where(is_possible, losses, 0 if zero_infinity else jnp.inf).astype(dtype)
    if reduction == 1:
        return (losses / jnp.maximum(target_lengths, 1).astype(dtype)).mean()
    if reduction == 2:
        return losses.sum()
    return losses[0] if is_single else losses


def _grouped_product(
    left: Any, right: Any, offs: Any = None, bias: None = None, out_dtype: Any = None
) -> Any:
    """Multiply matrices group by group, as experts of a model do.

    Args:
        left: Rows of all groups (rows, inner), or a matrix for each (groups, rows, inner).
        right: Columns of all groups (inner, columns), or a matrix for each.
        offs: The end of each group, (groups,), in what one of them has of all groups: rows,
            columns, or, if both do, what is summed over.
        bias: None: PyTorch takes no other.
        out_dtype: The type of the result, if it is another one.
    """
    dtype = left.dtype if out_dtype is None else jnp.dtype(str(out_dtype).removeprefix("torch."))
    if offs is None:
        return jnp.matmul(left, right).astype(dtype)
    if left.ndim == right.ndim == 2:
        groups = jnp.searchsorted(offs, jnp.arange(left.shape[1]), side="right")
        is_inside = groups == jnp.arange(len(offs))[:, None]
        return jnp.matmul(jnp.where(is_inside[:, None], left, 0), right).astype(dtype)
    sizes = jnp.diff(offs, prepend=0)
    if left.ndim == 3:
        rows = jax.lax.ragged_dot(right.T, jnp.swapaxes(left, 1, 2), sizes)
        return rows.T.astype(dtype)
    return jax.lax.ragged_dot(left, right, sizes).astype(dtype)


CONSTANTS: Final[dict[str, Callable[..., Any]]] = {
    "bartlett_window": _window(lambda: np.bartlett),
    "blackman_window": _window(lambda: _cosines(0.42, 0.5, 0.08)),
    "fft_fftfreq": _frequencies(np.fft.fftfreq),
    "fft_rfftfreq": _frequencies(np.fft.rfftfreq),
    "hamming_window": _window(lambda alpha=0.54, beta=0.46: _cosines(alpha, beta)),
    "hann_window": _window(lambda: _cosines(0.5, 0.5)),
    "kaiser_window": _window(lambda beta=12.0: lambda length: np.kaiser(length, beta)),
}
"""Functions that make windows and frequencies, by the names of PyTorch's operators."""

OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "_cdist_forward": _distances,
    "_embedding_bag": _bags,
    "_embedding_bag_forward_only": _bags,
    "_grouped_mm": _grouped_product,
    "_linalg_det": _determinant,
    "_linalg_slogdet": _log_determinant,
    "_linalg_solve_ex": _solve,
    "_pdist_forward": _own_distances,
    "add": _add,
    "angle": _angle,
    "bucketize": _bucketize,
    "cholesky_inverse": _inverse_cholesky,
    "cholesky_solve": _solve_cholesky,
    "embedding": _embedding,
    "full_like": _full_like,
    "linalg_householder_product": _householder_product,
    "linalg_inv_ex": _inverse,
    "linalg_lstsq": _least_squares,
    "linalg_lu_solve": _solve_factored,
    "linalg_qr": _orthogonal,
    "linalg_solve_triangular": _solve_triangular,
    "linalg_lu": _lu,
    "linalg_lu_factor_ex": _lu_factors,
    "lu_solve": lambda right, factors, pivots: _solve_factored(factors, pivots, right),
    "lu_unpack": _unpack,
    "mT": lambda matrices: jnp.swapaxes(matrices, -1, -2),
    "searchsorted": _search,
    **CONSTANTS,
}
"""JAX functions, by the names of PyTorch's operators."""

FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    torch.ctc_loss: _ctc,
    torch.take_along_dim: _take_along,
    torch.Tensor.take_along_dim: _take_along,
}
"""JAX functions, by PyTorch's functions whose own code refuses what they get on the device."""

COMPOSED: Final[Sequence[Any]] = (
    *(torch.angle, torch.linalg.det, torch.linalg.slogdet, torch.logdet, torch.lu_solve),
    *(torch.cdist, torch.linalg.solve, torch.linalg.solve_ex, functional.max_pool2d),
)
"""Functions that PyTorch computes by these operators, and torchax by others."""


@functools.cache
def corrected_environment() -> Any:
    """Return torchax's environment, with these functions in the place of its own."""
    torchax = versions.torchax()
    environment = torchax.default_env()
    in_place = torchax.ops.op_base.InplaceOp
    for function in COMPOSED:
        environment._ops.pop(function, None)
    aten = [
        *((name, function, False, True) for name, function in randomness.IN_PLACE.items()),
        *((name, function, False, False) for name, function in randomness.OPERATORS.items()),
        *(
            (name, function, True, False)
            for table in (OPERATORS, slopes.OPERATORS, windows.OPERATORS)
            for name, function in table.items()
        ),
    ]
    ours = [
        *((known, *rest) for name, *rest in aten for known in _overloads(name)),
        *((known, function, True, False) for known, function in FUNCTIONS.items()),
        *(
            (known, in_place(function, is_jax_func=True), False, True)
            for known, function in (
                (torch.Tensor.fill_diagonal_, _fill_diagonal),
                (torch.ops.aten.embedding_renorm_.default, _renormalize),
            )
        ),
    ]
    for known, function, is_jax, is_view in ours:
        environment.override_op_definition(known, function, is_view)
        environment._ops[known].is_jax_function = is_jax
    _write_in_place(environment)
    return environment


def _write_in_place(environment: Any) -> None:
    """Let operators that write in place and are not known be those that do not."""
    torchax = versions.torchax()
    look_up = environment._get_op_or_decomp

    def find(operator: Any) -> Any:
        try:
            return look_up(operator)
        except torchax.tensor.OperatorNotFound:
            packet = getattr(operator, "overloadpacket", None)
            name = getattr(packet, "__name__", "")
            known = getattr(torch.ops.aten, name.removesuffix("_"), packet)
            if known is packet:
                raise
        environment.override_op_definition(operator, torchax.ops.op_base.InplaceOp(known), True)
        return environment._ops[operator]

    environment._get_op_or_decomp = find


def _overloads(name: str) -> list[Any]:
    name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, name)
    if overload:
        return [getattr(packet, overload)]
    return [getattr(packet, each) for each in packet.overloads() if not each.endswith("out")]
