"""Operators on the device compute what they compute on the CPU, with the same gradients."""

import copy
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

import snaprt.torch
from snaprt.errors import UsageError
from snaprt.torch.lowering import matrices, operators, randomness, slopes, versions, windows

_linalg: Any = torch.linalg


def _positive(a: torch.Tensor) -> torch.Tensor:
    return a @ a.mT + torch.eye(6, device=a.device)


def _on(a: torch.Tensor, *values: Any) -> torch.Tensor:
    return torch.tensor(values, device=a.device)


def _bag(*offsets: int, **options: Any) -> Callable[..., torch.Tensor]:
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        indices = _on(a, 0, 1, 1, 3, 4, 0)
        return functional.embedding_bag(indices, b[0], _on(a, *offsets), **options)

    return call


def _ctc(
    targets: Any, inputs: Any = (6, 5, 4), lengths: Any = (3, 2, 1), **options: Any
) -> Callable[..., torch.Tensor]:
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scores = b.reshape(6, 3, 6).log_softmax(-1)
        return functional.ctc_loss(scores, _on(a, *targets), inputs, lengths, **options)

    return call


def _window(name: str) -> Callable[..., torch.Tensor]:
    make = getattr(torch, name)
    return lambda a, b: (
        a[0] * make(6, device=a.device) + b[0] * make(6, periodic=False, device=a.device)
    )


def _stft(a: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(8, device=a.device)
    return torch.stft(a.flatten(), 8, 4, window=window, return_complex=True)


def _grouped(left: Any, right: Any, *ends: int) -> torch.Tensor:
    # PyTorch wants rows of 16 bytes, or a multiple.
    left, right = (functional.pad(t, (0, -t.shape[-1] % 4)) for t in (left, right))
    ends_of_groups = torch.tensor(ends, dtype=torch.int32, device=left.device) if ends else None
    return functional.grouped_mm(left, right, offs=ends_of_groups)


def _attention(mask: Any = None, **options: Any) -> Callable[..., torch.Tensor]:
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        given = None if mask is None else mask(b[:, :, :5])
        return functional.scaled_dot_product_attention(
            a, b[:, :5], a.mT[:, :5] * 2, given, **options
        )

    return call


def _blind(b: torch.Tensor) -> torch.Tensor:
    """Return a mask by which the second query sees nothing, and others some keys."""
    mask = b > 0
    mask[:, 1] = False
    return mask


def _images(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b]).reshape(1, 6, 6, 6)


_PADDED = ([1, 2, 2], [3, 1, 0], [5, 0, 0])

