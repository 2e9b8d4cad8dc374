"""What code reads besides its arguments is never stale in a wrapped or compiled function."""

import argparse
import collections
import functools
import gc
import itertools
import logging
import random
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import snaprt.torch
from snaprt import metrics
from snaprt.errors import UsageError

# What the code below reads; `_variables` sets it for each test.
SCALE: float = 0.0
loss_of: Any = None
leaky: Any = None
helper: Any = None
slotted: Any = None
options: Any = None
activation: Any = None
array: Any = None
tensor: Any = None
switches: Any = None


class Config:
    scale = 1.0


class Scaling:
    scale = 1.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Activation:
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class ScaledGradient(torch.autograd.Function):
    """Reads a global in code that PyTorch calls."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * SCALE


class Scaled:
    """Reads a global where an object is made, and where an operator is applied to it."""

    def __init__(self) -> None:
        self.scale = SCALE

    def __mul__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * SCALE


class Made(collections.OrderedDict[str, Any]):
    """Makes what is asked for, and must not be asked without need."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


@torch.no_grad()
def without_gradient(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


made = Made(scale=lambda: SCALE)
scale = Scaling()
LEAKIER = functools.partial(F.leaky_relu, negative_slope=0.5)


def _write_to_array() -> None:
    array[1] = 5


def _set_global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


# By name: what the code does, and what changes then.
READS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]] = {
    "global": (lambda x: x * SCALE, _set_global("SCALE", 2.0)),
    "autograd": (lambda x: ScaledGradient.apply(x), _set_global("SCALE", 2.0)),
    "object that is made": (lambda x: Scaled() * x, _set_global("SCALE", 3.0)),
    "dictionary that makes values": (lambda x: x * made["scale"], _set_global("SCALE", 4.0)),
    "decorated": (lambda x: without_gradient(x), _set_global("SCALE", 2.0)),
    "sign of zero": (lambda x: x / (x * 0 + SCALE), _set_global("SCALE", -0.0)),
    "function": (lambda x: loss_of(x, x * 0), _set_global("loss_of", F.l1_loss)),
    "partial": (
        lambda x: leaky(x),
        _set_global("leaky", functools.partial(F.leaky_relu, negative_slope=0.5)),
    ),
    "class": (lambda x: x * Config.scale, lambda: setattr(Config, "scale", 3.0)),
    "method": (lambda x: Scaling().scaled(x), lambda: setattr(Scaling, "scale", 4.0)),
    "patched": (
        lambda x: Scaling().scaled(x),
        lambda: setattr(Scaling, "scaled", lambda self, x: x + 7),
    ),
    "module": (lambda x: x * helper.scale, lambda: setattr(helper, "scale", 2.0)),
    "inside of a module": (lambda x: helper.scaled(x), lambda: setattr(helper, "scale", 3.0)),
    "an attribute that is called as its object": (
        lambda x: x * scale.scale,
        lambda: setattr(scale, "scale", 2.0),
    ),
    "slots": (lambda x: x * slotted.scale, lambda: setattr(slotted, "scale", 2.0)),
    "namespace": (lambda x: x * options.scale, lambda: setattr(options, "scale", 2.0)),
    "new attribute": (
        lambda x: x * getattr(options, "factor", 1.0),
        lambda: setattr(options, "factor", 2.0),
    ),
    "item": (
        lambda x: x * options.parts["scales"][0],
        lambda: options.parts["scales"].insert(0, 2),
    ),
    "object": (lambda x: activation(x), lambda: setattr(activation, "function", torch.tanh)),
    "array": (lambda x: x * torch.from_numpy(array), _write_to_array),
    "tensor": (lambda x: x * tensor, lambda: tensor.mul_(2)),
    "other tensor": (lambda x: x * tensor, _set_global("tensor", torch.arange(3.0))),
    "set": (lambda x: x * 2 if "double" in switches else x, lambda: switches.add("double")),
}


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("helper")
    exec("scale = 1.0\ndef scaled(x): return x * scale", vars(module))
    values = {
        "SCALE": 1.0,
        "loss_of": F.mse_loss,
        "leaky": functools.partial(F.leaky_relu, negative_slope=0.1),
        "helper": module,
        "slotted": Slotted(),
        "scale": Scaling(),
        "options": argparse.Namespace(scale=1.0, parts={"scales": [1.0]}),
        "activation": Activation(torch.relu),
        "array": np.ones(3, np.float32),
        "tensor": torch.ones(3),
        "switches": set(),
    }
    for name, value in values.items():
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(Config, "scale", 1.0)
    monkeypatch.setattr(Scaling, "scale", 1.0)
    monkeypatch.setattr(Scaling, "scaled", Scaling.scaled)


