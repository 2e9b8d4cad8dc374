"""Cases of `jax.scipy`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

from breadth_cases import DISTRIBUTIONS, Case, expressions

SPECIAL_OF_ONE = """
dawsn digamma entr erf erfc erfcinv erfcx erfinv exp1 expi expit factorial fresnel gamma gammaln
gammasgn i0 i0e i1 i1e log_ndtr log_softmax loggamma logit logsumexp ndtr ndtri sici softmax
spence wofz
""".split()

SPECIAL_OF_TWO = """
beta betaln boxcox boxcox1p comb gammainc gammaincc kl_div owens_t poch rel_entr xlog1py xlogy
zeta
""".split()

SPECIAL = [
    *(f"special.{name}(unit)" for name in SPECIAL_OF_ONE),
    *(f"special.{name}(x)" for name in SPECIAL_OF_ONE),
    *(f"special.{name}(positive, unit)" for name in SPECIAL_OF_TWO),
    *(f"special.{name}(above, positive)" for name in SPECIAL_OF_TWO),
    "special.bernoulli(6)",
    "special.bessel_jn(x, v=3)",
    "special.betainc(positive, above, unit)",
    "special.expn(2, positive)",
    "special.hyp1f1(positive, above, unit)",
    "special.hyp2f1(positive, unit, above, unit)",
    "special.multigammaln(above + 2, 2)",
    "special.polygamma(2, positive)",
    "special.log_ndtr(x - 10)",
    "special.sph_harm_y(jnp.array([2]), jnp.array([1]), unit[0, :1], unit[1, :1], n_max=3)",
    "special.logsumexp(x, axis=0, b=positive)",
    "jax.grad(lambda v: special.gammaln(v).sum())(positive)",
    "jax.grad(lambda v: special.i0(v).sum())(x)",
    "jax.grad(lambda v: special.ndtri(v).sum())(unit)",
]

LINALG = [
    "sla.block_diag(x, square, three)",
    "sla.cho_factor(spd)",
    "sla.cho_solve((jnp.linalg.cholesky(spd), True), rhs)",
    "sla.cholesky(spd, lower=True)",
    "sla.circulant(three)",
    "sla.companion(row)",
    "sla.convolution_matrix(three, 4)",
    "sla.det(square)",
    "sla.eigh(spd)",
    "sla.eigh_tridiagonal(row, three, eigvals_only=True)",
    "sla.expm(square)",
    "sla.expm_frechet(square, spd)",
    "sla.fiedler(row)",
    "sla.fiedler_companion(row)",
    "sla.funm(spd, jnp.sin)",
    "sla.hankel(three, row)",
    "sla.hessenberg(square)",
    "sla.inv(spd)",
    "sla.leslie(row, three)",
    "sla.lu(square)",
    "sla.lu_factor(square)",
    "sla.lu_solve(sla.lu_factor(spd), rhs)",
    "sla.polar(tall, method='svd')",
    "sla.polar(square)",
    "sla.qr(tall)",
    "sla.qr_multiply(tall, vec[:5])",
    "sla.rsf2csf(*sla.schur(square))",
    "sla.schur(square)",
    "sla.solve(spd, rhs)",
    "sla.solve(spd, rhs, assume_a='pos')",
    "sla.solve_sylvester(spd, spd, square)",
    "sla.solve_triangular(lower, rhs, lower=True)",
    "sla.sqrtm(spd)",
    "sla.svd(tall)",
    "sla.toeplitz(three, row)",
]

CONSTANT_MATRICES = [
    "sla.dft(4)",
    "sla.hadamard(4)",
    "sla.helmert(4)",
    "sla.hilbert(4)",
    "sla.invhilbert(4)",
    "sla.invpascal(4)",
    "sla.pascal(4)",
]

SIGNAL = [
    "signal.convolve(x, square, mode='same')",
    "signal.convolve2d(x, square)",
    "signal.correlate(vec, three)",
    "signal.correlate2d(square, x, mode='valid')",
    "signal.csd(samples, samples * 2, nperseg=16)",
    "signal.detrend(x)",
    "signal.detrend(x, type='constant')",
    "signal.fftconvolve(x, square)",
    "signal.istft(signal.stft(samples, nperseg=16)[2], nperseg=16)",
    "signal.stft(samples, nperseg=16)",
    "signal.welch(samples, nperseg=16)",
    "dct.dct(x)",
    "dct.dctn(x, norm='ortho')",
    "dct.idct(x)",
    "dct.idctn(x)",
    "ndimage.map_coordinates(x, [positive / 2, positive / 3], order=1)",
    "ndimage.map_coordinates(x, [positive, positive], order=0, mode='nearest')",
    "integrate.trapezoid(x, dx=number)",
    "interpolate.RegularGridInterpolator((jnp.arange(3.0), jnp.arange(4.0)), x)"
    "(positive[:, :2] / 4)",
    "vq.vq(tall, tall[:2])",
    "spatial.Rotation.from_rotvec(three).as_matrix()",
    "spatial.Rotation.from_quat(row).apply(three)",
    "spatial.Rotation.from_euler('xyz', three).as_quat()",
    "spatial.Slerp.init(jnp.array([0.0, 1.0]), spatial.Rotation.from_rotvec(jnp.stack([three,"
    " three * 2])))(0.3).as_rotvec()",
    "optimize.minimize(lambda v: ((v - three) ** 2).sum(), three * 0, method='BFGS').x",
    "sparse_linalg.cg(spd, row)",
    "sparse_linalg.bicgstab(spd, row)",
    "sparse_linalg.gmres(spd, row)",
    "sparse_linalg.cg(lambda v: spd @ v, row, maxiter=3)",
]

# What follows the values in the arguments of a distribution, where it has parameters of its own.
PARAMETERS = {
    "bernoulli": "unit",
    "beta": "above, positive",
    "betabinom": "9, above, positive",
    "binom": "9, unit",
    "chi2": "above",
    "dirichlet": "rates",
    "gamma": "above",
    "gennorm": "positive",
    "geom": "unit",
    "multinomial": "9, rates / rates.sum()",
    "multivariate_normal": "row, spd",
    "nbinom": "positive, unit",
    "pareto": "positive",
    "poisson": "positive",
    "t": "above",
    "truncnorm": "-1.0, 2.0",
    "vonmises": "positive",
    # Between 0 and 1 at every kind: elsewhere XLA's CPU compiler in jaxlib 0.10 returns what it
    # never wrote, under jax.jit as well.
    "wrapcauchy": "real / 9 + 0.5",
}

# What a distribution is looked at, where that is not any number.
POINTS = {
    **dict.fromkeys(("bernoulli", "betabinom", "binom", "geom", "nbinom", "poisson"), "counts"),
    "dirichlet": "rates / rates.sum()",
    "multinomial": "jnp.array([2, 3, 0, 4])",
}


def _distributions() -> Iterator[str]:
    for name in DISTRIBUTIONS:
        module = importlib.import_module(f"jax.scipy.stats.{name}")
        parameters = PARAMETERS.get(name, "")
        for function, value in vars(module).items():
            if function.startswith("_") or not callable(value) or isinstance(value, type):
                continue
            takes_points = next(iter(inspect.signature(value).parameters)) in ("x", "k", "q", "p")
            points = "unit" if function in ("ppf", "isf") else POINTS.get(name, "x")
            given = ", ".join(filter(None, (points if takes_points else "", parameters)))
            yield f"stats.{name}.{function}({given})"


STATS = [
    "stats.mode(x)",
    "stats.mode(x, axis=1, keepdims=True)",
    "stats.rankdata(x)",
    "stats.rankdata(x, method='dense', axis=0)",
    "stats.sem(x)",
    "stats.gaussian_kde(vec).evaluate(other)",
    "stats.gaussian_kde(x).logpdf(y)",
    "stats.gaussian_kde(vec).resample(key, (5,))",
    "stats.norm.pdf(x, scalar, number)",
    "jax.grad(lambda v: stats.norm.logcdf(v).sum())(x)",
]


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    yield from expressions("jax.scipy.special", {"fih": SPECIAL, "c": SPECIAL[:58]})
    yield from expressions("jax.scipy.linalg", {"fc": LINALG, "f": CONSTANT_MATRICES})
    yield from expressions("jax.scipy, the rest", {"fc": SIGNAL})
    yield from expressions("jax.scipy.stats", {"fi": [*_distributions(), *STATS]})