# Each takes `a`, well-conditioned, and `b`, both of shape (3, 6, 6).
CASES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "grouped rows": lambda a, b: _grouped(a[..., :4].flatten(0, 1), b[:, :4], 4, 4, 18),
    "grouped columns": lambda a, b: _grouped(a[..., :4], b[:, :4].mT.flatten(0, 1).mT, 4, 4, 20),
    "grouped sums": lambda a, b: _grouped(
        a.transpose(0, 1).flatten(1), b.flatten(0, 1)[[*range(18), 0, 0]], 4, 9, 20
    ),
    "grouped, each alone": lambda a, b: _grouped(a[..., :4], b[:, :4]),
    "attention": _attention(),
    "causal attention": _attention(is_causal=True, scale=0.3),
    "attention of one that sees nothing": _attention(_blind),
    "attention with a bias": _attention(lambda b: b.masked_fill(~_blind(b), -torch.inf)),
    "attention of groups": lambda a, b: functional.scaled_dot_product_attention(
        a[:2].repeat(2, 1, 1), b[:2], a[1:], enable_gqa=True
    ),
    "gaussian_nll_loss of small variances": lambda a, b: functional.gaussian_nll_loss(
        a, b.detach(), (b * b / 9).clone(), full=True, eps=0.1
    ),
    "all and any": lambda a, b: (
        a * (a == a)._is_all_true() + b * (b > 99)._is_any_true() + b * torch._is_all_true(b == a)
    ),
    "log_softmax of a number": lambda a, b: a[0, 0, 0].log_softmax(0) + b.mean(),
    "clamp by a tensor and a number": lambda a, b: torch.clamp(a, 0, b.max().detach() / 2),
    "clamp_ by a number and a tensor": lambda a, b: (a * 1).clamp_(min=b.mean().detach(), max=0.5),
    "solve": lambda a, b: _linalg.solve(a[0], b[0]),
    "solve a vector": lambda a, b: _linalg.solve(a[0], b[0, 0]),
    "solve from the right": lambda a, b: _linalg.solve(a, b[:, :2], left=False),
    "solve a batch": lambda a, b: _linalg.solve(a, b),
    "solve a batch of vectors": lambda a, b: _linalg.solve(a, b[:, 0]),
    "solve with one right side": lambda a, b: _linalg.solve(a, b[0]),
    "solve_ex": lambda a, b: _linalg.solve_ex(a, b[..., :2]).result,
    "inv": lambda a, b: _linalg.inv(a) + _linalg.inv_ex(a).inverse + b,
    "solve_triangular": lambda a, b: (
        _linalg.solve_triangular(a, b, upper=True)
        + _linalg.solve_triangular(a[0], b, upper=False, left=False)
        + _linalg.solve_triangular(a / 6, b[0], upper=False, unitriangular=True)
    ),
    "lu_solve": lambda a, b: (
        _linalg.lu_solve(*_linalg.lu_factor(a), b)
        + _linalg.lu_solve(*_linalg.lu_factor(a), b, left=False)
        + _linalg.lu_solve(*_linalg.lu_factor(a), b, adjoint=True)
        + _linalg.lu_solve(*_linalg.lu_factor(a), b, adjoint=True, left=False)
    ),
    "lu": lambda a, b: _linalg.lu(a).L @ b + _linalg.lu(b).P,
    "lu_unpack": lambda a, b: torch.lu_unpack(*_linalg.lu_factor(a))[2] @ b,
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, _linalg.cholesky(_positive(a))),
    "cholesky_solve of upper factors": lambda a, b: torch.cholesky_solve(
        b, _linalg.cholesky(_positive(a), upper=True), upper=True
    ),
    "cholesky_inverse": lambda a, b: torch.cholesky_inverse(_linalg.cholesky(_positive(a))) + b,
    "lstsq": lambda a, b: _linalg.lstsq(a[..., :4], b[..., :2]).solution,
    "lstsq of vectors": lambda a, b: _linalg.lstsq(a[..., :4], b[..., 0]).solution,
    "lstsq of fewer rows": lambda a, b: _linalg.lstsq(a[:, :4], b[:, :4, :2]).solution,
    "lstsq rank": lambda a, b: _linalg.lstsq(a, b).rank + a.sum() + b.sum(),
    "qr": lambda a, b: (
        _linalg.qr(a[..., :4], mode="complete").Q.detach().abs() + _linalg.qr(b).R.abs()
    ),
    "det": lambda a, b: _linalg.det(a) + torch.det(b) + b.det(),
    "slogdet": lambda a, b: torch.slogdet(b)[1] * _linalg.slogdet(a)[0] + b.slogdet().logabsdet,
    "logdet": lambda a, b: torch.logdet(_positive(a)) + _positive(b).logdet(),
    "logdet of a negative determinant": lambda a, b: torch.logdet(-a[:, :5, :5].detach()) + a.sum(),
    "mT": lambda a, b: a.mT @ b + b.mH + b.adjoint(),
    "angle": lambda a, b: torch.angle(torch.complex(a, b)) + b.angle() + torch.angle(a),
    **{
        name: _window(name)
        for name in (
            *("bartlett_window", "blackman_window", "hamming_window", "hann_window"),
            "kaiser_window",
        )
    },
    "windows with parameters": lambda a, b: (
        a * torch.hamming_window(6, True, 0.5, 0.4, device=a.device)
        + b * torch.kaiser_window(6, True, 4.0, device=a.device)
    ),
    "stft": lambda a, b: torch.view_as_real(_stft(a)),
    "istft": lambda a, b: torch.istft(_stft(a), 8, 4, window=torch.hann_window(8, device=a.device)),
    "rrelu": lambda a, b: functional.rrelu(a) + torch.rrelu(b, 0.1, 0.2),
    "searchsorted": lambda a, b: torch.searchsorted(a.detach().sort().values, b.detach()) + a.sum(),
    "searchsorted from the right": lambda a, b: (
        torch.searchsorted(a.detach().round().sort().values, b.detach().round(), right=True)
        + a.sum()
    ),
    "searchsorted with a sorter": lambda a, b: (
        torch.searchsorted(a.detach(), b.detach(), sorter=a.argsort()) + a.sum()
    ),
    "take_along_dim": lambda a, b: (
        torch.take_along_dim(a, b.argsort(1)[:, :2], 1)
        + a.take_along_dim(b.argmax(1, keepdim=True), 1)
        + torch.take_along_dim(b, a.flatten().argsort()[:6])
    ),
    "embedding by frequency": lambda a, b: functional.embedding(
        _on(a, 0, 0, 3), b[0], scale_grad_by_freq=True
    ),
    "embedding with padding": lambda a, b: functional.embedding(_on(a, 0, 1, 3), b[0], 1),
    "embedding_bag of rows": lambda a, b: functional.embedding_bag(_on(a, [0, 1], [1, 3]), b[0]),
    **{
        f"embedding_bag, {mode}, {padding}": _bag(0, 2, 2, 5, mode=mode, padding_idx=padding)
        for mode in ("sum", "mean", "max")
        for padding in (None, 1)
    },
    "embedding_bag with the last offset": _bag(0, 2, 2, 6, mode="sum", include_last_offset=True),
    "embedding_bag with weights": lambda a, b: functional.embedding_bag(
        _on(a, 0, 1, 1, 3), b[0], _on(a, 0, 2), mode="sum", per_sample_weights=a[0, 0, :4]
    ),
    "cdist": lambda a, b: torch.cdist(a, b) + torch.cdist(a, b, p=1) + torch.cdist(a, b, p=3.0),
    "cdist by the largest": lambda a, b: torch.cdist(a, b, p=float("inf")),
    "pdist": lambda a, b: functional.pdist(a[0]) + functional.pdist(b[0]),
    "fill_diagonal_": lambda a, b: (
        (a[0] * 1).fill_diagonal_(2.0).mm((b[:, 0] * 1).fill_diagonal_(3.0).mT)
    ),
    "fftfreq": lambda a, b: (
        a * torch.fft.fftfreq(6, device=a.device) + b * torch.fft.rfftfreq(10, device=a.device)
    ),
    "fold": lambda a, b: functional.fold(
        functional.unfold(_images(a, b), 3, padding=1, stride=2), (6, 6), 3, padding=1, stride=2
    ),
    "fold of one": lambda a, b: functional.fold(
        torch.cat([a, b]).reshape(12, 18)[:, :8],
        (5, 9),
        (2, 3),
        dilation=(2, 2),
        padding=(0, 1),
        stride=2,
    ),
    "transposed convolution of groups": lambda a, b: functional.conv_transpose2d(
        _images(a, b),
        torch.cat([a, b])[:, :, :5].reshape(6, 2, 3, 5),
        _on(a, 1.0, 2, 3, 4),
        stride=(2, 3),
        padding=(1, 0),
        output_padding=(1, 2),
        groups=2,
        dilation=(2, 1),
    ),
    "transposed convolution of time": lambda a, b: functional.conv_transpose1d(
        a, torch.cat([b, b]), groups=3
    ),
    "conv_tbc": lambda a, b: functional.conv_tbc(a, b[:2], b[0, 0], 1),
    "dilated max_pool": lambda a, b: (
        functional.max_pool2d(_images(a, b), 2, 1, 1, dilation=2, ceil_mode=True)
        * functional.max_pool3d(_images(a, b), (1, 2, 2), 1, (0, 1, 1), dilation=2)
    ),
    "max_pool of time": lambda a, b: functional.max_pool1d(a, 3, 2, dilation=2) * b[:, :, :1],
    "max_pool and back": lambda a, b: functional.max_unpool2d(
        *functional.max_pool2d(_images(a, b), 2, return_indices=True), (2, 2)
    ),
    "max_unpool of windows that overlap": lambda a, b: functional.max_unpool2d(
        *functional.max_pool2d(_images(a, b), 3, 1, return_indices=True), (3, 3), (1, 1)
    ),
    "smooth resize": lambda a, b: torch.cat(
        [
            functional.interpolate(_images(a, b), (3, 9), mode="bicubic", antialias=True).flatten(),
            functional.interpolate(
                _images(a, b), scale_factor=(0.4, 1.7), mode="bilinear", antialias=True
            ).flatten(),
            functional.interpolate(
                _images(a, b), (2, 5), mode="bilinear", antialias=True, align_corners=True
            ).flatten(),
        ]
    ),
    "resize to a square": lambda a, b: (
        functional.interpolate(_images(a, b), 4, mode="bicubic")
        + functional.interpolate(input=_images(a, b), size=4, mode="bilinear", align_corners=True)
    ),
    "adaptive_max_pool": lambda a, b: torch.cat(
        [t.flatten() for t in functional.adaptive_max_pool2d(_images(a, b), (4, 5), True)]
    ),
    "householder_product": lambda a, b: (
        _linalg.householder_product(a[..., :4], b[:, 0, :3]) + torch.orgqr(a[0, :, :4], b[0, 0, :4])
    ),
    "quantile": lambda a, b: (
        a.quantile(0.3, 1, interpolation="nearest") * b.quantile(0.7, 1, interpolation="midpoint")
    ),
    "view of bits": lambda a, b: (
        a.detach().half().view(torch.int32).view(torch.float16)
        + b.detach().view(torch.uint8).view(torch.int16).view(torch.float32)
        + torch.view_as_real(a.detach().view(torch.complex64)).reshape(a.shape)
        + b.detach().view(torch.complex64).view(torch.float32) * (a.sum() + b.sum())
    ),
    **{
        f"index_reduce, {reduce}, {of_self}": lambda a, b, r=reduce, s=of_self: (
            a.round().index_reduce(1, _on(a, 4, 0, 4), b[:, :3].round(), r, include_self=s) * 1
        ).index_reduce_(-1, _on(a, 1), b[..., :1], r, include_self=s)
        for reduce in ("mean", "prod", "amax", "amin")
        for of_self in (True, False)
    },
    "scatter_reduce, prod": lambda a, b: a.round().scatter_reduce(
        0, (b > 0).long(), b.round(), "prod"
    ),
    "histc": lambda a, b: (
        torch.histc(_on(a, 0.0, -1.5, 2, 0.5, 1, -2.5), 3)
        + torch.histc(b.detach(), 3, -1, 1) * (a.sum() + b.sum())
    ),
    "bincount": lambda a, b: (
        torch.bincount(_on(a, 0, 2, 2, 5), a[0, 0, :4].detach()) * (a.sum() + b.sum())
    ),
    "multilabel_margin_loss": lambda a, b: (
        functional.multilabel_margin_loss(b[0, :2], _on(a, [3, 0, -1, 2, 1, 0], [1, 2, 3, 4, 5, 0]))
        + functional.multilabel_margin_loss(a[0, 0], _on(a, -1, 2, 1, 0, 3, 4))
    ),
    "fake_quantize": lambda a, b: (
        torch.fake_quantize_per_tensor_affine(a, 0.1, 1, -5, 7)
        + torch.fake_quantize_per_tensor_affine(b, b.detach().max(), _on(a, 2).int(), 0, 3)
        + torch.fake_quantize_per_channel_affine(
            b, _on(a, 0.1, 0.2, 0.3), _on(a, 1, 2, 0).int(), 0, -5, 7
        )
    ),
    "polygamma": lambda a, b: (
        a.digamma() + torch.polygamma(1, b) + a.abs().polygamma(2) * b.lgamma()
    ),
    "log_ndtr": lambda a, b: torch.special.log_ndtr(a * 3) + torch.special.log_ndtr(-b),
    "eig": lambda a, b: (
        _linalg.eig(a)[1].abs() * _linalg.eigvals(b).abs()[..., None] + _linalg.eigvals(b[0]).real
    ),
    "eigh of a triangle": lambda a, b: (
        _linalg.eigh(a)[0] + _linalg.eigvalsh(b, UPLO="U") + _linalg.eigh(b)[1].abs()[0, 0]
    ),
    "cholesky of a triangle": lambda a, b: (
        _linalg.cholesky(_positive(a) + b.triu(1))
        + _linalg.cholesky(_positive(b) + a.tril(-1), upper=True)
    ),
    "copies": lambda a, b: b.to(torch.float32, False, True).mul_(2) + a.to(b, False, True),
    "tensor_split": lambda a, b: torch.cat(
        [
            torch.tensor_split(a, indices=(1, 4), dim=1)[1],
            torch.tensor_split(b, sections=2, dim=1)[0],
            a.tensor_split(3, 1)[0],
        ],
        1,
    ),
    "new_tensor": lambda a, b: (
        a * b.new_tensor([1.0, 2, 3, 4, 5, 6]) + b * a.new_tensor(3) + b.new_tensor(True)
    ),
    "sum of booleans": lambda a, b: a + ((b > 0) + (a.detach() > 0) + (b > 1)),
    "ctc_loss": _ctc(_PADDED),
    "ctc_loss of targets in a row": _ctc((1, 2, 2, 3, 1, 5), reduction="none"),
    "ctc_loss with lengths on the CPU": _ctc(
        _PADDED, torch.tensor([6, 5, 3]), torch.tensor([3, 2, 0]), reduction="sum", blank=4
    ),
    "ctc_loss of the impossible": _ctc(_PADDED, (3, 5, 0), reduction="none", zero_infinity=True),
    "ctc_loss of probabilities": lambda a, b: functional.ctc_loss(
        -b[0].abs(), _on(a, 1, 2), _on(a, 6), _on(a, 2)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_it_does_on_the_cpu(name: str) -> None:
    a, b = torch.randn(3, 6, 6) + 4 * torch.eye(6), torch.randn(3, 6, 6)

    def run(function: Callable[..., Any], device: Any) -> list[torch.Tensor | None]:
        inputs = [x.clone().to(device).requires_grad_() for x in (a, b)]
        result = function(*inputs)
        weights = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape).to(device)
        (result * weights).sum().backward()
        results = [result.detach(), *[x.grad for x in inputs]]
        return [None if x is None else x.cpu() for x in results]

    case = CASES[name]
    wanted = run(case, "cpu")
    for ours in (case, snaprt.torch.wrap(lambda a, b: case(a, b))):
        for got, want in zip(run(ours, snaprt.torch.device()), wanted, strict=True):
            want = torch.zeros_like(a) if want is None else want
            got = torch.zeros_like(a) if got is None else got
            torch.testing.assert_close(
                got, want, rtol=1e-3, atol=1e-3, equal_nan=True, check_dtype=False
            )


