"""What a function uses besides its arguments: modules, optimizers and tensors in its variables.

Python says which names the code of a function has. They are looked up where the function finds
them: in its globals and closure, and in the attributes of objects that are reached from there.
Attributes whose names are nowhere in the code are not looked at, however often they change.
"""

from __future__ import annotations

import collections
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import torch

from snaprt import jaxapi
from snaprt.errors import UsageError
from snaprt.torch.structure import are_the_same, flatten
from snaprt.torch.tensors import Tensor, plainly

#: Larger containers are data.
_MAX_ITEMS: Final = 1000

# Their code has no variables of the user's.
_LIBRARIES: Final = frozenset({"torch", "jax", "jaxlib", "numpy", "torchax", "snaprt"}) | (
    sys.stdlib_module_names - {"__main__"}
)
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a variable is.

    Attributes:
        holder: A dictionary of attributes or globals, a list, or the cell of a closure.
        key: The name or number in it; None for a cell.
        name: What the variable is called, with the object that it belongs to.
    """

    holder: Any
    key: Any
    name: str

    def get(self) -> Any:
        """Return the value; None if there is none."""
        if self.key is None:
            return self.holder.cell_contents if _is_filled(self.holder) else None
        try:
            return self.holder[self.key]
        except LookupError:
            return None

    def set(self, value: Any) -> None:
        """Set the variable."""
        if self.key is None:
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


def objects_in(args: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments that may have modules or optimizers, or are such."""
    for value in args:
        if type(value) in (list, tuple):
            yield from objects_in(value)
        elif type(value) is dict:
            yield from objects_in(value.values())
        elif type(value) not in _PLAIN and not isinstance(value, torch.Tensor):
            yield value


