"""Arguments and results as tensors and the structure around them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import overrides
from torch.utils import _pytree as pytree

from snaprt.errors import UsageError

_T = TypeVar("_T")

Structure = Any
"""What is left of a value without its tensors: nested tuples, hashable, compared by value."""

_TENSOR: Final = ("tensor",)
_SEQUENCES: Final = frozenset({tuple, list, torch.Size})
_PLAIN: Final = frozenset({bool, int, str, bytes, type(None), complex, torch.dtype, torch.device})
_MAX_DEPTH: Final = 40


class Context:
    """The context of a node of PyTorch's pytrees; equal to an equal one."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


def flatten(value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Structure:
    """Append the tensors of ``value`` to ``tensors`` and return the structure around them.

    Looks into sequences, dictionaries, PyTorch's pytrees, dataclasses and other objects that hold
    tensors in their attributes; everything else is part of the structure.

    Raises:
        UsageError: It is nested too deeply, or refers to itself.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TENSOR
    if kind in _PLAIN:
        return (kind, value)
    if kind is float:
        return (kind, value.hex(), value)  # so that NaN equals itself, and 0.0 is not -0.0
    if depth > _MAX_DEPTH:
        raise UsageError(
            f"an argument or a result is nested more than {_MAX_DEPTH} deep, or refers to itself",
            hint="pass and return tensors in tuples, lists and dictionaries",
        )
    below = depth + 1
    if kind in _SEQUENCES:
        return (kind, tuple([flatten(item, tensors, below) for item in value]))
    if kind is dict or kind is collections.OrderedDict:
        return (kind, tuple(value), tuple([flatten(v, tensors, below) for v in value.values()]))
    if kind in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        parts = tuple([flatten(child, tensors, below) for child in children])
        return ("node", kind, Context(context), parts)
    if kind is slice:
        parts = tuple([flatten(v, tensors, below) for v in (value.start, value.stop, value.step)])
        return ("slice", parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ("named", kind, tuple([flatten(item, tensors, below) for item in value]))
    return _object(value, tensors, below)


def _object(value: Any, tensors: list[torch.Tensor], depth: int) -> Structure:
    attributes = _attributes(value)
    if attributes:
        inside: list[torch.Tensor] = []
        parts = tuple([flatten(item, inside, depth) for item in attributes.values()])
        if inside:
            tensors += inside
            return ("object", type(value), tuple(attributes), parts)
    return ("static", Static(value))


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, type | torch.nn.Module | torch.optim.Optimizer) or callable(value):
        return {}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))


class Static:
    """A value without tensors, compared by value where it can be hashed, else by identity."""

    __slots__ = ("_key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._key: Any = (type(value), id(value))
        if not issubclass(type(value), torch.Tensor):  # which are compared element by element
            with contextlib.suppress(Exception):  # whatever an object of the user's raises
                hash(value)
                self._key = (type(value), value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and bool(self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)


def statics_in(structure: Structure) -> Iterator[Any]:
    """Yield the values without tensors in a structure, apart from plain ones."""
    kind = structure[0]
    if kind == "static":
        yield structure[1].value
    elif kind in _NESTED or kind in _SEQUENCES or kind is dict or kind is collections.OrderedDict:
        for part in structure[-1]:
            yield from statics_in(part)


_NESTED: Final = frozenset({"node", "slice", "named", "object"})


_OPERANDS: Final = frozenset(
    {"input", "self", "other", "tensor1", "tensor2", "src", "indices", "exponent"}
)


def by_position(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of a function of PyTorch with its operands by position, not by name."""
    if _OPERANDS.isdisjoint(kwargs):
        return args, kwargs
    names = _names_of(function)
    positional, rest = [*args], dict(kwargs)
    while len(positional) < len(names):
        name = names[len(positional)]
        if name not in rest or name not in _OPERANDS:
            break
        positional.append(rest.pop(name))
    return positional, rest


@functools.lru_cache(maxsize=4096)
def _names_of(function: Any) -> tuple[str, ...]:
    if function is torch.Tensor.copy_:
        return ("self", "other")  # which PyTorch's own table calls otherwise
    known: Any = overrides.get_testing_overrides().get(function, function)
    try:
        return tuple(inspect.signature(known).parameters)
    except (TypeError, ValueError):
        return ()


def argument_names(
    function: Callable[..., Any], structure: Structure, taken: Iterable[str] = ()
) -> list[str]:
    """Return a name for each tensor of ``(args, kwargs)``, such as ``batch['x']``.

    Args:
        function: The names of its parameters are taken, where it has a signature.
        structure: What `flatten` returned for the arguments.
        taken: Names that none may have.
    """
    (_, positional), (_, keywords, named) = structure[1]
    parameters = _positional_names(function)
    paths: list[str] = []
    for index, part in enumerate(positional):
        _add_paths(part, parameters[index] if index < len(parameters) else f"arg{index}", paths)
    for keyword, part in zip(keywords, named, strict=True):
        _add_paths(part, str(keyword), paths)
    unique: dict[str, None] = dict.fromkeys(taken)
    for index, path in enumerate(paths):
        name = path if path not in unique else f"argument {index}"
        unique[name] = None
        paths[index] = name
    return paths


def _positional_names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C++
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _add_paths(structure: Structure, path: str, paths: list[str]) -> None:
    """Append the paths of the tensors inside of ``structure``, which is at ``path``."""
    kind = structure[0]
    if kind == "tensor":
        paths.append(path)
    elif kind is dict or kind is collections.OrderedDict or kind == "object":
        keys, parts = structure[-2:]
        for key, part in zip(keys, parts, strict=True):
            _add_paths(part, f"{path}.{key}" if kind == "object" else f"{path}[{key!r}]", paths)
    elif kind in _SEQUENCES or kind in _NESTED:
        for index, part in enumerate(structure[-1]):
            _add_paths(part, f"{path}[{index}]", paths)


def unflatten(structure: Structure, tensors: Iterator[Any]) -> Any:
    """Return the value of which `flatten` returned ``structure``, with other tensors."""
    kind = structure[0]
    if kind == "tensor":
        return next(tensors)
    if kind in _PLAIN:
        return structure[1]
    if kind is float:
        return structure[2]
    if kind in _SEQUENCES:
        return kind([unflatten(part, tensors) for part in structure[1]])
    if kind is dict or kind is collections.OrderedDict:
        values = [unflatten(part, tensors) for part in structure[2]]
        return kind(zip(structure[1], values, strict=True))
    if kind == "node":
        _, node, context, parts = structure
        children = [unflatten(part, tensors) for part in parts]
        return pytree.SUPPORTED_NODES[node].unflatten_fn(children, context.value)
    if kind == "slice":
        return slice(*[unflatten(part, tensors) for part in structure[1]])
    if kind == "named":
        return structure[1](*[unflatten(part, tensors) for part in structure[2]])
    if kind == "object":
        _, cls, names, parts = structure
        value = cls.__new__(cls)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(value, name, unflatten(part, tensors))
        return value
    return structure[1].value


def values_of(dictionaries: Iterable[dict[Any, Any]]) -> Iterator[Any]:
    """Yield the values of dictionaries, one after the other."""
    return itertools.chain.from_iterable(map(dict.values, dictionaries))


def first_that(known: list[_T], is_it: Callable[[_T], bool]) -> _T | None:
    """Return the first that is it, and put it at the front: the next one asked for is the same."""
    for index, each in enumerate(known):
        if is_it(each):
            if index:
                known.insert(0, known.pop(index))
            return each
    return None


def are_the_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Return whether these are the same objects."""
    return len(now) == len(then) and all(map(operator.is_, now, then))
