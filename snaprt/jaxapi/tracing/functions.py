"""JAX's own functions, and calls of them that failed."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import jax
from jax._src import api as _api
from jax._src import random as _random
from jax._src import source_info_util as _source_info

from snaprt.jaxapi.frames import frames_to
from snaprt.jaxapi.tracing.arrays import is_array_aval

_NOT_CALLED_AGAIN = frozenset({"load", "save", "savez", "fromfile"})  # they open files


@functools.cache
def public_functions() -> Mapping[str, Callable[..., Any]]:
    """Return the public functions of JAX that compute with arrays, by name: ``jax.numpy.where``."""
    modules = (jax.numpy, jax.numpy.linalg, jax.numpy.fft, jax.nn, jax.lax)
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in _NOT_CALLED_AGAIN
        and callable(value)
        and hasattr(inspect.unwrap(value), "__code__")
    }


@functools.cache
def _names_of_code() -> Mapping[CodeType, str]:
    codes: dict[CodeType, str] = {}
    for name, function in public_functions().items():  # of several names, the first one stays
        code: Any = inspect.unwrap(function)
        codes.setdefault(code.__code__, name)
    return codes


@dataclass(frozen=True)
class FailedCall:
    """A public function of JAX's that raised an error, with its arguments as they were then."""

    function: str
    arguments: Mapping[str, Any]


def failed_calls(error: BaseException) -> list[FailedCall]:
    """Return the public functions of JAX's that an error came through, outermost first.

    Only those are returned that were called after the last of the user's own functions, and that
    have not deleted an argument since, as `jax.numpy.nonzero` does: it would be another call.
    """
    calls: list[FailedCall] = []
    for frame, _ in frames_to(error):
        code = frame.f_code
        if _source_info.is_user_filename(code.co_filename):
            calls.clear()
        elif code in _names_of_code():
            name = _names_of_code()[code]
            parameters = inspect.signature(inspect.unwrap(public_functions()[name])).parameters
            arguments = {
                parameter: frame.f_locals[parameter]
                for parameter in parameters
                if parameter in frame.f_locals
            }
            if all(map(arguments.__contains__, _required(parameters))):
                calls.append(FailedCall(name, arguments))
    return calls


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]


def call_abstractly(name: str, arguments: Mapping[str, Any]) -> None:
    """Call a public function of JAX's with abstract values in place of arrays."""
    function = public_functions()[name]
    leaves, tree = jax.tree.flatten(dict(arguments), is_leaf=is_array_aval)
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
        for leaf in leaves
        if is_array_aval(leaf)
    ]

    def call(*arrays: Any) -> Any:
        remaining = iter(arrays)
        filled = [next(remaining) if is_array_aval(leaf) else leaf for leaf in leaves]
        return _call_with(function, jax.tree.unflatten(tree, filled))

    jax.eval_shape(call, *shapes)


def _call_with(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in inspect.signature(inspect.unwrap(function)).parameters.items():
        if name not in arguments:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            args.extend(arguments[name])
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs.update(arguments[name])
        elif parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = arguments[name]
        else:
            args.append(arguments[name])
    return function(*args, **kwargs)


def random_function_names() -> frozenset[str]:
    """Return the names of the jitted functions that `jax.random` consists of.

    A module has a function of that name, or of that name, an underscore and a number, where a
    program calls one.
    """
    names = {f"jax._src.random.{module.name}" for module in pkgutil.iter_modules(_random.__path__)}
    modules = [_random, *(sys.modules[name] for name in names & sys.modules.keys())]
    jitted: Any = type(_api.jit(lambda: None))
    functions = [value for module in modules for value in vars(module).values()]
    return frozenset(function.__name__ for function in functions if isinstance(function, jitted))
