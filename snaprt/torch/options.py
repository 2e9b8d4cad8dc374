"""Options of optimizers' parameter groups, as a compiled step takes them.

Learning rates are operands. So are numbers that schedulers change, such as a momentum or a weight
decay, from the first change on. What a step is compiled for is the rest, and their signs.
"""

from __future__ import annotations

import importlib
import math
import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch

from snaprt import jaxapi
from snaprt.torch.tensors import Tensor, array_of

_adagrad: Any = importlib.import_module("torch.optim.adagrad")

# Their steps read nothing but their groups, their state and gradients.
KNOWN: Final[tuple[type[torch.optim.Optimizer], ...]] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adadelta),
    *(torch.optim.ASGD, torch.optim.Adagrad),
)
"""The optimizers whose steps are compiled."""

_CAPTURABLE: Final[tuple[type[torch.optim.Optimizer], ...]] = tuple(
    kind for kind in KNOWN if kind not in (torch.optim.SGD, torch.optim.Adagrad)
)


class Place(NamedTuple):
    """Where a number is: a group, an option, and the position in a tuple or None."""

    group: int
    option: str
    position: int | None


class Options:
    """The options of one optimizer.

    Attributes:
        changing: The places of the numbers that are operands, besides the learning rates.
    """

    def __init__(self) -> None:
        self.changing: dict[Place, None] = {}
        self._groups: Any = None
        self._numbers: dict[Place, float] = {}
        self._key: Any = None

    def key(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return what a compiled step depends on: equal for equal ones.

        Raises:
            TypeError: An option cannot be compared.
        """
        groups = [
            [(k, v) for k, v in group.items() if k not in ("params", "lr")]
            for group in optimizer.param_groups
        ]
        if groups != self._groups:
            self._key = self._key_of(groups)
            self._groups = groups
        return self._key

    def _key_of(self, groups: list[list[tuple[str, Any]]]) -> Any:
        """Note which numbers have changed, and return the key."""
        now = dict(_numbers_in(groups))
        before, self._numbers = self._numbers, now
        changed = [place for place, value in now.items() if value != before.get(place, value)]
        self.changing |= dict.fromkeys(changed)
        self.changing = {place: None for place in self.changing if place in now}
        key = tuple(
            [
                (place, ("changing", _sign(value)) if place in self.changing else value)
                for place, value in _places_in(groups)
            ]
        )
        hash(key)
        return key

    def numbers(self, rates: list[float]) -> list[float]:
        """Return the operands: the learning rates, then three numbers for each changing one."""
        if not self.changing:
            return rates
        values = [self._numbers[place] for place in self.changing]
        return [*rates, *[number for value in values for number in _forms(value)]]


def _places_in(groups: list[list[tuple[str, Any]]]) -> Iterator[tuple[Place, Any]]:
    for index, group in enumerate(groups):
        for name, value in group:
            if type(value) in (list, tuple):
                for position, item in enumerate(value):
                    yield Place(index, name, position), item
            else:
                yield Place(index, name, None), value


def _numbers_in(groups: list[list[tuple[str, Any]]]) -> Iterator[tuple[Place, float]]:
    return (pair for pair in _places_in(groups) if type(pair[1]) in (float, int))


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _forms(value: float) -> tuple[float, float, float]:
    """Return a number, what it lacks to 1, and its logarithm, all in double precision.

    On the device, where they are float32, the last two would have few digits for a beta of 0.999.
    """
    return value, 1.0 - value, math.log(value) if value > 0 else -math.inf


def rates_of(optimizer: torch.optim.Optimizer) -> list[float] | None:
    """Return the learning rates; None if one is neither a number nor a tensor of the CPU."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if {*map(type, rates)} == {float}:
        return rates
    known = [_is_number(rate) for rate in rates]
    return [float(rate) for rate in rates] if all(known) else None


def _is_number(rate: Any) -> bool:
    if isinstance(rate, torch.Tensor):
        return type(rate) is torch.Tensor and rate.device.type == "cpu" and rate.numel() == 1
    return isinstance(rate, numbers.Real)


class Operands:
    """Numbers as an array, made anew where one has changed."""

    def __init__(self) -> None:
        self._numbers: list[float] = []
        self._array: Any = None

    def on_device(self, given: list[float]) -> Any:
        """Return the numbers, in double precision where JAX has that."""
        if given != self._numbers or self._array is None:
            with jaxapi.evaluating():
                self._array = jnp.asarray(np.asarray(given, np.float64))
            self._numbers = given
        return self._array


@contextmanager
def on_device_variant(
    optimizer: torch.optim.Optimizer, options: Options, operands: Any
) -> Iterator[None]:
    """Let an optimizer read no values, and take its numbers from an array."""
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    get_value = _adagrad._get_value
    try:
        _adagrad._get_value = lambda value: value  # it has no variant that reads none
        for index, group in enumerate(groups):
            group["lr"] = Tensor(operands[index])
            group["foreach"] = group["fused"] = False
            if type(optimizer) in _CAPTURABLE:
                group["capturable"] = True
            if "betas" in group:
                betas = group["betas"]
                group["betas"] = tuple([_Decay(b) if isinstance(b, float) else b for b in betas])
        for number, place in enumerate(options.changing):
            at = len(groups) + 3 * number
            group, name, position = groups[place.group], place.option, place.position
            value = group[name] if position is None else group[name][position]
            option = _Changing(operands[at], Tensor(operands[at + 1]), operands[at + 2], value)
            if position is None:
                group[name] = option
            else:
                group[name] = (*group[name][:position], option, *group[name][position + 1 :])
        yield
    finally:
        _adagrad._get_value = get_value
        for group, earlier in zip(groups, before, strict=True):
            group.clear()
            group.update(earlier)


class _Changing(Tensor):
    """A number that is an operand: a tensor, of which a trace may know the sign."""

    @staticmethod
    def __new__(cls, array: Any, complement: Tensor, logarithm: Any, value: float) -> _Changing:
        """Make a tensor of a number, what it lacks to 1, its logarithm, and its present value."""
        number: Any = Tensor.__new__(cls, array)
        number.complement, number.logarithm, number.sign = complement, logarithm, _sign(value)
        return number

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _OF_CHANGING.get(func.__name__)
        if own is not None and type(args[0]) is cls:
            result = own(*args)
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs)


