"""What a Python function depends on, taken apart: its arrays, and everything else as plain data.

Two functions whose data are equal compute the same of their arrays, as far as Python shows what a
function can reach: its code, its defaults, the variables that it closes over, the globals that it
names, and of objects of the user's own classes the attributes that code of the user's names. The
arrays are taken out, so that another function may be made with other arrays in their place.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np

from snaprt import jaxapi
from snaprt.graph.operation import Identity
from snaprt.host import stacks
from snaprt.trace.array import LazyArray

Data = Any
"""Nested tuples, hashable; equal for what traces to the same."""

_PLAIN: Final = frozenset({bool, int, str, bytes, type(None), type(Ellipsis), range})
_SEQUENCES: Final = frozenset({tuple, list, collections.deque})
_MAX_DEPTH: Final = 64

#: Longer lists and dictionaries are not compared at each call.
_MAX_ITEMS: Final = 10_000

#: Who names these may ask for any attribute.
_ANY_ATTRIBUTE: Final = frozenset(
    {"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter"}
)

#: Methods that Python calls without their name, but not while a function uses an object.
_ONCE: Final = frozenset({"__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__"})

#: Arrays of numpy that are no inputs are compared by their bytes up to so many, else by identity.
_MAX_COMPARED: Final = 4096
_ARRAY: Final = ("array",)


class NotCapturedError(Exception):
    """The function cannot be taken apart: it is too large, or holds a foreign tracer."""


class Held:
    """Carries an object along in data without taking part in comparisons."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held)

    def __hash__(self) -> int:
        return hash(Held)


class Static:
    """An object that is the same if it is that very object, or one that its type calls equal."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        if self.value is other.value:
            return True
        kind: Any = type(other.value)
        return _compares(kind) and type(self.value) is kind and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


def capture(function: Any, arrays: list[Any]) -> Data:
    """Return what ``function`` depends on, and append the arrays in it to ``arrays``.

    Raises:
        NotCapturedError: It cannot be taken apart.
    """
    reached = _Reached()
    guarding = _Capture(None, reached)
    data = _Capture(arrays, reached).of(function, 0)
    return data, tuple([(*at, guarding.of(value, 0)) for *at, value in reached.attributes()])


def rebuild(data: Data, arrays: Iterator[Any]) -> Any:
    """Return the function whose data this is, with other arrays in the place of its own."""
    return _Rebuild(arrays).of(data[0])


def users_code(function: Any) -> types.CodeType | None:
    """Return the code of the first function of the user's own that calling ``function`` reaches."""
    seen: set[int] = set()
    pending = [function]
    while pending and len(seen) < _MAX_DEPTH:
        value = pending.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            pending += [value.func, *value.args]
        elif isinstance(value, types.MethodType):
            pending.append(value.__func__)
        elif isinstance(value, types.FunctionType):
            if _is_users(value.__code__.co_filename):
                return value.__code__
            pending += [content for content in _contents(value) if callable(content)]
    return None


