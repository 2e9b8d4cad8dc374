"""Run the own tests of JAX or of a library plainly, lazily, recorded and cached, and compare.

    python tests/ecosystem/jax_tests.py CHECKOUT [FILE ...] [--modes lazy,recorded] [--json OUT]

CHECKOUT is a checkout of JAX, flax, equinox, ... at the tag of the installed version, or any folder
with tests, as ``site-packages/optax``; such tests are not in this repository. FILE is a file or a
folder of them, by default each ``*_test.py`` and ``test_*.py``. Prints a row for each FILE (how
many tests passed in each mode) and then each test that passes plainly and does not pass in a mode.
Exits with 1 where `EXPECTED` does not give the reason.

Every FILE runs in a process of its own. A test that ends its process, or hangs, counts as
``crashed`` or ``timeout``, and a new process goes on after it. The same file is the pytest plugin
that those processes load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

OUTCOMES_FILE = "JAX_TESTS_OUTCOMES"  # JSON lines: one when a test starts, one when it has ended
RUN_LAZILY = "JAX_TESTS_LAZY"
EVERY = "JAX_TESTS_EVERY"
AT_MOST = "JAX_TESTS_AT_MOST"
SECONDS = "JAX_TESTS_SECONDS"
PATTERNS = ("*_test.py", "test_*.py")
NOT_COLLECTED = " (not collected)"


@dataclass(frozen=True)
class Mode:
    """A way to run a file of tests.

    Attributes:
        environment: What it sets; ``{folder}`` is a folder that lasts for the file.
        launcher: What stands between ``python`` and pytest's arguments.
    """

    environment: Mapping[str, str]
    launcher: tuple[str, ...] = ("-m", "pytest")


_CACHED = {"SNAPRT_JAX_CACHE": "1", "SNAPRT_CACHE_DIR": "{folder}/cache"}
_DEVICES = "--xla_force_host_platform_device_count"
_RECORD = ("-m", "snaprt", "run", "--record", "--dump", "{folder}/dump")

#: In the order in which they run: `warm` starts with the cache that `cold` has filled, and `again`
#: with that of `lazy`.
MODES: Mapping[str, Mode] = {
    "plain": Mode({}),
    "lazy": Mode({RUN_LAZILY: "1"}),
    "again": Mode({RUN_LAZILY: "1"}),
    "recorded": Mode({}, (*_RECORD, "-m", "pytest")),
    # Little or nothing is recorded: C++ makes most of the calls.
    "armed": Mode({}, (*_RECORD, "--when", "execution=1000000", "-m", "pytest")),
    "errors": Mode({}, (*_RECORD, "--when", "error", "-m", "pytest")),
    "cold": Mode(_CACHED),
    "warm": Mode(_CACHED),
}

#: Mode, pattern of ``file::class::test``, and why it differs by design
#: (docs/explanation/lazy-runtime.md).
EXPECTED: tuple[tuple[str, str, str], ...] = (
    (
        "warm",
        r"::testNoTracebacksIfDisabled$",
        "what is loaded before it is asked for was loaded while tracebacks were still taken",
    ),
    (
        "lazy",
        r"::(test_primitive_compilation_cache|test_single_device_lowering_cache_hit_diff_devices"
        r"|test_compilation_cache_miss_when_devices_change|test_cpp_layout_cache_miss"
        r"|test_eval_shape_jitted_fun_cache_hit"
        r"|test_lowering_cache_hit_with_closed_over_constants_(jit_\w+|scan_no_hoist|sharded)"
        r"|test_lowering_cache_(hit_inputs_with_different_mesh|miss_different_devices_and_sharding)"
        r"|test_cache_hit_pjit_lower_with_cpp_cache_miss|test_jit_submhlo_cached"
        r"|test_different_devices_(wsc|shmap)_abstract_mesh_cache_hit|test_jaxpr_as_fun_fast_path"
        r"|test_global_jit_cpp_cache_hit_out_shardings|test_jit_cpp_cache_obj_config"
        r"|test_pjit_(different_device_recompilation|function_cache_cpp|out_sharding_preserved"
        r"|no_global_cache_hit_axis_resources|single_device_sharding_(add|cache)"
        r"|with_static_argnames_cpp_dispatch)"
        r"|test_single_device_(add_single_compile|pjit_cpp_dispatch)"
        r"|test_compilation_caching_pure)$",
        "JAX's own counters of its caches count other numbers",
    ),
    (
        "lazy",
        r"ArrayPjitTest::(test_partial_sharded_prng_key_inp|test_prng_sharding_propagation"
        r"(_with_nested_jit)?)$",
        "P('d') may stand for P('d', None)",
    ),
    (
        "lazy",
        r"ShardingInTypesTest::test_cet_unreduced$",
        "JAX cannot send what was no array to where its program wants it unreduced",
    ),
    (
        "lazy",
        r"::test_closed_constants_at_top_level$",
        "what a traced function closes over is equal in its jaxpr, and not the same object",
    ),
    (
        "lazy",
        r"export_test.*::(test_error_wrong_platform_\w+|test_with_sharding"
        r"|test_lower_load_with_different_partitioners_error_msg_Please\w+)$",
        "what JAX refuses only when it lowers raises CompileError where its graph is compiled",
    ),
    (
        "lazy",
        r"::test_shape_dtype_struct_as_const_error$",
        "what JAX refuses only when it lowers raises CompileError where its graph is compiled",
    ),
    (
        "lazy",
        r"::test_device_put_copy_donate$",
        "donate_argnums inside the scope is not acted upon",
    ),
    (
        "lazy",
        r"ShardingInTypes\w*::test_rng_bit_generator$",
        "what lies whole on each device may be called P(None) rather than P()",
    ),
    (
        "lazy",
        r"::test_callback_with_wrong_shape_outputs_pure$",
        "a pure_callback whose result nobody reads is never called",
    ),
    *(
        (
            mode,
            r"::(test_pjit_single_device_sharding_add"
            r"|test_jit_cpp_cache_obj_config"
            r"|test_lowering_cache_hit_with_closed_over_constants_jit_\w+)$",
            "JAX's own counters of its caches count other numbers",
        )
        for mode in ("recorded", "armed", "errors")
    ),
    (
        "recorded",
        r"::test_static_args_equality$",
        "JAX counts a call with a host number twice: the array that is recorded is handed on",
    ),
    ("recorded", r"::testBuffersAreFreedPromptly$", "arrays live until their snapshot is written"),
    *(
        (mode, r"::test_jit_reference_dropping$", "functions that are called again are held")
        for mode in ("recorded", "armed", "errors")
    ),
    ("cold", r"^compilation_cache_test", "the tests are of the cache whose place is taken"),
    ("warm", r"^compilation_cache_test", "the tests are of the cache whose place is taken"),
    (
        "lazy",
        r"test_cannot_pmap_ordered_effect|test_cant_jit_and_pmap_function_with_ordered_effects"
        r"|test_ordered_print_not_supported_in_pmap"
        r"|test_check_for_large_number_of_constants_old|test_cant_mpmd_map_twice$"
        r"|test_partial_auto_error_(invalid_auto|wsc_manual)$",
        "what JAX finds out when it lowers is said when the graph is compiled",
    ),
    (
        "lazy",
        r"test_deref_after_free_ref_raises|test_double_free_ref_raises|test_no_execution"
        r"|test_while_errors_if_same_ref_in_body_and_cond|test_unimplemented_interpreter_rules"
        r"|test_callback_with_wrong_(number_of_args|number_of_returned_values|shape_outputs)_pure"
        r"|test_vmap_vectorized_callback_errors_if_returns_wrong_shape"
        r"|test_ppermute_different_axis_order_error|test_pjit_uncommitted_array_multi_devices"
        r"|FfiTest::test_non_hashable_attributes"
        r"|test_pjit_with_deleted_input_at_subsequent_call_uncommitted"
        r"|^test_errors\.py::test_(basic|vmap|jvp|grad)$|^test_callback\.py::test_wrong$"
        r"|^test_debug\.py::test_check_dce$",
        "what nobody reads is never run or compiled, and raises nothing",
    ),
    (
        "lazy",
        r"test_call_primitive_discharges_(closed_)?call_primitive"
        r"|^nnx/nn/normalization_test.*test_nnx_linen_(group|layer)norm_equivalence"
        r"|^linen/linen_linear_test.*test_einsum_ellipsis_equivalence"
        r"|^test_jit\.py::test_filter_jit\[|^test_sde1\.py::test_sde_strong_limit"
        r"|distributions_test\.py::test_normal_inverse_gamma_log_prob$",
        "operations are fused: the last bits differ, as under jax.jit",
    ),
    (
        "lazy",
        r"test_optimize_remat(_cond|_vmap)?$",
        "the forward rule of a custom_vjp runs, also where nobody needs its residuals",
    ),
    (
        "lazy",
        r"test_can_lower_multiple_effects"
        r"|test_runtime_tokens_should_update_after_running_effectful_function"
        r"|test_with_constants(_and_dce)?$|testPmapConstant$|test_primitive_compilation_cache$"
        r"|test_pure_callback_fastpath|test_clear_cache$|test_grad_of_jit_compilation_caching"
        r"|test_compilation_caching_io_(un)?ordered$"
        r"|test_jit_cache_clear|test_jit_with_pruned_args|test_linearize_caching"
        r"|test_remat_basic(_policy)?$|test_cpp_dispatch_|test_eval_shape_trace_cache_share"
        r"|^_src/alias_test\.py::AliasTest::test_optimization\d+$"
        r"|test_jit_lower_no_pruning|test_jit_traceback$|test_cache_key_defaults"
        r"|test_jit_mul_sum_sharding_preserved$|test_debug_logging$",
        "what JAX counts and logs of its own work is different",
    ),
    (
        "lazy",
        r"test_debug_print_respects_numpy_printoptions"
        r"|^test_while_loop\.py::test_backward_checkpointed"
        r"|^zoom_linesearch_test.*::test_failure_",
        "what jax.debug.print prints appears when the graph has run",
    ),
    (
        "lazy",
        r"^pallas/(gpu_pallas_interpret_(\w+_)?test|tpu_pallas_interpret_thread_map_test)\.py::",
        "what callbacks write to Python variables, and raise, comes when the graph has run",
    ),
    (
        "lazy",
        r"test_fully_replicated_donated_array_is_deleted|test_jit_donate_|test_donate_arg"
        r"|test_specify_donate_argnums_and_argnames"
        r"|test_pmap_donate_argnums_invalidates_input|test_jit_no_forwarding$"
        r"|::testBufferDonation(DifferentIOShapes|With(Kwargs|Names|OutputShardingInference"
        r"|PyTreeKwargs))?$"
        r"|test_device_put_on_single_device_donated_buffer_fails"
        r"|^test_jit\.py::test_(buffer_donation_|donation_warning)",
        "donate_argnums of a jit inside of the scope is not acted upon",
    ),
    (
        "lazy",
        r"testPickleOfArray$|testPickleX64$|^test_tree\.py::test_tree_(equal|allclose)",
        "type(x) is LazyArray, and a pickle of it gives JAX's array",
    ),
    (
        "lazy",
        r"test_device_put_on_(buffers|sharded_device_array)1$|test_typed_prng_key_sharded$",
        "functions of jaxlib that are not public take JAX's own arrays alone",
    ),
    (
        "lazy",
        r"CustomElementTypesTest::",
        "element types other than JAX's own are not public, and its arrays of them neither",
    ),
    (
        "lazy",
        r"test_array_getitem_compile_multi_device_sharding",
        "in Auto mode XLA chooses the sharding of a result for the whole program",
    ),
    (
        "lazy",
        r"test_cond_memory_leak",
        "what jitted functions closed over is let go of once it has 16 MiB",
    ),
    (
        "lazy",
        r"test_call_wrapped_second_phase_cleanup",
        "JAX's trace_state_clean, which is not public, says that something is being traced",
    ),
    (
        "lazy",
        r"FilteredTracebackTest::test_debug_nans_|UserContextTracebackTest::test_grad_norm$"
        r"|^debug_nans_test.*::(testCallDeoptimized\d|testDebugNans(ZeroDiv|Input"
        r"|DoesntReturnDeoptimizedResult))$",
        "what nobody reads is never run or compiled, and raises nothing",
    ),
    (
        "lazy",
        r"^debug_nans_test.*::(testPmap|testGradPmap)$",
        "the error of jax_debug_nans names the graph, in words of its own",
    ),
    (
        "lazy",
        r"^garbage_collection_guard_test",
        "what jaxlib logs of its own arrays is not logged of arrays that have no value yet",
    ),
    (
        "lazy",
        r"^compilation_cache_test",
        "the tests count what JAX itself compiles and caches, by the names of its programs",
    ),
    *(
        (
            mode,
            r"^compilation_cache_test.*::test_cache_misses_metric[01]$",
            "the test puts ten values into the place of time.monotonic, which snaprt calls as well",
        )
        for mode in ("recorded", "armed", "errors")
    ),
    (
        "armed",
        r"^logging_test.*::test_subprocess_toggling_logging_level$",
        "a process in which no condition held says so when it ends",
    ),
    (
        "lazy",
        r"^transfer_guard_test.*::test_(simple|nesting|mixed_nesting"
        r"|disallow_(explicit_)?(all|device_to_device|host_to_device))$",
        "a host scalar is a part of a program, and what nobody reads is never transferred",
    ),
    (
        "lazy",
        r"KeyArrayTest::test_device_put_replicated$"
        r"|pmap_test.*::(ArrayTest::test_(delete_is_idempotent|repr)"
        r"|ArrayPmapTest::test_(amap|device_put_sharded_transfer_guard))$",
        "functions that are no longer public take JAX's own arrays alone",
    ),
    ("lazy", r"test_fwd_and_bwd$", "jax.no_tracing() refuses every call of a jitted function"),
    (
        "lazy",
        r"CustomVJPTest::test_symbolic_zero_custom_vjp$",
        "in a steady scope, results are arrays where Python numbers were handed on",
    ),
)


def expected_reason(mode: str, test: str) -> str | None:
    """Return why ``test`` (with its file and class) differs in ``mode`` by design, or ``None``."""
    for expected_mode, pattern, reason in EXPECTED:
        if expected_mode == ("lazy" if mode == "again" else mode) and re.search(pattern, test):
            return reason
    return None


# --- the plugin, inside of the process that runs a file ------------------------------------------


def _outcomes_file() -> Path | None:
    name = os.environ.get(OUTCOMES_FILE)
    return Path(name) if name else None


def _note(line: Mapping[str, Any]) -> None:
    path = _outcomes_file()
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what an earlier process of this file has run, and what is not sampled."""
    path = _outcomes_file()
    if path is None:
        return
    done = _read_outcomes(path).keys()
    every = max(int(os.environ[EVERY]), math.ceil(len(items) / int(os.environ[AT_MOST])))
    items[:] = [item for item in items[::every] if item.nodeid not in done]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the devices before the first test, with which the compile cache takes JAX's place.

    JAX's test class asserts that a test leaves the configuration as it was.
    """
    import jax

    jax.devices()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run the test method itself lazily, where that is asked for; never its set-up.

    JAX's test class asserts around set-up and tear-down that no trace is open.
    """
    if os.environ.get(RUN_LAZILY) and isinstance(item, pytest.Function):
        item.obj = _lazily(item.obj)
    limit = int(os.environ.get(SECONDS, "0"))
    previous = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError("the test took too long")