def test_rrelu_draws_while_it_trains() -> None:
    x = torch.full((100,), -1.0, device=snaprt.torch.device())
    drawn = -torch.nn.RReLU(0.1, 0.3)(x).cpu()
    assert drawn.min() >= 0.1
    assert drawn.max() <= 0.3
    assert len(drawn.unique()) > 50


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_an_embedding_renormalizes_the_rows_that_it_uses(kind: Any, is_wrapped: bool) -> None:
    plain = kind(4, 3, max_norm=0.5)
    ours = copy.deepcopy(plain)
    ours = snaprt.torch.wrap(ours) if is_wrapped else ours.to(snaprt.torch.device())
    indices = torch.tensor([[1, 3, 1]])
    results = [m(indices.to(m.weight.device)) for m in (plain, ours)]
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(results[1].cpu(), results[0])
    torch.testing.assert_close(ours.weight.cpu(), plain.weight)
    torch.testing.assert_close(ours.weight.grad.cpu(), plain.weight.grad)


_EDGES = torch.tensor(
    [
        [0.0, -0.0, 1.0, 1.0, -1.0, -1.0],
        [2.0, 2.0, 0.0, 3.0, -3.0, 0.5],
        [6.0, 6.0, -6.0, 3.0, 3, 0],
    ]
)

