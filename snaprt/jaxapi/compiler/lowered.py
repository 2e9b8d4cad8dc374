"""Programs that JAX has lowered: modules, devices, options."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import effects as _effects
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jaxlib.mlir import ir

from snaprt.host.interruptions import raise_if_interrupted
from snaprt.jaxapi.compiler.executables import compile_options
from snaprt.jaxapi.compiler.modules import (
    bytecode_of,
    bytecode_without_locations,
    module_to_hlo_proto,
    portable_artifact,
)
from snaprt.jaxapi.installation import Device
from snaprt.jaxapi.tracing.arrays import is_extended_dtype, key_type_text
from snaprt.jaxapi.tracing.traces import once


def lower(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donated: Sequence[int] = (),
    shardings: Sequence[jax.sharding.Sharding | None] = (),
) -> jax.stages.Lowered:
    """Lower ``function`` for the shapes, dtypes and shardings of ``arguments``; drop none.

    Args:
        function: Takes and returns arrays.
        arguments: Describes each argument.
        donated: The arguments whose memory the results may take.
        shardings: How each result is to lie, ``None`` where the compiler chooses; or nothing.
    """
    options: dict[str, Any] = {"out_shardings": list(shardings)} if any(shardings) else {}
    jitted = jax.jit(function, keep_unused=True, donate_argnums=tuple(donated), **options)
    _teach_warnings()
    _warned.is_quiet = True  # where a donation is of no use, the user could not change that
    try:
        return _lowered(jitted.trace(*arguments))
    except Exception as error:  # perhaps of what is done in vain
        raise_if_interrupted(error)
        traced = jitted.trace(*arguments)
        # Without its arguments, an effect would be lowered for fewer devices than it has, which
        # XLA may not survive.
        if _effects.ordered_effects.filter_in(traced.jaxpr.effects):
            raise
        traced._params = {**traced._params, "jaxpr": _without_dead_code(traced.jaxpr)}
        return _lowered(traced)
    finally:
        _warned.is_quiet = False


class _Warned(threading.local):
    is_quiet = False  # whether this thread is not warned of donations of no use


_warned = _Warned()


class _Warnings:
    """The module `warnings` for JAX's lowering.

    `warnings.catch_warnings` would let Python show each warning again that it has shown, of the
    program's as well, and is not for several threads.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(
        self, message: Any, category: Any = None, stacklevel: int = 1, source: Any = None
    ) -> None:
        """Warn as `warnings.warn`, but not of donations where this thread is quiet."""
        if not (_warned.is_quiet and str(message).startswith("Some donated buffers were not")):
            warnings.warn(message, category, stacklevel + 1, source)


@once
def _teach_warnings() -> None:
    """Let JAX's lowering warn by `_Warnings`; checked with jax 0.10.2 to 0.12.0."""
    mlir: Any = _mlir
    mlir.warnings = _Warnings()


def _lowered(traced: Any) -> jax.stages.Lowered:
    """Lower what was traced, and keep none of its constants in a cache, as JAX 0.12 would."""
    try:
        return traced.lower()
    finally:
        _pxla._dce_jaxpr.evict_weakref(traced.jaxpr)


def _without_dead_code(jaxpr: Any) -> Any:
    """Return a closed jaxpr without what nothing needs.

    JAX removes that too, but not where all arguments are kept. Checked with jax 0.10.2 and 0.12.0,
    whose caches keep what is found here, so it is not looked for without need.
    """
    used = [True] * len(jaxpr.jaxpr.outvars)
    pruned, *_ = _partial_eval.dce_jaxpr_consts(jaxpr.jaxpr, used, instantiate=True)
    return pruned if hasattr(pruned, "consts") else jaxpr.replace(jaxpr=pruned)


def stablehlo_without_locations(lowered: jax.stages.Lowered) -> bytes:
    """Return the module as MLIR bytecode without source locations."""
    return bytecode_without_locations(lowered.compiler_ir("stablehlo"))


def portable_stablehlo(lowered: jax.stages.Lowered) -> bytes:
    """Return the module as a portable StableHLO artifact, which later versions of XLA can read.

    Modules with dialects that StableHLO does not version (Shardy) are stored in mixed form.
    """
    return portable_artifact(_static_module(lowered))