class _Reached:
    """What code of the user's names, and objects of the user's classes that it may ask for that."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._objects: list[tuple[Any, Mapping[str, Any], bool]] = []

    def add_code(self, code: types.CodeType) -> None:
        """Add what a function names."""
        self._names.update(dict.fromkeys(_names_in(code)))

    def add(self, value: Any) -> None:
        """Add an object, or a class."""
        kind: Any = value if isinstance(value, type) else type(value)
        if kind is not value and not _compares(kind):
            self._objects.append((value, getattr(value, "__dict__", {}), False))
        is_made = kind is value  # by the function, perhaps
        for base in kind.__mro__:
            if _is_users_class(base):
                self._objects.append((base, vars(base), is_made))

    def attributes(self) -> Iterator[tuple[int, str, Any]]:
        """Yield each attribute that is named; what is added meanwhile is looked at as well."""
        visited: set[tuple[int, str]] = set()
        progress = -1
        while progress != len(visited):
            progress = len(visited)
            for number, (_, attributes, is_made) in enumerate(tuple(self._objects)):
                for name in self._named(attributes, is_made):
                    if (number, name) not in visited:
                        visited.add((number, name))
                        yield number, name, _behind(attributes[name])

    def _named(self, attributes: Mapping[str, Any], is_made: bool) -> list[str]:
        if not self._names.keys().isdisjoint(_ANY_ATTRIBUTE):
            names = [*attributes]
        else:
            names = [name for name in self._names if name in attributes]
        called = [n for n in attributes if n[:2] == n[-2:] == "__" and (is_made or n not in _ONCE)]
        return [*names, *(n for n in called if isinstance(attributes[n], types.FunctionType))]


def _behind(attribute: Any) -> Any:
    """Return the function of a property or a method of a class; anything else as it is."""
    for name in ("__func__", "fget", "func"):
        if isinstance(attribute, _DESCRIPTORS) and hasattr(attribute, name):
            return getattr(attribute, name)
    return attribute


_DESCRIPTORS: Final = (property, classmethod, staticmethod, functools.cached_property)


class _Capture:
    """Takes apart one function.

    Args:
        arrays: Receives the arrays; ``None`` where an array is no input but must stay the same.
        reached: Receives what else may matter.
    """

    def __init__(self, arrays: list[Any] | None, reached: _Reached) -> None:
        self._arrays = arrays
        self._reached = reached
        self._met: dict[int, int] = {}
        self._met_values: list[Any] = []  # so that no ``id`` is used again
        self._is_whole: dict[int, Held] = {}  # what was met and has no arrays
        self._guarding = self if arrays is None else _Capture(None, reached)

    def of(self, value: Any, depth: int) -> Data:
        """Return the data of ``value``."""
        kind = type(value)
        if kind is LazyArray or kind is jaxapi.ArrayImpl:
            return self._array(value)
        if kind in _PLAIN:
            return (kind, value)
        if kind is float or kind is complex:
            return (kind, repr(value), Held(value))  # NaN equals itself, and 0.0 is not -0.0
        if depth > _MAX_DEPTH:
            raise NotCapturedError("it is nested too deeply")
        below = depth + 1
        if (kind in _SEQUENCES or kind is dict) and len(value) > _MAX_ITEMS:
            raise NotCapturedError("it holds a long list")
        if kind in _SEQUENCES:
            return (kind, tuple([self.of(item, below) for item in value]))
        if kind is dict:
            keys = tuple([_key(key) for key in value])
            return (kind, keys, tuple([self.of(item, below) for item in value.values()]))
        take = _TAKEN_APART.get(kind)
        if take is not None:
            return self._once(value, below, take)
        if isinstance(value, np.ndarray | np.generic):
            return self._of_numpy(value)
        if isinstance(value, jaxapi.Tracer):
            raise NotCapturedError("it holds a tracer")
        if isinstance(value, jax.Array):
            if not jaxapi.is_array_aval(jaxapi.typeof(value)):
                raise NotCapturedError("it holds a reference")
            return self._array(value)
        if isinstance(value, types.ModuleType):
            return ("same", Static(value))
        if isinstance(value, type):
            return self._once(value, below, _Capture._class)
        children, tree = jax.tree.flatten(value, is_leaf=lambda leaf: leaf is not value)
        if len(children) != 1 or children[0] is not value:
            return ("node", tree, tuple([self.of(child, below) for child in children]))
        return self._once(value, below, _Capture._object)

    def _array(self, value: Any) -> Data:
        if self._arrays is None:
            return ("this array", Identity(value))
        self._arrays.append(value)
        return _ARRAY

    def _of_numpy(self, value: Any) -> Data:
        if value.dtype.hasobject:
            return ("same", Static(value))
        if value.ndim and (self._arrays is not None or value.nbytes > _MAX_COMPARED):
            return self._array(value)
        return (type(value), value.dtype, value.shape, value.tobytes(), Held(value.copy()))

    def _once(self, value: Any, depth: int, take: Callable[[_Capture, Any, int], Data]) -> Data:
        """Return the data of what may refer to itself."""
        number = self._met.get(id(value))
        if number is not None:
            return ("met", number, self._is_whole.get(number))
        number = self._met[id(value)] = len(self._met)
        self._met_values.append(value)
        before = 0 if self._arrays is None else len(self._arrays)
        data = take(self, value, depth)
        if self._arrays is not None and len(self._arrays) > before:
            return ("with arrays", number, data)
        holder = self._is_whole[number] = Held(value)
        return ("whole", holder, data)

    def _function(self, function: types.FunctionType, depth: int) -> Data:
        code = function.__code__
        cells = tuple([self.of(content, depth) for content in _contents(function)])
        defaults = self.of(function.__defaults__, depth)
        keyword_defaults = self.of(function.__kwdefaults__, depth)
        globals_of: tuple[Any, ...] = ()
        guards: tuple[Any, ...] = ()
        if _is_users(code.co_filename):
            self._reached.add_code(code)
            variables, of_modules = _globals_read(function)
            globals_of = tuple([(name, self.of(value, depth)) for name, value in variables])
            guards = tuple([(name, self._guarding.of(v, depth)) for name, v in of_modules])
        namespace = Static(function.__globals__)
        parts = (cells, defaults, keyword_defaults, globals_of, guards)
        return (types.FunctionType, code, namespace, function.__name__, *parts)

    def _method(self, method: types.MethodType, depth: int) -> Data:
        parts = (self.of(method.__func__, depth), self.of(method.__self__, depth))
        return (types.MethodType, parts)

    def _partial(self, partial: functools.partial[Any], depth: int) -> Data:
        parts = (partial.func, partial.args, partial.keywords)
        return (functools.partial, tuple([self.of(part, depth) for part in parts]))

    def _object(self, value: Any, depth: int) -> Data:
        kind: Any = type(value)
        if _wraps(kind):
            attributes = vars(value)
            parts = tuple([self.of(attribute, depth) for attribute in attributes.values()])
            return ("object", Static(kind), tuple(attributes), parts)
        if _is_users_class(kind):
            self._reached.add(value)
        return ("same", Static(value))

    def _class(self, kind: type, depth: int) -> Data:
        self._reached.add(kind)
        return ("same", Static(kind))


_TAKEN_APART: Final[Mapping[type, Callable[[_Capture, Any, int], Data]]] = {
    types.FunctionType: _Capture._function,
    types.MethodType: _Capture._method,
    functools.partial: _Capture._partial,
}


class _Rebuild:
    """Puts together one function of the data of another."""

    def __init__(self, arrays: Iterator[Any]) -> None:
        self._arrays = arrays
        self._rebuilt: dict[int, Any] = {}

    def of(self, data: Data, number: int = -1) -> Any:
        """Return the value whose data this is; it was the ``number``-th that may be met again."""
        kind = data[0]
        if kind == "array":
            return next(self._arrays)
        if kind in _PLAIN:
            return data[1]
        if kind in _SEQUENCES:
            return kind([self.of(item) for item in data[1]])
        if kind is dict:
            keys = [key for _, key in data[1]]
            return dict(zip(keys, [self.of(item) for item in data[2]], strict=True))
        if kind == "with arrays":
            return self.of(data[2], data[1])
        if kind == "whole":
            return data[1].value
        if kind == "met":
            return self._rebuilt[data[1]] if data[2] is None else data[2].value
        if kind == "same":
            return data[1].value
        if kind == "node":
            return data[1].unflatten([self.of(child) for child in data[2]])
        if kind is types.FunctionType:
            return self._function(data, number)
        if kind == "object":
            rebuilt = self._rebuilt[number] = object.__new__(data[1].value)
            for name, part in zip(data[2], data[3], strict=True):
                object.__setattr__(rebuilt, name, self.of(part))
            return rebuilt
        if kind is types.MethodType or kind is functools.partial:
            rebuilt = self._rebuilt[number] = _put_together(
                kind, [self.of(part) for part in data[1]]
            )
            return rebuilt
        return data[-1].value  # a float, or what numpy holds

    def _function(self, data: Data, number: int) -> types.FunctionType:
        _, code, namespace, name, contents, defaults, keyword_defaults, globals_of, _ = data
        # A copy, for what the function reads of it may be arrays.
        names = {**namespace.value} if globals_of else namespace.value
        cells = tuple([types.CellType() for _ in contents])
        rebuilt = self._rebuilt[number] = types.FunctionType(code, names, name, None, cells)
        for cell, content in zip(cells, contents, strict=True):
            value = self.of(content)
            if value is not _EMPTY:
                cell.cell_contents = value
        rebuilt.__defaults__ = self.of(defaults)
        rebuilt.__kwdefaults__ = self.of(keyword_defaults)
        for name, value in globals_of:
            names[name] = self.of(value)
        return rebuilt


@functools.lru_cache(maxsize=4096)
def _wraps(kind: Any) -> bool:
    """Return whether objects of a class of a library's wrap a function, as those of JAX do."""
    return (
        any("__call__" in vars(base) for base in kind.__mro__)
        and not _compares(kind)
        and kind.__new__ is object.__new__
        and kind.__dictoffset__ != 0
        and not _is_users_class(kind)
    )


