"""What PyTorch's autograd offers besides ``backward``: right in a wrapped module, or an error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import snaprt
import snaprt.torch
from snaprt.errors import UsageError
from snaprt.runtime.step import thread_trace


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _assert_same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_have_the_same_gradients(use_reentrant: bool) -> None:
    plain = Checkpointed(use_reentrant)
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    x = torch.randn(4, 8, requires_grad=True)
    ours(x.detach()).square().sum().backward()
    plain(x).square().sum().backward()
    _assert_same_gradients(ours, plain)


def test_a_wrapped_module_can_be_checkpointed() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    x = torch.randn(4, 8)
    moved = x.to(snaprt.torch.device()).requires_grad_()
    checkpoint(ours, moved, use_reentrant=False).square().sum().backward()
    plain(x).square().sum().backward()
    _assert_same_gradients(ours, plain)


def test_operations_outside_of_wrapped_modules_can_be_checkpointed() -> None:
    x = torch.linspace(-1, 1, 6)
    gradients = []
    for device in ("cpu", snaprt.torch.device()):
        given = x.clone().to(device).requires_grad_()
        checkpoint(lambda t: t.sin().cos() * t, given, use_reentrant=False).sum().backward()
        gradients.append(given.grad.cpu())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_a_nan_in_backward_is_found_by_the_anomaly_mode_of_pytorch() -> None:
    model = snaprt.torch.wrap(nn.Linear(2, 1))
    with torch.autograd.detect_anomaly(check_nan=True):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="returned nan"):
            (model(torch.ones(1, 2)) * torch.nan).sum().backward()


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev])
def test_transforms_of_torch_func_are_refused(transform: Callable[..., Any]) -> None:
    model = snaprt.torch.wrap(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"transforms of torch\.func"):
        transform(model)(torch.ones(2, 2, device=snaprt.torch.device()))


def test_a_function_with_its_own_backward_works_outside() -> None:
    plain = nn.Linear(3, 3)
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    x = torch.randn(2, 3)
    for model in (ours, plain):
        Sign.apply(model(x)).sum().backward()
    _assert_same_gradients(ours, plain)


def test_forward_hooks_of_inner_modules_take_part_until_they_are_removed() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    x = torch.randn(4, 8)
    handles = [m[0].register_forward_hook(lambda m, args, out: out * 2) for m in (ours, plain)]
    torch.testing.assert_close(ours(x).cpu(), plain(x))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(ours(x).cpu(), plain(x))


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_of_inner_modules_are_refused(register: str) -> None:
    model = snaprt.torch.wrap(nn.Sequential(nn.Linear(2, 2)))
    getattr(model[0], register)(lambda *_: None)
    with pytest.raises(UsageError, match="backward hook, which would not be called"):
        model(torch.ones(1, 2))


class Force(nn.Module):
    def __init__(self, energy: nn.Module, is_backward: bool) -> None:
        super().__init__()
        self.energy = energy
        self.is_backward = is_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        total = self.energy(x).sum() + x.square().sum()
        if self.is_backward:
            total.backward()
            assert x.grad is not None
            return x.grad
        return torch.autograd.grad(total, x, create_graph=True)[0]


@pytest.mark.parametrize("is_backward", [False, True])
def test_gradients_inside_of_a_wrapped_module_are_refused(is_backward: bool) -> None:
    model = snaprt.torch.wrap(Force(nn.Linear(3, 1), is_backward))
    with pytest.raises(UsageError, match="computes gradients itself"):
        model(torch.ones(2, 3))


def test_gradients_of_a_wrapped_module_can_be_part_of_a_loss() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    x = torch.randn(2, 3)
    for model, given in ((ours, x.to(snaprt.torch.device())), (plain, x.clone())):
        energy = model(given.requires_grad_()).sum()
        (force,) = torch.autograd.grad(energy, given, create_graph=True)
        force.square().sum().backward()
    for mine, other in zip(ours[:2].parameters(), plain[:2].parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-5, atol=1e-5)


class Partly(nn.Module):
    """Uses one layer, another one for its second result, and a third one only as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.layers[0](x)
        return first * self.layers[2].weight.detach(), self.layers[1](x)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_parameters_that_a_loss_does_not_depend_on_have_no_gradient(is_jitted: bool) -> None:
    def train(model: nn.Module) -> list[list[bool]]:
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)

        def step(x: torch.Tensor, uses_second: bool) -> list[bool]:
            first, second = model(x)
            (first + second if uses_second else first).sum().backward()
            optimizer.step()
            had_one = [p.grad is not None for p in model.parameters()]
            optimizer.zero_grad()
            return had_one

        if is_jitted and model is ours:
            step = snaprt.torch.jit(step)
        return [step(torch.ones(4, 4), uses_second) for uses_second in (False, False, True, False)]

    plain = Partly()
    ours = snaprt.torch.wrap(copy.deepcopy(plain))
    assert train(ours) == train(plain)
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach())


