"""How arrays and programs are spread over devices."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import sharding_impls as _shardings
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.mlir import ir

from snaprt.jaxapi.installation import Device, device_list
from snaprt.jaxapi.settings import under_mesh
from snaprt.jaxapi.tracing.traces import evaluating


@functools.cache
def single_device_sharding(device: Any) -> jax.sharding.Sharding:
    """Return the sharding of an array on ``device``; ``None`` means JAX's default device."""
    with evaluating(), under_mesh(None), jax.default_device(device), jax.transfer_guard("allow"):
        return jax.numpy.zeros(()).sharding


def devices_of_sharding(sharding: Any) -> tuple[Device, ...]:
    """Return the devices of a sharding in its own order."""
    return tuple(sharding._device_assignment)


@dataclass(frozen=True)
class NamedShardings:
    """What the parameters of an operation, and the jaxprs among them, say of where it runs."""

    # The devices in the order of each sharding; two entries contradict each other.
    devices: frozenset[tuple[Device, ...]] = frozenset()
    # The mesh that it computes under, whatever `jax.set_mesh` says.
    mesh: jax.sharding.Mesh | None = None
    commits: bool = False  # whether its results are committed though it names no devices
    # The sharding that each operand must have, ``None`` for any; or nothing.
    operands: tuple[jax.sharding.Sharding | None, ...] = ()
    # The sharding that each result will have, ``None`` for any; or nothing.
    results: tuple[jax.sharding.Sharding | None, ...] = ()
    # Whether what uses the results must be another program, for inside of one they would be of
    # another type.
    ends_program: bool = False


def named_shardings(params: Mapping[str, Any]) -> NamedShardings:
    """Return what the parameters of an operation say of where it runs."""
    operands = tuple(map(_named, params.get("in_shardings", ())))
    results = tuple(map(_named, params.get("out_shardings", ())))
    if "unconstrained_dims" in params and not _mlir.contains_unconstrained(params["sharding"]):
        results = (_named(params["sharding"]),)
    shardings = [*operands, *results, _named(params.get("sharding"))]
    commits = False
    for jaxpr in _core.jaxprs_in_params(params):
        shardings += [
            _named(sharding) for sharding, _ in _dispatch.get_intermediate_shardings(jaxpr)
        ]
        commits = commits or bool(_pxla.jaxpr_transfer_mem_kinds(jaxpr))
    devices = {devices_of_sharding(sharding) for sharding in shardings if sharding is not None}
    # Of a jitted function, and of a change of an array's explicit sharding.
    meshes = (params.get("ctx_mesh"), params.get("concrete_mesh"), params.get("mesh"))
    mesh = next((m for m in meshes if isinstance(m, jax.sharding.Mesh) and not m.empty), None)
    if mesh is not None:
        devices.add(tuple(mesh.devices.flat))
    return NamedShardings(
        devices=frozenset(devices),
        mesh=mesh,
        commits=commits,
        operands=operands if any(operands) else (),
        results=results if any(results) else (),
        ends_program=any(sharding is not None and changes_type(sharding) for sharding in results),
    )


def _named(sharding: Any) -> jax.sharding.Sharding | None:
    """Return ``sharding`` if it names devices."""
    is_concrete = isinstance(sharding, jax.sharding.Sharding) and sharding._is_concrete
    return sharding if is_concrete else None


def changes_type(sharding: jax.sharding.Sharding) -> bool:
    """Return whether arrays that a program hands out so are of another type than inside of it.

    They are in another memory and over explicit axes.
    """
    mesh = getattr(sharding, "mesh", None)
    is_explicit = mesh is not None and not mesh.empty and not mesh._are_all_axes_auto_or_manual
    space = _core.mem_kind_to_space(sharding.memory_kind)
    return is_explicit or space != jax.memory.Space.Device


