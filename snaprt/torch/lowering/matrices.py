"""Linear algebra that torchax lacks or computes wrongly, as JAX functions of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from snaprt.errors import UsageError
from snaprt.torch.lowering.slopes import straight_through


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
    if not is_zero.shape[-1]:
        return jnp.zeros(is_zero.shape[:-1], jnp.int32)
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
    if not matrices.shape[-1]:
        return jnp.ones(matrices.shape[:-2], matrices.dtype), *_factors(matrices)
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


def _of_triangle(matrices: Any, lower: bool) -> Any:
    """Return the Hermitian matrices whose lower or upper triangles those of ``matrices`` are.

    A gradient is that of all entries, and Hermitian, as PyTorch has it.
    """
    inside = jnp.tril(matrices) if lower else jnp.triu(matrices)
    beyond = _transposed(jnp.tril(matrices, -1) if lower else jnp.triu(matrices, 1))
    mean = (matrices + _transposed(matrices)) / 2
    return straight_through(mean, jax.lax.stop_gradient(inside + beyond))


def _cholesky(matrices: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    lower = jnp.linalg.cholesky(_of_triangle(matrices, not upper), symmetrize_input=False)
    is_bad = jnp.isnan(jnp.diagonal(lower, axis1=-2, axis2=-1)).any(-1)
    return _transposed(lower) if upper else lower, is_bad.astype(jnp.int32)


def _hermitian_eigenvectors(matrices: Any, UPLO: str = "L", compute_v: bool = True) -> Any:  # noqa: N803
    matrices = _of_triangle(matrices, UPLO.upper() == "L")
    return tuple(jnp.linalg.eigh(matrices, symmetrize_input=False))


def _eigenvectors(matrices: Any) -> Any:
    # PyTorch, too, leaves it to the caller that a gradient does not depend on the vectors' phases.
    return tuple(
        jax.lax.linalg.eig(matrices, compute_left_eigenvectors=False, enable_eigvec_derivs=True)
    )


def _singular(
    matrices: Any,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> Any:
    if not compute_uv:
        nothing = jnp.zeros(0, matrices.dtype)
        return nothing, jnp.linalg.svd(matrices, compute_uv=False), nothing
    if full_matrices and matrices.shape[-1] != matrices.shape[-2]:
        return _full_singular(matrices)
    return tuple(jnp.linalg.svd(matrices, full_matrices=False))


@jax.custom_jvp
def _full_singular(matrices: Any) -> Any:
    return tuple(jnp.linalg.svd(matrices, full_matrices=True))


@_full_singular.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise UsageError(
        "the singular value decomposition with full matrices has no gradient on this device",
        hint="pass full_matrices=False (some=True to torch.svd), or detach the matrix",
    )


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "_linalg_det": _determinant,
    "_linalg_eigh": _hermitian_eigenvectors,
    "_linalg_slogdet": _log_determinant,
    "_linalg_solve_ex": _solve,
    "_linalg_svd": _singular,
    "cholesky_inverse": _inverse_cholesky,
    "cholesky_solve": _solve_cholesky,
    "cholesky": lambda matrices, upper=False: _cholesky(matrices, upper=upper)[0],
    "linalg_cholesky_ex": _cholesky,
    "linalg_eig": _eigenvectors,
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
}
"""JAX functions, by the names of PyTorch's operators."""