# Each takes values at which it is not smooth: zeros, bounds and equal ones.
NOT_SMOOTH: dict[str, Callable[[Any], torch.Tensor]] = {
    "abs": lambda x: x.abs(),
    "l1_loss": lambda x: functional.l1_loss(x, x.detach()),
    "relu6": functional.relu6,
    "hardtanh": lambda x: functional.hardtanh(x, 0, 2),
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "leaky_relu": functional.leaky_relu,
    "logsigmoid": functional.logsigmoid,
    "cross entropy of logits": lambda x: functional.binary_cross_entropy_with_logits(x, x.detach()),
    "cross entropy": lambda x: functional.binary_cross_entropy(
        x.clamp(-2, 9).sigmoid().round(), x.detach().sigmoid()
    ),
    "clamp": lambda x: x.clamp(0, 2),
    "clamp_": lambda x: (x * 1).clamp_(max=2),
    "clamp_min": lambda x: torch.clamp_min(x, 1),
    "clamp by tensors": lambda x: x.clamp(_on(x, 0.0), _on(x, 2.0)),
    "clamp before a singularity": lambda x: x.clamp(-1, 1).acos(),
    "clamp of integers": lambda x: x * x.detach().int().clamp(-1, 2),
    "max": lambda x: x.max(1).values * x.max(-1, keepdim=True).values,
    "max of a column": lambda x: torch.max(x[:, :1] * 0, 0)[0],
    "min": lambda x: x.min(1)[0] + x.min(0).indices.sum(),
    "max of a number": lambda x: x[0, 0].max(0).values * x,
    "cummax": lambda x: x.cummax(1).values + x.cummin(-1).indices,
    "cummin": lambda x: x.cummin(0).values,
    "adaptive_max_pool": lambda x: functional.adaptive_max_pool2d(x[None], 2),
    "norm": lambda x: (x * 0).norm() + (x * 0).norm(dim=1) + x.norm(1, 0, keepdim=True).sum(),
    "other norms": lambda x: x.norm(3) + (x * 0).norm(1.5) + x.norm(-1, dim=1) + x.norm(torch.inf),
    "norm in another type": lambda x: torch.linalg.vector_norm(x.half(), dtype=torch.float32),
    "matrix norm": lambda x: torch.linalg.matrix_norm(x * 0) + torch.norm(x * 0, p="fro"),
    "dist": lambda x: torch.dist(x, x) + torch.dist(x, x.detach(), 1),
    "normalize": lambda x: functional.normalize(x * 0, dim=1),
    "cosine_similarity": lambda x: functional.cosine_similarity(x * 0, x),
    "renorm": lambda x: torch.renorm(x * 0, 2, 0, 1.0) + torch.renorm(x, 2, 0, 1.0),
    "std": lambda x: (x * 0).std(1) + x.std(-1, correction=0) + x.std() + torch.std_mean(x * 0)[0],
    "pow": lambda x: x**0 + x.pow(2) + x.detach() ** 0.0,
    "pow by nothing": lambda x: x**0 + x.pow(0.0),
    "pow by a tensor": lambda x: x.abs() ** x.relu() + x ** (x.detach() * 0),
    "division with rounding": lambda x: (
        torch.div(x, 0.7, rounding_mode="floor") + torch.div(x.exp(), x + 9, rounding_mode="trunc")
    ),
    "round to decimals": lambda x: torch.round(x / 3, decimals=1),
    "copysign": lambda x: torch.copysign(x.detach() + 1, x),
    "fill_": lambda x: (x * 1).fill_(3) + (x * 1).zero_() + (x * 1).bernoulli_(1.0),
    "fill_ by a tensor": lambda x: (x.detach() * 1).fill_(x[0, 2]),
    "bernoulli": lambda x: torch.bernoulli(x.clamp(0, 1).round()) + torch.poisson(x * 0),
    "nextafter": lambda x: torch.nextafter(x, x.detach() + 1),
    "i0": torch.i0,
    "angle of real numbers": lambda x: x.angle(),
    "number of differences": lambda x: torch.cdist(x, x.detach() + 1, p=0).sum(),
    "norm of a number": lambda x: (
        functional.normalize(x[0, 2], dim=0) * torch.linalg.vector_norm(x[1, 0], dim=-1)
    ),
    "softmax of nothing": lambda x: torch.ops.aten._safe_softmax(
        x.masked_fill(x.detach() < 3, -torch.inf), 1
    ),
    "atan2": lambda x: torch.atan2(x * 0, x),
    "angle": lambda x: torch.complex(x.abs(), x).angle(),
    "sinc": lambda x: torch.sinc(x) + torch.sinc(x / 1e12),
    "exponentials of large numbers": lambda x: (
        functional.elu(x * 50)
        + functional.selu(x * 50)
        + functional.celu(x * 50, 2.0)
        + functional.softplus(x * 50)
        + functional.softplus(x, 3.0, 4.0)
        + functional.mish(x * 50)
    ),
    "xlogy": lambda x: (
        torch.xlogy(x.relu(), x.detach() + 3)
        + torch.xlogy(x.abs(), x.abs())
        + torch.special.xlog1py(x.relu(), x.detach().abs())
        + torch.xlogy(2, x.exp())
    ),
    "logit": lambda x: torch.logit(x / 8 + 0.5) + torch.logit(x, 0.1),
    "fmod": lambda x: x.fmod(torch.full_like(x, torch.inf)) + x.fmod(2) + torch.fmod(x.exp(), 3),
}