class Variables:
    """The modules, optimizers and tensors among the variables of a function, each once.

    Args:
        function: The function, or an object that can be called.
        args: Objects among its arguments.

    Attributes:
        modules: The modules that are not parts of others that are found first.
        optimizers: The optimizers.
        tensors: The tensors that variables hold, by the name of the variable.
        constants: The numbers, flags and strings that the function may read, by name and value.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.args = [*args]
        names: set[str] = set()
        while True:
            count = len(names)
            search = _Search(names)
            search.look_into(function, *args)
            if len(names) == count:  # else more attributes have to be looked at
                break
        self.modules = search.modules
        self.optimizers = search.optimizers
        self._slots = search.slots
        self._holders = [*search.holders.values()]
        self._sizes = [*map(len, self._holders)]
        self._take()

    def _take(self) -> None:
        self._values = [slot.get() for slot in self._slots]
        pairs = [*zip(self._slots, self._values, strict=True)]
        self.tensors = {
            f"variable{number}.{slot.name}": value
            for number, (slot, value) in enumerate(pairs)
            if isinstance(value, Tensor)
        }
        self.constants = tuple(
            [(slot.name, type(v), _by_value(v)) for slot, v in pairs if type(v) in _PLAIN]
        )

    def hold(self) -> bool:
        """Return whether the variables are what they were, apart from plain values and tensors."""
        if [*map(len, self._holders)] != self._sizes:
            return False
        now = [slot.get() for slot in self._slots]
        if are_the_same(now, self._values):
            return True
        if not all(map(_are_alike, now, self._values)):
            return False
        self._take()
        return True

    def take_new(self) -> list[tuple[Slot, Tensor]]:
        """Return the tensors that were assigned to variables, which get their old values again.

        Raises:
            UsageError: A tensor is in a list or another object that a variable holds.
        """
        new: list[tuple[Slot, Any]] = []
        for slot, before in zip(self._slots, self._values, strict=True):
            value = slot.get()
            if value is not before and _has_tracer(value):
                new.append((slot, value))
                slot.set(before)
        for holder, size in zip(self._holders, self._sizes, strict=True):
            keys = [*holder][size:] if isinstance(holder, dict) else range(size, len(holder))
            more = [Slot(holder, key, f"{type(holder).__name__}[{key!r}]") for key in keys]
            added = [(slot, value) for slot in more if _has_tracer(value := slot.get())]
            for slot, _ in reversed(added):
                del holder[slot.key]
            new += added
        for slot, value in new:
            if not isinstance(value, Tensor) or isinstance(slot.holder, list):
                raise UsageError(
                    f"a function compiled by snaprt.torch.jit puts a tensor into {slot.name}",
                    hint="return the tensor, and store it outside of the function",
                )
        return new


def _by_value(value: Any) -> Any:
    return value.hex() if type(value) is float else value  # NaN equals itself, and 0.0 not -0.0


def _are_alike(now: Any, then: Any) -> bool:
    kind = type(now)
    return now is then or (kind is type(then) and (kind is Tensor or kind in _PLAIN))


def _has_tracer(value: Any) -> bool:
    tensors: list[torch.Tensor] = []
    try:
        flatten(value, tensors)
    except UsageError:
        return False
    with plainly():
        return any(type(t) is Tensor and isinstance(t.box.array, jaxapi.Tracer) for t in tensors)


class _Search:
    """Looks for variables, by the names that are in the code of functions found on the way.

    Args:
        names: The names known so far, to which those of functions are added.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._seen: dict[int, Any] = {}
        self._methods_of: set[int] = set()
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.slots: list[Slot] = []
        self.holders: dict[int, Any] = {}  # by ``id``: the lists and dictionaries of variables

    def look_into(self, *values: Any) -> None:
        """Look into values, and into what is found there."""
        pending = collections.deque([("", value) for value in values])
        while pending:
            name, value = pending.popleft()
            if id(value) in self._seen or type(value) in _PLAIN or isinstance(value, torch.Tensor):
                continue
            self._seen[id(value)] = value
            if isinstance(value, torch.optim.Optimizer):
                self.optimizers.append(value)
                continue
            if isinstance(value, torch.nn.Module):
                self.modules.append(value)
            slots = [*self._slots_in(name, value)]
            others = self._others_in(value)
            fixed = [i for i, other in enumerate(others) if isinstance(other, torch.Tensor)]
            self.slots += [*slots, *[Slot(others, i, f"{name}[{i}]") for i in fixed]]
            pending += [(slot.name, slot.get()) for slot in slots]
            pending += [(name, other) for other in others]

    def _slots_in(self, name: str, value: Any) -> Iterator[Slot]:
        """Yield the variables that a function, an object or a container has."""
        if inspect.isfunction(value):
            for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield Slot(cell, None, free)
            if _is_of_user(value.__globals__.get("__name__")):
                names = _names_in(value.__code__)
                self._names |= names
                yield from self._slots_by_name(value.__globals__, "", names)
        elif isinstance(value, list | tuple):
            self.holders[id(value)] = value
            indices = range(min(len(value), _MAX_ITEMS))
            yield from [Slot(value, index, f"{name}[{index}]") for index in indices]
        elif isinstance(value, dict):
            self.holders[id(value)] = value
            yield from [Slot(value, key, f"{name}[{key!r}]") for key in [*value][:_MAX_ITEMS]]
        elif not isinstance(value, types.ModuleType | type | types.MethodType):
            attributes = getattr(value, "__dict__", {})
            yield from self._slots_by_name(attributes, f"{type(value).__name__}.", self._names)

    def _slots_by_name(self, holder: Any, of: str, names: Set[str]) -> Iterator[Slot]:
        self.holders[id(holder)] = holder
        yield from [Slot(holder, name, f"{of}{name}") for name in sorted(names & holder.keys())]

    def _others_in(self, value: Any) -> list[Any]:
        """Return what else to look into, which does not change: functions, arguments, items."""
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if inspect.ismethod(value):
            self._methods_of.add(id(value.__self__))
            return [value.__func__, value.__self__]
        if inspect.isfunction(value):
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            return [getattr(value, "__wrapped__", None), *defaults]
        if isinstance(value, types.ModuleType):
            return _named_in(vars(value), self._names) if _is_of_user(value.__name__) else []
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        of_user = [kind for kind in kinds if _is_of_user(kind.__module__)]
        # An object may be called, but hardly by its own methods.
        names = self._names if id(value) in self._methods_of else self._names | {"__call__"}
        return [other for kind in of_user for other in _named_in(vars(kind), names)]


def _named_in(holder: Any, names: Set[str]) -> list[Any]:
    found = [holder[name] for name in [*holder] if name in names]
    return [other for value in found for other in _behind(value)]


def _behind(value: Any) -> list[Any]:
    """Return the functions behind an attribute of a class or module, or the attribute itself."""
    if isinstance(value, property):
        return [function for function in (value.fget, value.fset) if function is not None]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, functools.cached_property):
        return [value.func]
    return [value]


def _is_of_user(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals, and of attributes, in code and in the functions inside it."""
    inside = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inside)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
