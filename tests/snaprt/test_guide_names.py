"""What docs/how-to/coming-from-pytorch-xla.md says is here is here, and what is here it says."""

import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import snaprt
from snaprt import settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "coming-from-pytorch-xla.md").read_text(encoding="utf-8")
HERE = PAGE.partition("## What has no counterpart")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| PyTorch/XLA or NeuronX |"))
]


def _found(name: str) -> object:
    if name.startswith("snaprt.torch"):
        if importlib.util.find_spec("torchax") is None:
            pytest.skip("PyTorch is not installed: snaprt[torch]")
        return pkgutil.resolve_name(name)
    value: object = snaprt
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(set(re.findall(r"snaprt(?:\.[A-Za-z_]\w*)+", PAGE))))
def test_a_name_of_snaprt_on_the_page_is_there(name):
    assert _found(name) is not None


@pytest.mark.parametrize(
    "name",
    sorted(set(re.findall(r"jax(?:\.[A-Za-z_]\w*)+", PAGE)) - {"jax.collect_profile"}),
)
def test_a_name_of_jax_on_the_page_is_there(name):
    assert pkgutil.resolve_name(name) is not None


def test_a_variable_that_is_said_to_be_the_same_is_read():
    said = " ".join(row[0] for row in ROWS if row[1].startswith("the same"))
    names = re.findall(r"`((?:XLA|NEURON|PT_XLA|TF_CPP|GET|SYNC)_\w+|RANK|LOCAL_RANK)", said)
    known = {setting.name for setting in settings.SETTINGS}
    assert names
    assert sorted(set(names) - known) == []
    here = re.findall(r"`(SNAPRT_\w+)", PAGE)
    assert sorted(set(here) - known) == []


def test_every_variable_of_the_guides_that_is_read_is_on_the_page():
    names = [one.name for one in settings.SETTINGS if not one.name.startswith("SNAPRT_")]
    assert [name for name in names if f"`{name}" not in HERE] == []


