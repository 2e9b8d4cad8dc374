"""Views share memory with what they show, as PyTorch's do, in wrapped functions and outside."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import snaprt
import snaprt.torch
from snaprt import metrics
from snaprt.errors import UsageError

Function = Callable[[torch.Tensor], Any]

# Each gets a tensor of shape (2, 3, 4).
WRITES: dict[str, Function] = {
    "view": lambda x: x.view(-1).mul_(2),
    "reshape": lambda x: x.reshape(6, 4).mul_(2),
    "flatten": lambda x: x.flatten(1).mul_(2),
    "ravel": lambda x: x.ravel().mul_(2),
    "contiguous": lambda x: x.contiguous().mul_(2),
    "transpose": lambda x: x.transpose(0, 2).add_(torch.ones(3, 2, device=x.device)),
    "permute": lambda x: x.permute(2, 0, 1)[1].mul_(3),
    "mT": lambda x: x.mT.mul_(2),
    "T of a slice": lambda x: x[0].T.add_(torch.arange(3.0, device=x.device)),
    "copy, not view": lambda x: x.transpose(0, 1).reshape(-1).mul_(2),
    "contiguous copy": lambda x: x.transpose(0, 1).contiguous().mul_(2),
    "select": lambda x: x.select(1, 0).copy_(torch.ones(2, 4, device=x.device)),
    "narrow": lambda x: x.narrow(2, 1, 2).zero_(),
    "chunk": lambda x: [part.mul_(i) for i, part in enumerate(x.chunk(2, 2))],
    "split": lambda x: x.split([1, 2], 1)[1].neg_(),
    "unbind": lambda x: x.unbind(0)[1].add_(1),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1).mul_(2),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2).fill_(7),
    "expand": lambda x: x.expand(2, 3, 4).mul_(2),
    "view_as": lambda x: x.view_as(torch.zeros(6, 4, device=x.device)).mul_(2),
    "unflatten": lambda x: x.unflatten(2, (2, 2))[..., 0].mul_(2),
    "unfold": lambda x: x.unfold(2, 2, 2)[:, 0].mul_(2),
    "slice of a view": lambda x: x.view(-1)[1:9:2].neg_(),
    "view of a slice": lambda x: x[:, 1:].select(2, 0).mul_(5),
    "setitem of a view": lambda x: x.view(6, 4).__setitem__((slice(None), 1), 3.0),
    "iadd of a view": lambda x: _iadd(x.view(6, 4)),
    "detach": lambda x: x.detach().mul_(2),
    "data": lambda x: x.data.mul_(2),
    "view of detach": lambda x: x.detach().view(-1)[3:7].mul_(2),
    "out": lambda x: torch.mul(x, 2, out=x.view(2, 3, 4)),
    "foreach": lambda x: torch._foreach_mul_([*x.unbind(0)], 2.0),
    "relu": lambda x: nn.functional.relu(x.view(-1), inplace=True),
    "masked": lambda x: x.view(-1).masked_fill_(x.view(-1) > 0, 0.5),
    "masked slice": lambda x: x[1:, ::2].masked_fill_(x[1:, ::2] > 0, 0.5),
    "view of a detached view": lambda x: x.transpose(0, 1).detach().reshape(6, 4).mul_(3),
    "mask index": lambda x: x.view(-1).__setitem__(x.view(-1) > 0, 0.5),
    "no_grad": torch.no_grad()(lambda x: x.view(-1).mul_(2)),
}


def _iadd(x: torch.Tensor) -> None:
    x[:, 1] += 1
    x[0] *= 2


def _read_after(write: Function) -> Function:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x * 1.5
        before = (x.view(-1), x.mT, x[0], x.detach(), x.transpose(0, 1).reshape(-1))
        write(x)
        return (x + 0, *[view * 2 for view in before], x.view(-1))

    return call


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_view_is_seen_by_all_that_share_its_memory(
    write: Function, is_wrapped: bool
) -> None:
    function = _read_after(write)
    plain = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    wanted = function(plain)
    ours = snaprt.torch.wrap(function) if is_wrapped else function
    got = ours(plain.to(snaprt.torch.device()))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


# PyTorch refuses these where a gradient is needed.
_REFUSED = ("chunk", "split", "unbind", "out", "foreach")


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("name", [name for name in WRITES if name not in _REFUSED])
def test_gradients_flow_through_writes_to_views(name: str, is_wrapped: bool) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * x
        flat = y.view(-1)
        WRITES[name](y)
        return (y * torch.arange(1.0, 5.0, device=y.device)).sum() + flat[5] ** 2

    found = []
    for device, function in (
        ("cpu", loss),
        (snaprt.torch.device(), snaprt.torch.wrap(loss) if is_wrapped else loss),
    ):
        x = torch.linspace(-1, 1, 24).reshape(2, 3, 4).to(device).requires_grad_()
        value = function(x)
        value.backward()
        assert x.grad is not None
        found.append((value.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_detached_tensor_has_the_gradients_of_what_is_written_to_its_views(
    is_wrapped: bool,
) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        detached = y.detach()
        part = detached.unsqueeze(0)[..., 1:]
        part.copy_(x[1:] * x[0] + x[1])
        return y.sum() + (detached * torch.arange(1.0, 5.0, device=x.device)).sum() + part.sum()

    found = []
    for device in ("cpu", snaprt.torch.device()):
        x = torch.linspace(-1, 1, 4).to(device).requires_grad_()
        function = snaprt.torch.wrap(loss) if is_wrapped and device != "cpu" else loss
        value = function(x)
        value.backward()
        assert x.grad is not None
        found.append((value.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(*found)


def test_the_shape_of_a_view_is_not_changed_in_place() -> None:
    x = torch.zeros(2, 3, device=snaprt.torch.device())
    with pytest.raises(UsageError, match="changes the shape or dtype of a view"):
        snaprt.torch.wrap(lambda x: x.view(-1).unsqueeze_(0).mul_(2))(x)


def test_a_module_may_write_to_views_of_its_buffers() -> None:
    class Queue(nn.Module):
        memory: torch.Tensor
        place: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("memory", torch.zeros(3, 4))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            with torch.no_grad():
                self.memory.view(-1)[:4].copy_(y[0])
                self.memory.t()[2].mul_(0.5)
                self.memory.data[1:].add_(y.detach()[1:3])
                self.place += 1
            return (y @ self.memory.t()).sum()

    results = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        module = snaprt.torch.wrap(Queue()) if is_ours else Queue()
        optimizer = torch.optim.SGD(module.parameters(), 0.01)
        with snaprt.torch.lazy():
            for step in range(3):
                x = torch.linspace(step, step + 1, 12).reshape(3, 4)
                optimizer.zero_grad()
                module(x.to(module.memory.device)).backward()
                optimizer.step()
                snaprt.mark_step()
        results.append([t.detach().cpu() for t in module.state_dict().values()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=False)


def _flat_parameters(device: Any) -> list[torch.Tensor]:
    """Train parameters that are views of one tensor, with gradients that are, too."""
    flat, gradient = torch.linspace(-1, 1, 8, device=device), torch.zeros(8, device=device)
    params = [nn.Parameter(part) for part in flat.split(4)]
    for param, part in zip(params, gradient.split(4), strict=True):
        param.grad = part
    optimizer = torch.optim.SGD(params, 0.1)
    for _ in range(2):
        (params[0] * params[1]).sum().backward()
        gradient.mul_(0.5)
        optimizer.step()
        flat.add_(1)
    return [flat, gradient, *params, params[0] * 2]


def _counts(device: Any) -> list[torch.Tensor]:
    counts = torch.zeros(3, 4, device=device)
    for index in (0, 2, 2):
        counts[index] += 1
        counts[index][1:3] *= 2
    return [counts, counts.sum(0)]


def _gates(device: Any) -> list[torch.Tensor]:
    cell = nn.LSTMCell(2, 3).to(device)
    with torch.no_grad():
        for param in cell.parameters():
            for gate in param.chunk(4):
                nn.init.constant_(gate, 0.1)
        cell.bias_ih[3:6].fill_(1.0)
        cell.bias_hh.data[3:6] += 2
    return [*cell.parameters()]


def _history(device: Any) -> list[torch.Tensor]:
    weight = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    states = torch.zeros(3, 2, device=device)
    last = states[2]
    for step in range(3):
        states[step] += weight * (step + 1)
        states[step].mul_(weight)
    loss = (states.detach()[0] * weight + last * states[1]).sum()
    loss.backward()
    return [states, last, loss, weight.grad]  # type: ignore[list-item]


def _assign_in_steps(device: Any) -> list[torch.Tensor]:
    weight = torch.arange(1.0, 4.0).to(device).requires_grad_()
    x = torch.linspace(-1, 1, 6).reshape(2, 3).to(device)
    weight.data[0].fill_(3)
    x[:, :1] *= 0.5
    x[1] += weight
    row = x[0]
    row.copy_(weight * 2)
    x.t()[2].mul_(weight[:2])
    loss = (row * row).sum() + (x.flatten() * weight.repeat(2)).sum()
    loss.backward()
    return [x, row, loss, weight, weight.grad]  # type: ignore[list-item]


def _views_of_a_copy(device: Any) -> list[torch.Tensor]:
    x = torch.arange(6.0, device=device).reshape(2, 3)
    copy = x.t().reshape(-1)
    part = copy[2:]
    copy.add_(1)
    part[0] = 9
    return [x, copy, part]


def _parts_of_complex_numbers(device: Any) -> list[torch.Tensor]:
    numbers = torch.tensor([1 + 2j, 3 - 1j], device=device)
    copies = [numbers.real.contiguous(), numbers.imag.clone()]
    copies[0].add_(1)
    return [*copies, numbers]


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        *(_flat_parameters, _counts, _gates, _history, _assign_in_steps, _views_of_a_copy),
        _parts_of_complex_numbers,
    ],
)
def test_outside_of_wrapped_functions_views_share_memory_as_pytorch_s_do(
    program: Callable[[Any], list[torch.Tensor]], is_lazy: bool
) -> None:
    with snaprt.torch.lazy() if is_lazy else contextlib.nullcontext():
        found = [tensor.detach().cpu() for tensor in program(snaprt.torch.device())]
    expected = [tensor.detach() for tensor in program(torch.device("cpu"))]
    torch.testing.assert_close(found, expected)


def test_a_view_without_a_gradient_keeps_no_history_alive() -> None:
    weight = torch.ones(2, 3, device=snaprt.torch.device(), requires_grad=True)
    result = weight * 2
    detached = result[0].detach()
    with torch.no_grad():
        other = result.view(-1)
    history = weakref.ref(result)
    del result
    gc.collect()
    assert history() is None
    detached.add_(1)
    assert detached.tolist() == [3, 3, 3]
    assert other.tolist() == [3, 3, 3, 2, 2, 2]


def _step_of_flat_parameters(device: Any, jit: Any, *, reads_base: bool) -> list[torch.Tensor]:
    flat = torch.linspace(-1, 1, 8, device=device)
    params = [nn.Parameter(part) for part in flat.split(4)]
    optimizer = torch.optim.SGD(params, 0.1)

    @jit
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (params[0] * x * params[1]).sum()
        if reads_base:
            loss = loss + flat.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if reads_base:
            flat.mul_(0.5)
            with torch.no_grad():
                params[0].add_(flat[4:])
        return loss.detach()

    losses = [step(torch.arange(4.0, device=device)) for _ in range(4)]
    flat.add_(1)
    return [*losses, flat, *params]


@pytest.mark.parametrize("reads_base", [False, True])
def test_a_compiled_step_writes_to_views_and_what_they_show(reads_base: bool) -> None:
    found, expected = (
        [t.detach().cpu() for t in _step_of_flat_parameters(device, jit, reads_base=reads_base)]
        for device, jit in ((snaprt.torch.device(), snaprt.torch.jit), ("cpu", lambda f: f))
    )
    torch.testing.assert_close(found, expected)


def test_what_pytorch_refuses_to_write_to_is_refused() -> None:
    weight = torch.zeros(2, 3, device=snaprt.torch.device(), requires_grad=True)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
        weight[0].add_(1)
    with pytest.raises(UsageError, match="changes an expanded tensor"):
        torch.zeros(3, device=snaprt.torch.device()).expand(2, 3).add_(1)
    with pytest.raises(UsageError, match="not share memory"):
        torch.zeros(3, dtype=torch.complex64, device=snaprt.torch.device()).real.add_(1)
    assert weight.tolist() == [[0, 0, 0], [0, 0, 0]]


def _index_with_lists(x: torch.Tensor) -> torch.Tensor:
    x[:, [0, 2]] += 1
    x[[True, False]] *= 2
    x[[1, 0]] = x[[0, 1]] + 1
    x[[0, 1], [1, 2]] = 9
    x[range(2), torch.tensor([0, 1])] += x[(1, 0), 2] + x[range(1, -1, -1)][:, 0]
    copy = x[[0]]
    copy.zero_()
    other = x[np.array([1, 0])]
    other.zero_()
    return x[np.array([[0], [1]]), 1]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_lists_as_indices_take_copies(is_wrapped: bool) -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    ours = plain.to(snaprt.torch.device())
    wanted = _index_with_lists(plain)
    got = (snaprt.torch.wrap(_index_with_lists) if is_wrapped else _index_with_lists)(ours)
    assert got.tolist() == wanted.tolist()
    assert ours.tolist() == plain.tolist()


def test_tensors_of_the_cpu_are_constants_in_wrapped_functions() -> None:
    scale, mask, places = torch.arange(1.0, 4.0), torch.tensor([True, False, True]), [0, 2]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * scale
        y[:, mask] = 5.0
        y[0, torch.tensor(places)] = scale[:2]
        rows = [x[0][mask], x[1][places], x[:, torch.tensor(places)].mT[1]]
        return [*rows, y, torch.cat([y[0], scale]), torch.where(mask, x, scale), scale - x]

    plain = torch.linspace(0, 1, 6).reshape(2, 3)
    got = snaprt.torch.wrap(function)(plain.to(snaprt.torch.device()))
    for ours, theirs in zip(got, function(plain), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_a_wrapped_function_does_not_write_to_a_tensor_of_the_cpu() -> None:
    total = torch.zeros(3)
    x = torch.ones(3, device=snaprt.torch.device())
    for write in (total.add_, lambda x: total.__setitem__(0, x[0]), lambda x: total.copy_(x)):
        with pytest.raises(UsageError, match="a CPU tensor"):
            snaprt.torch.wrap(lambda x, write=write: [write(x), x][1])(x)


OUTSIDE: list[Any] = [5, -6, (0, 3), (..., 3), [1, 5], ([0, 1], [2, -4])]


@pytest.mark.parametrize("index", OUTSIDE)
def test_an_index_out_of_bounds_is_an_error_as_in_pytorch(index: Any) -> None:
    plain = torch.zeros(5, 3)
    ours = plain.to(snaprt.torch.device())

    def message(run: Callable[[], object]) -> str:
        with pytest.raises(IndexError) as caught:
            run()
        return str(caught.value).splitlines()[0]

    expected = message(lambda: plain[index])
    assert message(lambda: ours[index]) == expected
    assert message(lambda: snaprt.torch.wrap(lambda x: x[index])(ours)) == expected
    assert "out of bounds" in message(lambda: ours.__setitem__(index, 1.0))
    assert not ours.any()


@pytest.mark.parametrize("is_lazy", [True, False])
def test_an_index_that_moves_is_one_program(is_lazy: bool) -> None:
    plain = torch.arange(400.0).reshape(100, 4).requires_grad_()
    ours: Any = plain.detach().to(snaprt.torch.device()).requires_grad_()
    late = 0
    with snaprt.torch.lazy() if is_lazy else contextlib.nullcontext():
        for i in range(0, 90, 3):
            if i == 45:
                late = metrics.counter_value("UncachedCompile") or 0
            for x in (ours, plain):
                parts = (x[i : i + 5], x[i], x[i, 2], x[-i - 1, 1:3], x[i : i + 2, -1], x[:, 1][i])
                torch.stack([part.square().sum() for part in parts]).sum().backward()
            snaprt.mark_step()
            torch.testing.assert_close(ours[i].cpu(), plain[i])
    torch.testing.assert_close(ours.grad.cpu(), plain.grad)
    assert (metrics.counter_value("UncachedCompile") or 0) == late


def test_a_view_by_an_index_that_moves_shows_the_memory_of_its_base() -> None:
    plain = torch.zeros(40, 3)
    ours = plain.to(snaprt.torch.device())
    for i in range(20):
        for x in (ours, plain):
            x[i][1] = i
            part = x[i : i + 2]
            part += 1
            x[i : i + 3, 0] = part[0, 1]
    assert ours.tolist() == plain.tolist()
