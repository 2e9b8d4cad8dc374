"""`torch.autograd.Function` inside of what is wrapped: as in PyTorch, values and gradients."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from programs import run_program
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import snaprt.torch
from snaprt.errors import UsageError

# A part of PyTorch's own interface, without annotations: ctx and what forward takes vary.
# mypy: disable-error-code="override, no-untyped-def, no-untyped-call"
# pyright: reportIncompatibleMethodOverride=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportFunctionMemberAccess=false


class Sign(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Quantize(Function):
    """Saves arguments and intermediate tensors, also as attributes."""

    @staticmethod
    def forward(ctx, x, scale, levels=7, name="q"):
        steps = x / scale
        rounded = steps.round()
        ctx.inside = steps.abs() < levels
        ctx.others = {"steps": steps, "levels": levels}
        ctx.save_for_backward(x, scale, rounded)
        return (rounded * scale).clamp(-levels * scale, levels * scale)

    @staticmethod
    def backward(ctx, gradient):
        x, _, rounded = ctx.saved_tensors
        assert ctx.others["levels"] == 7
        assert ctx.needs_input_grad[:2] == (True, True)
        of_scale = gradient * torch.where(ctx.inside, rounded - ctx.others["steps"], 7.0)
        return gradient * ctx.inside * x.cos(), of_scale, None, None


class Exp(Function):
    """Has the second style, and saves a result."""

    @staticmethod
    def forward(x, factor=2.0):
        return (x * factor).exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.factor = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result * ctx.factor, None


class Cube(Function):
    """Has a derivative of its own that is none: the second follows from it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 5 * x**2


class Several(Function):
    @staticmethod
    def forward(ctx, x, y, flag, nothing):
        assert flag == "sum"
        assert nothing is None
        ctx.save_for_backward(x, None, y)
        return x * y, x, (x > y), 3

    @staticmethod
    def backward(ctx, of_product, of_x, of_mask, of_number):
        assert of_number is None
        assert of_mask.dtype is torch.bool
        _, none, y = ctx.saved_tensors
        assert none is None
        return of_product * y + 2 * of_x, None, None, None


class Topk(Function):
    @staticmethod
    def forward(ctx, x, k):
        values, indices = x.topk(k)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    def backward(ctx, of_values, of_indices):
        assert of_indices is None
        (indices,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, device=of_values.device).scatter(-1, indices, of_values), None


class NonDifferentiable(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.mark_non_differentiable(y)
        return y, x * 3

    @staticmethod
    def backward(ctx, of_y, of_z):
        return of_z + of_y + 1


class Relu(Function):
    """Changes its argument in place."""

    @staticmethod
    def forward(ctx, x):
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * (result > 0) * 3


class Embed(Function):
    @staticmethod
    def forward(ctx, weight, ids):
        ctx.save_for_backward(ids)
        ctx.count = weight.shape[0]
        return weight[ids]

    @staticmethod
    def backward(ctx, gradient):
        (ids,) = ctx.saved_tensors
        with torch.enable_grad():
            one_hot = torch.nn.functional.one_hot(ids, ctx.count).to(gradient.dtype)
        return 2 * one_hot.T @ gradient, torch.ones(3)


class Outer(Function):
    """Calls other functions of this kind, in both directions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Exp.apply(x) + Sign.apply(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return Cube.apply(x) * gradient


class Scaled(Function):
    """Has gradients of other shapes and dtypes, which PyTorch fits."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return (gradient * scale).double(), gradient * x


class Square(Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, gradient):
        (z,) = ctx.saved_tensors
        return gradient * (3 * z).conj()


def _complex(x):
    z = Square.apply(torch.complex(x, 2 * x + 1))
    return z.real + 3 * z.imag


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.25))

    def forward(self, x):
        return Quantize.apply(self.inner(x), self.scale).sin()


def _several(x, y):
    product, same, mask, number = Several.apply(x, y, "sum", None)
    return product * number + same * torch.where(mask, 2.0, 3.0) + y


def _checkpointed(use_reentrant):
    return lambda x: checkpoint(lambda x: Exp.apply(x.sin()), x, use_reentrant=use_reentrant)


def _dirty(x):
    y = x * 2
    z = Relu.apply(y)
    return z * y + x


def _without_gradient(x):
    with torch.no_grad():
        y = Exp.apply(x)
    return x * y


