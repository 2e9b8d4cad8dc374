"""Which environment variables may be written down, with what values; and what XLA_FLAGS says.

What is recorded, packed or bundled goes to other people. So the variables are listed by name: one
that nobody here knows may hold a secret, whatever its name begins with.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snaprt import settings

HIDDEN: Final = "(hidden)"

_NAMES: Final = """
XLA_PYTHON_CLIENT_ALLOCATOR XLA_PYTHON_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_PREALLOCATE
XLA_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT XLA_USE_SPMD XLA_IR_DEBUG
XLA_STABLEHLO_COMPILE XLA_PERSISTENT_CACHE_PATH XLA_SAVE_TENSORS_FILE TF_XLA_FLAGS
TF_CPP_MIN_VLOG_LEVEL TF_CPP_MAX_VLOG_LEVEL TF_CUDNN_DETERMINISTIC TF_CUDNN_USE_AUTOTUNE
TF_CUDNN_USE_FRONTEND TF_CUDNN_WORKSPACE_LIMIT_IN_MB TF_GPU_ALLOCATOR TF_FORCE_GPU_ALLOW_GROWTH
TF_DETERMINISTIC_OPS LIBTPU_INIT_ARGS TPU_LIBRARY_PATH TPU_NAME TPU_TOPOLOGY TPU_ACCELERATOR_TYPE
TPU_CHIPS_PER_HOST_BOUNDS TPU_CHIPS_PER_PROCESS_BOUNDS TPU_HOST_BOUNDS TPU_PROCESS_BOUNDS
TPU_PROCESS_ADDRESSES TPU_PROCESS_PORT TPU_SKIP_MDS_QUERY TPU_VISIBLE_CHIPS TPU_VISIBLE_DEVICES
TPU_WORKER_ID TPU_WORKER_HOSTNAMES TPU_STDERR_LOG_LEVEL TPU_MIN_LOG_LEVEL TPU_VMODULE
TPU_RUNTIME_METRICS_PORTS CLOUD_TPU_TASK_ID PJRT_DEVICE PJRT_NPROC PJRT_LOCAL_PROCESS_COUNT
PJRT_LOCAL_PROCESS_RANK PJRT_ALLOCATOR_CUDA_ASYNC PJRT_ALLOCATOR_FRACTION
PJRT_ALLOCATOR_PREALLOCATE NEURON_CC_FLAGS NEURON_FRAMEWORK_DEBUG NEURON_RT_NUM_CORES
NEURON_RT_VISIBLE_CORES NEURON_RT_LOG_LEVEL NEURON_RT_LOG_LOCATION NEURON_RT_EXEC_TIMEOUT
NEURON_RT_STOCHASTIC_ROUNDING_EN NEURON_RT_STOCHASTIC_ROUNDING_SEED
NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS NEURON_RT_VIRTUAL_CORE_SIZE NEURON_LOGICAL_NC_CONFIG
NEURON_COMPILE_CACHE_URL NEURON_PARALLEL_COMPILE_MAX_RETRIES NEURON_PLATFORM_TARGET_OVERRIDE
NEURON_RT_ROOT_COMM_ID NEURON_FUSE_SOFTMAX CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER
CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING CUDA_HOME CUDA_PATH
CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
ROCR_VISIBLE_DEVICES NCCL_ALGO NCCL_PROTO NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_P2P_DISABLE
NCCL_P2P_LEVEL NCCL_SHM_DISABLE NCCL_IB_DISABLE NCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_IB_TIMEOUT
NCCL_SOCKET_IFNAME NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NET_PLUGIN NCCL_NTHREADS NCCL_MIN_NCHANNELS
NCCL_MAX_NCHANNELS NCCL_BUFFSIZE NCCL_LAUNCH_MODE NCCL_CROSS_NIC NCCL_COLLNET_ENABLE
NCCL_NVLS_ENABLE NCCL_CUMEM_ENABLE NCCL_TOPO_FILE NCCL_BLOCKING_WAIT NCCL_ASYNC_ERROR_HANDLING
OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS
"""
"""Variables of XLA and of what runs beneath it, beside our own settings and JAX's options."""

_SECRETS_IN_URLS: Final = (
    (re.compile(r"(://)[^/\s@'\"]+@"), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"([?&][\w.~-]*(?:token|secret|passw|sig|credential|key)[\w.~-]*=)[^&\s'\"]+", re.I
        ),
        rf"\1{HIDDEN}",
    ),
)


def steers(name: str, options: Collection[str] = ()) -> bool:
    """Return whether a variable is one of those that steer JAX and XLA.

    Args:
        name: Of the variable.
        options: Names of JAX's options, ``jax_enable_x64`` among them.
    """
    return name in _STEERING or name in _SETTINGS or name.lower() in options


def without_credentials(text: str) -> str:
    """Return a text with the user names, passwords and signatures in its URLs hidden."""
    if "://" in text:
        for pattern, replacement in _SECRETS_IN_URLS:
            text = pattern.sub(replacement, text)
    return text


_STEERING: Final = frozenset(_NAMES.split())
_SETTINGS: Final = frozenset(setting.name for setting in settings.SETTINGS)


@dataclass(frozen=True)
class Flag:
    """One flag of XLA."""

    name: str  # without dashes
    value: str | None  # None where there is no `=`
    text: str  # as the user wrote it

    def plain(self) -> str:
        """Return the flag without quotes, as a process gets it among its arguments."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


def parse_flags(variable: str) -> tuple[Flag, ...]:
    """Split the text of XLA_FLAGS, or of the file that it names, into flags.

    As in XLA: words that do not begin with ``--`` are skipped, a value may be quoted.

    Source: ``xla/parse_flags_from_env.cc``.
    """
    text = variable.strip()
    if text and not text.startswith("-"):
        try:
            text = Path(text).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ()
    return tuple(
        Flag(word[1], None if word[2] is None else _unquote(word[2]), word[0])
        for word in re.finditer(
            r"""(?<!\S)--([A-Za-z0-9_]+)(?:=('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\S*))?""", text
        )
    )


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] in "'\"" and value[-1] == value[0]:
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value
