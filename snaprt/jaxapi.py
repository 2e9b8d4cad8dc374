"""The one place that touches JAX names which are not public API; it must know nothing of snaprt.

Everything here was checked with jax 0.10.2 and 0.12.0; a function that leans on something newer or
older says so. When a new JAX breaks snaprt, this is the file to read and to change.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import hashlib
import io
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import api as _api
from jax._src import cache_key as _cache_key
from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import layout as _layout
from jax._src import pjit as _pjit
from jax._src import source_info_util as _source_info
from jax._src import tree_util as _tree_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.lax import lax as _lax
from jax._src.lib import jax_jit as _jax_jit
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
        return frame.f_back.f_code.co_name.strip("_<>")
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


# --- calls that may be known already -----------------------------------------------------------

NOT_KNOWN = object()


class _Answer:
    """Stands for what JAX infers of a call, where what the call returns is known already."""

    effects = consts = ()

    def __init__(self, returned: Any) -> None:
        self.returned = returned


_FollowJit = Callable[
    [Any, Callable[..., Any], Any, Any, Any], tuple[Any, Callable[[Any], None] | None]
]


def intercept_jit(kind: type, follow: _FollowJit) -> None:
    """Ask ``follow`` first whenever a jitted function is called under a trace of type ``kind``.

    Checked with jax 0.10.2 and 0.12.0: what C++ does not know it hands to ``cache_miss``, which
    calls these two functions of its module in turn. Of a JAX that has others nothing is changed.

    Args:
        kind: The type of the trace.
        follow: Takes the trace, the function, what JAX knows of the jit, and the arguments. Returns
            what the call returns, or ``NOT_KNOWN`` and what to tell what JAX then returned.
    """
    infer = getattr(_pjit, "_infer_params", None)
    run = getattr(_pjit, "_run_python_pjit", None)
    if infer is None or run is None or getattr(infer, "intercepted", False):
        return
    learners = threading.local()

    def infer_params(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        trace = current_trace_setting.value
        # `jit(f).lower(...)` asks as well.
        if type(trace) is kind and sys._getframe(1).f_code.co_name == "cache_miss":
            returned, learn = follow(trace, fun, info, args, kwargs)
            if returned is not NOT_KNOWN:
                return _Answer(returned), ()
            inferred = infer(fun, info, args, kwargs)
            learners.of = (args, learn)
            return inferred
        return infer(fun, info, args, kwargs)

    def run_python_pjit(p: Any, args_flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if type(p) is _Answer:
            return p.returned, (), None, (), p, None, None, ()
        asked, learn = getattr(learners, "of", (None, None))
        learners.of = (None, None)
        done = run(p, args_flat, fun, args, kwargs)
        if asked is args and learn is not None:
            learn(done[0])
        return done

    infer_params.intercepted = True  # type: ignore[attr-defined]
    module: Any = _pjit
    module._infer_params, module._run_python_pjit = infer_params, run_python_pjit


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
        signature, operands = _jax_jit.parse_arguments(
            args,
            tuple(kwargs.values()),
            tuple(kwargs),
            info.static_argnums,
            info.static_argnames,
            _tree_util.tracing_registry,
        )
        key = (weakref.ref(function), info, signature)
        hash(key)
    except (TypeError, ValueError):
        return None
    return key, operands


# --- what stands at an operation ---------------------------------------------------------------


def source_info() -> Any:
    """Return the Python traceback and the name stack of the operation being bound."""
    return _source_info.current()


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
    """Return a copy in memory of its own, where ``array`` lies."""
    with evaluating():
        return jax.numpy.copy(array)


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
    text = module.operation.get_asm(enable_debug_info=True, large_elements_limit=largest_constant)
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
    module: Any = lowered.compiler_ir("stablehlo")
    return _jaxlib.mlir.serialize_portable_artifact(module, stablehlo.get_current_version(), True)


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


def compile_module(module: Any, device: Device, options: Any) -> Any:
    """Compile an MLIR module for ``device`` and load it."""
    return device.client.compile_and_load(module, _device_list([device]), options)


def load_module(payload: bytes, device: Device) -> Any:
    """Load an executable that `serialize_module` stored."""
    return device.client.deserialize_executable(payload, _device_list([device]))


def serialize_module(executable: Any) -> bytes:
    """Return a loaded executable as bytes."""
    return executable.client.serialize_executable(executable)


def run_module(executable: Any, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a loaded executable of one device on arrays that live there."""
    results = executable.execute_sharded(list(inputs))
    return [shards[0] for shards in results.disassemble_into_single_device_arrays()]


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


class _OwnCache(threading.local):
    """Whether this thread keeps what it compiles elsewhere."""

    bypassed = False


_own_cache = _OwnCache()
_log = logging.getLogger("snaprt.cache")
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_compilation_cache(
    cache: Any,
    key_of: Callable[[Compilation], str],
    compiled: Callable[[BaseException | None], None],
) -> None:
    """Put ``cache`` in the place of JAX's compilation cache, whatever directory JAX was given.

    Checked with jax 0.10.2 and 0.12.0: JAX makes its cache at the first compilation, unless one is
    there. It asks `get_cache_key` for every key.

    Args:
        cache: Has ``get`` and ``put`` as JAX's ``CacheInterface``.
        key_of: Returns the string by which JAX asks the cache for a compilation.
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

    _compilation_cache.reset_cache()
    _compilation_cache._cache = cache
    _compilation_cache._cache_initialized = True
    _compilation_cache.get_cache_key = get_cache_key  # type: ignore[assignment]
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