def _against_zero(compare: Callable[[int, int], bool]) -> Callable[[Any, Any], Any]:
    def call(number: Any, other: Any) -> Any:
        return (
            compare(number.sign, 0) if type(other) in (int, float) and not other else NotImplemented
        )

    return call


def _lacks(number: Any, minuend: Any) -> Any:
    return number.complement if type(minuend) in (int, float) and minuend == 1 else NotImplemented


def _power(number: Any, exponent: Any) -> Any:
    return _Power(number.logarithm, exponent) if _is_tensor(exponent) else NotImplemented


_OF_CHANGING: Final[dict[str, Callable[..., Any]]] = {
    "eq": _against_zero(int.__eq__),
    "__eq__": _against_zero(int.__eq__),
    "ne": _against_zero(int.__ne__),
    "gt": _against_zero(int.__gt__),
    "ge": _against_zero(int.__ge__),
    "lt": _against_zero(int.__lt__),
    "le": _against_zero(int.__le__),
    "__bool__": lambda number: number.sign != 0,
    "__rsub__": _lacks,
    "pow": _power,
}


class _Decay(float):
    """A rate of decay, whose power with the number of steps keeps the digits that 1 takes away.

    PyTorch computes ``1 - beta**step`` in double precision on the host. On the device, where it is
    float32, a beta of 0.999 would leave three digits in the first steps.
    """

    def __pow__(self, exponent: Any) -> Any:  # type: ignore[override]
        if not _is_tensor(exponent):
            return float(self) ** exponent
        return _Power(math.log(self) if self else -math.inf, exponent)


class _Power:
    """A rate of decay to the power of the number of steps, as optimizers use it."""

    def __init__(self, logarithm: Any, steps: Tensor) -> None:
        self._logarithm = logarithm * array_of(steps).astype(jnp.result_type(float))

    def __rsub__(self, number: float) -> Tensor:
        return Tensor(-jnp.expm1(self._logarithm) - (1 - number))

    def __sub__(self, number: float) -> Tensor:
        return Tensor(jnp.expm1(self._logarithm) - (number - 1))

    def __rmul__(self, factor: Tensor) -> torch.Tensor:
        return factor * Tensor(jnp.exp(self._logarithm))


def _is_tensor(value: Any) -> bool:
    return type(value) is Tensor