@pytest.mark.parametrize("name", NOT_SMOOTH)
def test_a_gradient_is_that_of_the_cpu_where_there_is_none(name: str) -> None:
    function = NOT_SMOOTH[name]

    def run(function: Callable[..., torch.Tensor], device: Any) -> tuple[torch.Tensor, Any]:
        x = _EDGES.clone().to(device).requires_grad_()
        result = function(x)
        (
            result * torch.linspace(1, 2, result.numel(), device=device).view_as(result)
        ).sum().backward()
        return result.detach().cpu(), None if x.grad is None else x.grad.cpu()

    wanted = run(function, "cpu")
    for ours in (function, snaprt.torch.wrap(lambda x: function(x))):
        for got, want in zip(run(ours, snaprt.torch.device()), wanted, strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "mT of a vector": (lambda x: x[0].mT, RuntimeError, "Got 1-D tensor"),
    "mH of a vector": (lambda x: x[0].mH, RuntimeError, "Got 1-D tensor"),
    "adjoint of a number": (lambda x: x[0, 0].adjoint(), RuntimeError, "Got 0-D tensor"),
    "bits of another size": (lambda x: x.view(torch.float64), UsageError, "JAX_ENABLE_X64=1"),
    "a gradient of full matrices": (
        lambda x: torch.linalg.svd(x)[0],
        UsageError,
        "full_matrices=False",
    ),
    "packed sequences": (
        lambda x: torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2])),
        UsageError,
        "pad the sequences",
    ),
    "sparse tensors": (lambda x: x.to_sparse(), UsageError, "use dense tensors"),
    "what torchax lacks": (lambda x: torch.geqrf(x), UsageError, "x.cpu()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_available_says_what_to_do(name: str) -> None:
    function, kind, part = REFUSED[name]
    x = torch.ones(3, 2, device=snaprt.torch.device(), requires_grad=True)
    for ours in (function, snaprt.torch.wrap(lambda x: function(x))):
        with pytest.raises(kind, match=re.escape(part)):
            ours(x)


INTEGERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "division with rounding": lambda x: torch.stack(
        [torch.div(x, d, rounding_mode=mode) for d in (3, -3) for mode in ("floor", "trunc")]
    ),
    "powers": lambda x: torch.stack([x**7, x.square(), x.pow(x.abs())]),
    "extremes without those before": lambda x: torch.stack(
        [
            x.scatter_reduce(0, _on(x, 0, 0, 2), x * 1, reduce, include_self=False)
            for reduce in ("amin", "amax", "prod")
        ]
    ),
    "sums": lambda x: torch.cat([x.cumsum(0), x.cumprod(0), x.sum()[None], x.prod()[None]]),
    "sums in another type": lambda x: x.half().sum(dtype=torch.float32) + x.sum(dtype=torch.half),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_computed_exactly_in_the_dtypes_of_pytorch(
    name: str, dtype: torch.dtype
) -> None:
    function = INTEGERS[name]
    x = torch.tensor([5, 11, 249 if dtype == torch.uint8 else -7], dtype=dtype)
    wanted = function(x)
    for ours in (function, snaprt.torch.wrap(lambda x: function(x))):
        got = ours(x.to(snaprt.torch.device())).cpu()
        assert got.dtype == {torch.int64: torch.int32}.get(wanted.dtype, wanted.dtype)
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("read", [int, float, bool, complex, operator.index])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_of_one_element_is_read_whatever_its_shape(
    read: Callable[[Any], Any], shape: tuple[int, ...]
) -> None:
    plain = torch.full(shape, 3, dtype=torch.int32)
    assert read(plain.to(snaprt.torch.device())) == read(plain)


@pytest.mark.parametrize("read", [int, float, bool, complex, operator.index])
def test_a_tensor_of_several_elements_is_not_read(read: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        read(torch.arange(2, device=snaprt.torch.device()))


def test_what_a_torch_lacks_has_stand_ins_while_torchax_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {("add", "Tensor"), ("add", "lost"), ("lost", "default"), ("lost", "")}
    monkeypatch.setattr(versions, "_named_by_torchax", lambda: named)
    with versions._stand_ins(torch):
        assert torch.ops.aten.lost.default.name() == "aten::lost.default"
        assert "not in this torch" in repr(torch.ops.aten.add.lost)
    assert not hasattr(torch.ops.aten, "lost")
    assert not hasattr(torch.ops.aten.add, "lost")
    assert hasattr(torch.ops.aten.add, "Tensor")


_INDICES = torch.tensor([[0, 2, 1], [2, 1, 0]])

BY_NAME: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: torch.add(input=a, other=b, alpha=2),
    "add of a method": lambda a, b: a.add(other=b),
    "sub": lambda a, b: torch.sub(a, other=b),
    "addcmul": lambda a, b: torch.addcmul(input=a, tensor1=b, tensor2=b, value=0.5),
    "addcdiv of a method": lambda a, b: a.addcdiv(tensor1=b, tensor2=b + 3, value=0.5),
    "copy_": lambda a, b: (a * 1).copy_(other=b),
    "detach": lambda a, b: torch.detach(input=a) * b,
    "ldexp": lambda a, b: torch.ldexp(input=a, other=b),
    "adjoint": lambda a, b: torch.adjoint(input=a),
    "transpose": lambda a, b: torch.transpose(input=a, dim0=0, dim1=1),
    "narrow": lambda a, b: torch.narrow(input=a * 1, dim=1, start=0, length=2).mul_(other=2),
    "take_along_dim": lambda a, b: torch.take_along_dim(
        input=a, indices=_INDICES.to(a.device), dim=1
    ),
    "full_like": lambda a, b: torch.full_like(input=a, fill_value=2.0) * a,
    "where": lambda a, b: torch.where(condition=a > b, input=a, other=b),
    "maximum": lambda a, b: torch.maximum(input=a, other=b),
    "clamp": lambda a, b: torch.clamp(input=a, min=b),
    "pow": lambda a, b: torch.pow(input=a * a + 1, exponent=b),
    "div": lambda a, b: torch.div(input=a, other=b + 3, rounding_mode="floor") + a,
    "matmul": lambda a, b: torch.matmul(input=a, other=b.mT),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_operands_may_be_given_by_name(name: str) -> None:
    function = BY_NAME[name]
    given = [torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(2, -2, 6).reshape(2, 3)]
    wanted = function(*given)
    on_device = [tensor.to(snaprt.torch.device()) for tensor in given]
    for ours in (function, snaprt.torch.wrap(lambda a, b: function(a, b))):
        torch.testing.assert_close(ours(*on_device).cpu(), wanted)


def test_tensors_are_compared_by_name() -> None:
    a = torch.ones(3, device=snaprt.torch.device())
    assert torch.equal(input=a, other=a * 1)
    assert torch.allclose(input=a, other=a + 1e-9)


def test_pytorch_has_the_operators_that_are_computed_here() -> None:
    modules = (operators, matrices, randomness, slopes, windows)
    names = {name.partition(".")[0] for module in modules for name in module.OPERATORS}
    missing = {name for name in names if not hasattr(torch.ops.aten, name)}
    assert missing <= {"cholesky"}  # which it does not have from 2.14 on