X = torch.linspace(-1.3, 1.1, 8).reshape(2, 4)
Y = torch.linspace(-0.4, 0.9, 8).reshape(2, 4)

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "straight-through": (lambda x: Sign.apply(x) * x, (X,)),
    "gradient reversal": (lambda x: Reverse.apply(x, 0.5).sin(), (X,)),
    "saved and kept tensors": (lambda x, s: Quantize.apply(x, s).sin(), (X, torch.full((4,), 0.1))),
    "setup_context": (lambda x: Exp.apply(x) * x, (X,)),
    "setup_context with an argument": (lambda x: Exp.apply(x, 0.5) * x, (X,)),
    "several results": (_several, (X, Y)),
    "mark_non_differentiable": (lambda x: Topk.apply(x, 2)[0].sin(), (X,)),
    "a result without gradient": (lambda x: sum(NonDifferentiable.apply(x)), (X,)),
    "mark_dirty": (_dirty, (X,)),
    "integers": (lambda w: Embed.apply(w, torch.tensor([0, 1, 1])).sin(), (X,)),
    "a constant": (lambda x: Scaled.apply(torch.ones(2, 4), x), (X,)),
    "nested": (lambda x: Outer.apply(x).sin(), (X,)),
    "the same argument twice": (lambda x: Scaled.apply(x, x), (X,)),
    "sums over what was broadcast": (Scaled.apply, (X, torch.tensor([[2.0], [3.0]]))),
    "checkpoint": (_checkpointed(False), (X,)),
    "reentrant checkpoint": (_checkpointed(True), (X,)),
    "complex numbers": (_complex, (X,)),
    "no_grad": (_without_gradient, (X,)),
}


def _gradients(function, given, device="cpu"):
    leaves = [tensor.clone().to(device).requires_grad_() for tensor in given]
    result = function(*leaves)
    (
        result * torch.linspace(0.5, 1, result.numel()).reshape(result.shape).to(device)
    ).sum().backward()
    return [result.detach().cpu(), *[None if x.grad is None else x.grad.cpu() for x in leaves]]


def _assert_same(ours, plain, tolerance=1e-6):
    for mine, other in zip(ours, plain, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wrapped_function_has_the_values_and_gradients_of_pytorch(name: str) -> None:
    function, given = PROGRAMS[name]
    wrapped = snaprt.torch.wrap(function)
    expected = _gradients(function, given)
    for _ in range(2):  # traced, and warm
        _assert_same(_gradients(wrapped, given, snaprt.torch.device()), expected)


@pytest.mark.parametrize(
    "name", ["straight-through", "saved and kept tensors", "setup_context", "nested", "no_grad"]
)
def test_outside_of_wrapped_modules_autograd_runs_it(name: str) -> None:
    function, given = PROGRAMS[name]
    _assert_same(_gradients(function, given, snaprt.torch.device()), _gradients(function, given))


def test_a_module_trains_through_it() -> None:
    plain = Gated()
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    results = []
    for model in (ours, plain):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).sum().backward()
            optimizer.step()
        results.append([model(X).detach().cpu(), *[p.grad.cpu() for p in model.parameters()]])
    _assert_same(*results, tolerance=1e-5)  # sums of rounding errors of both signs


def test_what_was_taken_from_a_class_before_has_its_gradient_or_is_an_error(tmp_path) -> None:
    program = """
        import torch
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.round()
            @staticmethod
            def backward(ctx, gradient):
                return 2 * gradient
        kept = Double.apply
        import snaprt.torch
        from snaprt.errors import UsageError
        x = torch.ones(2).to(snaprt.torch.device()).requires_grad_()
        for f in (kept, lambda x: Double.apply(x), lambda x: kept(x)):
            try:
                snaprt.torch.wrap(f)(x).sum().backward()
                print(x.grad.tolist())
                x.grad = None
            except UsageError as error:
                print("a reference to Double.apply from before" in str(error))
        y = torch.ones(2, requires_grad=True)
        kept(y).sum().backward()
        print(y.grad.tolist())
    """
    first, second, third, plain = run_program(program, folder=tmp_path).stdout.splitlines()
    assert first == second == plain == "[2.0, 2.0]"
    assert third in ("True", plain)


@pytest.mark.parametrize("function", [Cube.apply, Outer.apply, Exp.apply])
def test_second_derivatives_are_those_of_backward(function: Callable[..., Any]) -> None:
    def second(function: Callable[..., Any], device: Any) -> list[Any]:
        x = X.clone().to(device).requires_grad_()
        (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
        (of_first,) = torch.autograd.grad(first.square().sum(), x)
        return [first.detach().cpu(), of_first.cpu()]

    _assert_same(
        second(snaprt.torch.wrap(function), snaprt.torch.device()), second(function, "cpu")
    )


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_a_second_derivative_of_a_once_differentiable_one_is_an_error() -> None:
    wrapped = snaprt.torch.wrap(Once.apply)
    x = X.clone().to(snaprt.torch.device()).requires_grad_()
    wrapped(x).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * X)
    with pytest.raises(UsageError, match=r"Once\.backward is once_differentiable"):
        torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)