def _static_module(lowered: jax.stages.Lowered) -> Any:
    """Return the module with the shapes of its arguments, as JAX compiles it.

    A function that was exported for symbolic shapes is lowered with dynamic ones.
    """
    lowering: Any = lowered._lowering
    module: Any = lowered.compiler_ir("stablehlo")
    state = lowering.compile_args["shape_poly_state"]
    if state is None or not state.uses_dim_vars:
        return module
    return _mlir.refine_polymorphic_shapes(module)


def bytecode(lowered: jax.stages.Lowered) -> bytes:
    """Return the module as MLIR bytecode with source locations, for this version of jaxlib.

    A portable artifact would come back as a module that is equal in meaning, not in its bytes.
    """
    return bytecode_of(_static_module(lowered).operation)


def hlo_proto(lowered: jax.stages.Lowered) -> bytes:
    """Return the unoptimized module as a serialized ``xla.HloModuleProto``."""
    module = _static_module(lowered)
    if module is not lowered.compiler_ir("stablehlo"):
        return module_to_hlo_proto(module)
    computation: Any = lowered.compiler_ir("hlo")  # which knows whether its parameters are a tuple
    return computation.as_serialized_hlo_module_proto()


def compile_named(
    lowered: jax.stages.Lowered, graph_id: str, options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compile with a graph id in the module's name, which profiles and XLA's dumps show.

    The id is a digest of the module, and its snapshots hold the module: both with the name that the
    module has before and after.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    attributes = module.operation.attributes
    name = attributes["sym_name"]
    with module.context:
        attributes["sym_name"] = ir.StringAttr.get(f"{name.value}_{graph_id}")
    try:
        return lowered.compile(compiler_options=dict(options) if options else None)
    finally:
        attributes["sym_name"] = name


def devices_of_lowered(lowered: jax.stages.Lowered) -> tuple[Device, ...]:
    """Return the devices a lowered program will run on, in the order of its partitions."""
    return tuple(lowered._lowering._device_list)  # type: ignore[attr-defined]


def results_of_lowered(lowered: jax.stages.Lowered) -> list[Any]:
    """Return the abstract values of a lowered program's results."""
    return list(lowered._lowering.compile_args["global_out_avals"])


def compile_options_of_lowered(lowered: jax.stages.Lowered) -> Any:
    """Return the options that JAX compiles a lowered program with.

    Source: ``from_hlo`` of jax/_src/interpreters/pxla.py.
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


def holds_objects(lowered: jax.stages.Lowered) -> bool:
    """Return whether a lowered program needs Python objects of this process, such as callbacks.

    Checked with jax 0.10.2 and 0.12.0: what a module names by address JAX keeps alive beside it.
    """
    lowering: Any = lowered._lowering
    arguments = lowering.compile_args
    return bool(arguments["keepalive"] or arguments["host_callbacks"])


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
    avals = [*parts["global_in_avals"], *parts["global_out_avals"]]
    dtypes = [getattr(aval, "dtype", None) for aval in avals]  # a token has none
    parts["keys"] = [key_type_text(dtype) for dtype in dtypes if is_extended_dtype(dtype)]
    return repr(parts)


def call_of_lowered(lowered: jax.stages.Lowered) -> str:
    """Return as text what JAX stores with an executable beside its module.

    Checked with jax 0.10.2 and 0.12.0: by the shardings inside it names those of the results.
    """
    lowering: Any = lowered._lowering
    inside = lowering.compile_args.get("intermediate_shardings")
    signature = signature_of_lowered(lowered)
    return f"{signature} {inside!r}" if inside else signature


def is_compiled(lowered: jax.stages.Lowered) -> bool:
    """Return whether XLA has compiled a lowered program."""
    lowering: Any = lowered._lowering
    return lowering._executable is not None


def identity_of_lowered(lowered: jax.stages.Lowered) -> int:
    """Return what is the same for the same program, as long as it is alive."""
    return id(lowered._lowering)


def with_module(lowered: jax.stages.Lowered, module: Any) -> jax.stages.Lowered:
    """Put ``module`` in the place of a lowered program's own; its signature must be the same."""
    lowering: Any = lowered._lowering
    lowering._hlo = module
    return lowered