def test_gradients_of_what_is_not_used_are_refused_or_none() -> None:
    model = snaprt.torch.wrap(Partly())
    parameters = [*model.parameters()]
    first, _ = model(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(first.sum(), parameters, retain_graph=True)
    gradients = torch.autograd.grad(
        first.square().sum(), parameters, allow_unused=True, create_graph=True
    )
    assert [g is not None for g in gradients] == [True] * 2 + [False] * 6
    gradients[0].square().sum().backward()
    assert [p.grad is not None for p in parameters] == [True] * 2 + [False] * 6


def test_torch_compile_and_export_are_refused() -> None:
    model = snaprt.torch.wrap(nn.Linear(2, 2))
    with pytest.raises(Exception, match=r"torch\.compile and torch\.export"):
        torch.compile(model)(torch.ones(1, 2))
    with pytest.raises(UsageError, match=r"torch\.compile and torch\.export"):
        torch.export.export(model, (torch.ones(1, 2),))


def _gradients(between: Callable[[], object]) -> list[list[float]]:
    """Return a gradient of each of four steps, with ``between`` between forward and backward."""
    torch.manual_seed(0)
    model = snaprt.torch.wrap(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    x = torch.linspace(-1, 1, 6).reshape(2, 3).to(snaprt.torch.device())
    gradients = []
    with snaprt.torch.lazy():
        for step in range(4):
            model.zero_grad()
            y = model(x + step)
            between()
            y.sum().backward()
            snaprt.mark_step()
            gradients.append(model[0].bias.grad.tolist())
    return gradients


def test_a_step_that_ends_between_forward_and_backward_changes_no_gradient() -> None:
    whole = _gradients(lambda: None)
    assert len({*map(tuple, whole)}) == 4
    for apart, together in zip(_gradients(snaprt.mark_step), whole, strict=True):
        assert apart == pytest.approx(together, rel=1e-6)


def test_the_arrays_of_a_warm_forward_pass_do_not_grow_with_the_depth() -> None:
    def arrays(depth: int) -> int:
        model = snaprt.torch.wrap(nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)]))
        x = torch.ones(2, 4).to(snaprt.torch.device())
        with snaprt.torch.lazy():
            for _ in range(3):
                loss = model(x).sum()
                recording = thread_trace().recording
                made = len(recording.arrays)
                loss.backward()
                snaprt.mark_step()
        return made

    assert arrays(2) == arrays(8)


def test_a_gradient_is_a_tensor_once_it_is_asked_for() -> None:
    weight = nn.Parameter(torch.ones(3))
    model = nn.Module()
    model.weight, model.bias = weight, nn.Parameter(torch.zeros(3))
    function = snaprt.torch.wrap(lambda w, b: (w * w + b).sum())
    snaprt.torch.wrap(model)
    function(weight, model.bias).backward()
    gradient = weight.grad
    assert gradient is weight.grad
    assert gradient.tolist() == [2.0] * 3
    function(weight, model.bias).backward()  # adds to the tensor
    assert gradient.tolist() == [4.0] * 3
    weight.sum().backward()  # by PyTorch's own engine
    assert weight.grad.tolist() == [5.0] * 3
    weight.grad = None
    function(weight, model.bias).backward()
    weight.sum().backward()  # before anybody has asked
    function(weight, model.bias).backward()
    assert weight.grad.tolist() == [5.0] * 3
    assert model.bias.grad.tolist() == [4.0] * 3
    del weight.grad
    model.zero_grad()
    assert weight.grad is model.bias.grad is None