class Reads(nn.Module):
    def __init__(self, code: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inner = nn.ModuleList([Inner(code)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](self.linear(x))


class Inner(nn.Module):
    def __init__(self, code: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(x) + self.code(x * 2)


def _hooked(code: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return code(output)

    model[1].register_forward_hook(hook)
    return model


def _module(make: Callable[..., nn.Module]) -> Callable[..., Any]:
    return lambda code: snaprt.torch.wrap(make(code))


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "function": lambda code: snaprt.torch.wrap(lambda x: code(x)),
    "module": _module(Reads),
    "hook": _module(_hooked),
    "jit": lambda code: snaprt.torch.jit(lambda x: code(x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", READS)
def test_what_code_reads_elsewhere_is_never_stale(what: str, way: str) -> None:
    code, change = READS[what]
    call = WAYS[way](code)
    x = torch.tensor([-1.0, 0.5, 2.0])
    on_device = x.to(snaprt.torch.device())

    def expected() -> torch.Tensor:
        if isinstance(call, nn.Module):
            return snaprt.torch.unwrap(call)(x)
        return code(x)

    before = [call(on_device).detach() for _ in range(3)][-1]
    change()
    after = [call(on_device).detach() for _ in range(3)][-1]
    torch.testing.assert_close(after.cpu(), expected().detach())
    assert not torch.equal(before, after)


def test_nothing_is_made_to_look_at_it() -> None:
    runs = itertools.count()
    values = Made(scale=lambda: 2.0, other=lambda: next(runs))
    call = snaprt.torch.wrap(lambda x: x * values["scale"])
    for _ in range(2):
        assert float(call(torch.ones(()))) == 2
    assert repr(runs) == "count(0)"


class Drops(nn.Module):
    """Skips its layer at random, as Python or NumPy says."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.draw() < 0.5 else x


class Generator:
    def __init__(self) -> None:
        self.generator = np.random.RandomState(1)

    def draw(self) -> float:
        return float(self.generator.rand())


DRAWS: dict[str, Callable[[], Callable[[], float]]] = {
    "random": lambda: random.random,
    "np.random": lambda: np.random.rand,
    "default_rng": lambda: np.random.default_rng(1).random,
    "Random": lambda: random.Random(1).random,
    "method": lambda: Generator().draw,
    "function": lambda: functools.partial(random.uniform, 0, 1),
}


@pytest.mark.parametrize("way", DRAWS)
def test_code_that_draws_numbers_of_python_is_traced_at_each_call(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, ours = Drops(DRAWS[way]()), Drops(DRAWS[way]())
    ours.load_state_dict(model.state_dict())
    snaprt.torch.wrap(ours)
    compiled = snaprt.torch.jit(lambda x: ours(x))
    x = torch.ones(2, 3)

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)

    seed()
    expected = [model(x).detach() for _ in range(8)]
    seed()
    with caplog.at_level(logging.WARNING, "snaprt.torch"):
        results = [ours(x.to(snaprt.torch.device())).detach().cpu() for _ in range(8)]
    torch.testing.assert_close(results, expected)
    assert [record.getMessage()[:32] for record in caplog.records] == [
        "Drops draws random numbers of Py"
    ]
    compiled(x)
    with pytest.raises(UsageError, match="draws random numbers on the CPU"):
        compiled(x)


class Hostile:
    """Raises, whatever is asked of it but for one attribute."""

    scale = 2.0

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("nobody asked")

    def __hash__(self) -> int:
        raise RuntimeError("nobody asked")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("nobody asked")


def test_objects_that_raise_when_they_are_looked_at_do_no_harm() -> None:
    hostile = Hostile()
    call = snaprt.torch.wrap(lambda x: x * hostile.scale * SCALE)
    for scale in (1.0, 3.0):
        globals()["SCALE"] = scale
        for _ in range(2):
            assert float(call(torch.ones(()))) == 2 * scale


@dataclass(frozen=True)
class Settings:
    scale: float


class Mutable:
    scale = 1.0


@pytest.mark.parametrize("way", [snaprt.torch.wrap, snaprt.torch.jit])
def test_an_object_among_the_arguments_may_change(way: Callable[..., Any]) -> None:
    call = way(lambda x, settings: x * settings.scale)
    x = torch.ones(())
    mutable = Mutable()
    for scale in (1.0, 2.0, 2.0, 1.0):
        mutable.scale = scale
        for _ in range(2):
            assert float(call(x, mutable)) == scale
        assert float(call(x, Settings(scale))) == scale


@pytest.mark.parametrize("way", [snaprt.torch.wrap, snaprt.torch.jit])
def test_values_that_come_back_trace_nothing_again(way: Callable[..., Any]) -> None:
    runs = itertools.count()
    functions = [torch.tanh, torch.relu]

    @way
    def call(x: torch.Tensor) -> torch.Tensor:
        next(runs)
        return activation(x)

    x = torch.tensor([-1.0, 2.0])
    counts = []
    for step in range(12):
        activation.function = functions[step % 2]
        torch.testing.assert_close(call(x).cpu(), functions[step % 2](x))
        counts.append(repr(runs))
    assert counts[5] == counts[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_tensor_of_the_cpu_counts_by_its_values_and_is_not_kept(dtype: torch.dtype) -> None:
    runs = itertools.count()
    holder: dict[str, Any] = {}

    @snaprt.torch.wrap
    def call(x: torch.Tensor) -> torch.Tensor:
        next(runs)
        return x * holder["factor"].float()

    gone = []
    for step in range(6):
        holder["factor"] = torch.tensor([1, 0]).to(dtype).roll(step)
        gone.append(weakref.ref(holder["factor"]))
        expected = holder["factor"].float() * 3
        torch.testing.assert_close(call(torch.tensor([3.0, 3.0])).cpu(), expected)
    gc.collect()
    assert [each() is None for each in gone] == [True, True, True, True, True, False]
    assert repr(runs) == "count(2)"


@pytest.mark.parametrize("way", [snaprt.torch.wrap, snaprt.torch.jit])
def test_a_count_of_its_own_traces_makes_no_function_stale(way: Callable[..., Any]) -> None:
    @way
    def call(x: torch.Tensor) -> torch.Tensor:
        options.scale += 1
        return x * 2

    for _ in range(6):
        call(torch.ones(()))
    assert options.scale <= 3


@pytest.mark.parametrize("way", [snaprt.torch.wrap, snaprt.torch.jit])
def test_a_function_that_is_traced_again_and_again_is_never_stale_and_says_why(
    way: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings = types.SimpleNamespace(scale=1.0)
    call = way(lambda x: x * settings.scale)
    with caplog.at_level(logging.WARNING, "snaprt.torch"):
        for number in range(8):
            settings.scale = float(number)
            assert float(call(torch.ones(()))) == number
    assert "SimpleNamespace.scale changed between calls" in caplog.text


def test_a_step_that_assigns_a_tensor_follows_a_container_that_is_replaced() -> None:
    holder: dict[str, Any] = {"results": {"last": torch.zeros(())}}

    @snaprt.torch.jit
    def step(x: torch.Tensor) -> None:
        holder["results"]["last"] = x * 2

    for number in range(6):
        if number % 2 == 0:
            holder["results"] = {"last": torch.zeros(()).to(snaprt.torch.device())}
        step(torch.tensor(float(number)).to(snaprt.torch.device()))
        assert float(holder["results"]["last"]) == 2 * number


def test_values_that_come_back_compile_nothing_again() -> None:
    model = snaprt.torch.wrap(Reads(lambda x: x * options.scale))
    x = torch.ones(2, 3).to(snaprt.torch.device())
    compiled = []
    with snaprt.torch.lazy():
        for step in range(6):
            options.scale = float(step % 2)
            model(x).sum()
            snaprt.mark_step()
            compiled.append(metrics.metric_data("Compile"))
    assert compiled[3] == compiled[-1]
