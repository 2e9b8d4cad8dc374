"""What PyTorch/XLA has and snaprt has not, with what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn

from snaprt.errors import UsageError

_SHARDING: Final = (
    "PyTorch code runs on one device here; write the model for JAX to shard it "
    "(docs/how-to/many-processes.md)"
)
_COLLECTIVE: Final = "PyTorch code runs in one process here; leave the call out"
_GRAPH: Final = "set XLA_SAVE_TENSORS_FILE to write the graphs (docs/how-to/graph-files.md)"
_LOOP: Final = "write a Python loop in a function that snaprt.torch.jit compiles"

# Names, and what to do without them.
_ROWS: Final = (
    (
        "use_spmd Mesh HybridMesh ShardingSpec XLAShardedTensor get_1d_mesh get_global_mesh",
        _SHARDING,
    ),
    ("set_global_mesh mark_sharding clear_sharding enable_manual_sharding", _SHARDING),
    (
        "disable_manual_sharding apply_xla_patch_to_nn_linear DataParallel CheckpointManager",
        _SHARDING,
    ),
    ("XlaFullyShardedDataParallel FullyShardedDataParallel checkpoint_module", _SHARDING),
    ("SpmdFullyShardedDataParallel consolidate_sharded_model_checkpoints", _SHARDING),
    ("size_based_auto_wrap_policy transformer_auto_wrap_policy recursive_wrap", _SHARDING),
    ("ZeroRedundancyOptimizer xla_replication_devices", _SHARDING),
    ("all_to_all collective_permute reduce_scatter send recv", _COLLECTIVE),
    ("reduce_scatter_bucketized all_gather_bucketized", _COLLECTIVE),
    ("get_stablehlo get_stablehlo_bytecode save_as_stablehlo", _GRAPH),
    ("save_torch_model_as_stablehlo exported_program_to_stablehlo", _GRAPH),
    ("_get_xla_tensors_text _get_xla_tensors_hlo _get_xla_tensors_dot", _GRAPH),
    ("fori_loop while_loop", _LOOP),
    ("GradScaler", "bfloat16 needs no scaling of the loss; leave it out"),
    ("trace", "use snaprt run --profile DIR, or xp.trace_detached in the program"),
    ("set_custom_compile_options", "set XLA_FLAGS"),
    ("optimization_barrier_", "XLA orders operations; leave the call out"),
    ("flash_attention FlashAttention", "use torch.nn.functional.scaled_dot_product_attention"),
    ("place_to_host place_to_device", "arrays of JAX have memory kinds; use jax.device_put"),
    ("to_dlpack from_dlpack", "use snaprt.torch.to_jax and to_torch, and jax.dlpack"),
)

ABSENT: Final[Mapping[str, str]] = MappingProxyType(
    {name: instead for names, instead in _ROWS for name in names.split()}
)
"""Names of PyTorch/XLA, and what to do without each."""


def absent(name: str) -> Callable[..., NoReturn]:
    """Return what stands for a name of `ABSENT`: a function that raises when it is called."""

    def call(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(f"snaprt.torch.xla has no {name}", hint=ABSENT[name])

    call.__name__ = call.__qualname__ = name
    return call


def refuse(option: str, value: Any, instead: str) -> None:
    """Check that an option that has no meaning here is not used.

    Raises:
        UsageError: It is.
    """
    if value is not None:
        raise UsageError(f"snaprt.torch.xla does not support {option}", hint=instead)
