"""The one place that touches JAX names which are not public API; it must know nothing of snaprt.

Everything here was checked with jax 0.10.2 and 0.12.0; a function that leans on something newer or
older says so. When a new JAX breaks snaprt, this is the file to read and to change.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import hashlib
import inspect
import io
import logging
import pkgutil
import re
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax._src import api as _api
from jax._src import array as _array
from jax._src import cache_key as _cache_key
from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import layout as _layout
from jax._src import mesh as _mesh
from jax._src import pjit as _pjit
from jax._src import random as _random
from jax._src import sharding_impls as _shardings
from jax._src import source_info_util as _source_info
from jax._src import traceback_util as _traceback_util
from jax._src import tree_util as _tree_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.api_util import InternalFloatingPointError as _InternalFloatingPointError
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax._src.lib import jax_jit as _jax_jit
from jax._src.lib import xla_client as _xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.named_sharding import UNSPECIFIED as _UNSPECIFIED
from jax._src.numpy import indexing as _indexing
from jax._src.random import prng as _prng
from jax.experimental import serialize_executable
from jax.extend import core as jex_core
from jaxlib import _hlo  # type: ignore[attr-defined]
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib import lapack as _lapack
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo
from jaxlib.version import __version__ as _jaxlib_version

ClosedJaxpr = jex_core.ClosedJaxpr
Jaxpr = jex_core.Jaxpr
JaxprLiteral = jex_core.Literal
Primitive = jex_core.Primitive
JAXLIB_VERSION: str = _jaxlib_version
# Any: our subclasses answer where the base classes are typed to raise.
Tracer: Any = _core.Tracer
Trace: Any = _core.Trace
ShapedArray = _core.ShapedArray
ArrayImpl: Any = _jaxlib.ArrayImpl
#: The types of arrays that hold their values: ordinary ones, and those of PRNG keys.
CONCRETE_ARRAYS = frozenset({ArrayImpl, _prng.PRNGKeyArray})
set_current_trace = jex_core.set_current_trace
typeof = jax.typeof


class Device(Protocol):
    """A device of JAX's, for type checkers: some of them cannot see through `jax.Device`.

    Attributes:
        id: Its number within its platform and all processes.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        device_kind: The vendor's name of it.
        process_index: The process it belongs to.
        client: XLA's client that owns it.
    """

    id: int
    platform: str
    device_kind: str
    process_index: int
    client: Any

    def __hash__(self) -> int:
        """Hash by identity."""
        ...


# --- traces ------------------------------------------------------------------------------------


def evaluating() -> AbstractContextManager[Any]:
    """Return a context in which operations run at once, as they do in plain eager JAX."""
    return set_current_trace(_core.eval_trace)


def current_trace() -> Any:
    """Return this thread's current trace (``None`` while JAX 0.12 binds a primitive)."""
    return _core.trace_ctx.trace


#: Its ``value`` is this thread's current trace: `current_trace`, three times as fast.
current_trace_setting: Any = _core.trace_state_strong_ref


#: Returns all settings of JAX that may change what a call records, as a tuple (dtypes and their
#: promotion, precision, mesh, default device, compute type, ...).
trace_context: Callable[[], tuple[Any, ...]] = _config.trace_context


def set_thread_trace(trace: Any) -> None:
    """Make ``trace`` this thread's current trace until told otherwise; ``None`` means eager."""
    _core.trace_ctx.set_trace(_core.eval_trace if trace is None else trace)


def is_eager(trace: Any) -> bool:
    """Say whether ``trace`` is JAX's own eager trace."""
    return trace is _core.eval_trace


def asked_as_opaque_state() -> bool:
    """Say whether the caller's caller is the comparison of two opaque trace states.

    Libraries (flax) compare `get_opaque_trace_state()` to find out whether an object was made at
    another trace level. Recording lazily is no other level, so there the lazy trace answers that
    it equals the eager one. Everywhere else, above all in the key of jit's fast path, it must not.
    """
    return sys._getframe(2).f_code is _core.OpaqueTraceState.__eq__.__code__


# Functions that only pass the question "is this concrete?" on.
_ASKS_ON = frozenset({"is_concrete", "to_concrete_value"})

# Functions of JAX that demand a value on behalf of their caller, which gives the cause its name.
_DEMANDS_FOR = frozenset({"concrete_dim_or_error", "_ensure_index_tuple", "<genexpr>"})

# Functions that fail, or behave differently from eager JAX, without the value: what they stand for.
_DEMANDS = {
    "__bool__": "bool",
    "__hex__": "hex",
    "__index__": "index",
    "__int__": "int",
    "__oct__": "oct",
    "_is_slice_element_none_or_constant_or_symbolic": "slice",
    "concrete_or_error": "",  # named after its caller: `nonzero`, `arange`, ...
    "expand_bool_indices": "bool_mask",
    "is_constant_dim": "shape",
}


def demanded_by() -> str | None:
    """Return what needs the value that the caller was asked for, or ``None`` for a mere probe.

    `Tracer.to_concrete_value` serves code that needs a value (`concrete_or_error`, a boolean
    mask) and mere probes (in `asarray`, `ad`, `power`); only the first may cut a graph. The
    question may come through the tracers of `grad` and `vmap`, hence the walk up the stack.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_name in _ASKS_ON and frame.f_back is not None:
        frame = frame.f_back
    cause = _DEMANDS.get(frame.f_code.co_name)
    if cause == "" and frame.f_back is not None:
        frame = frame.f_back
        while frame.f_code.co_name in _DEMANDS_FOR and frame.f_back is not None:
            frame = frame.f_back
        return frame.f_code.co_name.strip("_<>")
    return cause


def evaluate_call(name: str, *args: Any, **params: Any) -> Any:
    """Call the eager trace's own ``process_*`` method of that name."""
    with evaluating():
        return getattr(_core.eval_trace, name)(*args, **params)


_device_get_patched = False


def teach_device_get(kind: type, read: Callable[[Any], np.ndarray]) -> None:
    """Make `jax.device_get` read instances of ``kind``, which it would hand back as tracers."""
    global _device_get_patched
    if _device_get_patched:
        return
    original = _api._device_get

    def device_get_leaf(x: Any) -> Any:
        return read(x) if isinstance(x, kind) else original(x)

    _api._device_get = device_get_leaf
    _device_get_patched = True