def _lazily(method: Any) -> Any:
    import functools

    import snaprt

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with snaprt.lazy():
            return method(*args, **kwargs)

    return run


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note why the file cannot be imported, as where its JAX is not the installed one."""
    if report.failed:
        detail = _last_line(report.longreprtext)
        _note({"test": report.nodeid + NOT_COLLECTED, "outcome": "failed", "detail": detail})


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note which test runs, for it may end the process."""
    _note({"test": nodeid, "outcome": "crashed"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a phase of the test ended, where that decides the test's outcome."""
    if report.when == "call" or report.outcome != "passed":
        detail = "" if report.outcome == "passed" else _last_line(report.longreprtext)
        is_late = "TimeoutError: the test took" in report.longreprtext
        outcome = "timeout" if is_late else report.outcome
        line = {"outcome": outcome, "detail": detail, "seconds": round(report.duration, 3)}
        _note({"test": report.nodeid, **line})


def _last_line(text: str) -> str:
    """Return the first line of the error that ended a test, not of one that caused that error."""
    *_, last = re.split(r"^(?:The above|During handling of the above) exception", text, flags=re.M)
    errors = [line[1:].strip() for line in last.splitlines() if line.startswith("E  ")]
    return (errors[0] if errors else text.strip().rpartition("\n")[2])[:300]


# --- the runner ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a test ended: a word of pytest, ``crashed`` or ``timeout``; the error, in a line."""

    outcome: str
    detail: str = ""
    seconds: float = 0.0


CRASHED = Outcome("crashed")  # how a test ended that has only started


@dataclass(frozen=True)
class Difference:
    """A test that passes plainly, and what happened to it in another mode."""

    test: str
    mode: str
    outcome: Outcome

    @property
    def reason(self) -> str | None:
        """Why that is so by design, or ``None``: no process ends by design."""
        if self.outcome.outcome == "crashed":
            return None
        return expected_reason(self.mode, self.test)


def _read_outcomes(path: Path) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            test = entry.pop("test")
            # A failing tear-down comes after the call that passed, a failing subtest before it.
            if entry["outcome"] != "passed" or outcomes.get(test, CRASHED) == CRASHED:
                outcomes[test] = Outcome(**entry)
    return outcomes


def run_tests(
    tests: Path, name: str, mode: Mode, folder: Path, options: argparse.Namespace
) -> dict[str, Outcome]:
    """Run a file or folder below ``tests`` in one mode and return the outcome of each test."""
    outcomes_file = folder / f"outcomes-{time.monotonic_ns()}.jsonl"
    environment = {
        **os.environ,
        **({"XLA_FLAGS": f"{_DEVICES}={options.devices}"} if options.devices else {}),
        "SNAPRT_CACHE_DIR": str(folder / "own-cache"),
        "JAX_NUM_GENERATED_CASES": str(options.cases),
        "PYTHONPATH": os.pathsep.join(
            (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
        ),
        OUTCOMES_FILE: str(outcomes_file),
        EVERY: str(options.every),
        AT_MOST: str(options.at_most),
        SECONDS: str(options.seconds),
        **{name: value.format(folder=folder) for name, value in mode.environment.items()},
    }
    command = [
        sys.executable,
        *(word.format(folder=folder) for word in mode.launcher),
        *("-p", "jax_tests", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--tb=short"),
        "--continue-on-collection-errors",
        *("-c", os.devnull, "--rootdir", str(tests), str(tests / name)),
    ]
    log = (folder / "log.txt").open("ab")
    known = -1
    while len(_read_outcomes(outcomes_file)) > known:  # a process that got no further ends it
        known = len(_read_outcomes(outcomes_file))
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
        )
        if _wait(process, outcomes_file, options.seconds + 60) in (0, 1, 2, 5):
            break
    return _read_outcomes(outcomes_file)


def _wait(process: subprocess.Popen[bytes], outcomes_file: Path, limit: float) -> int:
    """Wait for the process; end it when no test has started or ended for ``limit`` seconds."""
    size, since = -1, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1)
        now = outcomes_file.stat().st_size if outcomes_file.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > limit:
            process.kill()
            process.wait()
            _replace_last_outcome(outcomes_file, "timeout")
            return -signal.SIGKILL


def _replace_last_outcome(outcomes_file: Path, outcome: str) -> None:
    outcomes = list(_read_outcomes(outcomes_file))
    if outcomes:
        with outcomes_file.open("a") as file:
            file.write(json.dumps({"test": outcomes[-1], "outcome": outcome}) + "\n")


def main() -> int:
    """Run what the command line names, print the table and the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "checkout", type=Path, help="a checkout at the installed version's tag, or a folder"
    )
    parser.add_argument("files", nargs="*", help="below its tests/, if it has that folder")
    parser.add_argument(
        "--modes", default=",".join(MODES), help="comma-separated; plain always runs"
    )
    parser.add_argument("--devices", type=int, default=8, help="CPU devices; 0: as the tests say")
    parser.add_argument("--cases", type=int, default=3, help="JAX_NUM_GENERATED_CASES")
    parser.add_argument("--every", type=int, default=1, help="run every Nth test of a file")
    parser.add_argument("--seconds", type=int, default=120, help="limit for one test")
    parser.add_argument("--at-most", type=int, default=10**6, help="sample files of more tests")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    options = parser.parse_args()
    modes = ["plain", *(mode for mode in options.modes.split(",") if mode != "plain")]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        parser.error(f"unknown mode {unknown[0]!r}: choose from {', '.join(MODES)}")
    tests = options.checkout.absolute()  # each file runs in a folder of its own
    tests = tests / "tests" if (tests / "tests").is_dir() else tests
    files = options.files or sorted({f.name for p in PATTERNS for f in tests.glob(p)})
    missing = [name for name in files if not (tests / name).exists()]
    if missing:
        parser.error(f"not found: {tests / missing[0]}")

    print("file".ljust(40), *(mode.rjust(9) for mode in modes), flush=True)
    differences: list[Difference] = []
    everything: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for name in files:
        outcomes: dict[str, dict[str, Outcome]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for mode in MODES:
                if mode in modes:
                    outcomes[mode] = run_tests(tests, name, MODES[mode], Path(folder), options)
        passed = {
            test for test, outcome in outcomes["plain"].items() if outcome.outcome == "passed"
        }
        counts = [sum(o.outcome == "passed" for o in outcomes[mode].values()) for mode in modes]
        print(name.ljust(40), *(str(count).rjust(9) for count in counts), flush=True)
        if not outcomes["plain"]:
            print("  (no test ran)", flush=True)
        for test, outcome in outcomes["plain"].items():
            if test.endswith(NOT_COLLECTED):
                print(f"  {test}: {outcome.detail}", flush=True)
        for mode in modes[1:]:
            for test in sorted(passed):
                outcome = outcomes[mode].get(test, Outcome("crashed", "it did not run"))
                if outcome.outcome != "passed":
                    differences.append(Difference(test, mode, outcome))
        everything[name] = {
            mode: {test: [o.outcome, o.detail, o.seconds] for test, o in of_mode.items()}
            for mode, of_mode in outcomes.items()
        }
        if options.json is not None:
            options.json.write_text(json.dumps(everything, indent=1))

    for difference in differences:
        print(
            f"{difference.mode} {difference.test} {difference.outcome.outcome}: "
            f"{difference.reason or difference.outcome.detail}"
        )
    unexplained = [difference for difference in differences if difference.reason is None]
    print(f"{len(differences)} differences, {len(unexplained)} of them unexplained")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