#: What the guides name: PyTorch/XLA's troubleshooting, API and SPMD guides and its table of
#: variables, PyTorch NeuronX's guides on variables, debugging and compilation, and
#: torch.compile's troubleshooting.
NAMES = """
    CPU_NUM_DEVICES CachedCompile CachedSyncTensors CompileTime CreateDataHandles
    DestroyDataHandles DestroyXlaTensor ExecuteTime GET_TENSORS_OPBYOP HybridMesh InboundData
    MASTER_ADDR MASTER_PORT MarkStep Mesh MpDeviceLoader NCCL_DEBUG NEURONCORE_NUM_DEVICES
    NEURON_CC_FLAGS NEURON_COMPILE_CACHE_URL NEURON_CUSTOM_SILU NEURON_DUMP_HLO_SNAPSHOT
    NEURON_EXTRACT_GRAPHS_ONLY NEURON_FRAMEWORK_DEBUG NEURON_FUSE_SOFTMAX
    NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE NEURON_NC0_ONLY_SNAPSHOT
    NEURON_NUM_RECENT_MODELS_TO_KEEP NEURON_PARALLEL_COMPILE_DUMP_RESULTS
    NEURON_PARALLEL_COMPILE_MAX_RETRIES NEURON_RT_EXEC_TIMEOUT NEURON_RT_LOG_LEVEL
    NEURON_RT_NUM_CORES NEURON_RT_ROOT_COMM_ID NEURON_RT_STOCHASTIC_ROUNDING_EN
    NEURON_RT_STOCHASTIC_ROUNDING_SEED NEURON_RT_VISIBLE_CORES
    NEURON_TRANSFER_ALL_PARAMETERS_WITH_STATIC_RING NEURON_TRANSFER_WITH_STATIC_RING_OPS
    NEURON_USE_EAGER_DEBUG_MODE OutboundData PJRT_CPU_ASYNC_CLIENT PJRT_DEVICE
    PJRT_SELECT_DEFAULT_DEVICE PJRT_TPU_MAX_INFLIGHT_COMPUTATIONS PT_XLA_DEBUG
    PT_XLA_DEBUG_FILE PT_XLA_DEBUG_LEVEL PersistentCacheDeserializeFailure PersistentCacheHit
    PersistentCacheLoad PersistentCacheMiss SPLIT_EXECUTOR_CACHE_SIZE SYNC_TENSORS_OPBYOP
    TF_CPP_LOG_THREAD_ID TF_CPP_MIN_LOG_LEVEL TF_CPP_VMODULE TORCHDYNAMO_DEBUG_FUNCTION
    TORCHDYNAMO_REPRO_AFTER TORCHDYNAMO_REPRO_LEVEL TORCHINDUCTOR_CACHE_DIR TORCH_COMPILE_DEBUG
    TORCH_DIST_INIT_BARRIER TORCH_LOGS TORCH_TEST_DEVICES TORCH_TRACE TPU_LEGACY TPU_NUM_DEVICES
    TPU_PROCESS_BOUNDS TPU_VISIBLE_CHIPS TensorsGraphSize TransferFromDeviceTime
    TransferFromServerTime TransferToDeviceTime TransferToServerTime
    TransferToServerTransformTime UncachedCompile XLA_AUTO_SPMD XLA_AUTO_SPMD_MESH
    XLA_AUTO_USE_GROUP_SHARDING XLA_COMPILE_TIME_THRESHOLD XLA_DENSE_GATHER_FACTOR
    XLA_DENSE_SCATTER_FACTOR XLA_DEVDATA_CACHE_SIZE XLA_DISABLE_FUNCTIONALIZATION
    XLA_DOWNCAST_BF16 XLA_DUMP_FATAL_STACK XLA_DUMP_HLO_GRAPH XLA_DUMP_POST_OPTIMIZATIONS
    XLA_DYNAMO_DEBUG XLA_ENABLE_PARAM_ALIASING XLA_EXPERIMENTAL XLA_FLAGS XLA_FNTRACKER_FILE
    XLA_FNTRACKER_LEVEL XLA_FNTRACKER_LIST XLA_HLO_DEBUG XLA_IO_THREAD_POOL_SIZE XLA_IR_DEBUG
    XLA_IR_SHAPE_CACHE_SIZE XLA_LAYOUTS XLA_MAX_PADDING_FACTOR XLA_METRICS_FILE
    XLA_METRICS_PERCENTILES XLA_METRICS_SAMPLES XLA_NO_SPECIAL_SCALARS
    XLA_RELEASE_GIL_DURING_TRANSFER XLA_RESIZE_SPLIT_FACTOR XLA_RNG_BIT_GENERATOR
    XLA_SAVE_HLO_FILE XLA_SAVE_TENSORS_FILE XLA_SAVE_TENSORS_FMT XLA_SLOW_COMPILE_HLO_FOLDER
    XLA_STABLEHLO_COMPILE XLA_SYNC_WAIT XLA_TENSOR_ALLOCATOR_MAXSIZE XLA_TENSOR_UPDATE_SYNC
    XLA_TEST_DUMP_GRAPHS XLA_TRIM_GRAPH_CHECK_FREQUENCY XLA_TRIM_GRAPH_SIZE XLA_USE_32BIT_LONG
    XLA_USE_BF16 XLA_USE_DUMMY_STORE XLA_USE_EAGER_DEBUG_MODE XLA_USE_SPMD XRT_TPU_CONFIG
    XrtCompile XrtExecute XrtReadLiteral _get_xla_tensor_dimension_size _get_xla_tensors_hlo
    _get_xla_tensors_text _set_allow_execution accumulated_recompile_limit add_step_closure
    addressable_device_count all_gather all_reduce all_to_all allow_in_graph assume_pure
    autocast broadcast_master_param cache_size_limit capture_profile.py capture_scalar_outputs
    clear-locks clear_all clear_sharding consolidate_sharded_ckpts counter_names counter_value
    custom_kernel device_count device_type distributed_checkpoint eager_mode
    fail_on_recompile_limit_hit fori_loop get_1d_mesh get_global_mesh get_master_ip
    get_mat_mul_precision get_memory_info get_rng_state get_stablehlo get_stablehlo_bytecode
    get_xla_supported_devices global_device_count global_ordinal global_runtime_device_count
    graph_breaks guards initialize_cache is_master_ordinal is_spmd launch local_device_count
    local_ordinal local_process_count manual_seed mark_dynamic mark_sharding mark_step
    mesh_reduce metric_data metric_names metrics_report neuron_parallel_compile optimizer_step
    pt-xla-profiler: recompile_limit recompiles register_hlo_snapshot_callback rendezvous
    --retry_failed_compilation save_cache_artifacts scan_layers set_global_mesh
    set_mat_mul_precision set_rng_state set_stance short_metrics_report spawn start_server
    start_trace suppress_errors sync tlparse torch.cond torch.compiler.disable use_spmd
    wait_device_ops world_size xla_device xla_device_hw xla_quantized_matmul
"""


def test_what_the_guides_name_is_on_the_page():
    said = {part for word in re.findall(r"[\w.:-]+", PAGE) for part in (word, *word.split("."))}
    assert sorted(set(NAMES.split()) - said) == []


def test_what_has_no_counterpart_has_a_reason():
    rows = [row for row in ROWS if len(row) == 2]
    assert rows
    assert all(len(reason) > 20 for _, reason in rows)