def type_with_sharding(aval: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Return the type of an array that a program hands out by ``sharding``, ``None`` for any."""
    if sharding is None or not changes_type(sharding):
        return aval
    return _core.update_aval_with_sharding(aval, sharding)


def is_typed_within(aval: Any, mesh: jax.sharding.Mesh | None) -> bool:
    """Return whether a type is on ``mesh`` with axes of other types, as inside `auto_axes`.

    A program that runs under ``mesh`` returns such an array as one on that mesh; see
    `snaprt.jaxapi.with_axes_of_type`.
    """
    within = aval.sharding.mesh
    return (
        mesh is not None
        and within.axis_names == mesh.axis_names
        and within.axis_types != mesh.axis_types
    )


def has_devices_for(aval: Any, devices: int) -> bool:
    """Return whether a program on so many devices may have a result of this type."""
    mesh = aval.sharding.mesh
    return mesh.empty or not mesh.are_all_axes_explicit or bool(mesh.size == devices)


def takes_mesh_of_operand(params: Mapping[str, Any]) -> bool:
    """Return whether an operation names axes, and leaves it to its operand over which devices."""
    mesh = getattr(params.get("sharding"), "mesh", None)
    return isinstance(mesh, jax.sharding.AbstractMesh)


def is_exported_for(params: Mapping[str, Any], devices: int) -> bool:
    """Return whether a call of what `jax.export` made, if it is one, may run on so many devices.

    Checked with jax 0.10.2 and 0.12.0, which refuse others when they lower the call.
    """
    exported = params.get("exported")
    return exported is None or exported.nr_devices in (1, devices)


def sharding_of_type(aval: Any, devices: Sequence[Device]) -> jax.sharding.Sharding | None:
    """Return how an array on ``devices`` lies by its type, ``None`` where that leaves a choice."""
    mesh = aval.sharding.mesh
    if mesh.empty or not mesh.are_all_axes_explicit:
        return None
    over = np.array(devices, dtype=object).reshape(mesh.axis_sizes)
    concrete = jax.sharding.Mesh(over, mesh.axis_names, axis_types=mesh.axis_types)
    return jax.sharding.NamedSharding(concrete, aval.sharding.spec)


def is_plain_sharding(sharding: jax.sharding.Sharding) -> bool:
    """Return whether arrays lie so on one device that JAX was not told a mesh or a memory for."""
    if not isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return False
    device: Any = next(iter(sharding.device_set))
    return sharding.memory_kind in (None, device.default_memory().kind)


def hlo_sharding_text(sharding: jax.sharding.Sharding, ndim: int) -> str:
    """Return a sharding of an array of ``ndim`` dimensions as XLA writes it in HLO."""
    return str(sharding._to_xla_hlo_sharding(ndim))


def places_of_sharding(sharding: Any, shape: tuple[int, ...]) -> Mapping[Device, Any]:
    """Return for each device which part of an array of ``shape`` it holds.

    Of what is not reduced yet, each holds a summand of its part: of those, JAX 0.10.2 and 0.12.0
    tell no places.
    """
    try:
        return sharding.devices_indices_map(shape)
    except NotImplementedError:
        if isinstance(sharding, jax.sharding.NamedSharding):
            spec = jax.sharding.PartitionSpec(*sharding.spec.partitions)
            return sharding.update(spec=spec).devices_indices_map(shape)
        return dict.fromkeys(devices_of_sharding(sharding), (slice(None),) * len(shape))


def parts_of_array(array: jax.Array) -> list[tuple[Device, Any, jax.Array]]:
    """Return each device of this process that holds a part of an array, its place and the part."""
    array._check_if_deleted()  # type: ignore[attr-defined]
    places = places_of_sharding(array.sharding, array.shape)
    parts: list[Any] = array._arrays  # type: ignore[attr-defined]
    return [(device := part.device, places[device], part) for part in parts]


def only_part_of_array(array: jax.Array) -> jax.Array:
    """Return the part of an array that lies on one device, which is all of it."""
    array._check_if_deleted()  # type: ignore[attr-defined]
    [part] = array._arrays  # type: ignore[attr-defined]
    return part


def partitions_of(module: Any) -> int:
    """Return over how many devices an MLIR module is to run."""
    attributes = module.operation.attributes
    if "mhlo.num_partitions" not in attributes:
        return 1
    return ir.IntegerAttr(attributes["mhlo.num_partitions"]).value


@dataclass(frozen=True)
class Partitioning:
    """How XLA was told to spread a program over devices."""

    replicas: int = 1  # how many copies of the whole program run
    # For each parameter, whether XLA may choose its sharding; or nothing.
    parameters: tuple[bool, ...] = ()
    results: tuple[bool, ...] = ()  # the same of each result
    shardy: bool = False  # whether the module's shardings are Shardy's rather than GSPMD's


def partitioning_of_options(serialized: bytes) -> Partitioning:
    """Return what serialized compile options say of devices.

    Raises:
        ValueError: They cannot be read.
    """
    try:
        options = _jaxlib.CompileOptions.ParseFromString(serialized)
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
    over = device_list(devices)

    def shardings(op_shardings: Any, count: int) -> list[jax.sharding.Sharding]:
        if len(devices) == 1 or not op_shardings:  # the partitioner did not run: nothing is split
            return [_shardings.GSPMDSharding.get_replicated(over)] * count
        return [_shardings.GSPMDSharding(over, sharding) for sharding in op_shardings]

    return (
        shardings(executable.get_parameter_shardings(), parameters),
        shardings(executable.get_output_shardings(), results),
    )
