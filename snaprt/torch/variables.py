"""What a function uses besides its arguments: modules, optimizers and tensors in its variables.

Python says which names the code of a function has. They are looked up where the function finds
them: in its globals and closure, and in the attributes of objects that are reached from there.
Attributes whose names are nowhere in the code are not looked at, however often they change.

A trace is good for the values that these variables had: plain ones by value, others by identity.
"""

from __future__ import annotations

import collections
import dis
import functools
import hashlib
import logging
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from snaprt.errors import UsageError
from snaprt.torch.structure import Static, Structure, are_the_same, first_that, statics_in
from snaprt.torch.tensors import Tensor, has_tracer, plainly

_log = logging.getLogger("snaprt.torch")

#: Larger containers are data.
_MAX_ITEMS: Final = 1000

# Their code has no variables of the user's.
_LIBRARIES: Final = frozenset({"torch", "jax", "jaxlib", "numpy", "torchax", "snaprt"}) | (
    sys.stdlib_module_names - {"__main__"}
)
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
_FORWARD_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a variable is.

    Attributes:
        holder: A dictionary of attributes or globals, a list, a class, an object with
            ``__slots__``, or the cell of a closure.
        key: The name or number in it; None for a cell.
        name: What the variable is called, with the object that it belongs to.
    """

    holder: Any
    key: Any
    name: str

    def get(self) -> Any:
        """Return the value; None if there is none."""
        try:
            if self.key is None:
                return self.holder.cell_contents
            if _is(self.holder, dict):
                return dict.get(self.holder, self.key)  # a subclass may make what is not there
            if _is(self.holder, list | tuple):
                return self.holder[self.key]
            if _is(self.holder, type):
                return vars(self.holder)[self.key]
            return getattr(self.holder, self.key)
        except Exception:  # an attribute may be computed, and raise whatever it wants
            return None

    def set(self, value: Any) -> None:
        """Set the variable."""
        if self.key is None:
            self.holder.cell_contents = value
        elif _is(self.holder, dict | list):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


_CONTAINERS: Final = (dict, list, tuple)


class VariablesOf:
    """The variables of a function, for each of the objects among its arguments.

    Args:
        function: The function, or an object that can be called.
        is_watched: Whether somebody else watches the attributes of modules.
    """

    def __init__(self, function: Callable[..., Any], *, is_watched: bool = False) -> None:
        self._function = function
        self._is_watched = is_watched
        self._known: list[Variables] = []

    def find(self, structure: Structure) -> Variables:
        """Return the variables as they are now.

        Args:
            structure: The structure of the arguments.
        """
        args = [*statics_in(structure)]
        variables = first_that(
            self._known, lambda each: are_the_same(args, each.args) and each.hold()
        )
        if variables is None:
            variables = Variables(self._function, args, is_watched=self._is_watched)
            self._known[:] = [variables, *self._known[: _MAX_KNOWN - 1]]
        return variables


#: They keep the objects among the arguments alive.
_MAX_KNOWN: Final = 4


class Variables:
    """The modules, optimizers and tensors among the variables of a function, each once.

    Args:
        function: The function, or an object that can be called.
        args: Objects among its arguments.
        is_watched: Whether somebody else watches the attributes of modules.

    Attributes:
        modules: The modules that are not parts of others that are found first.
        optimizers: The optimizers.
        tensors: The tensors of the device that variables hold, by the name of the variable.
        constants: All other values of variables, which a trace depends on.
    """

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], *, is_watched: bool = False
    ) -> None:
        self.args = [*args]
        names: set[str] = set()
        while True:
            count = len(names)
            search = _Search(names, is_watched=is_watched)
            search.look_into(function, *args)
            if len(names) == count:  # else more attributes have to be looked at
                break
        self.modules = search.modules
        self._of_modules = {id(vars(m)) for module in self.modules for m in module.modules()}
        self.optimizers = search.optimizers
        self._generators = search.generators
        self._slots = search.slots
        self._slot_of = {f"variable{n}.{slot.name}": slot for n, slot in enumerate(self._slots)}
        self._holders = [*search.holders.values()]
        self._sizes = [*map(len, self._holders)]
        self._take()

    def _take(self) -> None:
        self._values = [slot.get() for slot in self._slots]
        self._data = [value for value in self._values if _contents(value) is not None]
        self._contents = [*map(_contents, self._data)]
        pairs = [*zip(self._slots, self._values, strict=True)]
        named = zip(self._slot_of, self._values, strict=True)
        self.tensors = {name: value for name, value in named if _is(value, Tensor)}
        self.constants = Constants(tuple([(slot.name, _described(v)) for slot, v in pairs]))

    def hold(self) -> bool:
        """Return whether the variables are what they were, apart from plain values and tensors."""
        if [*map(len, self._holders)] != self._sizes:
            return False
        now = [slot.get() for slot in self._slots]
        if are_the_same(now, self._values):
            if [*map(_contents, self._data)] == self._contents:
                return True
        elif not all(map(_are_alike, now, self._values)):
            return False
        self._take()
        return True

    def states_of_generators(self) -> list[bytes]:
        """Return the states of the generators of random numbers of Python and NumPy."""
        states = [random.getstate(), np.random.get_state()]
        for generator in self._generators:
            states += [read(generator) for kind, read in _STATES.items() if _is(generator, kind)]
        return [pickle.dumps(state) for state in states]

    def take_new(self) -> list[tuple[Place, Any]]:
        """Return the tensors that were assigned to variables, which get their old values again.

        Raises:
            UsageError: A tensor is in a list or another object that a variable holds.
        """
        new: list[tuple[Place, Any]] = []
        for number, (slot, before) in enumerate(zip(self._slots, self._values, strict=True)):
            value = slot.get()
            if value is not before and has_tracer(value):
                new.append((number, value))
                slot.set(before)
        for number, (holder, size) in enumerate(zip(self._holders, self._sizes, strict=True)):
            keys = _keys(holder)[size:]
            added = [((number, key), holder[key]) for key in keys if has_tracer(holder[key])]
            for (_, key), _ in reversed(added):
                del holder[key]
            new += added
        for place, value in new:
            slot = self._slot_at(place)
            if not _is(value, torch.Tensor) or _is(slot.holder, list):
                raise UsageError(
                    f"a wrapped or compiled function puts a tensor into {slot.name}",
                    hint="return the tensor, and store it outside of the function",
                )
        return new

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors of the device that are not computed from others, nor of modules."""
        if not self.tensors:
            return {}
        with plainly():
            return {
                name: tensor
                for name, tensor in self.tensors.items()
                if tensor.is_leaf and id(self._slot_of[name].holder) not in self._of_modules
            }

    @contextmanager
    def holding(self, tensors: Mapping[str, Any]) -> Iterator[None]:
        """Let variables have these values, and what they had before at the end.

        Those that were assigned to meanwhile keep that, for `take_new`.
        """
        held = [(self._slot_of[name], tensor) for name, tensor in tensors.items()]
        before = [slot.get() for slot, _ in held]
        for slot, tensor in held:
            slot.set(tensor)
        is_assigned = [False] * len(held)
        try:
            yield
            is_assigned = [slot.get() is not tensor for slot, tensor in held]
        finally:
            for (slot, _), value, keeps in zip(held, before, is_assigned, strict=True):
                if not keeps:
                    slot.set(value)

    def set(self, place: Place, tensor: Tensor) -> None:
        """Assign a tensor to a variable."""
        self._slot_at(place).set(tensor)

    def _slot_at(self, place: Place) -> Slot:
        if isinstance(place, int):
            return self._slots[place]
        number, key = place
        holder = self._holders[number]
        return Slot(holder, key, f"{type(holder).__name__}[{key!r}]")