def _function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Faulty", (Function,), members)


FAULTS: dict[str, Callable[..., Any]] = {
    "returned 2 gradients for the 1": lambda ctx, g: (g, g),
    r"a gradient of shape \[4\] for argument 0 of shape \[2, 4\]": lambda ctx, g: g[0],
    "returned 1.0 as the gradient of argument 0": lambda ctx, g: 1.0,
    "draws random numbers": lambda ctx, g: g * torch.rand_like(g),
    "needs the values of a tensor": lambda ctx, g: g if g.sum() > 0 else -g,
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_in_backward_is_an_error_that_names_the_class(message: str) -> None:
    faulty = _function(lambda ctx, x: x * 2, FAULTS[message])
    x = X.clone().to(snaprt.torch.device()).requires_grad_()
    result = snaprt.torch.wrap(lambda x: faulty.apply(x))(x)
    with pytest.raises(UsageError, match=f"Faulty.backward.*{message}|Faulty.backward {message}"):
        result.sum().backward()


def test_none_is_no_gradient_and_more_of_it_is_ignored() -> None:
    function = _function(lambda ctx, x, y: x * y, lambda ctx, g: (g, None, None))
    given = (X, Y)
    ours = _gradients(
        snaprt.torch.wrap(lambda *a: function.apply(*a)), given, snaprt.torch.device()
    )
    _assert_same(ours, _gradients(function.apply, given))


def test_a_dirty_tensor_that_is_not_returned_is_an_error() -> None:
    function = _function(lambda ctx, x: ctx.mark_dirty(x) or x * 2, lambda ctx, g: g)
    with pytest.raises(UsageError, match="marks a tensor as dirty"):
        snaprt.torch.wrap(lambda x: function.apply(x * 1))(X)


def test_keywords_are_for_the_second_style() -> None:
    x = X.to(snaprt.torch.device())
    wrapped = snaprt.torch.wrap(lambda x: Exp.apply(x, factor=0.5))
    torch.testing.assert_close(wrapped(x).cpu(), (X * 0.5).exp())
    with pytest.raises(UsageError, match=r"Sign\.apply takes keyword arguments only"):
        snaprt.torch.wrap(lambda x: Sign.apply(x=x))(x)


def test_forward_may_draw_random_numbers() -> None:
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    function = _function(forward, lambda ctx, g: g * ctx.saved_tensors[0])
    wrapped = snaprt.torch.wrap(lambda x: function.apply(x))
    for _ in range(2):
        x = torch.ones(3).to(snaprt.torch.device()).requires_grad_()
        result = wrapped(x)
        result.sum().backward()
        assert x.grad.tolist() == result.tolist()
        assert len({*result.tolist()}) == 3


def test_its_name_is_in_the_program() -> None:
    wrapped = snaprt.torch.wrap(lambda x: Quantize.apply(x, x))
    x = X.to(snaprt.torch.device())
    program = jax.jit(lambda a: snaprt.torch.to_jax(wrapped(snaprt.torch.to_torch(a))))
    text = program.lower(snaprt.torch.to_jax(x)).as_text(debug_info=True)
    assert "Quantize" in text


class Matmul(Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.kind = (x @ weight).dtype
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        assert (x @ weight).dtype is ctx.kind
        return gradient @ weight.T, x.T @ gradient


class Wide(Matmul):
    forward = staticmethod(
        custom_fwd(Matmul.forward.__wrapped__, device_type="cpu", cast_inputs=torch.float32)
    )


@pytest.mark.parametrize("function", [Matmul.apply, Wide.apply])
def test_autocast_has_its_meaning(function: Callable[..., Any]) -> None:
    def run(function: Callable[..., Any], device: Any) -> list[Any]:
        x, w = (t.clone().to(device).requires_grad_() for t in (X, Y.T.contiguous()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = function(x, w)
        result.float().sin().sum().backward()
        return [result.detach().cpu(), x.grad.cpu(), w.grad.cpu()]

    ours, plain = run(snaprt.torch.wrap(function), snaprt.torch.device()), run(function, "cpu")
    for mine, other in zip(ours, plain, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2)


def test_autocast_inside_of_what_is_wrapped_has_its_meaning() -> None:
    def kinds(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = x @ x.T
            with torch.autocast("cpu", enabled=False):
                wide = x @ x.T
        return [inside, wide, x @ x.T]

    wrapped = snaprt.torch.wrap(kinds)
    ours = [result.dtype for result in wrapped(X)]
    assert ours == [result.dtype for result in kinds(X)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = [result.dtype for result in wrapped(X)]
        assert ours == [result.dtype for result in kinds(X)]
