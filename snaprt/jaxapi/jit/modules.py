"""What goes into the module of a jitted function, and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from snaprt.jaxapi.compiler.lowered import devices_of_lowered
from snaprt.jaxapi.installation import Device
from snaprt.jaxapi.jit.calls import FlatCall, are_arrays, behind_reference


@dataclass(frozen=True)
class JitModule:
    """What a lowered jitted function is called with, and what it returns."""

    name: str  # of the function
    devices: tuple[Device, ...]  # where it runs, in the order of its partitions
    # Of each parameter of the module; arguments that it does not use are gone.
    input_names: tuple[str, ...]
    input_shapes: list[tuple[int, ...]]
    output_names: tuple[str, ...]
    donated: tuple[int, ...]  # the parameters whose memory an execution may take
    is_recordable: bool  # whether arrays alone go in and out
    is_pure: bool  # whether it neither writes to references nor has effects
    has_all_results: bool  # whether each result that the user gets comes out of the module as it is
    # Which arguments go in, where those alone do, on one device; else None.
    kept_arguments: tuple[int, ...] | None


def describe_jit_module(lowered: jax.stages.Lowered, call: FlatCall) -> JitModule:
    """Describe what `lower_jit_call` returned for a call."""
    lowering: Any = lowered._lowering
    written = _written_references(lowering)
    is_plain = (
        len(lowering._device_list) == 1
        and not lowering.const_args
        and lowering.compile_args["mut"] is None
    )
    constants = [f"constant{number}" for number in range(len(lowering.const_args))]
    inputs = _module_arguments(lowering, [*constants, *call.names])
    inputs += [f"reference{number}" for number in range(len(_captured_references(lowering)))]
    outputs = iter(call.results)
    overwritten = {place for place in written if place is not None}
    donated = {number for number, flag in enumerate(lowering._donated_invars) if flag}
    avals = [*lowering.compile_args["global_in_avals"], *lowering.compile_args["global_out_avals"]]
    is_pure = not call.params["jaxpr"].effects and lowering.compile_args["mut"] is None
    return JitModule(
        name=call.params["name"],
        devices=devices_of_lowered(lowered),
        input_names=tuple(inputs),
        input_shapes=[
            getattr(aval, "shape", ()) for aval in lowering.compile_args["global_in_avals"]
        ],
        output_names=tuple(
            [inputs[place] if place is not None else next(outputs) for place in written]
            if written
            else outputs
        ),
        donated=tuple(sorted(donated | overwritten)),
        is_recordable=all(hasattr(aval, "dtype") and hasattr(aval, "shape") for aval in avals),
        is_pure=is_pure,
        has_all_results=is_pure and not any(map(_is_float0, avals)),
        kept_arguments=tuple(sorted(lowering.compile_args["kept_var_idx"])) if is_plain else None,
    )


def jit_module_inputs(
    lowered: jax.stages.Lowered, module: JitModule, args: Sequence[Any]
) -> list[Any]:
    """Return the arrays with which a module is run, placed, for the arguments of a flat call."""
    lowering: Any = lowered._lowering
    if module.kept_arguments is not None:
        arrays = [args[number] for number in module.kept_arguments]
        if are_arrays(arrays):
            return arrays
    arguments = _module_arguments(lowering, [*lowering.const_args, *args])
    arguments += _captured_references(lowering)
    arrays = [_in_module(behind_reference(value)) for value in arguments]
    if len(lowering._device_list) > 1:
        shardings = lowering.compile()._in_shardings
        return [
            array
            if isinstance(array, jax.Array)
            and array.sharding.is_equivalent_to(sharding, array.ndim)
            else jax.device_put(array, sharding)
            for array, sharding in zip(arrays, shardings, strict=True)
        ]
    avals = lowering.compile_args["global_in_avals"]
    return [
        array
        if isinstance(array, jax.Array) or _is_float0(aval)
        else np.asarray(array, dtype=aval.dtype)
        for array, aval in zip(arrays, avals, strict=True)
    ]


def run_jit_module(lowered: jax.stages.Lowered, inputs: Sequence[Any]) -> list[Any]:
    """Run a module that is pure on what `jit_module_inputs` returned; return all its results."""
    lowering: Any = lowered._lowering
    execute = lowering.compile().unsafe_call
    places = dict(zip(sorted(execute.kept_var_idx), inputs, strict=True))
    return list(execute(*[places.get(number) for number in range(max(places, default=-1) + 1)]))


def jit_module_outputs(
    lowered: jax.stages.Lowered, args: Callable[[], Sequence[Any]], results: Sequence[Any]
) -> list[Any]:
    """Return the arrays that the module of a call returned, whose function returned ``results``."""
    results = [_in_module(result) for result in results]
    lowering: Any = lowered._lowering
    written = _written_references(lowering)
    if not written:
        return results
    arguments = _module_arguments(lowering, [*lowering.const_args, *args()])
    arguments += _captured_references(lowering)
    rest = iter(results)
    # The next execution may write to the reference, and take the memory of what is there.
    return [
        next(rest) if place is None else jax.numpy.copy(behind_reference(arguments[place]))
        for place in written
    ]


def _module_arguments(lowering: Any, arguments: Sequence[Any]) -> list[Any]:
    indices = lowering.compile_args["kept_var_idx"]
    return [value for number, value in enumerate(arguments) if number in indices]


def _written_references(lowering: Any) -> list[int | None]:
    """Return for each result of a module the parameter it replaces, if it replaces one."""
    references = lowering.compile_args["mut"]
    return [] if references is None else list(references.out_mut)


def _captured_references(lowering: Any) -> list[Any]:
    references = lowering.compile_args["mut"]
    return [] if references is None else list(references.in_mut)


def _is_float0(of: Any) -> bool:
    return getattr(of, "dtype", None) == jax.dtypes.float0


def _in_module(array: Any) -> Any:
    """Return an array as the module has it: booleans stand for derivatives of integers."""
    return np.zeros(array.shape, bool) if _is_float0(array) else array