def teach_compiled(kind: type, read: Callable[[Any], jax.Array]) -> None:
    """Let what `jax.stages.Lowered.compile` returns take the values of instances of ``kind``.

    JAX takes them for tracers, to which it refuses to apply a compiled function. Checked with jax
    0.10.2 and 0.12.0: whatever is no plain array comes by this method.
    """
    original: Any = jax.stages.Compiled.call
    if getattr(original, "intercepted", False):
        return

    def value(leaf: Any) -> Any:
        return read(leaf) if isinstance(leaf, kind) else leaf

    def call(params: Any, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(value, (args, kwargs))
        return original(params, *args, **kwargs)

    call.intercepted = True  # type: ignore[attr-defined]
    jax.stages.Compiled.call = staticmethod(call)  # type: ignore[method-assign]


_set_mesh_patched = False


def teach_set_mesh(kind: type) -> None:
    """Let `jax.set_mesh` and `jax.sharding.get_mesh` work under a trace of type ``kind``.

    Both refuse to where JAX traces, which they ask `trace_state_clean`; recording lazily is not
    tracing to them. Whoever else asks gets the old answer.
    """
    global _set_mesh_patched
    if _set_mesh_patched:
        return
    original = _core.trace_state_clean
    asked_by = {_shardings.set_mesh.__init__.__code__, _shardings.get_mesh.__code__}

    def trace_state_clean() -> bool:
        return original() or (
            type(current_trace_setting.value) is kind and sys._getframe(1).f_code in asked_by
        )

    _core.trace_state_clean = trace_state_clean
    _set_mesh_patched = True


# --- calls that may be known already -----------------------------------------------------------

NOT_KNOWN = object()

_FollowJit = Callable[
    [Any, Callable[..., Any], Any, Any, Any], tuple[Any, Callable[[Any], None] | None]
]


def intercept_jit(kind: type, follow: _FollowJit) -> None:
    """Ask ``follow`` first whenever a jitted function is called under a trace of type ``kind``.

    Args:
        kind: The type of the trace.
        follow: Takes the trace, the function, what JAX knows of the jit, and the arguments. Returns
            what the call returns, or ``NOT_KNOWN`` and what to tell what JAX then returned.
    """

    def ask(fun: Any, info: Any, args: Any, kwargs: Any) -> _MakeCall | None:
        trace = current_trace_setting.value
        if type(trace) is not kind:
            return None
        returned, learn = follow(trace, fun, info, args, kwargs)
        if returned is not NOT_KNOWN:
            return lambda: (returned, *_NO_FAST_PATH)
        if learn is None:
            return None

        def make() -> tuple[Any, ...]:
            inferred, flat = _infer_jit(fun, info, args, kwargs)
            done = _run_jit(inferred, flat, fun, args, kwargs)
            learn(done[0])
            return done

        return make

    _ask_before_jit(kind, ask)


def intercept_indexing(
    kind: type, follow: Callable[[Any, Any, Any, Callable[[], Any]], Any]
) -> None:
    """Ask ``follow`` whenever an ordinary array is indexed under a trace of type ``kind``.

    Checked with jax 0.10.2 and 0.12.0: ``__getitem__`` of an array calls this function by its name.

    Args:
        kind: The type of the trace.
        follow: Takes the trace, the array, the index, and what computes the result as JAX does.
    """
    take = getattr(_indexing, "rewriting_take", None)
    if take is None or getattr(take, "intercepted", False):
        return

    def rewriting_take(array: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        trace = current_trace_setting.value
        if type(trace) is kind and type(array) is ArrayImpl and not (args or kwargs):
            return follow(trace, array, index, lambda: take(array, index))
        return take(array, index, *args, **kwargs)

    rewriting_take.intercepted = True  # type: ignore[attr-defined]
    module: Any = _indexing
    module.rewriting_take = rewriting_take


def parse_call(
    function: Callable[..., Any], info: Any, args: Any, kwargs: Any
) -> tuple[Any, Sequence[Any]] | None:
    """Return what identifies a call of a jitted function, and its flat arguments that are traced.

    The first can be hashed and compared; it does not hold the function. ``None`` where arguments
    cannot be hashed.
    """
    try:
        signature, operands = _parse_jit_call(info, args, kwargs)
        key = (weakref.ref(function), info, signature)
        hash(key)
    except (TypeError, ValueError):
        return None
    return key, operands


# --- what stands at an operation ---------------------------------------------------------------


def source_info() -> Any:
    """Return the Python traceback and the name stack of the operation being bound."""
    return _source_info.current()


def hide_traceback_below(folder: Path) -> None:
    """Leave code below ``folder`` out of the tracebacks of errors, as JAX leaves out its own."""
    _traceback_util.register_exclusion(str(folder))


def hide_frames_below(folder: Path) -> None:
    """Leave code below ``folder`` out of what JAX takes for the user's frames."""
    _source_info.register_exclusion(str(folder))


def bind_at(
    info: Any, context: Any, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
) -> Any:
    """Bind ``primitive`` under the current trace, with the recorded location and context."""
    stack = _source_info.current_name_stack() + info.name_stack
    with _source_info.user_context(info.traceback, name_stack=stack), context.manager:
        return primitive.bind(*operands, **primitive.get_bind_params(params))


def operation_context() -> Any:
    """Return what lowering needs beside the parameters (compute type, mesh, ...); interned."""
    return _core.JaxprEqnContext()


def abstract_evaluate(
    primitive: Any, avals: Sequence[Any], params: dict[str, Any]
) -> tuple[Any, Any]:
    """Return (abstract value or values, effects) of one operation."""
    return primitive.abstract_eval(*avals, **params)


def sharding_of_call(params: dict[str, Any]) -> Any:
    """Return the first concrete sharding that a call or constraint names, or ``None``."""
    candidates = [
        *params.get("in_shardings", ()),
        *params.get("out_shardings", ()),
        params.get("sharding"),
    ]
    for sharding in candidates:
        if isinstance(sharding, jax.sharding.Sharding) and _has_devices(sharding):
            return sharding
    return None


def _has_devices(sharding: Any) -> bool:
    return not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def is_array_aval(aval: Any) -> bool:
    """Say whether ``aval`` describes an ordinary array (no reference, no token)."""
    return isinstance(aval, ShapedArray)


def has_no_values(aval: Any) -> bool:
    """Say whether ``aval`` is of the derivatives of integers, which JAX keeps as numpy arrays."""
    return bool(aval.dtype == jax.dtypes.float0)


def refuse_escaped_tracer(value: Any) -> None:
    """Raise `jax.errors.UnexpectedTracerError`, as eager JAX does, if ``value`` is a tracer."""
    if isinstance(value, Tracer):
        raise _core.escaped_tracer_error(value)


def host_literal(value: Any) -> bool:
    """Say whether ``value`` is a scalar that lives on the host (Python or numpy)."""
    return not isinstance(value, jax.Array) and np.ndim(value) == 0


def to_device(value: Any) -> jax.Array:
    """Copy a host value to the default device, keeping its dtype and weak type."""
    aval = typeof(value)
    with evaluating():
        array = jax.numpy.array(np.asarray(value), dtype=aval.dtype, copy=True)
        if getattr(aval, "weak_type", False):
            return jax.lax.convert_element_type_p.bind(
                array, new_dtype=aval.dtype, weak_type=True, sharding=None
            )
        return array


def copy_array(array: jax.Array) -> jax.Array:
    """Return a copy in memory of its own, where ``array`` lies; compiles nothing."""
    with evaluating():
        where = array.sharding if array.committed else None
        return jax.device_put(array, where, may_alias=False)


@functools.cache
def single_device_sharding(device: Any) -> jax.sharding.Sharding:
    """Return the sharding of an array on ``device``; ``None`` means JAX's default device."""
    with evaluating(), jax.default_device(device):
        return jax.numpy.zeros(()).sharding


def x64_enabled() -> bool:
    """Say whether 64-bit types are enabled for this thread."""
    return bool(_config.enable_x64.value)


@contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """Enable or disable 64-bit types for this thread inside the context."""
    with _config.enable_x64(enabled):
        yield


def default_device() -> Any:
    """Return the device that `jax.default_device` names, or ``None`` for JAX's own choice."""
    return _config.default_device.value


def literal_bytes(value: Any) -> bytes:
    """Return the bits of a host scalar: equal for equal NaNs, different for 0.0 and -0.0."""
    return np.asarray(value).tobytes()


def describe_input(array: jax.Array) -> tuple[Any, ...]:
    """Return what a compiled program depends on in an input beside its values."""
    return typeof(array), array.sharding, array.committed


def devices_of_sharding(sharding: Any) -> tuple[Device, ...]:
    """Return the devices of a sharding in its own order."""
    return tuple(sharding._device_assignment)


# --- modules and executables -------------------------------------------------------------------


def lower(
    function: Callable[..., Any], arguments: Sequence[Any], donated: Sequence[int] = ()
) -> jax.stages.Lowered:
    """Lower ``function`` for the shapes, dtypes and shardings of ``arguments``; drop none.

    Args:
        function: Takes and returns arrays.
        arguments: Describes each argument.
        donated: The arguments whose memory the results may take.
    """
    jitted = jax.jit(function, keep_unused=True, donate_argnums=tuple(donated))
    with warnings.catch_warnings():
        # Where a donation is of no use, that is nothing that the user could change.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return jitted.lower(*arguments)


def stablehlo_without_locations(lowered: jax.stages.Lowered) -> bytes:
    """Return the module as MLIR bytecode without source locations."""
    return bytecode_without_locations(lowered.compiler_ir("stablehlo"))


def bytecode_without_locations(module: Any) -> bytes:
    """Return an MLIR module as bytecode after ``strip-debuginfo``: equal for equal programs."""
    with module.context:
        stripped = module.operation.clone()
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(stripped)
        buffer = io.BytesIO()
        stripped.write_bytecode(file=buffer)
        return buffer.getvalue()


def stablehlo_with_locations(module: Any, largest_constant: int) -> str:
    """Return an MLIR module as text with source locations, for people to compare.

    Args:
        module: The program.
        largest_constant: A constant with more elements than this loses its value, and the digests
            of those values stand at the end, each in a line ``// constant DIGEST``, in order.
    """
    return _text_to_compare(module, largest_constant, locations=True)


def stablehlo_to_compare(module: Any, largest_constant: int) -> str:
    """Do what `stablehlo_with_locations` does, but for the locations."""
    return _text_to_compare(module, largest_constant, locations=False)


def _text_to_compare(module: Any, largest_constant: int, *, locations: bool) -> str:
    text = module.operation.get_asm(
        enable_debug_info=locations, large_elements_limit=largest_constant
    )
    if "__elided__" not in text:
        return text
    digests = [
        f"// constant {_digest_of_constant(operation.attributes['value'])}"
        for operation in _operations_within(module.operation)
        if operation.name == "stablehlo.constant"
        and len(operation.attributes["value"]) > largest_constant
        and not operation.attributes["value"].is_splat
    ]
    return "\n".join([text, *digests])


def _operations_within(operation: Any) -> Iterator[Any]:
    """Yield the operations inside ``operation``, in the order in which MLIR prints them."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations_within(inner.operation)


def _digest_of_constant(value: Any) -> str:
    try:
        content = memoryview(value).tobytes()
    except BufferError:  # an element type that Python's buffers do not have, such as bf16
        content = str(value).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def portable_stablehlo(lowered: jax.stages.Lowered) -> bytes:
    """Return the module as a portable StableHLO artifact, which later versions of XLA can read.

    Modules with dialects that StableHLO does not version (Shardy) are stored in mixed form.
    """
    return portable_artifact(lowered.compiler_ir("stablehlo"))


def hlo_proto(lowered: jax.stages.Lowered) -> bytes:
    """Return the unoptimised module as a serialised ``xla.HloModuleProto``."""
    computation: Any = lowered.compiler_ir("hlo")
    return computation.as_serialized_hlo_module_proto()


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


# JAX 0.12 pickles the sentinel `AutoLayout` as a new object, which equals nothing: the abstract
# values of a loaded executable's outputs then equal no others, and what uses them is traced anew.
if hasattr(_layout, "AutoLayoutSingleton"):
    copyreg.pickle(_layout.AutoLayoutSingleton, lambda _: "AutoLayout")


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


def parse_module(module: bytes | str) -> Any:
    """Parse StableHLO text, MLIR bytecode or a portable artifact into an MLIR module.

    Raises:
        ValueError: If it is none of them.
    """
    _prepare_custom_calls(module)
    context = _mlir.make_ir_context()
    if isinstance(module, bytes) and module.startswith(b"ML\xefR"):
        try:
            return _jaxlib.mlir.deserialize_portable_artifact(module, context)
        except Exception:  # not portable: plain bytecode
            pass
    try:
        with context:
            return ir.Module.parse(module)
    except ir.MLIRError as error:
        raise ValueError(str(error).strip()) from None


def module_signature(module: Any) -> tuple[list[Any], list[Any]]:
    """Return the (shape, dtype) of each parameter and of each result of ``main``."""
    for operation in module.body.operations:
        if operation.operation.name == "func.func" and operation.sym_name.value == "main":
            kind = operation.function_type.value
            return [_tensor(t) for t in kind.inputs], [_tensor(t) for t in kind.results]
    raise ValueError("the module has no function 'main'")


def _tensor(kind: Any) -> tuple[tuple[int, ...], np.dtype]:
    if not isinstance(kind, ir.RankedTensorType):
        raise ValueError(f"a parameter or result of type {kind} cannot be given as an array")
    return tuple(kind.shape), _mlir_dtype(str(kind.element_type))


def _mlir_dtype(name: str) -> np.dtype:
    dtype = _element_types().get(name)
    if dtype is None:
        raise ValueError(f"arrays of element type {name} are not supported")
    return dtype


@functools.cache
def _element_types() -> dict[str, np.dtype]:
    """Return MLIR's element type names and their dtypes, as JAX itself maps them."""
    dtypes = [d for d in map(np.dtype, _mlir._dtype_to_ir_type) if d.name not in _NOT_ELEMENTS]
    with _mlir.make_ir_context(), ir.Location.unknown():
        return {str(_mlir.dtype_to_ir_type(dtype)): dtype for dtype in dtypes}


# float0 has no element; the one-bit integers share MLIR's i1 with bool.
_NOT_ELEMENTS = ("float0", "int1", "uint1")


def compile_module(module: Any, devices: Sequence[Device], options: Any) -> Any:
    """Compile an MLIR module for ``devices`` and load it."""
    return devices[0].client.compile_and_load(module, _device_list(devices), options)


def load_module(payload: bytes, devices: Sequence[Device]) -> Any:
    """Load an executable that `serialize_module` stored."""
    return devices[0].client.deserialize_executable(payload, _device_list(devices))


def serialize_module(executable: Any) -> bytes:
    """Return a loaded executable as bytes."""
    return executable.client.serialize_executable(executable)


def run_module(executable: Any, inputs: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Run a loaded executable on arrays that live on its devices; return each result's shards."""
    results = executable.execute_sharded(list(inputs))
    return results.disassemble_into_single_device_arrays()


def _device_list(devices: Sequence[Device]) -> Any:
    return _jaxlib.DeviceList(tuple(devices))


def xla_binaries() -> list[Path]:
    """Return the shared libraries that hold XLA itself in this jaxlib."""
    return sorted(Path(_jaxlib.__file__).parent.glob("libjax*.so")) or [Path(_jaxlib.__file__)]


def devices_of_lowered(lowered: jax.stages.Lowered) -> tuple[Device, ...]:
    """Return the devices a lowered program will run on, in the order of its partitions."""
    return tuple(lowered._lowering._device_list)  # type: ignore[attr-defined]


def backends_are_initialized() -> bool:
    """Say whether JAX has made its devices; by then XLA has parsed its flags."""
    return _xla_bridge.backends_are_initialized()


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


def stablehlo_text(module: Any) -> str:
    """Return an MLIR module as text, without source locations."""
    return module.operation.get_asm(enable_debug_info=False)


def module_to_hlo_proto(module: Any) -> bytes:
    """Convert a StableHLO module to a serialised, unoptimised ``xla.HloModuleProto``.

    Raises:
        ValueError: XLA has no HLO for something in it.
    """
    buffer = io.BytesIO()
    module.operation.write_bytecode(file=buffer)
    try:
        computation = _jaxlib.mlir.mlir_module_to_xla_computation(buffer.getvalue())
    except Exception as error:  # of several types, by version and cause
        raise ValueError(str(error)) from None
    return computation.as_serialized_hlo_module_proto()


def hlo_text(proto: bytes) -> str:
    """Return a serialised ``xla.HloModuleProto`` as HLO text.

    Raises:
        ValueError: It is none, or XLA does not accept it.
    """
    try:
        return _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string()
    except Exception as error:
        raise ValueError(str(error)) from None


def _prepare_custom_calls(module: bytes | str) -> None:
    """Give LAPACK's custom calls their functions, which JAX does when it lowers such a call itself.

    A module from a file that calls LAPACK ends the process with a segmentation fault without this.
    It costs 0.2 s, because it imports scipy. Source: jaxlib/lapack.py, 0.10 to 0.12.
    """
    text = module if isinstance(module, bytes) else module.encode()
    if b"lapack_" in text:
        _lapack._lapack.initialize()  # pyright: ignore[reportPrivateImportUsage]


def hlo_to_stablehlo(proto: bytes) -> bytes:
    """Convert a serialised ``xla.HloModuleProto`` to StableHLO, as MLIR bytecode.

    Raises:
        ValueError: It is none, or something in it has no StableHLO.
    """
    try:
        return _jaxlib.mlir.hlo_to_stablehlo(proto)
    except Exception as error:  # of several types, by version and cause
        raise ValueError(str(error)) from None


def portable_artifact(module: Any) -> bytes:
    """Return an MLIR module as a portable StableHLO artifact, as `portable_stablehlo` does.

    It has the form of `jax.export.Exported.mlir_module_serialized` (tried with 0.10.2 and 0.12.0).
    """
    return _jaxlib.mlir.serialize_portable_artifact(module, stablehlo.get_current_version(), True)


def parse_hlo_text(text: str) -> bytes:
    """Parse HLO text into a serialised ``xla.HloModuleProto``.

    Raises:
        ValueError: XLA's parser refuses it; the message names line and column.
    """
    try:
        return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:
        raise ValueError(str(error)) from None


def shapes_of(arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """Return what lowering needs of ``arrays``, without the arrays."""
    return [
        jax.ShapeDtypeStruct(
            array.shape,
            array.dtype,
            sharding=array.sharding if array.committed else None,
            weak_type=getattr(typeof(array), "weak_type", False),
        )
        for array in arrays
    ]


def lowering_module(primitive: Any) -> str:
    """Return the Python module that defines how ``primitive`` is lowered, "" where none does."""
    tables = [_mlir._lowerings, *_mlir._platform_specific_lowerings.values()]
    modules = {_module_of(table[primitive].rule) for table in tables if primitive in table}
    foreign = [module for module in modules if not module.startswith(("jax.", "jaxlib."))]
    return foreign[0] if foreign else min(modules, default="")


def _module_of(rule: Any) -> str:
    while isinstance(rule, functools.partial):
        rule = rule.func
    return getattr(rule, "__module__", None) or ""


# Settings of JAX that take no part in what an operation is lowered to: by the start of their name.
_UNRELATED_SETTINGS = (
    *("check_vma", "jax_check", "jax_compilation_cache", "jax_cpu_get", "jax_cross_host"),
    *("jax_debug_log", "jax_default_device", "jax_dump", "jax_enable_compilation_cache"),
    *("jax_explain", "jax_log", "jax_persistent_cache", "jax_platform", "jax_pprint"),
    *("jax_raise", "jax_traceback", "jax_tracer", "jax_transfer_guard"),
)


def configuration() -> list[tuple[str, str]]:
    """Return JAX's settings as this thread has them, but for those that lowering ignores."""
    return [
        (name, repr(getattr(jax.config, name, value)))
        for name, value in sorted(jax.config.values.items())
        if not name.startswith(_UNRELATED_SETTINGS)
    ]


# --- JAX's own compilation cache -----------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """What JAX is about to compile, in the parts that make an executable.

    Attributes:
        name: The module's name, such as ``jit_train_step``.
        module: The module as bytecode: without source locations, and with functions named by
            their order, for their names come from Python and change nothing.
        options: Serialised compile options, without where to dump or to cache.
        topology: What XLA says identifies the topology of the devices.
        extra: What JAX's hook for additions to the key returns.
        devices: Where it will run.
        written: The module as JAX has it, with source locations.
    """

    name: str
    module: bytes
    options: bytes
    topology: bytes
    extra: str
    devices: tuple[Device, ...]
    written: Any


JitExecutable = tuple[Any, int]
"""What JAX takes from its cache: an executable that is loaded, and the seconds its making took."""


def load_jit_executable(payload: bytes, devices: Sequence[Device]) -> JitExecutable:
    """Load what JAX puts into its cache, as JAX does when it finds it there."""
    packed = _compilation_cache.decompress_executable(payload)
    serialized, seconds = _compilation_cache.extract_executable_and_time(packed)
    return devices[0].client.deserialize_executable(serialized, _device_list(devices)), seconds


class _OwnCache(threading.local):
    """Whether this thread keeps what it compiles elsewhere."""

    bypassed = False


_own_cache = _OwnCache()
_log = logging.getLogger("snaprt.cache")
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_compilation_cache(
    cache: Any,
    key_of: Callable[[Compilation], str],
    loaded: Callable[[str, Sequence[Device]], JitExecutable | None],
    compiled: Callable[[BaseException | None], None],
) -> None:
    """Put ``cache`` in the place of JAX's compilation cache, whatever directory JAX was given.

    Checked with jax 0.10.2 and 0.12.0: JAX makes its cache at the first compilation, unless one is
    there. It asks `get_cache_key` for every key.

    Args:
        cache: Has ``get`` and ``put`` as JAX's ``CacheInterface``.
        key_of: Returns the string by which JAX asks the cache for a compilation.
        loaded: Returns what is behind a string where it has been loaded for these devices already.
        compiled: Called after every compilation or load, in its thread, with the error it ended
            with.
    """

    def get_cache_key(
        module: Any, devices: np.ndarray, options: Any, client: Any, *ignored: Any, **named: Any
    ) -> str | None:
        if _own_cache.bypassed:
            return None
        try:
            found = Compilation(
                name=module.operation.attributes["sym_name"].value,
                module=_module_of_compilation(module, *ignored, *named.values()),
                options=_options_of_compilation(options, client),
                topology=_hashed(_cache_key._hash_accelerator_config, devices),
                extra=_cache_key.custom_hook(),
                devices=tuple(devices.flat),
                written=module,
            )
            return key_of(found)
        except Exception as error:  # whatever this JAX does otherwise: the program goes on
            _log.warning("a program is compiled without the compile cache: %r", error)
            return None

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            compiled(sys.exc_info()[1])

    get_from_cache = _compilation_cache.get_executable_and_time

    def get_executable_and_time(
        cache_key: str, compile_options: Any, backend: Any, executable_devices: Any, *callbacks: Any
    ) -> Any:
        # Callbacks into Python are bound to an executable as it is loaded (JAX 0.12).
        ready = None if any(callbacks) else loaded(cache_key, tuple(executable_devices))
        if ready is not None:
            return ready
        return get_from_cache(cache_key, compile_options, backend, executable_devices, *callbacks)

    _compilation_cache.reset_cache()
    _compilation_cache._cache = cache
    _compilation_cache._cache_initialized = True
    _compilation_cache.get_cache_key = get_cache_key  # type: ignore[assignment]
    _compilation_cache.get_executable_and_time = get_executable_and_time
    jax.monitoring.register_event_duration_secs_listener(heard)


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Keep what is compiled inside the context out of a cache of ours under JAX."""
    before, _own_cache.bypassed = _own_cache.bypassed, True
    try:
        yield
    finally:
        _own_cache.bypassed = before


class _Collector:
    """Takes the place of a hash object, and keeps what it is fed."""

    def __init__(self) -> None:
        self.content = b""

    def update(self, content: bytes) -> None:
        self.content += content


def _hashed(feed: Callable[..., Any], *arguments: Any) -> bytes:
    collector = _Collector()
    feed(collector, *arguments)
    return collector.content


def _module_of_compilation(module: Any, *ignored: Any) -> bytes:
    if _config.compilation_cache_include_metadata_in_key.value:
        return _hashed(_cache_key._hash_computation, module, *ignored)
    with module.context, ir.Location.unknown():
        anonymous = module.operation.clone()
        anonymous.attributes["sym_name"] = ir.StringAttr.get("module")
        functions = (o for o in anonymous.regions[0].blocks[0].operations if _is_private(o))
        for number, function in enumerate(list(functions)):
            name = f"snaprt.{number}"
            old = function.attributes["sym_name"].value
            ir.SymbolTable.replace_all_symbol_uses(old, name, anonymous.operation)
            ir.SymbolTable.set_symbol_name(function, name)
    return _hashed(_cache_key._hash_computation, anonymous, *ignored)


def _is_private(operation: Any) -> bool:
    attributes = operation.attributes
    return (
        operation.operation.name == "func.func"
        and "sym_visibility" in attributes
        and attributes["sym_visibility"].value == "private"
        # XLA knows some of its own functions by their names.
        and not attributes["sym_name"].value.startswith("xla.")
    )


# Options that say where XLA writes and what it logs, beside those that JAX leaves out itself.
_OPTIONS_WITHOUT_EFFECT: Mapping[str, str | bool | int] = {
    "xla_detailed_logging": False,
    "xla_enable_dumping": False,
    "xla_gpu_dump_autotune_logs_to": "",
    "xla_gpu_dump_autotune_results_to": "",
    "xla_gpu_experimental_autotune_cache_mode": 0,
    "xla_gpu_kernel_cache_file": "",
    "xla_gpu_per_fusion_autotune_cache_dir": "",
}


def _options_of_compilation(options: Any, client: Any) -> bytes:
    options = copy.deepcopy(options)  # the compiler gets the original
    build_options = options.executable_build_options
    flags = build_options.debug_options
    for name, value in _OPTIONS_WITHOUT_EFFECT.items():
        if hasattr(type(flags), name):
            setattr(flags, name, value)
    return _hashed(
        _cache_key._hash_serialized_compile_options,
        options,
        client.platform == "gpu",  # whose processes share entries
    )


# --- compiling ahead of time ----------------------------------------------------------------------


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


def dtype_of_name(name: str) -> Any:
    """Return the dtype, of JAX's own too, that ``str`` calls ``name``.

    Raises:
        ValueError: There is none.
    """
    for implementation in _prng.prngs.values():
        kind = _prng.KeyTy(implementation)
        if str(kind) == name:
            return kind
    try:
        return jax.numpy.dtype(name)
    except TypeError as error:
        raise ValueError(f"no dtype is called {name}") from error


def results_of_lowered(lowered: jax.stages.Lowered) -> list[Any]:
    """Return the abstract values of a lowered program's results."""
    return list(lowered._lowering.compile_args["global_out_avals"])


_OF_THE_CALL = (
    *("global_in_avals", "global_out_avals", "in_shardings", "out_shardings", "in_layouts"),
    *("out_layouts", "tuple_args", "kept_var_idx", "committed", "num_devices", "context_mesh"),
    *("ordered_effects", "unordered_effects", "host_callbacks"),
)


def signature_of_lowered(lowered: jax.stages.Lowered) -> str:
    """Return as text what JAX keeps of a lowered program beside its module, and calls it by.

    Checked with jax 0.10.2 and 0.12.0: two programs of one signature differ in their modules alone.
    """
    lowering: Any = lowered._lowering
    parts = {name: lowering.compile_args[name] for name in _OF_THE_CALL}
    parts["devices"] = [device.id for device in lowering._device_list]
    parts["donated"] = lowering._donated_invars
    parts["name"] = lowering._name
    parts["constants"] = len(lowering.const_args)
    parts["options"] = lowering._compiler_options_kvs
    return repr(parts)


def is_compiled(lowered: jax.stages.Lowered) -> bool:
    """Tell whether XLA has compiled a lowered program (JAX 0.10.2 and 0.12.0)."""
    lowering: Any = lowered._lowering
    return lowering._executable is not None


def with_module(lowered: jax.stages.Lowered, module: Any) -> jax.stages.Lowered:
    """Put ``module`` in the place of a lowered program's own; its signature must be the same."""
    lowering: Any = lowered._lowering
    lowering._hlo = module
    return lowered


def bytecode(lowered: jax.stages.Lowered) -> bytes:
    """Return the module as MLIR bytecode with source locations, for this version of jaxlib.

    A portable artifact would come back as a module that is equal in meaning, not in its bytes.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    buffer = io.BytesIO()
    module.operation.write_bytecode(file=buffer)
    return buffer.getvalue()


def compile_for_topology(module: Any, devices: Sequence[Any]) -> bytes:
    """Compile an MLIR module for devices that are not there; return the serialised executable."""
    client = devices[0].client
    return client.compile(module, _device_list(devices), compile_options(devices)).serialize()


def partitions_of(module: Any) -> int:
    """Return over how many devices an MLIR module is to run."""
    attributes = module.operation.attributes
    if "mhlo.num_partitions" not in attributes:
        return 1
    return ir.IntegerAttr(attributes["mhlo.num_partitions"]).value


# --- the reference interpreter --------------------------------------------------------------------


def interpret(module: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Evaluate an MLIR module with StableHLO's reference interpreter.

    Args:
        module: Its results are real numbers of types that Python's buffers have.
        inputs: One array for each parameter of ``main``, of any dtype that XLA has.

    Raises:
        ValueError: The interpreter does not know an operation of it.
    """
    (main,) = [
        o for o in module.body.operations if o.operation.attributes["sym_name"].value == "main"
    ]
    with module.context, ir.Location.unknown():
        _generalise_dots(module)
        arguments = [
            ir.DenseElementsAttr.get(np.ascontiguousarray(array).tobytes(), type=kind)
            for array, kind in zip(inputs, main.function_type.value.inputs, strict=True)
        ]
        try:
            results = stablehlo.eval_module(module, arguments)
        except Exception as error:  # of several types, by version and cause
            raise ValueError(str(error)) from None
        return [np.asarray(result) for result in results]


def _generalise_dots(module: Any) -> None:
    """Replace ``stablehlo.dot``, which `hlo_to_stablehlo` makes and the interpreter refuses."""
    for dot in list(_operations_within(module.operation)):
        if dot.name != "stablehlo.dot":
            continue
        left, right = dot.operands
        contracted = ir.RankedTensorType(left.type).rank - 1
        numbers = stablehlo.DotDimensionNumbers.get([], [], [contracted], [0])
        with ir.InsertionPoint(dot):
            general = stablehlo.dot_general(dot.results[0].type, left, right, numbers)
        dot.results[0].replace_all_uses_with(general)
        dot.erase()


# --- what a compiler says of an executable --------------------------------------------------------


def compile_unloaded(
    module: Any, devices: Sequence[Any], overrides: Mapping[str, Any] | None = None
) -> Any:
    """Compile an MLIR module for devices that are not there; return what XLA knows of it."""
    options = compile_options(devices, overrides)
    return devices[0].client.compile(module, _device_list(devices), options)


def executable_memory(executable: Any) -> dict[str, int]:
    """Return an executable's memory in bytes by use: ``argument_size``, ``temp_size``, ..."""
    statistics = executable.get_compiled_memory_stats()
    return {
        name.removesuffix("_in_bytes"): int(getattr(statistics, name))
        for name in dir(statistics)
        if name.endswith("_in_bytes")
    }


def executable_report(executable: Any) -> tuple[dict[str, int], dict[str, float], str]:
    """Return an executable's memory in bytes by use, its cost analysis, and its optimised HLO."""
    memory = executable_memory(executable)
    try:
        cost = dict(executable.cost_analysis())
    except Exception:  # not every plugin has one
        cost = {}
    return memory, cost, "\n".join(one.to_string() for one in executable.hlo_modules())


# --- several devices, and what was compiled -------------------------------------------------------


@dataclass(frozen=True)
class Partitioning:
    """How XLA was told to spread a program over devices.

    Attributes:
        replicas: How many copies of the whole program run.
        parameters: For each parameter, whether XLA may choose its sharding; or nothing.
        results: The same of each result.
        shardy: Whether the module's shardings are Shardy's rather than GSPMD's.
    """

    replicas: int = 1
    parameters: tuple[bool, ...] = ()
    results: tuple[bool, ...] = ()
    shardy: bool = False


def compile_options_of_lowered(lowered: jax.stages.Lowered) -> Any:
    """Return the options that JAX compiles a lowered program with.

    Checked with jax 0.10.2 and 0.12.0. Source: ``from_hlo`` of jax/_src/interpreters/pxla.py.
    """
    lowering: Any = lowered._lowering
    arguments = lowering.compile_args
    parameters, results = _pxla.get_prop_to_input_output(
        arguments["in_shardings"], arguments["out_shardings"], len(arguments["ordered_effects"])
    )
    options = compile_options(devices_of_lowered(lowered), dict(lowering._compiler_options_kvs))
    options.parameter_is_tupled_arguments = arguments["tuple_args"]
    build_options = options.executable_build_options  # a view
    build_options.allow_spmd_sharding_propagation_to_parameters = list(parameters)
    build_options.allow_spmd_sharding_propagation_to_output = list(results)
    return options


def partitioning_of_options(serialised: bytes) -> Partitioning:
    """Return what serialised compile options say of devices.

    Raises:
        ValueError: They cannot be read.
    """
    try:
        options = _jaxlib.CompileOptions.ParseFromString(serialised)
    except Exception as error:
        raise ValueError(str(error)) from None
    build_options = options.executable_build_options
    return Partitioning(
        replicas=options.num_replicas,
        parameters=tuple(build_options.allow_spmd_sharding_propagation_to_parameters),
        results=tuple(build_options.allow_spmd_sharding_propagation_to_output),
        shardy=build_options.use_shardy_partitioner,
    )


def partition(options: Any, partitioning: Partitioning) -> None:
    """Set compile options as ``partitioning`` has it, but for the number of replicas."""
    build_options = options.executable_build_options
    build_options.allow_spmd_sharding_propagation_to_parameters = list(partitioning.parameters)
    build_options.allow_spmd_sharding_propagation_to_output = list(partitioning.results)
    build_options.use_shardy_partitioner = partitioning.shardy


def shardings_of_module(
    executable: Any, devices: Sequence[Device], parameters: int, results: int
) -> tuple[list[jax.sharding.Sharding], list[jax.sharding.Sharding]]:
    """Return how a loaded executable spreads its parameters and its results over its devices."""
    device_list = _device_list(devices)

    def shardings(found: Any, count: int) -> list[jax.sharding.Sharding]:
        if len(devices) == 1 or not found:  # the partitioner did not run: nothing is split
            return [_shardings.GSPMDSharding.get_replicated(device_list)] * count
        return [_shardings.GSPMDSharding(device_list, sharding) for sharding in found]

    return (
        shardings(executable.get_parameter_shardings(), parameters),
        shardings(executable.get_output_shardings(), results),
    )


def hlo_sharding_text(sharding: jax.sharding.Sharding, ndim: int) -> str:
    """Return a sharding of an array of ``ndim`` dimensions as XLA writes it in HLO."""
    return str(sharding._to_xla_hlo_sharding(ndim))


def optimised_hlo(executable: Any, *, constants: bool) -> str:
    """Return what XLA made of a loaded executable's module, as HLO text, "" where it keeps none.

    Names and source locations are left out: equal programs have equal texts. No other thread runs
    Python meanwhile (jaxlib 0.10.2 and 0.12.0.1 print while they hold its lock).

    Args:
        executable: Of XLA's.
        constants: Whether constants of more than ten elements are printed, else ``{...}`` is.
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
    found = getattr(executable, "fingerprint", None) or b""
    return found.decode() if found.isalnum() else found.hex()


def loaded_executable(compiled: Any) -> Any:
    """Return XLA's executable below a `jax.stages.Compiled`, None where there is none."""
    runtime = getattr(compiled, "runtime_executable", None)
    return None if runtime is None else runtime()


# --- calls of jax.jit -----------------------------------------------------------------------------
#
# A jitted function is called in C++, which finds the executable by the arguments and by what of
# JAX's configuration counts. A setting of our own counts here: while a thread has it, C++ finds
# nothing and asks JAX's Python, which asks us. Nothing else of JAX looks at it. Checked with
# jax 0.10.2 and 0.12.0.

_watch: Any = _jaxlib.config.Config(
    "snaprt_watch", None, include_in_jit_key=True, include_in_trace_context=False
)


class JitWatcher(Protocol):
    """Makes the calls of jitted functions in threads that are watched."""

    def leaves_to_jax(self, source: str) -> bool:
        """Say whether a function is not watched; ``source`` is ``NAME at FILE:LINE``."""
        ...

    def call(self, fun: Any, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``jax.jit(fun)``, of which JAX knows ``info``, as the user does."""

    def bind(self, args: tuple[Any, ...], params: dict[str, Any]) -> list[Any]:
        """Run what `grad`, `vmap` and the like have made of a jitted function."""
        ...


@dataclass(frozen=True)
class FlatCall:
    """A call of a jitted function as JAX lowers it.

    Attributes:
        args: The leaves of its arguments, static ones left out.
        names: Of each argument, such as ``params['w']``.
        results: The name of each result, such as ``result['loss']``.
        params: The parameters of the primitive ``jit``.
        unflatten: Makes of the results what the function returns.
        captured: How many of the arguments are no leaves of the user's, and come before those.
    """

    args: tuple[Any, ...]
    names: tuple[str, ...]
    results: tuple[str, ...]
    params: dict[str, Any]
    unflatten: Callable[[Sequence[Any]], Any] = list
    captured: int = 0


_infer_jit: Any = _pjit._infer_params
_run_jit: Any = _pjit._run_python_pjit
_run_jit_primitive: Any = _pjit.jit_p.impl
_ASKED_BY_CPP = next(
    constant
    for constant in _pjit._cpp_pjit.__code__.co_consts
    if isinstance(constant, CodeType) and constant.co_name == "cache_miss"
)
_NO_FAST_PATH = (None, None, None, SimpleNamespace(effects=(), consts=()), None, None, None)


_MakeCall = Callable[[], tuple[Any, ...]]
_AskBeforeJit = Callable[[Any, Any, Any, Any], _MakeCall | None]
_asked_before_jit: Mapping[Any, _AskBeforeJit] = {}  # replaced, for threads that look at it
_asked_before_jit_lock = threading.Lock()
_MADE_ELSEWHERE = object()


def _ask_before_jit(owner: Any, ask: _AskBeforeJit) -> None:
    """Ask before JAX's Python makes a call of a jitted function for C++; once for each owner.

    C++ hands what it does not know to ``cache_miss``, which calls two functions of its module in
    turn: one infers the types of the call, one makes it. Those are replaced, once for all who ask.

    Args:
        owner: Who asks.
        ask: Takes the function, what JAX knows of the jit, and the arguments. Returns ``None``
            where it leaves the call to others, else what makes it and returns what JAX's does.
    """
    global _asked_before_jit
    with _asked_before_jit_lock:
        is_asked_already = bool(_asked_before_jit)
        _asked_before_jit = {**_asked_before_jit, owner: ask}
    if is_asked_already:
        return

    def infer(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        if sys._getframe(1).f_code is _ASKED_BY_CPP:  # and not to lower it, say
            for ask in _asked_before_jit.values():
                make = ask(fun, info, args, kwargs)
                if make is not None:
                    return make, _MADE_ELSEWHERE
        return _infer_jit(fun, info, args, kwargs)

    def run(inferred: Any, flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if flat is _MADE_ELSEWHERE:
            return inferred()
        return _run_jit(inferred, flat, fun, args, kwargs)

    module: Any = _pjit
    module._run_python_pjit = run  # first, for what the other returns is its alone
    module._infer_params = infer


def use_jit_watcher(watcher: JitWatcher) -> None:
    """Let ``watcher`` make the calls of jitted functions wherever `set_watch` says so."""
    clean, source_of = _core.trace_state_clean, _source_of_jaxpr

    def ask(fun: Any, info: Any, args: Any, kwargs: Any) -> _MakeCall | None:
        if (
            _watch.value is None
            or not clean()  # it is traced or recorded: a part of another program
            or watcher.leaves_to_jax(info.fun_sourceinfo)
        ):
            return None
        return lambda: (watcher.call(fun, info, args, kwargs), *_NO_FAST_PATH)

    def run_primitive(*args: Any, **params: Any) -> Any:
        if _watch.value is None or watcher.leaves_to_jax(source_of(params["jaxpr"])):
            return _run_jit_primitive(*args, **params)
        return watcher.bind(args, params)

    _ask_before_jit(use_jit_watcher, ask)
    jit_primitive: Any = _pjit.jit_p
    jit_primitive.def_impl(run_primitive)


def set_watch(words: tuple[str, ...] | None) -> Any:
    """Watch this thread's jitted functions from here on; return what `restore_watch` takes.

    Args:
        words: Anything on which the watcher's `leaves_to_jax` depends; None not to watch.
    """
    return _watch.swap_local(words)


def restore_watch(before: Any) -> None:
    """Watch this thread again as it was before `set_watch`."""
    _watch.set_local(before)


def set_process_watch(words: tuple[str, ...] | None) -> None:
    """Watch the calls of every thread that has no watch of its own."""
    _watch.set_global(words)


def watch() -> tuple[str, ...] | None:
    """Return the words with which this thread is watched."""
    return _watch.value


def _source_of_jaxpr(jaxpr: Any) -> str:
    return str(jaxpr.debug_info.func_src_info)


def is_source_of_jax(source: str) -> bool:
    """Say whether ``NAME at FILE:LINE`` names a file of JAX itself."""
    return source.partition(" at ")[2].startswith(_JAX_FOLDER)


_JAX_FOLDER = str(Path(jax.__file__).parent / "_")[:-1]  # with the separator


def jit_again(fun: Any, info: Any) -> Any:
    """Return another function as `jax.jit` made of ``fun``: both use the same compiled programs."""
    return _pjit._cpp_pjit(fun, info)


def jit_entries(function: Any) -> int:
    """Return for how many kinds of calls JAX has looked for a compiled program of a function."""
    return function._cache_size()


def kind_of_jit_call(info: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return what tells calls of a jitted function that run different programs.

    Returns:
        A key, equal for calls of one kind as long as what stands beside it is alive; the same
        call may have more than one.
    """
    signature, leaves = _parse_jit_call(info, args, kwargs)
    parts, alive = _kinds_of(leaves)
    return (signature, parts, _jit_context()), alive


def _parse_jit_call(info: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    return _jax_jit.parse_arguments(
        args,
        tuple(kwargs.values()),
        tuple(kwargs),
        info.static_argnums,
        info.static_argnames,
        _tree_util.tracing_registry,
    )


def kind_of_flat_call(call: FlatCall) -> tuple[Any, Any]:
    """Return what tells calls of one traced function that run different programs.

    Returns:
        As `kind_of_jit_call`.
    """
    params = call.params
    chosen = (params["in_shardings"], params["out_shardings"], params["donated_invars"])
    parts, alive = _kinds_of(call.args)
    return (parts, chosen, _jit_context()), alive


def _kinds_of(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    parts: list[Any] = []
    alive: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, _array.ArrayImpl):
            aval, sharding = leaf.aval, leaf.sharding
            parts += (id(aval), id(sharding), leaf._committed)
            alive += (aval, sharding)
        else:
            parts += (type(leaf), getattr(leaf, "dtype", None), np.shape(leaf))
    return tuple(parts), alive


def _jit_context() -> tuple[Any, ...]:
    return _config.trace_context(), _config.default_device.value, _mesh.get_concrete_mesh()


def identity_of_lowered(lowered: jax.stages.Lowered) -> int:
    """Return what is the same for the same program, as long as it is alive."""
    return id(lowered._lowering)


def flatten_jit_call(fun: Any, info: Any, args: Any, kwargs: Any) -> FlatCall:
    """Return a call as JAX lowers it; the function is traced if it was not for such arguments."""
    traced, flat = _infer_jit(fun, info, args, kwargs)
    names = [f"closure{number}" for number in range(len(traced.consts))]
    names += traced.arg_names or [""] * (len(flat) - len(names))
    return FlatCall(
        args=tuple(map(_core.full_lower, flat)),
        names=_numbered("arg", names, len(flat)),
        results=_results_of(traced.params["jaxpr"]),
        params=traced.params,
        unflatten=traced.out_tree.unflatten,
        captured=len(traced.consts),
    )


def leaves_of_jit_call(info: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of a call of a function that captured nothing, as JAX lowers it."""
    return tuple(
        [
            leaf if type(leaf) is _array.ArrayImpl else _core.full_lower(leaf)
            for leaf in _parse_jit_call(info, args, kwargs)[1]
        ]
    )


def flat_jit_call(args: tuple[Any, ...], params: dict[str, Any]) -> FlatCall:
    """Return a call of the primitive ``jit`` as one with names."""
    jaxpr = params["jaxpr"]
    names = _numbered("arg", jaxpr.debug_info.arg_names, len(args))
    return FlatCall(args, names, _results_of(jaxpr), params)


def _results_of(jaxpr: Any) -> tuple[str, ...]:
    return _numbered("out", jaxpr.debug_info.result_paths, len(jaxpr.out_avals))


def _numbered(word: str, names: Any, count: int) -> tuple[str, ...]:
    """Return names, made of ``word`` and a number where JAX knows none."""
    if not isinstance(names, tuple | list) or len(names) != count:
        names = [""] * count
    return tuple([name or f"{word}{number}" for number, name in enumerate(names)])


def without_donation(call: FlatCall) -> FlatCall:
    """Return the call of a program that leaves its arguments as they are."""
    donated = call.params["donated_invars"]
    return replace(call, params={**call.params, "donated_invars": (False,) * len(donated)})


def with_result(
    call: FlatCall, add: Callable[[Callable[..., Any]], Callable[..., Any]], name: str
) -> FlatCall:
    """Return the call of a program that has one more result.

    Args:
        call: Arrays alone go in and out of it.
        add: Makes of a flat function one that has it: the same for every call.
        name: Its name.
    """
    params = call.params
    jaxpr = params["jaxpr"]
    if jaxpr not in _extended:
        avals = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            for aval in jaxpr.in_avals
        ]
        _extended[jaxpr] = jax.make_jaxpr(add(_core.jaxpr_as_fun(jaxpr)))(*avals)
    params = {
        **params,
        "jaxpr": _extended[jaxpr],
        "out_shardings": (*params["out_shardings"], _UNSPECIFIED),
        "out_layouts": (*params["out_layouts"], None),
    }
    return replace(call, params=params, results=(*call.results, name))


_extended: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def run_flat_jit_call(call: FlatCall) -> list[Any]:
    """Run a flat call as JAX does."""
    return _run_jit_primitive(*call.args, **call.params)


def lower_jit_call(call: FlatCall) -> Any:
    """Lower a flat call as JAX does when it runs it: it then finds this, and compiles it once."""
    computation = _pjit._resolve_and_lower(
        tuple(map(_pjit.convert_to_metaty, call.args)),
        **call.params,
        lowering_platforms=None,
        lowering_parameters=_mlir.LoweringParameters(),
        pgle_profiler=None,
    )
    return jax.stages.Lowered(computation, {}, None)


@dataclass(frozen=True)
class JitModule:
    """What a lowered jitted function is called with, and what it returns.

    Attributes:
        name: Of the function.
        devices: Where it runs, in the order of its partitions.
        input_names: Of each parameter of the module; arguments that it does not use are gone.
        output_names: Of each result.
        input_shapes: Of each parameter.
        donated: The parameters whose memory an execution may take.
        is_recordable: Whether arrays alone go in and out.
        is_pure: Whether it neither writes to references nor has effects.
        kept: Which arguments go in, where those alone do, on one device; else None.
    """

    name: str
    devices: tuple[Device, ...]
    input_names: tuple[str, ...]
    input_shapes: list[tuple[int, ...]]
    output_names: tuple[str, ...]
    donated: tuple[int, ...]
    is_recordable: bool
    is_pure: bool
    kept: tuple[int, ...] | None


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
    taken = {place for place in written if place is not None}
    donated = {number for number, flag in enumerate(lowering._donated_invars) if flag}
    avals = [*lowering.compile_args["global_in_avals"], *lowering.compile_args["global_out_avals"]]
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
        donated=tuple(sorted(donated | taken)),
        is_recordable=all(hasattr(aval, "dtype") and hasattr(aval, "shape") for aval in avals),
        is_pure=not call.params["jaxpr"].effects and lowering.compile_args["mut"] is None,
        kept=tuple(sorted(lowering.compile_args["kept_var_idx"])) if is_plain else None,
    )


def jit_module_inputs(
    lowered: jax.stages.Lowered, module: JitModule, args: Sequence[Any]
) -> list[Any]:
    """Return the arrays with which a module is run, placed, for the arguments of a flat call."""
    lowering: Any = lowered._lowering
    if module.kept is not None:
        arrays = [args[number] for number in module.kept]
        if all(type(array) is _array.ArrayImpl for array in arrays):
            return arrays
    given = _module_arguments(lowering, [*lowering.const_args, *args])
    given += _captured_references(lowering)
    arrays = [_behind_reference(value) for value in given]
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
        array if isinstance(array, jax.Array) else np.asarray(array, dtype=aval.dtype)
        for array, aval in zip(arrays, avals, strict=True)
    ]


def jit_module_outputs(
    lowered: jax.stages.Lowered, args: Callable[[], Sequence[Any]], results: Sequence[Any]
) -> list[Any]:
    """Return the arrays that the module of a call returned, whose function returned ``results``."""
    lowering: Any = lowered._lowering
    written = _written_references(lowering)
    if not written:
        return list(results)
    given = _module_arguments(lowering, [*lowering.const_args, *args()])
    given += _captured_references(lowering)
    rest = iter(results)
    # The next execution may write to the reference, and take the memory of what is there.
    return [
        next(rest) if place is None else jax.numpy.copy(_behind_reference(given[place]))
        for place in written
    ]


def _module_arguments(lowering: Any, given: Sequence[Any]) -> list[Any]:
    kept = lowering.compile_args["kept_var_idx"]
    return [value for number, value in enumerate(given) if number in kept]


def _written_references(lowering: Any) -> list[int | None]:
    """Return for each result of a module the parameter it replaces, if it replaces one."""
    references = lowering.compile_args["mut"]
    return [] if references is None else list(references.out_mut)


def _captured_references(lowering: Any) -> list[Any]:
    references = lowering.compile_args["mut"]
    return [] if references is None else list(references.in_mut)


def _behind_reference(value: Any) -> Any:
    return value._refs._buf if isinstance(value, _core.Ref) else value


def without_locations_or_names(module: bytes, *, names: bool) -> bytes:
    """Return a module, as a portable artifact, without what tells where it came from.

    Args:
        module: StableHLO in any form.
        names: Whether to give neutral names to the module, its functions and the axes of its meshes
            too, and take out JAX's notes on arguments and results.

    Raises:
        ValueError: It cannot be parsed.
    """
    parsed: Any = parse_module(module)
    with parsed.context, ir.Location.unknown():
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(parsed.operation)
        if names:
            _take_out_names(parsed)
            text = _with_neutral_axes(parsed.operation.get_asm(enable_debug_info=False))
            parsed = ir.Module.parse(text)
        return portable_artifact(parsed)


def _take_out_names(module: Any) -> None:
    whole = module.operation
    whole.attributes["sym_name"] = ir.StringAttr.get("graph")
    functions = [one.operation for one in module.body if one.operation.name == "func.func"]
    for number, function in enumerate(functions):
        name = ir.StringAttr(function.attributes["sym_name"]).value
        if name != "main":
            neutral = f"snaprt_function{number}"
            ir.SymbolTable.replace_all_symbol_uses(name, neutral, whole)
            ir.SymbolTable.set_symbol_name(function, neutral)
        for side in ("arg_attrs", "res_attrs"):
            if side in function.attributes:
                kept = [_without_notes(one) for one in ir.ArrayAttr(function.attributes[side])]
                function.attributes[side] = ir.ArrayAttr.get(kept)


def _without_notes(attributes: Any) -> Any:
    """Return an argument's attributes without JAX's own, but for the one that has a meaning."""
    named: Any = ir.DictAttr(attributes)
    return ir.DictAttr.get(
        {
            one.name: one.attr
            for one in named
            if not one.name.startswith("jax.") or one.name == "jax.buffer_donor"
        }
    )


_AXIS = re.compile(r'(?<=[<,\[ ])"([^"]+)"=\d+')


def _with_neutral_axes(text: str) -> str:
    lines = text.splitlines()
    meshes = [line for line in lines if line.lstrip().startswith("sdy.mesh ")]
    axes = list(dict.fromkeys(name for line in meshes for name in _AXIS.findall(line)))
    neutral = {f'"{name}"': f'"axis{number}"' for number, name in enumerate(axes)}
    if not neutral:
        return text
    quoted = re.compile("|".join(map(re.escape, neutral)))
    return "\n".join(
        quoted.sub(lambda found: neutral[found[0]], line) if "sdy." in line else line
        for line in lines
    )


def mesh_axes(module: bytes) -> tuple[str, ...]:
    """Return the names of the axes of a StableHLO module's meshes, in their order there."""
    parsed: Any = parse_module(module)
    text = "\n".join(
        one.operation.get_asm() for one in parsed.body if one.operation.name == "sdy.mesh"
    )
    return tuple(dict.fromkeys(_AXIS.findall(text)))


def compile_options_without_paths(serialised: bytes) -> bytes:
    """Return serialised compile options without the options that hold a path."""
    options = _jaxlib.CompileOptions.ParseFromString(serialised)
    build_options = options.executable_build_options  # each is a view into the one before it
    flags = build_options.debug_options
    for name in dir(flags):
        value = getattr(flags, name)
        if name.startswith("xla_") and isinstance(value, str) and ("/" in value or "\\" in value):
            setattr(flags, name, "")
    return options.SerializeAsString()


# --- errors while a graph is recorded -------------------------------------------------------------


@dataclass(frozen=True)
class BoundOperation:
    """A primitive with what it was bound to."""

    primitive: Any
    operands: Sequence[Any]
    params: Mapping[str, Any]


_watch_errors_lock = threading.Lock()
_watched_errors: list[Callable[[BaseException], None]] = []


def watch_errors(seen: Callable[[BaseException], None]) -> None:
    """Call ``seen`` with each error that leaves JAX, before JAX cuts its traceback down.

    Checked with jax 0.10.2 and 0.12.0: ``filter_traceback`` is called by the outermost of JAX's own
    functions that an error passes, unless JAX_TRACEBACK_FILTERING is ``off`` or ``tracebackhide``.
    """
    with _watch_errors_lock:
        if seen in _watched_errors:
            return
        _watched_errors.append(seen)
        if len(_watched_errors) > 1:
            return
        original = _traceback_util.filter_traceback

        def filter_traceback(tb: Any) -> Any:
            error = sys.exc_info()[1]
            if error is not None and error.__traceback__ is tb:
                for one in _watched_errors:
                    one(error)
            return original(tb)

        _traceback_util.filter_traceback = filter_traceback


def failed_operation(error: BaseException) -> BoundOperation | None:
    """Return the innermost primitive that was being bound when an error was raised."""
    found = None
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code is _core.Primitive.bind_with_trace.__code__:
            found = at.tb_frame
        at = at.tb_next
    if found is None:
        return None
    names = found.f_locals
    return BoundOperation(names["self"], tuple(names["args"]), dict(names["params"]))


def user_stack(error: BaseException) -> tuple[str, ...]:
    """Return ``file:line (function)`` of the user's frames on the way to an error, outermost first.

    Checked with jax 0.10.2 and 0.12.0.
    """
    return tuple(
        f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_qualname})"
        for frame, line in _frames_to(error)
        if _source_info.is_user_filename(frame.f_code.co_filename)
    )


class Frame(NamedTuple):
    """A place in the user's program: its file, line (from 1) and function."""

    file: str
    line: int
    function: str


def user_frames() -> tuple[Frame, ...]:
    """Return the user's frames of this thread as they are now, outermost first.

    Checked with jax 0.10.2 and 0.12.0.
    """
    frames = [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_qualname)
        for frame, line in traceback.walk_stack(sys._getframe(1))
        if _source_info.is_user_filename(frame.f_code.co_filename)
    ]
    return tuple(reversed(frames))


def user_variables() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the file and the variables of each of the user's frames now, innermost first.

    The variables are the local ones, and those of the module that the frame's code names.
    Checked with jax 0.10.2 and 0.12.0.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if _source_info.is_user_filename(code.co_filename):
            local, outer = dict(frame.f_locals), frame.f_globals
            named = {name: outer[name] for name in code.co_names if name in outer}
            yield code.co_filename, {**named, **local}


def frames_of_operation(source: Any) -> tuple[Frame, ...]:
    """Return the user's frames of an operation, of what `source_info` said of it, outermost first.

    Checked with jax 0.10.2 and 0.12.0.
    """
    frames = [
        Frame(frame.file_name, frame.start_line, frame.function_name)
        for frame in _source_info.user_frames(source.traceback)
    ]
    return tuple(reversed(frames))


def place_of_operation(source: Any) -> tuple[Any, ...]:
    """Return where an operation stands, of what `source_info` said of it; equal for equal places.

    Checked with jax 0.10.2 and 0.12.0.
    """
    return (*frames_of_operation(source), str(source.name_stack))


def whole_stacks() -> AbstractContextManager[Any]:
    """Return a context in which modules are lowered with the whole stack at each operation.

    Checked with jax 0.10.2 and 0.12.0; by default it ends after 100 frames.
    """
    stack = contextlib.ExitStack()
    stack.enter_context(_config.include_full_tracebacks_in_locations(True))
    stack.enter_context(_config.traceback_in_locations_limit(-1))
    return stack


def forbidden_value(error: BaseException) -> str | None:
    """Return ``nan`` or ``inf`` where an error says that JAX's settings forbid such a value.

    Checked with jax 0.10.2 and 0.12.0.
    """
    return error.args[1] if isinstance(error, _InternalFloatingPointError) else None


def _frames_to(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames on the way to an error, those it has not come to included."""
    first = error.__traceback__
    if first is None:
        return []
    outer = list(traceback.walk_stack(first.tb_frame.f_back))[::-1]
    return [*outer, *traceback.walk_tb(first)]


def primitive_named(name: str, module: str) -> Any:
    """Return JAX's own primitive of that name, None where there is none.

    Args:
        name: Its name, which several may have.
        module: What `lowering_module` says of it.
    """
    tables = [_mlir._lowerings, *_mlir._platform_specific_lowerings.values()]
    named = {one for table in tables for one in table if one.name == name}
    ours = [one for one in named if lowering_module(one).partition(".")[0] in ("jax", "jaxlib")]
    return next((one for one in ours if lowering_module(one) == module), next(iter(ours), None))


def is_extended_dtype(value: Any) -> bool:
    """Say whether ``value`` is a dtype of JAX's own, as that of PRNG keys."""
    return isinstance(value, _prng.KeyTy)


def is_placed_aval(aval: Any) -> bool:
    """Say whether the type of an array names the axes of a mesh."""
    mesh = getattr(aval.sharding, "mesh", None)
    kind = getattr(aval, "manual_axis_type", None)
    varies = getattr(aval, "vma", None) or getattr(kind, "varying", None)
    return bool(varies) or (mesh is not None and not mesh.empty)


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

    Only those are returned that were called after the last of the user's own functions.
    """
    calls: list[FailedCall] = []
    for frame, _ in _frames_to(error):
        code = frame.f_code
        if _source_info.is_user_filename(code.co_filename):
            calls.clear()
        elif code in _names_of_code():
            name = _names_of_code()[code]
            parameters = inspect.signature(inspect.unwrap(public_functions()[name])).parameters
            found = {one: frame.f_locals[one] for one in parameters if one in frame.f_locals}
            calls.append(FailedCall(name, found))
    return calls


def call_abstractly(name: str, arguments: Mapping[str, Any]) -> None:
    """Call a public function of JAX's with abstract values in place of arrays.

    Args:
        name: One of `public_functions`.
        arguments: By parameter; abstract values anywhere inside of them.
    """
    function = public_functions()[name]
    leaves, tree = jax.tree.flatten(dict(arguments), is_leaf=is_array_aval)
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
        for leaf in leaves
        if is_array_aval(leaf)
    ]

    def call(*arrays: Any) -> Any:
        left = iter(arrays)
        filled = [next(left) if is_array_aval(leaf) else leaf for leaf in leaves]
        return _call_with(function, jax.tree.unflatten(tree, filled))

    jax.eval_shape(call, *shapes)


def _call_with(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    given: list[Any] = []
    named: dict[str, Any] = {}
    for name, parameter in inspect.signature(inspect.unwrap(function)).parameters.items():
        if name not in arguments:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            given.extend(arguments[name])
        elif parameter.kind is parameter.VAR_KEYWORD:
            named.update(arguments[name])
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = arguments[name]
        else:
            given.append(arguments[name])
    return function(*given, **named)


def raised_inside(error: BaseException) -> bool:
    """Say whether JAX's own code raised an error, not what the user wrote."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").partition(".")[0] == "jax"


def is_scalar_type(value: Any) -> bool:
    """Say whether ``value`` is one of JAX's own scalar types, such as ``jax.numpy.float32``."""
    return isinstance(value, type(jax.numpy.float32))


def own_cpu() -> Device:
    """Return the device of a new CPU client, beside JAX's own, none of which is started.

    Checked with JAX 0.10.2 and 0.12.0.
    """
    client: Any = _xla_client.make_cpu_client()
    device: Device = client.local_devices()[0]
    return device


def put_on(device: Device, value: np.ndarray) -> jax.Array:
    """Return an array on a device of any client; it may share the memory of ``value``.

    Checked with JAX 0.10.2 and 0.12.0.
    """
    with x64(True):  # or 64-bit values would be narrowed
        array: jax.Array = _xla_client.batched_device_put(
            ShapedArray(value.shape, value.dtype),
            jax.sharding.SingleDeviceSharding(device),
            [value],
            [device],
        )
    return array


def names_within(primitive: Any, params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of a primitive and, each once, those in the jaxprs among its parameters.

    Checked with jax 0.10.2 and 0.12.0.
    """
    yield primitive.name
    for jaxpr in _core.jaxprs_in_params(params):
        for equation in jaxpr.eqns:
            yield from names_within(equation.primitive, equation.params)


def leave_name_scopes() -> None:
    """Forget the names of the `jax.named_scope` in which this thread is; each restores its outer's.

    Checked with jax 0.10.2 and 0.12.0.
    """
    context = _source_info._source_info_context.context
    if context.name_stack.stack:
        _source_info._source_info_context.context = context.replace(
            name_stack=_source_info.NameStack()
        )


def is_staging() -> bool:
    """Say whether a function is being traced here whose operations run later, and more than once.

    Checked with jax 0.10.2 and 0.12.0.
    """
    trace = current_trace()
    while trace is not None:
        if isinstance(trace, _partial_eval.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def random_function_names() -> frozenset[str]:
    """Return the names of the jitted functions that `jax.random` consists of.

    A module has a function of that name, or of that name, an underscore and a number, where a
    program calls one. Checked with jax 0.10.2 and 0.12.0.
    """
    names = {f"jax._src.random.{found.name}" for found in pkgutil.iter_modules(_random.__path__)}
    modules = [_random, *(sys.modules[name] for name in names & sys.modules.keys())]
    jitted: Any = type(_api.jit(lambda: None))
    functions = [value for module in modules for value in vars(module).values()]
    return frozenset(one.__name__ for one in functions if isinstance(one, jitted))


def element_of_type(kind: Any) -> str | None:
    """Return the element type of an MLIR tensor type, such as ``f32``; None if it is none."""
    return str(kind.element_type) if isinstance(kind, ir.RankedTensorType) else None


def with_element(kind: Any, element: str) -> Any:
    """Return an MLIR tensor type with another element type, such as ``bf16``."""
    return ir.RankedTensorType.get(kind.shape, ir.Type.parse(element), kind.encoding)


def convert_operand(
    operation: Any, index: int, kind: Any, bits: tuple[int, int] | None = None
) -> None:
    """Convert an operand of an MLIR operation to another type, before the operation.

    Args:
        operation: The operation.
        index: The number of the operand.
        kind: The type.
        bits: How many bits of exponent and of mantissa it is left with; None for all.
    """
    value, where = operation.operands[index], operation.location
    with ir.InsertionPoint(operation):
        value = stablehlo.convert(kind, value, loc=where)
        if bits is not None:
            value = stablehlo.reduce_precision(value, *bits, loc=where)
        operation.operands[index] = value


def convert_result(value: Any, kind: Any, where: Any) -> None:
    """Convert an MLIR value to another type at the insertion point, for all who use it."""
    with where:
        converted = stablehlo.convert(kind, value, loc=value.location)
    value.replace_all_uses_except(converted, converted.owner.operation)


def integer_of_constant(operation: Any) -> int | None:
    """Return the number that all elements of an MLIR constant are; None where they are no such."""
    if not isinstance(operation.results[0].type.element_type, ir.IntegerType):
        return None  # jaxlib cannot read complex ones
    value: Any = operation.attributes["value"]
    return int(ir.IntegerAttr(value.get_splat_value()).value) if value.is_splat else None


def set_constant(operation: Any, number: int) -> None:
    """Let all elements of an MLIR constant be another number."""
    kind = operation.results[0].type
    element = ir.IntegerAttr.get(kind.element_type, number)
    operation.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, element)


def after_operation(operation: Any) -> Any:
    """Return the insertion point after an MLIR operation."""
    return ir.InsertionPoint.after(operation)


def at_start_of_block(block: Any) -> Any:
    """Return the insertion point at the beginning of an MLIR block."""
    return ir.InsertionPoint.at_block_begin(block)


def set_function_type(function: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """Give an MLIR function another type."""
    kind = ir.FunctionType.get(inputs, results, function.context)
    function.attributes["function_type"] = ir.TypeAttr.get(kind)


def function_type(function: Any) -> Any:
    """Return the type of an MLIR function, with its ``inputs`` and ``results``."""
    return ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)


def set_symbol(operation: Any, attribute: str, name: str) -> None:
    """Name an MLIR function, or the one that an operation calls."""
    kind = ir.StringAttr if attribute == "sym_name" else ir.FlatSymbolRefAttr
    operation.attributes[attribute] = kind.get(name, operation.context)


@contextmanager
def changing_module(module: Any) -> Iterator[None]:
    """Let what is inside change an MLIR module."""
    with module.context, ir.Location.unknown():
        yield