def _put_together(kind: Any, parts: list[Any]) -> Any:
    if kind is types.MethodType:
        return types.MethodType(*parts)
    function, args, keywords = parts
    return functools.partial(function, *args, **keywords)


def _key(key: Any) -> Any:
    try:
        hash(key)
    except TypeError as error:
        raise NotCapturedError("it holds a key without a hash") from error
    return (type(key), key)


_EMPTY: Final = object()


def _contents(function: types.FunctionType) -> Iterator[Any]:
    """Yield what the variables hold that ``function`` closes over."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield _EMPTY


def _globals_read(
    function: types.FunctionType,
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the globals that a function of the user's names, and what it names of its modules."""
    names = _names_in(function.__code__)
    namespace = function.__globals__
    variables, of_modules = [], []
    for name in names:
        value = namespace.get(name, _EMPTY)
        if value is _EMPTY:
            continue
        if isinstance(value, types.ModuleType):
            if _is_users(getattr(value, "__file__", None) or "/site-packages/"):
                inside = vars(value)
                of_modules += [(f"{name}.{n}", inside[n]) for n in names if n in inside]
        else:
            variables.append((name, value))
    return variables, of_modules


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in ``code``, and in functions made inside."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_names_in(constant)))
    return tuple(names)


_is_users = stacks.is_users_file


@functools.lru_cache(maxsize=4096)
def _is_users_class(kind: Any) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    # What a notebook or `python -c` runs has no file.
    return file is not None and _is_users(file) if kind.__module__ != "__main__" else True


@functools.lru_cache(maxsize=4096)
def _compares(kind: Any) -> bool:
    """Return whether equal objects of a type stand for each other: they say so, and hash."""
    return kind.__eq__ is not object.__eq__ and kind.__hash__ is not None