Place = int | tuple[int, Any]
"""A variable: its number, or the number of what holds it and its key there, if it is new."""


class Constants:
    """Values of variables that a trace depends on; hashed once."""

    __slots__ = ("_hash", "values")

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values
        self._hash = hash(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.values == other.values

    def __hash__(self) -> int:
        return self._hash


class Traces:
    """Counts traces, and warns if there are many for the same kind of arguments.

    Args:
        what: The beginning of the warning: what has traced a function, and the function.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._made: collections.Counter[Any] = collections.Counter()
        self._last = Constants(())

    def count(self, kind: Any, constants: Constants) -> None:
        """Count a trace.

        Args:
            kind: The kind of arguments.
            constants: The values of the variables of the function.
        """
        self._made[kind] += 1
        if self._made[kind] == _MANY_TRACES:
            changed = {*constants.values} - {*self._last.values}
            names = sorted({value[0] for value in changed})
            reason = ", ".join(names) or "a variable, a module or an optimizer"
            _log.warning("%s %d times: %s changed between calls", self._what, _MANY_TRACES, reason)
        self._last = constants


_MANY_TRACES: Final = 6


def keep_last(traces: dict[Any, Any], key: Any, trace: Any) -> None:
    """Add a trace, and forget the oldest one if there are too many."""
    traces[key] = trace
    if len(traces) > _MAX_TRACES:
        del traces[next(iter(traces))]


_MAX_TRACES: Final = 256


_STATES: Final[dict[type, Callable[[Any], Any]]] = {
    random.Random: lambda generator: generator.getstate(),
    np.random.RandomState: lambda generator: generator.get_state(),
    np.random.Generator: lambda generator: generator.bit_generator.state,
}
_DATA: Final = (torch.Tensor, np.ndarray, set, frozenset)


def _is(value: Any, kinds: Any) -> bool:
    """Return whether a value is an instance, without asking it: proxies answer for others."""
    return issubclass(type(value), kinds)


def _contents(value: Any) -> Any:
    """Return what changes when a tensor of the CPU, a small array or a set is written to."""
    if _is(value, torch.Tensor):
        return None if _is(value, Tensor) else value._version
    if _is(value, np.ndarray) and value.size <= _MAX_ITEMS and not value.dtype.hasobject:
        return value.tobytes()
    return frozenset(value) if _is(value, set) else None


def _described(value: Any) -> Any:
    """Return what a trace depends on, apart from what is inside of a container."""
    if type(value) in _PLAIN:
        # NaN equals itself, and 0.0 not -0.0.
        return type(value), value.hex() if type(value) is float else value
    if _is(value, Tensor):
        return Tensor
    if _is(value, _CONTAINERS) and len(value) <= _MAX_ITEMS:
        return type(value), len(value)
    if _is(value, set):
        return type(value), frozenset(value)
    if _is(value, torch.Tensor | np.ndarray):
        with suppress(Exception):  # a layout without memory, or one of objects
            return _digest(value)
    return Static(value)


def _digest(value: Any) -> tuple[Any, ...]:
    """Return what stands for a tensor of the CPU or an array, and does not keep it alive."""
    if isinstance(value, torch.Tensor):
        array = value.detach().contiguous().flatten().view(torch.uint8).numpy()
    else:
        array = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    kind = (type(value), value.dtype, tuple(value.shape))
    return (*kind, hashlib.blake2b(array.data, digest_size=16).digest())


def _are_alike(now: Any, then: Any) -> bool:
    kind = type(now)
    return now is then or (
        kind is type(then) and (kind in _PLAIN or _is(now, torch.Tensor | np.ndarray))
    )


class _Search:
    """Looks for variables, by the names that are in the code of functions found on the way.

    Args:
        names: The names known so far, to which those of functions are added.
        is_watched: Whether somebody else watches the attributes of modules.
    """

    def __init__(self, names: set[str], *, is_watched: bool) -> None:
        self._names = names
        self._is_watched = is_watched
        self._seen: dict[int, tuple[Any, bool]] = {}
        self._methods_of: set[int] = set()
        self._of_classes: set[tuple[type, str]] = set()
        self._parts: set[int] = set()  # of modules that were found
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.generators: list[Any] = []
        self.slots: list[Slot] = []
        self.holders: dict[int, Any] = {}  # by ``id``: the lists and dictionaries of variables

    def look_into(self, *values: Any) -> None:
        """Look into values, and into what is found there."""
        pending = collections.deque([("", value, False) for value in values])
        while pending:
            name, value, is_fixed = pending.popleft()
            try:
                pending += self._look_at(name, value, is_fixed=is_fixed)
            except Exception as error:  # whatever an object of the user raises
                _log.debug("cannot look for variables in %s: %r", name, error)

    def _look_at(self, name: str, value: Any, *, is_fixed: bool) -> list[tuple[str, Any, bool]]:
        """Note the variables that a value has, and return what to look at then.

        Args:
            name: What it is called.
            value: The value.
            is_fixed: Whether an installed package has it, whose variables do not change. Code is
                that of its own module, whoever has wrapped it.
        """
        if type(value) in _PLAIN or _is(value, _DATA):
            return []
        module = _module_of(value)
        is_fixed = is_fixed if module is None else _is_installed(module)
        _, was_fixed = self._seen.get(id(value), (None, None))
        if was_fixed is False or was_fixed is is_fixed:
            return []
        self._seen[id(value)] = value, is_fixed
        if _is(value, (*_STATES,)):
            self.generators.append(value)
        if _is(value, torch.optim.Optimizer):
            self.optimizers += [value] if was_fixed is None else []
            return []
        if _is(value, torch.nn.Module) and id(value) not in self._parts:
            self.modules.append(value)
            self._parts |= {*map(id, value.modules())}
        holder, slots = self._slots_in(name, value)
        slots += self._slots_of_class(value if _is(value, type) else type(value))
        others = self._others_in(value)
        if holder is not None and self._may_change(holder, value, is_fixed=is_fixed):
            self.holders[id(holder)] = holder
        self.slots += [
            slot
            for slot in slots
            if self._may_change(slot.holder, value, is_fixed=is_fixed)
            or _is(slot.get(), torch.Tensor)
        ]
        tensors = [i for i, other in enumerate(others) if _is(other, torch.Tensor)]
        self.slots += [Slot(others, i, f"{name}[{i}]") for i in tensors]
        of_slots = [
            (slot.name, each, is_fixed or _is_installed(_module_of(slot.holder)))
            for slot in slots
            for each in _behind(slot.get())
        ]
        return of_slots + [(name, each, is_fixed) for other in others for each in _behind(other)]

    def _may_change(self, holder: Any, of: Any, *, is_fixed: bool) -> bool:
        """Return whether what a holder has is to be compared; others watch attributes of modules.

        Args:
            holder: What has variables.
            of: The value that they belong to.
            is_fixed: Whether an installed package has this value.
        """
        if _is(holder, type):
            return not _is_installed(holder.__module__)
        if _is(of, torch.nn.Module):
            return not self._is_watched and any(of is module for module in self.modules)
        return not is_fixed

    def _slots_in(self, name: str, value: Any) -> tuple[Any, list[Slot]]:
        """Return the variables of a function, an object or a container, and what may get more."""
        if type(value) is types.FunctionType:
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            free = [Slot(cell, None, variable) for variable, cell in cells]
            if not _is_followed(_module_of(value)):
                return None, free
            names = _names_in(value.__code__)
            self._names |= names.attributes
            return value.__globals__, [*free, *_by_name(value.__globals__, "", names.variables)]
        if _is(value, _CONTAINERS):
            keys = _keys(value)[:_MAX_ITEMS]
            return value, [Slot(value, key, f"{name}[{key!r}]") for key in keys]
        if _is(value, types.ModuleType):
            if not _is_followed(value.__name__):
                return None, []
            return vars(value), _by_name(vars(value), f"{value.__name__}.", self._names)
        if _is(value, type) or _is_written_in_c(value):
            return None, []
        of = f"{type(value).__name__}."
        attributes = getattr(value, "__dict__", None)
        slots = _by_name(attributes or {}, of, self._names)
        found = sorted(self._names & {*_slots_of(type(value))})
        return attributes, [*slots, *[Slot(value, key, f"{of}{key}") for key in found]]

    def _slots_of_class(self, kind: type) -> Iterator[Slot]:
        """Yield the attributes of a class and its bases, once each."""
        for each in kind.__mro__:
            if _is_followed(each.__module__):
                for key in sorted(self._names & vars(each).keys()):
                    if (each, key) not in self._of_classes:
                        self._of_classes.add((each, key))
                        yield Slot(each, key, f"{each.__name__}.{key}")

    def _others_in(self, value: Any) -> list[Any]:
        """Return what else to look into, which does not change: functions, arguments, items."""
        if _is(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if type(value) is types.MethodType:
            self._methods_of.add(id(value.__self__))
            return [value.__func__, value.__self__]
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
        if type(value) is types.FunctionType:
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            return [wrapped, *defaults]
        if _is(value, type):
            making = () if _is_installed(value.__module__) else _OF_NEW_OBJECTS
            return _implicit_methods(value, (*_OF_CLASSES, *making))
        if _is_written_in_c(value):
            return [getattr(value, "__self__", None), wrapped]
        # An object may be called, but hardly by its own methods.
        also = _OF_OBJECTS if id(value) not in self._methods_of else ()
        others = [wrapped, *_implicit_methods(type(value), also)]
        if _is(value, torch.nn.Module):
            others += value._modules.values()
            others += [hook for name in _FORWARD_HOOKS for hook in vars(value)[name].values()]
        return others


#: Methods that are called where the name of a class is, or an object: by PyTorch, too.
_OF_CLASSES: Final = ("forward", "backward", "setup_context", "jvp")
_OF_NEW_OBJECTS: Final = ("__init__", "__post_init__")  # not of installed ones: they lead far
_OF_OBJECTS: Final = ("__call__", "forward")
#: Methods that run where their names are not, and that matter to what is computed.
_OF_ALL: Final = (
    *("__getattr__", "__getitem__", "__setitem__", "__len__", "__iter__", "__next__"),
    *("__contains__", "__enter__", "__exit__", "__bool__", "__float__", "__int__", "__index__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__pow__", "__rpow__", "__matmul__", "__rmatmul__", "__neg__"),
)


def _implicit_methods(kind: type, also: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for each in kind.__mro__:
        if _is_followed(each.__module__):
            found += [vars(each)[name] for name in (*also, *_OF_ALL) if name in vars(each)]
    return found


def _is_written_in_c(value: Any) -> bool:
    return callable(value) and type(value).__module__ in _OF_C


_OF_C: Final = frozenset({"builtins", "functools"})


def _module_of(value: Any) -> str | None:
    """Return the name of the Python module whose code or variables this is."""
    if type(value) is types.FunctionType:
        return value.__globals__.get("__name__")
    if _is(value, types.ModuleType):
        return value.__name__
    return value.__module__ if _is(value, type) else None


def _by_name(holder: dict[str, Any], of: str, names: Set[str]) -> list[Slot]:
    found = sorted(names & holder.keys())
    return [Slot(holder, name, f"{of}{name}") for name in found if not name.startswith("__")]


def _keys(container: Any) -> list[Any]:
    if _is(container, dict):
        return [*dict.keys(container)]
    return [*range(len(container))]


def _slots_of(kind: type) -> Iterator[str]:
    """Yield the attributes that ``__slots__`` of a class names."""
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


def _behind(value: Any) -> list[Any]:
    """Return the functions behind an attribute of a class, or the value of another variable."""
    if _is(value, property):
        return [function for function in (value.fget, value.fset) if function is not None]
    if _is(value, staticmethod | classmethod):
        return [value.__func__]
    if _is(value, functools.cached_property):
        return [value.func]
    return [value]


def _is_followed(module: str | None) -> bool:
    """Return whether functions and classes of a module are looked into."""
    return module is not None and module.partition(".")[0] not in _LIBRARIES


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Return whether a module is of an installed package, whose variables do not change."""
    found = sys.modules.get((module or "").partition(".")[0])
    paths = [getattr(found, "__file__", None), *getattr(found, "__path__", ())]
    return any(not _PACKAGES.isdisjoint(Path(path).parts) for path in paths if path)


_PACKAGES: Final = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of variables and of attributes in code, and in the functions inside it."""

    variables: frozenset[str]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names:
    variables: set[str] = set()
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ON_GLOBALS:
            variables.add(instruction.argval)
        elif isinstance(instruction.argval, types.CodeType):
            inside = _names_in(instruction.argval)
            variables |= inside.variables
            attributes |= inside.attributes
        elif instruction.opcode in dis.hasname:
            attributes.add(instruction.argval)
    if "getattr" in variables:
        texts = [const for const in code.co_consts if isinstance(const, str)]
        attributes |= {text for text in texts if text.isidentifier()}
    return _Names(frozenset(variables), frozenset(attributes))


_ON_GLOBALS: Final = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "STORE_NAME"})