@pytest.mark.parametrize("wrap", [lambda function: function, snaprt.torch.wrap])
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a * b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.addcmul(a, b, a),
        lambda a, b: torch.where(a > 2, a, b),
    ],
)
def test_a_leaf_that_is_given_several_times_gets_all_of_its_gradient(
    function: Callable[..., torch.Tensor], wrap: Callable[..., Any]
) -> None:
    plain = torch.arange(1.0, 4).requires_grad_()
    ours = plain.detach().to(snaprt.torch.device()).requires_grad_()
    for call, x in ((function, plain), (wrap(function), ours)):
        for _ in range(2):  # the second time adds to what is there
            call(x, x).square().sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), plain.grad)


@pytest.mark.parametrize(
    "call",
    [
        snaprt.torch.wrap(nn.Linear(3, 2)),
        snaprt.torch.wrap(lambda x: x.square()),
        lambda x: x * torch.arange(3.0).to(snaprt.torch.device()),
    ],
)
def test_gradients_flow_back_to_tensors_of_the_cpu_that_are_moved_when_they_are_used(
    call: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    leaf = torch.ones(4, 3, requires_grad=True)
    moved = leaf.detach().to(snaprt.torch.device()).requires_grad_()
    call(leaf.double() * 2).sum().backward()
    call(moved * 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.device.type == "cpu"
    torch.testing.assert_close(leaf.grad, moved.grad.cpu())
    with torch.no_grad():
        assert not call(leaf).requires_grad


def _of_complex(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w = torch.fft.fft(z * torch.complex(x, x + 1)) * z.conj()
    return (w.abs() ** 2).sum() + w.imag.sum() + (w * (1 + 2j)).real.mean()


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["operations", "wrapped"])
def test_gradients_of_complex_numbers_are_those_of_pytorch(is_wrapped: bool) -> None:
    found = []
    for device in ("cpu", snaprt.torch.device()):
        z = torch.complex(torch.linspace(0, 1, 4), torch.linspace(1, -1, 4)).to(device)
        z, x = z.requires_grad_(), torch.linspace(-1, 2, 4).to(device).requires_grad_()
        is_ours = device != "cpu" and is_wrapped
        function = snaprt.torch.wrap(_of_complex) if is_ours else _of_complex
        first = torch.autograd.grad(function(z, x), (z, x), create_graph=True)
        (second,) = torch.autograd.grad((first[0] * (2 - 1j)).real.sum() + first[1].sum(), z)
        function(z, x).backward()
        found.append([t.detach().cpu() for t in (*first, second, z.grad, x.grad)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


RESULTS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x * 2,
    "detached": lambda x: (x * 2).detach(),
    "of something detached": lambda x: x.detach() + 1,
    "partly detached": lambda x: x.detach() + x,
    "zeros": torch.zeros_like,
    "round": torch.round,
    "sign": torch.sign,
    "dropped": lambda x: torch.nn.functional.dropout(x, 1.0),
    "drawn": lambda x: torch.bernoulli(x.sigmoid()),
    "times zero": lambda x: x * 0,
    "integers": lambda x: x.argmax().float(),
    "condition": lambda x: (x > 0).float(),
    "without a gradient": torch.no_grad()(lambda x: x * 2),
}


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_requires_a_gradient_where_it_does_in_pytorch(name: str, is_wrapped: bool) -> None:
    function = RESULTS[name]
    expected = function(torch.tensor([0.5, -2.0], requires_grad=True)).requires_grad
    on_device = torch.tensor([0.5, -2.0], device=snaprt.torch.device(), requires_grad=True)
    call = snaprt.torch.wrap(function) if is_wrapped else function
    assert call(on_device).requires_grad is expected
