"""How arrays and programs are spread over devices; must not know what they compute."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import sharding_impls as _shardings
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.mlir import ir

from snaprt.jaxapi.devices import Device, device_list
from snaprt.jaxapi.traces import evaluating


@functools.cache
def single_device_sharding(device: Any) -> jax.sharding.Sharding:
    """Return the sharding of an array on ``device``; ``None`` means JAX's default device."""
    with evaluating(), jax.default_device(device):
        return jax.numpy.zeros(()).sharding


def devices_of_sharding(sharding: Any) -> tuple[Device, ...]:
    """Return the devices of a sharding in its own order."""
    return tuple(sharding._device_assignment)


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
    return [(part.device, places[part.device], part) for part in array._arrays]  # type: ignore[attr-defined]


def partitions_of(module: Any) -> int:
    """Return over how many devices an MLIR module is to run."""
    attributes = module.operation.attributes
    if "mhlo.num_partitions" not in attributes:
        return 1
    return ir.IntegerAttr(attributes["mhlo.num_partitions"]).value


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
    over = device_list(devices)

    def shardings(found: Any, count: int) -> list[jax.sharding.Sharding]:
        if len(devices) == 1 or not found:  # the partitioner did not run: nothing is split
            return [_shardings.GSPMDSharding.get_replicated(over)] * count
        return [_shardings.GSPMDSharding(over, sharding) for sharding in found]

    return (
        shardings(executable.get_parameter_shardings(), parameters),
        shardings(executable.get_output_shardings(), results),
    )
