"""Compiles modules under XLA's options; loads, stores, runs and describes executables."""

from __future__ import annotations

import copyreg
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src import layout as _layout
from jax._src.lax import lax as _lax
from jax._src.random import prng as _prng
from jax._src.random.core import resolve_prng_impl as _key_type_named
from jax.experimental import serialize_executable
from jaxlib import _hlo  # type: ignore[attr-defined]
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]

from snaprt.jaxapi.compiler.custom_calls import custom_calls, make_available
from snaprt.jaxapi.installation import Device, device_list


def compile_options(devices: Sequence[Device], overrides: Mapping[str, Any] | None = None) -> Any:
    """Return XLA's compile options for one program over ``devices``.

    Args:
        devices: Where the program runs, in the order of its partitions.
        overrides: Values of ``xla_*`` options by name, without dashes.
    """
    return _compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        env_options_overrides=dict(overrides) if overrides else None,
        backend=devices[0].client,
    )


def compile_options_without_paths(serialized: bytes) -> bytes:
    """Return serialized compile options without the options that hold a path."""
    options = _jaxlib.CompileOptions.ParseFromString(serialized)
    build_options = options.executable_build_options  # each is a view into the one before it
    flags = build_options.debug_options
    for name in dir(flags):
        value = getattr(flags, name)
        if name.startswith("xla_") and isinstance(value, str) and ("/" in value or "\\" in value):
            setattr(flags, name, "")
    return options.SerializeAsString()


def dump_options_of_xla() -> dict[str, bool | str]:
    """Return the values of XLA's ``xla_dump_`` flags; makes XLA parse XLA_FLAGS if it has not.

    XLA ends the process if the variable has a flag that it does not know.
    """
    options = _jaxlib.CompileOptions()
    build_options = options.executable_build_options  # each is a view into the one before it
    flags = build_options.debug_options
    return {
        name: getattr(flags, name)
        for name in dir(flags)
        if name.startswith("xla_dump_") and isinstance(getattr(flags, name), (bool, str))
    }


# JAX 0.12 pickles the sentinel `AutoLayout` as a new object, which equals nothing: the abstract
# values of a loaded executable's outputs then equal no others, and what uses them is traced anew.
if hasattr(_layout, "AutoLayoutSingleton"):
    copyreg.pickle(_layout.AutoLayoutSingleton, lambda _: "AutoLayout")


def _reduce_key_type(implementation: Any) -> str | tuple[Any, ...]:
    name = implementation.name
    if _prng.prngs.get(name) is implementation:
        return _key_type_named, (name,)
    reduced: str | tuple[Any, ...] = implementation.__reduce_ex__(2)
    return reduced


# A type of PRNG keys is pickled as a tuple of its functions. The copy equals the original, so JAX's
# caches of types may hand it out for any key from then on; but jax.random.poisson asks with `is`.
copyreg.pickle(_prng.PRNGImpl, _reduce_key_type)


def load_compiled(
    payload: bytes, arguments: int, results: int, devices: Sequence[Device]
) -> jax.stages.Compiled:
    """Load what `serialize_compiled` returned, for calls with flat arguments and results."""
    return serialize_executable.deserialize_and_load(
        payload,
        jax.tree.structure(((0,) * arguments, {})),
        jax.tree.structure([0] * results),
        backend=devices[0].client,
        execution_devices=list(devices),
    )


def serialize_compiled(compiled: jax.stages.Compiled) -> bytes:
    """Return the executable as bytes; raises where it holds what cannot be stored."""
    return serialize_executable.serialize(compiled)[0]


def compile_module(module: Any, devices: Sequence[Device], options: Any) -> Any:
    """Compile an MLIR module for ``devices`` and load it, with the functions that it calls."""
    make_available(custom_calls(module).targets, devices[0].platform)
    return devices[0].client.compile_and_load(module, device_list(devices), options)


def load_module(payload: bytes, devices: Sequence[Device]) -> Any:
    """Load an executable that `serialize_module` stored."""
    return devices[0].client.deserialize_executable(payload, device_list(devices))


def serialize_module(executable: Any) -> bytes:
    """Return a loaded executable as bytes."""
    return executable.client.serialize_executable(executable)


