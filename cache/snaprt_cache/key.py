"""What identifies a compiled program: named parts, so that a miss can be explained part by part.

Which parts a program has is the caller's business; what every caller needs to make them (CPU
features, the XLA flags that matter) is here.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import blake3

from snaprt_cache.file_digests import file_digest

_KEY_DOMAIN: Final = b"snaprt key 1"


@dataclass(frozen=True)
class KeyPart:
    """One named part of a key.

    Attributes:
        name: What it is, such as ``jaxlib version``.
        value: Text that a person can read, or a digest where the text would be long.

    Examples:
        >>> from snaprt.cache import KeyPart
        >>> KeyPart("flags", "--xla_cpu_enable_fast_math=true").name
        'flags'
    """

    name: str
    value: str


@dataclass(frozen=True)
class Key:
    """The identity of one entry: its parts, in the caller's order.

    Examples:
        >>> from snaprt.cache import Key, KeyPart
        >>> len(Key((KeyPart("module", "1a2b"),)).digest)
        64
    """

    parts: tuple[KeyPart, ...]

    def listed(self) -> list[list[str]]:
        """Return the parts as JSON has them, each ``[name, value]``."""
        return [[part.name, part.value] for part in self.parts]

    @functools.cached_property
    def digest(self) -> str:
        """The BLAKE3 digest of the parts, 64 hexadecimal digits.

        Every text goes in behind its length (8 bytes, little endian), so that no two lists of
        parts give the same bytes.
        """
        content = [_KEY_DOMAIN, len(self.parts).to_bytes(8, "little")]
        for part in self.parts:
            for text in (part.name, part.value):
                encoded = text.encode("utf-8", "surrogatepass")
                content += [len(encoded).to_bytes(8, "little"), encoded]
        return blake3.blake3(b"".join(content)).hexdigest()


# Flags of XLA that change where XLA writes or what it logs, not the executable it makes.
# A row is the start of a flag's name, without the dashes. Device counts are part of the topology.
_FLAGS_WITHOUT_EFFECT: Final = (
    "alsologtostderr",
    "log_",
    "logtostderr",
    "minloglevel",
    "stderrthreshold",
    "v",
    "vmodule",
    "xla_cpu_dump_",
    "xla_dump_",
    "xla_force_host_platform_device_count",
    "xla_gpu_dump_",
    "xla_gpu_experimental_autotune_cache_mode",
    "xla_gpu_kernel_cache_file",
    "xla_gpu_per_fusion_autotune_cache_dir",
    "xla_hlo_profile",
    "xla_log_",
    "xla_tpu_dump_",
    "xla_vlog_",
)
# Names this short would drop foreign flags if they were read as the start of a name.
_WHOLE_NAMES: Final = frozenset({"v"})


def relevant_xla_flags(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the flags that may change an executable, sorted by name.

    Args:
        flags: Flags as in ``XLA_FLAGS``, such as ``--xla_cpu_enable_fast_math=true``.

    Returns:
        The flags without those for dumps, logs and XLA's own caches. A flag that is given twice
        stays twice, in the order given, for the last one may win or both may add up.
    """
    return tuple(sorted(filter(_has_effect, flags), key=_flag_name))


def _flag_name(flag: str) -> str:
    return flag.lstrip("-").partition("=")[0]


def _has_effect(flag: str) -> bool:
    name = _flag_name(flag)
    return not any(
        name == row if row in _WHOLE_NAMES else name.startswith(row)
        for row in _FLAGS_WITHOUT_EFFECT
    )


# Flags whose value is the path of a file, or of a folder of files, that the compiler reads.
_FLAGS_THAT_NAME_FILES: Final = frozenset(
    {
        "xla_gpu_algorithm_denylist_path",
        "xla_gpu_experimental_collective_perf_table_path",
        "xla_gpu_experimental_matmul_perf_table_path",
        "xla_gpu_gemm_autotuner_override_file",
        "xla_gpu_llvm_ir_file",
        "xla_gpu_load_autotune_results_from",
        "xla_gpu_pgle_profile_file_or_directory_path",
        "xla_gpu_ptx_file",
        "xla_gpu_target_config_filename",
    }
)


def flags_with_file_contents(
    flags: Iterable[str], memo_folder: Path | None = None
) -> tuple[str, ...]:
    """Return the flags with the digest of a file's content in the place of its path.

    Args:
        flags: Flags as in ``XLA_FLAGS``.
        memo_folder: Where ``file_digest`` remembers; None for this process only.

    Returns:
        The flags in the order given. A path where nothing can be read stays as it is.
    """
    return tuple(_with_file_contents(flag, memo_folder) for flag in flags)


def _with_file_contents(flag: str, memo_folder: Path | None) -> str:
    name, _, value = flag.partition("=")
    if _flag_name(flag) not in _FLAGS_THAT_NAME_FILES:
        return flag
    path = Path(value)
    try:
        if not path.is_dir():
            return f"{name}=<content {file_digest(path, memo_folder)}>"
        files = sorted(file for file in path.rglob("*") if file.is_file())
        names = (f"{file.relative_to(path)}:{file_digest(file, memo_folder)}" for file in files)
        listed = blake3.blake3("\n".join(names).encode("utf-8", "surrogateescape"))
        return f"{name}=<contents {listed.hexdigest()}>"
    except OSError:
        return flag


# What Linux lists among a CPU's flags though it is no instruction a compiler could use: the
# kernel's mitigations, clocks, power and virtualisation. It differs between kernels on one CPU.
_CPU_FLAGS_OF_THE_KERNEL: Final = """
    acpi amd_dcm aperfmperf arat arch_capabilities arch_lbr arch_perfmon art bts constant_tsc
    cpuid cpuid_fault decodeassists dtherm dtes64 ds_cpl dts epb ept ept_ad extd_apicid fast_lbr
    flexpriority flush_l1d flushbyasid hwp hwp_act_window hwp_epp hwp_notify hwp_pkg_req
    hypervisor ibpb ibpb_exit_to_user ibrs ibrs_enhanced ida intel_ppin l1tf lbrv md_clear monitor
    nonstop_tsc nopl nrip_save pausefilter pbe pdcm pebs pfthreshold pln pti pts rep_good
    retpoline rrsba_ctrl rsb_ctxsw ssbd stibp svm_lock tpr_shadow tsc_adjust tsc_deadline_timer
    tsc_known_freq tsc_reliable tsc_scale v_spec_ctrl v_vmsave_vmload vgif virt_ssbd vmcb_clean
    vmmcall vnmi vpid xtopology
"""
_CPU_FLAG_LINES: Final = ("flags", "Features")
_SYSCTL_NAMES: Final = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "hw.optional")


@functools.cache
def cpu_features() -> str:
    """Return the machine's architecture and a short digest of its CPUs' instruction sets.

    An executable compiled for instructions that a CPU lacks loads and then may crash: entries made
    on other CPUs must not match. The text is the same on every boot and kernel of one machine.
    """
    features = _linux_cpu_flags() or _sysctl_cpu_flags() or platform.processor().split()
    listed = " ".join(sorted(set(features) - set(_CPU_FLAGS_OF_THE_KERNEL.split())))
    return f"{platform.machine()}-{blake3.blake3(listed.encode()).hexdigest()[:16]}"


def _linux_cpu_flags() -> list[str]:
    flags: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n"):
            name, _, value = line.partition(":")
            if name.strip() in _CPU_FLAG_LINES:
                flags += value.split()
    return flags


def _sysctl_cpu_flags() -> list[str]:
    if platform.system() != "Darwin":
        return []
    command = ["/usr/sbin/sysctl", *_SYSCTL_NAMES]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.split()
