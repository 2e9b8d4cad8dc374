"""What training scripts do, on the device as on the CPU."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import snaprt
import snaprt.torch
from snaprt.errors import UsageError


def _close(ours: torch.Tensor, plain: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        ours.detach().cpu(), plain.detach(), rtol=tolerance, atol=tolerance, check_dtype=False
    )


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = models.EXAMPLES["MLP"].make()
    return snaprt.torch.wrap(copy.deepcopy(plain)), plain


def test_a_wrapped_module_stays_what_it_was() -> None:
    wrapped, plain = _pair()
    assert isinstance(wrapped, nn.Sequential)
    assert [*wrapped.state_dict()] == [*plain.state_dict()]
    assert all(p.device == snaprt.torch.device() for p in wrapped.parameters())
    assert all(isinstance(p, nn.Parameter) for p in wrapped.parameters())


def test_an_optimizer_made_before_wrapping_trains_the_module() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()
    wrapped = snaprt.torch.wrap(model)
    wrapped(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    _close(wrapped.weight, before - 0.1)


def test_a_saved_state_loads_in_plain_pytorch_and_back(tmp_path: Path) -> None:
    wrapped, plain = _pair()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.mul_(2.0)
    torch.save(wrapped.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    plain.load_state_dict(state)
    again, _ = _pair()
    again.load_state_dict(state)
    for ours, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        _close(ours, theirs, 0)


def test_a_module_can_be_copied_and_pickled() -> None:
    wrapped, plain = _pair()
    x = torch.randn(2, 6)
    expected = plain(x)
    _close(copy.deepcopy(wrapped)(x), expected)
    _close(pickle.loads(pickle.dumps(wrapped))(x), expected)
    buffer = io.BytesIO()
    torch.save(wrapped, buffer)
    for safe in ([nn.Sequential, nn.Linear], [nn.Sequential, nn.Linear, nn.Tanh, nn.ReLU]):
        buffer.seek(0)
        with torch.serialization.safe_globals(safe):
            if len(safe) == 2:
                with pytest.raises(pickle.UnpicklingError, match="Tanh"):
                    torch.load(buffer, weights_only=True)
            else:
                _close(torch.load(buffer, weights_only=True)(x), expected)


def test_an_unwrapped_module_is_plain_pytorch() -> None:
    wrapped, plain = _pair()
    back = snaprt.torch.unwrap(wrapped)
    assert type(back) is nn.Sequential
    assert all(type(p) is nn.Parameter for p in back.parameters())
    x = torch.randn(2, 6)
    torch.testing.assert_close(back(x), plain(x))


def test_training_and_evaluation_mode_give_what_pytorch_gives() -> None:
    plain = models.Cnn()
    wrapped = snaprt.torch.wrap(copy.deepcopy(plain))
    x = torch.randn(4, 1, 12, 12)
    for is_training in (True, False, True, False):
        _close(wrapped.train(is_training)(x), plain.train(is_training)(x))
    _close(wrapped.features[1].running_var, plain.features[1].running_var)
    assert int(wrapped.features[1].num_batches_tracked) == 2


def test_frozen_and_added_parameters_are_followed() -> None:
    wrapped, plain = _pair()
    x = torch.randn(2, 6)
    for model in (wrapped, plain):
        model[0].weight.requires_grad_(False)
        model(x).sum().backward()
    assert wrapped[0].weight.grad is None
    _close(wrapped[0].bias.grad, plain[0].bias.grad)
    torch.manual_seed(3)
    new = nn.Linear(3, 2)
    for model, layer in ((wrapped, copy.deepcopy(new)), (plain, new)):
        model.append(layer)
        model.zero_grad()
    _close(wrapped(x), plain(x))
    for model in (wrapped, plain):
        model(x).sum().backward()
    _close(wrapped[-1].weight.grad, plain[-1].weight.grad)


def test_an_attribute_that_changes_is_followed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = snaprt.torch.wrap(Scaled())
    assert model(torch.ones(1)).item() == 2
    model.scale = 3.0
    assert model(torch.ones(1)).item() == 3


def test_gradients_add_up_until_they_are_cleared() -> None:
    wrapped, plain = _pair()
    for _ in range(3):
        x = torch.randn(2, 6)
        (wrapped(x).sum() / 3).backward()
        (plain(x).sum() / 3).backward()
    _close(wrapped[0].weight.grad, plain[0].weight.grad)


def test_losses_are_combined_outside_of_modules() -> None:
    wrapped, plain = _pair()
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    values = []
    for model in (wrapped, plain):
        out = model(x)
        target = y.to(out.device)
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        value = nn.functional.mse_loss(out, target) + 0.1 * penalty + out[:, 0].abs().mean()
        value.backward()
        values.append(value)
    _close(values[0], values[1])
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        _close(ours.grad, theirs.grad)


def test_an_unwrapped_cnn_on_the_device_is_right() -> None:
    plain = models.Cnn()
    moved = copy.deepcopy(plain).to(snaprt.torch.device())
    x = torch.randn(4, 1, 12, 12)
    ours, theirs = moved(x.to(snaprt.torch.device())), plain(x)
    _close(ours, theirs)
    ours.pow(2).sum().backward()
    theirs.pow(2).sum().backward()
    for mine, other in zip(moved.parameters(), plain.parameters(), strict=True):
        _close(mine.grad, other.grad, 1e-4)


def test_two_optimizers_train_two_modules() -> None:
    torch.manual_seed(1)
    plain = [nn.Linear(3, 4), nn.Linear(4, 1)]
    ours = [snaprt.torch.wrap(copy.deepcopy(module)) for module in plain]
    x = torch.randn(5, 3)
    for first, second in (ours, plain):
        optimizers = [
            torch.optim.Adam(first.parameters(), 0.01),
            torch.optim.SGD(second.parameters(), 0.1, momentum=0.5),
        ]
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            second(first(x)).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    for mine, other in zip(ours, plain, strict=True):
        _close(mine.weight, other.weight)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam])
def test_the_first_steps_of_an_optimizer_have_all_digits(kind: Any) -> None:
    starts = [torch.zeros(4), torch.zeros(4).to(snaprt.torch.device())]
    values = []
    for start in starts:
        value = nn.Parameter(start)
        optimizer = kind([value], 1.0)
        for step in range(3):
            value.grad = torch.tensor([1e-3, -0.3, 2.0, 40.0]).to(start.device) * (step + 1)
            optimizer.step()
        values.append(value.detach().cpu())
    assert torch.allclose(*values, rtol=1e-6, atol=0)  # in float32, 1 - 0.999 has 4 digits


def test_no_grad_and_inference_mode_compute_without_history() -> None:
    wrapped, plain = _pair()
    x = torch.randn(2, 6)
    with torch.no_grad():
        assert not wrapped(x).requires_grad
    with torch.inference_mode():
        _close(wrapped(x), plain(x))
    assert wrapped(x).requires_grad


def test_no_grad_inside_a_module_stops_gradients() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                fixed = self.a(x)
            return self.b(fixed) + self.a(x).detach()

    model = snaprt.torch.wrap(Half())
    model(torch.randn(2, 3)).sum().backward()
    assert model.a.weight.grad is None or not model.a.weight.grad.any()
    assert model.b.weight.grad.any()


def test_dropout_follows_the_seed_of_pytorch() -> None:
    model = snaprt.torch.wrap(nn.Dropout(0.5))
    x = torch.ones(64)
    torch.manual_seed(5)
    first, second = model(x).cpu(), model(x).cpu()
    torch.manual_seed(5)
    assert torch.equal(first, model(x).cpu())
    assert torch.equal(second, model(x).cpu())
    assert not torch.equal(first, second)
    assert 16 < int((first > 0).sum()) < 48


def test_a_module_that_draws_nothing_leaves_the_generator_alone() -> None:
    wrapped, _ = _pair()
    before = torch.get_rng_state()
    wrapped(torch.randn(2, 6, generator=torch.Generator()))
    assert torch.equal(before, torch.get_rng_state())


def test_autocast_computes_in_bfloat16() -> None:
    wrapped, plain = _pair()
    x = torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = wrapped(x), plain(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    ours.float().sum().backward()
    theirs.float().sum().backward()
    _close(ours.float(), theirs.float(), 2e-2)
    assert wrapped[0].weight.grad.dtype == torch.float32
    _close(wrapped[0].weight.grad, plain[0].weight.grad, 5e-2)
    assert wrapped(x).dtype == torch.float32


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_reaches_what_functions_of_pytorch_call(need_weights: bool) -> None:
    plain = nn.MultiheadAttention(8, 2)
    x = torch.randn(4, 2, 8)
    wrapped = snaprt.torch.wrap(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (m(x, x, x, need_weights=need_weights)[0] for m in (wrapped, plain))
    assert ours.dtype == theirs.dtype == torch.bfloat16
    _close(ours.float(), theirs.float(), 2e-2)


@pytest.mark.parametrize("is_autocast", [True, False])
def test_gradients_of_16_bits_are_added_up_in_32(is_autocast: bool) -> None:
    plain = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(8, 3, 16, 16)
    if not is_autocast:
        plain, x = plain.bfloat16(), x.bfloat16()
    wrapped = snaprt.torch.wrap(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        result = wrapped(x)
    result.float().sum().backward()
    # PyTorch's own, of 16 bits, are up to a tenth off on some processors.
    exact = plain.double()
    exact(x.bfloat16().double()).sum().backward()
    assert wrapped.bias.grad.tolist() == exact.bias.grad.tolist() == [2048] * 4
    _close(wrapped.weight.grad.double(), exact.weight.grad, 2e-2)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.BatchNorm3d])
def test_an_empty_batch_leaves_the_statistics_as_they_are(kind: Any) -> None:
    plain = kind(3)
    wrapped = snaprt.torch.wrap(copy.deepcopy(plain))
    x = torch.zeros(0, 3, *[2] * (2 if kind is nn.BatchNorm2d else 3))
    for module in (wrapped, plain):
        assert module(x).shape == x.shape
    for ours, theirs in zip(wrapped.buffers(), plain.buffers(), strict=True):
        _close(ours, theirs, 0)


def _lazy() -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    return nn.Sequential(convolution, nn.Flatten(), nn.Dropout(0.5), nn.LazyLinear(3))


IMAGES = torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)


@pytest.mark.parametrize("make", [_lazy, lambda: nn.LazyLinear(2)], ids=["parts", "one"])
def test_a_lazy_module_gets_its_shapes_at_the_first_call(make: Callable[[], nn.Module]) -> None:
    plain = make().eval()
    torch.manual_seed(1)
    plain(IMAGES)
    wrapped = snaprt.torch.wrap(make())
    torch.manual_seed(1)
    with snaprt.torch.lazy():
        result = wrapped.eval()(IMAGES.to(snaprt.torch.device()))
    _close(result, plain(IMAGES))
    wrapped.train()(IMAGES).sum().backward()
    assert type(wrapped).__name__ == type(plain).__name__
    assert isinstance(wrapped, type(plain))
    for name, parameter in wrapped.named_parameters():
        assert parameter.device == snaprt.torch.device()
        assert parameter.grad is not None
        assert torch.equal(parameter.cpu(), plain.get_parameter(name))


def test_a_lazy_module_takes_a_state() -> None:
    plain = _lazy().eval()
    expected = plain(IMAGES)
    wrapped = snaprt.torch.wrap(_lazy()).eval()
    wrapped.load_state_dict(plain.state_dict())
    _close(wrapped(IMAGES), expected)


def test_a_compiled_step_may_call_a_lazy_module() -> None:
    model = snaprt.torch.wrap(nn.LazyLinear(2))

    @snaprt.torch.jit
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    first = evaluate(IMAGES)
    _close(first, model(IMAGES).sum().cpu(), 1e-4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(IMAGES).sum().backward()
    optimizer.step()
    assert evaluate(IMAGES).item() < first.item()


def test_a_lazy_module_that_is_never_called_is_an_error() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.LazyLinear(2), nn.LazyLinear(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = snaprt.torch.wrap(Half())
    for _ in range(2):
        with pytest.raises(UsageError, match="parameters of Half have no shapes yet"):
            model(IMAGES)
    lazy = nn.LazyLinear(2)
    with pytest.raises(UsageError, match="call the whole module once with a batch"):
        snaprt.torch.wrap(lambda x: lazy(x))(IMAGES)


def test_tensors_change_in_place() -> None:
    device = snaprt.torch.device()
    x = torch.zeros(2, 3, device=device)
    x += 1
    x[0] = 5.0
    x[:, 1].cpu()
    x.mul_(2.0).clamp_(max=8.0)
    x.data.add_(1.0)
    assert x.tolist() == [[9, 9, 9], [3, 3, 3]]
    y = torch.ones(3, device=device, requires_grad=True)
    z = torch.zeros(2, 3, device=device)
    z[0] = y * 3
    z.sum().backward()
    assert y.grad.tolist() == [3, 3, 3]


def test_tensors_of_the_cpu_are_moved_and_counted() -> None:
    wrapped, _ = _pair()
    snaprt.metrics.clear_all()
    wrapped(torch.randn(2, 6))
    assert snaprt.metrics.counter_value("torch::moved_to_device") == 1


def test_printing_reads_and_is_counted() -> None:
    with snaprt.torch.lazy():
        x = torch.ones(2, device=snaprt.torch.device()) * 2
        snaprt.metrics.clear_all()
        assert str(x) == "tensor([2., 2.], device='jax:0')"
        assert f"{x.sum():.1f}" == "4.0"
    reads = [n for n in snaprt.metrics.counter_names() if n.startswith("host::")]
    assert reads


def test_second_derivatives_are_right() -> None:
    wrapped, plain = _pair()
    x = torch.randn(3, 6)
    found = []
    for model in (wrapped, plain):
        z = (x.to(snaprt.torch.device()) if model is wrapped else x.clone()).requires_grad_()
        (gradient,) = torch.autograd.grad(model(z).pow(2).sum(), z, create_graph=True)
        gradient.pow(2).sum().backward()
        found.append((gradient, model[0].weight.grad))
    _close(found[0][0], found[1][0])
    _close(found[0][1], found[1][1], 1e-4)


def test_a_second_backward_needs_retain_graph() -> None:
    wrapped, _ = _pair()
    loss = wrapped(torch.randn(2, 6)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_caller_of_autograd_grad_gets_the_gradients() -> None:
    wrapped, plain = _pair()
    x = torch.randn(2, 6)
    ours = torch.autograd.grad(wrapped(x).sum(), [*wrapped.parameters()])
    theirs = torch.autograd.grad(plain(x).sum(), [*plain.parameters()])
    for mine, other in zip(ours, theirs, strict=True):
        _close(mine, other)
    assert wrapped[0].weight.grad is None


def test_hooks_of_parameters_see_their_gradients() -> None:
    wrapped, _ = _pair()
    seen = []
    wrapped[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    wrapped[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    wrapped(torch.randn(2, 6)).sum().backward()
    assert sorted(seen, key=len) == [(16,), (16, 6)]


def test_results_may_be_structures() -> None:
    class Many(nn.Module):
        def forward(self, x: torch.Tensor, *, name: str) -> dict[str, object]:
            return {"name": name, "parts": (x * 2, [x.sum()]), "index": x.argmax()}

    out = snaprt.torch.wrap(Many())(torch.arange(3.0), name="a")
    assert out["name"] == "a"
    assert out["parts"][0].tolist() == [0, 2, 4]
    assert out["index"].item() == 2


def test_a_wrapped_function_gives_gradients_to_its_arguments() -> None:
    @snaprt.torch.wrap
    def distance(a: torch.Tensor, b: torch.Tensor, power: float) -> torch.Tensor:
        return (a - b).abs().pow(power).sum()

    a = torch.tensor([1.0, 4.0], device=snaprt.torch.device(), requires_grad=True)
    distance(a, torch.tensor([0.0, 2.0]), 2.0).backward()
    assert a.grad.tolist() == [2, 4]


def test_a_module_whose_python_needs_values_runs_slowly_but_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w if x.sum() > 0 else x * self.w * 3

    model = snaprt.torch.wrap(Branch())
    with snaprt.torch.lazy():
        for sign, expected in ((1.0, 1), (-1.0, -3), (1.0, 1)):
            model.zero_grad()
            model(torch.full((2,), sign)).sum().backward()
            assert model.w.grad.tolist() == [expected] * 2
    assert "test_training.py" in caplog.text


def test_a_compiled_step_trains_as_pytorch_does() -> None:
    results = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = models.EXAMPLES["MLP"].make()
        loss_of = nn.MSELoss()
        if is_ours:
            snaprt.torch.wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-6)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

        def step(
            x: torch.Tensor,
            y: torch.Tensor,
            model: nn.Module = model,
            loss_of: nn.Module = loss_of,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        train = snaprt.torch.jit(step) if is_ours else step
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(6):
            losses.append(train(*models.vectors(generator)).item())
            scheduler.step()
        results.append((losses, [*model.state_dict().values()], model[0].weight.grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for mine, other in zip(results[0][1], results[1][1], strict=True):
        _close(mine, other, 1e-4)
    _close(results[0][2], results[1][2], 1e-4)


def test_a_compiled_step_draws_new_random_numbers_each_time() -> None:
    dropout = nn.Dropout(0.5)

    @snaprt.torch.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        return dropout(x)

    x = torch.ones(64)
    seen = [step(x).cpu() for _ in range(4)]
    assert not torch.equal(seen[2], seen[3])
    torch.manual_seed(9)
    again = step(x).cpu()
    torch.manual_seed(9)
    assert torch.equal(again, step(x).cpu())


def _trained(
    is_ours: bool, between: Callable[[int, nn.Module, torch.optim.Optimizer], None]
) -> Any:
    """Return the parameters after six steps, with something done before each."""
    torch.manual_seed(0)
    model = models.EXAMPLES["MLP"].make()
    loss_of = nn.MSELoss()
    if is_ours:
        snaprt.torch.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-6)
    generator = torch.Generator().manual_seed(1)
    with snaprt.torch.lazy():
        for step in range(6):
            between(step, model, optimizer)
            x, y = models.vectors(generator)
            optimizer.zero_grad()
            device = model[0].weight.device
            loss_of(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            snaprt.mark_step()
    return [*model.state_dict().values()]


def _load_state(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _clear_state(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step in (2, 4):
        optimizer.state.clear()


def _restart_one(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 3:
        optimizer.state[model[0].weight]["step"].fill_(1.0)
        optimizer.state[model[0].bias]["exp_avg"] = torch.zeros_like(model[0].bias)


def _freeze_one(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight.requires_grad_(step not in (0, 1, 4))


@pytest.mark.parametrize("between", [_load_state, _clear_state, _restart_one, _freeze_one])
def test_an_optimizer_whose_state_is_changed_goes_on_as_pytorch_does(
    between: Callable[[int, nn.Module, torch.optim.Optimizer], None],
) -> None:
    for mine, other in zip(_trained(True, between), _trained(False, between), strict=True):
        _close(mine, other, 1e-4)


def test_a_compiled_step_is_traced_once_while_gradients_remain() -> None:
    class Counted(nn.Module):
        traces = 0

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(3, 1), 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counted.traces += 1
            return self.inner(x) * self.scale

    model = snaprt.torch.wrap(Counted())

    @snaprt.torch.jit
    def accumulate(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    x = torch.ones(2, 3)
    before = torch.get_rng_state()
    for _ in range(3):
        accumulate(x)
    traces = Counted.traces
    gradient = model.inner.weight.grad
    for _ in range(4):
        accumulate(x)
    assert Counted.traces == traces
    assert model.inner.weight.grad is gradient
    assert gradient.tolist() == [[28, 28, 28]]
    model.scale = 3.0
    accumulate(x)
    assert gradient.tolist() == [[34, 34, 34]]
    assert torch.equal(before, torch.get_rng_state())


def test_a_generator_of_the_device_makes_the_numbers_of_its_seed() -> None:
    device = snaprt.torch.device()
    generator = torch.Generator(device=device)
    assert generator.device == device
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device.type == "cpu"

    def draw(seed: int) -> list[Any]:
        generator.manual_seed(seed)
        x = torch.rand(3, generator=generator, device=device)
        chosen = torch.multinomial(x, 2, generator=generator)
        order = torch.randperm(5, generator=generator, device=device)
        return [*x.normal_(generator=generator).tolist(), *chosen.tolist(), *order.tolist()]

    before = torch.get_rng_state()
    assert draw(1) == draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), before)


def _draw_by_own(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(3, generator=torch.Generator(snaprt.torch.device()), device=x.device)


def _draw_by_plain(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(3, generator=torch.Generator()).to(x.device)


def _draw_on_cpu(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(3).to(x.device)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (_draw_by_own, "passes a torch.Generator"),
        (_draw_by_plain, "passes a torch.Generator"),
        (_draw_on_cpu, "draws random numbers on the CPU"),
    ],
)
def test_random_numbers_that_would_be_the_same_in_each_step_are_refused(
    draw: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    x = torch.zeros(3, device=snaprt.torch.device())
    step = snaprt.torch.jit(draw)
    step(x)  # runs as it is written
    with pytest.raises(UsageError, match=message):
        step(x)
    if draw is not _draw_on_cpu:  # in a wrapped function, that draws on the device
        with pytest.raises(UsageError, match=message):
            snaprt.torch.wrap(draw)(x)


def test_a_loader_may_pin_memory() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(6.0))
    loader = torch.utils.data.DataLoader(dataset, 3, pin_memory=True)
    wrapped = snaprt.torch.wrap(nn.Identity())
    assert [wrapped(x).tolist() for (x,) in loader] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Rprop])
def test_optimizers_that_read_values_in_pytorch_are_one_program_a_step(kind: Any) -> None:
    wrapped, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(wrapped.state_dict())
    snaprt.torch.wrap(wrapped)
    optimizers = [kind(model.parameters(), lr=0.1) for model in (wrapped, plain)]
    x = torch.linspace(-1, 2, 6).reshape(2, 3)
    with snaprt.torch.lazy():
        for step in range(4):
            ran = snaprt.metrics.metric_data("ExecuteTime")
            for model, optimizer in zip((wrapped, plain), optimizers, strict=True):
                optimizer.zero_grad()
                model(x * (step - 1.5)).sum().square().backward()
                optimizer.step()
            snaprt.mark_step()
    assert snaprt.metrics.metric_data("ExecuteTime")[0] == ran[0] + 1
    assert not snaprt.metrics.counter_value("torch::untraced_optimizers")
    _close(wrapped.weight, plain.weight)