def run_module(executable: Any, inputs: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Run a loaded executable on arrays that live on its devices; return each result's shards."""
    results = executable.execute_sharded(list(inputs))
    return results.disassemble_into_single_device_arrays()


def loaded_executable(compiled: Any) -> Any:
    """Return XLA's executable below a `jax.stages.Compiled`, None where there is none."""
    runtime = getattr(compiled, "runtime_executable", None)
    return None if runtime is None else runtime()


def executable_memory(executable: Any) -> dict[str, int]:
    """Return an executable's memory in bytes by use: ``argument_size``, ``temp_size``, ..."""
    statistics = executable.get_compiled_memory_stats()
    return {
        name.removesuffix("_in_bytes"): int(getattr(statistics, name))
        for name in dir(statistics)
        if name.endswith("_in_bytes")
    }


def executable_cost(executable: Any) -> dict[str, float]:
    """Return an executable's cost analysis, empty where the plugin has none."""
    try:
        return dict(executable.cost_analysis())
    except Exception:  # of several types
        return {}


def optimized_program(executable: Any) -> tuple[str, bytes]:
    """Return what XLA made of an executable: HLO text, and the first module's HloModuleProto."""
    modules = executable.hlo_modules()
    text = "\n".join(module.to_string() for module in modules)
    return text, modules[0].as_serialized_hlo_module_proto()


def optimized_hlo(executable: Any, *, constants: bool) -> str:
    """Return what XLA made of a loaded executable's module, as HLO text, "" where it keeps none.

    Names and source locations are left out: equal programs have equal texts. No other thread runs
    Python meanwhile (jaxlib 0.10.2 and 0.12.0.1 print while they hold its lock).
    """
    options = _hlo.HloPrintOptions.canonical()
    options.print_metadata = False
    options.print_large_constants = constants
    try:
        modules = executable.hlo_modules()
    except Exception:  # a plugin that does not hand them out, in its own words
        return ""
    return "\n".join(module.to_string(options) for module in modules)


def executable_fingerprint(executable: Any) -> str:
    """Return the fingerprint that XLA gives a loaded executable, "" where it gives none."""
    fingerprint = getattr(executable, "fingerprint", None) or b""
    return fingerprint.decode() if fingerprint.isalnum() else fingerprint.hex()


def zeros_function(shapes: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of any arguments whose results have these shapes, dtypes and weak types.

    It carries the name of the function that a recorded program becomes, which its executable keeps.
    """

    def lazy_graph(*_: Any) -> list[Any]:
        return [_zeros(shape) for shape in shapes]

    return lazy_graph


def _zeros(of: Any) -> Any:
    if isinstance(of.dtype, _prng.KeyTy):
        implementation = of.dtype._impl
        data = jax.numpy.zeros((*of.shape, *implementation.key_shape), np.uint32)
        return jax.random.wrap_key_data(data, impl=implementation.name)
    full = jax.lax.full(of.shape, 0, of.dtype)
    weak = bool(getattr(of, "weak_type", False))
    return _lax._convert_element_type(full, of.dtype, weak_type=weak)


def compile_for_topology(module: Any, devices: Sequence[Any]) -> bytes:
    """Compile an MLIR module for devices that are not there; return the serialized executable."""
    client = devices[0].client
    return client.compile(module, device_list(devices), compile_options(devices)).serialize()


def compile_unloaded(
    module: Any, devices: Sequence[Any], overrides: Mapping[str, Any] | None = None
) -> Any:
    """Compile an MLIR module for devices that are not there; return what XLA knows of it."""
    options = compile_options(devices, overrides)
    return devices[0].client.compile(module, device_list(devices), options)


_registered: set[tuple[str, ...]] = set()


def registered_passes() -> tuple[str, ...]:
    """Return the names of the passes that were registered with XLA since this module is imported.

    What is compiled with them is another program, whatever its module says. XLA does not tell which
    there are. Source: jax/_src/xla_transform.py of JAX 0.12; earlier ones have no such passes.
    """
    return tuple(sorted({key[-2] for key in _registered}))


def _watch() -> None:
    try:
        library: Any = importlib.import_module("jaxlib._xla")
    except ImportError:
        return
    for suffix, arguments in (("", 2), ("_c_api", 3)):
        register = getattr(library, f"register_xla_transform{suffix}", None)
        clear = getattr(library, f"clear_xla_transform{suffix}", None)
        if register is not None and clear is not None:
            add, discard = _registered.add, _registered.discard
            setattr(library, f"register_xla_transform{suffix}", _noting(register, add, arguments))
            setattr(library, f"clear_xla_transform{suffix}", _noting(clear, discard, arguments))


def _noting(
    function: Callable[..., Any], note: Callable[[tuple[str, ...]], None], arguments: int
) -> Callable[..., Any]:
    """Return ``function``, which notes its first arguments: the last are a name and a stage."""

    @functools.wraps(function)
    def noting(*args: Any) -> Any:
        result = function(*args)
        note(tuple(map(str, args[:arguments])))
        return result

    return noting


_watch()
