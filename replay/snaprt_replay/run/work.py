"""Run jobs, one variant after the other: in a worker process, or in this one."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from snaprt import jaxapi, metrics
from snaprt.compile.ahead.ahead_of_time import topology_devices
from snaprt.compile.module import LoadedModule, compile_partitioned
from snaprt.compile.obtain import refuse_objects_of_another_process
from snaprt.errors import CompileError, DeviceError, ExecutionError, SnaprtError
from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import largest_arrays
from snaprt_replay.load.case import Index, Signature, same_bits, sharded
from snaprt_replay.run import devices, jobs
from snaprt_replay.run.jobs import HLO, STABLEHLO, ReplayJob, Spread
from snaprt_replay.run.variants import emulate, interpret, precision, random_rounding
from snaprt_replay.run.variants.op_by_op import OpByOp

_KINDS_OF_FAILURE: Final[Mapping[type[Exception], str]] = {
    CompileError: "compile error",
    ExecutionError: "run error",
    DeviceError: "missing device",
    SnaprtError: "unsupported",
}

Outputs = Sequence[np.ndarray]
"""The results of one run, in order; on several devices, each result as the parts they hold."""

WorkEvent = dict[str, Any]
"""JSON values: what is reported about a job after it was compiled, and after it has run."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A program that is ready to run."""

    run: Callable[[Sequence[Spread]], Outputs]  # takes the inputs and returns the outputs
    from_cache: bool  # whether the executable came from the persistent cache
    device: str  # the device's name
    environment: Mapping[str, str]  # see `devices.environment`
    notes: tuple[str, ...] = ()  # what a reader of the results should know
    # What the compiler reported about it; JSON values.
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # On several devices, the shape of each result and which part each device holds.
    layout: Sequence[tuple[tuple[int, ...], Sequence[Index]]] = ()


def serve(descriptor: int) -> None:
    """Run jobs until the other end of the socket is closed.

    The answer to a job is two messages, ``prepared`` and ``done``, or ``failed`` at any time.
    """
    metrics.clear_all()  # the metrics of the process that this one was forked from
    with socket.socket(fileno=descriptor) as connection:
        jobs.send(connection, {"event": "ready"})
        while True:
            try:
                job = jobs.receive_job(connection)
            except EOFError:
                return
            runs: list[Outputs] = []
            try:
                event, runs = perform(job, lambda prepared: jobs.send(connection, prepared))
            except (SnaprtError, MemoryError) as error:
                event = _failed(error)
            jobs.send(connection, {**event, "metrics": metrics.to_json()}, runs)
            metrics.clear_all()  # the other process counts them now


def perform(job: ReplayJob, tell: Callable[[WorkEvent], None]) -> tuple[WorkEvent, list[Outputs]]:
    """Run a job and return the event that reports its runs, and the outputs of runs that differ.

    Args:
        job: What to run.
        tell: Called between compiling and running.

    Raises:
        SnaprtError: It cannot be compiled or run.
    """
    started = time.perf_counter()
    prepared = _PREPARE[job.variant.kind](job)
    tell(
        {
            "event": "prepared",
            "compile_seconds": time.perf_counter() - started,
            "from_cache": prepared.from_cache,
            "device": prepared.device,
            "environment": dict(prepared.environment),
            "notes": prepared.notes,
            "report": dict(prepared.report),
            "layout": prepared.layout,
        }
    )
    seconds: list[float] = []
    runs: list[Outputs] = []
    for _ in range(job.repeat):
        started = time.perf_counter()
        outputs = prepared.run(job.inputs)
        seconds.append(time.perf_counter() - started)
        # Runs with identical bits are returned once.
        if not any(all(map(same_bits, outputs, before)) for before in runs):
            runs.append(outputs)
    if job.profile:
        _profile(job, prepared)
    return {"event": "done", "execute_seconds": seconds}, runs


def _profile(job: ReplayJob, prepared: Prepared) -> None:
    """Profile one more run, without compilation and memory allocation."""
    try:
        with (
            jaxapi.profile(Path(job.profile)),
            jaxapi.span("execute", graph=job.graph_id, program=job.name),
        ):
            prepared.run(job.inputs)
    except RuntimeError as error:
        # The device's memory is not meant.
        why = str(error).removeprefix("RESOURCE_EXHAUSTED: ")
        raise ExecutionError(
            f"no profile in {job.profile}: {why}",
            hint="name another folder, on a disk with free space: --profile DIR",
        ) from error


def _failed(error: Exception) -> WorkEvent:
    for kind, name in _KINDS_OF_FAILURE.items():
        if isinstance(error, kind):
            message, hint = getattr(error, "message", ""), getattr(error, "hint", "")
            return {"event": "failed", "kind": name, "message": message, "hint": hint}
    return {"event": "failed", "kind": "out of memory", "message": str(error), "hint": ""}


# --- the kinds of variants ------------------------------------------------------------------------


def _prepare_device(job: ReplayJob) -> Prepared:
    if job.variant.matmul_precision is not None:
        program = _to_stablehlo(_hlo_of(job).SerializeToString())
    else:
        program = job.program if job.form == STABLEHLO else _to_stablehlo(job.program)
    module = _compiled(job, program)
    prepared = _prepared(module)
    if job.form == HLO:  # one of many parts of a program, whose proof is not needed
        return prepared
    proof = module.proof
    environment = {
        **prepared.environment,
        "fingerprint": proof.fingerprint,
        "optimised_hlo": proof.optimised_hlo,
        "aliases": ", ".join(proof.aliases),
    }
    if job.devices == 1:
        return dataclasses.replace(prepared, environment=environment)
    shapes = [shape for shape, _ in module.results]
    layout = list(zip(shapes, module.result_indices, strict=True))

    def run(inputs: Sequence[Spread]) -> Outputs:
        results = module.run_sharded(_as_taken(inputs, module))
        return [
            part
            for parts, (shape, indices) in zip(results, layout, strict=True)
            for part in sharded("", shape, parts, indices).parts
        ]

    return dataclasses.replace(prepared, run=run, environment=environment, layout=layout)


def _prepare_f64(job: ReplayJob) -> Prepared:
    raised = precision.raise_to_f64(_hlo_of(job))
    module = raised.module.SerializeToString()
    return _prepared(_compiled(job, _to_stablehlo(module)), raised.notes)


def _prepare_random_rounding(job: ReplayJob) -> Prepared:
    """Prepare runs that each draw new roundings, and new last bits of the inputs."""
    module = random_rounding.round_at_random(_hlo_of(job))
    compiled = _compiled(job, _to_stablehlo(module.SerializeToString()))
    random = np.random.default_rng(0)

    def run(inputs: Sequence[Any]) -> Outputs:
        moved = [random_rounding.perturb(array, random) for array in inputs]
        seed = random.integers(2**63, dtype=np.uint64)
        return compiled.run(_as_taken([*moved, np.asarray(seed)], compiled))

    return dataclasses.replace(_prepared(compiled), run=run)


def _prepare_tpu_precision(job: ReplayJob) -> Prepared:
    assert job.variant.precision is not None
    module = emulate.with_tpu_precision(_hlo_of(job), job.variant.precision)
    return _prepared(_compiled(job, _to_stablehlo(module.SerializeToString())))


def _prepare_op_by_op(job: ReplayJob) -> Prepared:
    device = devices.find_device(job.variant.device)
    from_cache: list[bool] = []

    def compile_one(module: bytes) -> Callable[[Sequence[np.ndarray]], Outputs]:
        loaded = _compiled(job, _to_stablehlo(module))
        from_cache.append(loaded.from_cache)
        return loaded.run

    program = OpByOp(_hlo_of(job), compile_one)
    # The operations are known and compiled only after they have run.
    program.run(job.inputs)
    return Prepared(
        run=program.run,
        from_cache=all(from_cache),
        device=devices.device_name(device),
        environment=devices.environment(device),
        notes=(f"compiled {len(from_cache)} different operations, each separately",),
    )


def _prepare_interpreter(job: ReplayJob) -> Prepared:
    readable = interpret.make_readable(_hlo_of(job))
    stablehlo = _to_stablehlo(readable.module.SerializeToString())
    module = jaxapi.parse_module(stablehlo)
    calls = jaxapi.custom_calls(module)
    refuse_objects_of_another_process(calls)
    if calls.targets:  # they would end the process
        raise CompileError(
            f"the StableHLO interpreter cannot run custom calls: {', '.join(calls.targets)}",
            hint="use op-by-op or cpu,optimization=0",
        )
    cpu = devices.find_device("cpu")

    def run(inputs: Sequence[Any]) -> Outputs:
        try:
            return readable.assemble(jaxapi.interpret(module, inputs))
        except ValueError as error:
            raise ExecutionError(f"the reference interpreter failed: {error}") from error

    return Prepared(
        run=run,
        from_cache=False,
        device="StableHLO interpreter",
        environment=devices.environment(cpu),
    )


def _prepare_compile_only(job: ReplayJob) -> Prepared:
    program = job.program if job.form == STABLEHLO else _to_stablehlo(job.program)
    try:
        module = jaxapi.parse_module(program)
    except ValueError as error:
        raise CompileError(f"cannot read the program: {error}") from error
    target, options = job.variant.device, dict(job.variant.options)
    platform, _, topology = (target or "").partition(":")
    is_absent = platform == "tpu" and not topology.isdecimal() and bool(topology)
    if is_absent:
        target_devices = topology_devices(topology)[: jaxapi.partitions_of(module)]
        name = f"{target} ({target_devices[0].device_kind})"
    else:
        target_devices = (devices.find_device(target),)
        name = devices.device_name(target_devices[0])
    jaxapi.without_scans(module, target_devices[0].platform)
    try:
        if is_absent:
            executable = jaxapi.compile_unloaded(module, target_devices, options)
        else:
            compile_options = jaxapi.compile_options(target_devices, options)
            executable = jaxapi.compile_module(module, target_devices, compile_options)
    except Exception as error:
        raise CompileError(f"cannot compile the program for {name}: {error}") from error
    text, proto = jaxapi.optimized_program(executable)
    return Prepared(
        run=lambda _: (),
        from_cache=False,
        device=name,
        environment={},
        report={
            "memory": jaxapi.executable_memory(executable),
            "cost": jaxapi.executable_cost(executable),
            "hlo": text,
            "largest": largest_arrays(proto),
        },
    )


_PREPARE: Final[Mapping[str, Callable[[ReplayJob], Prepared]]] = {
    "compile-only": _prepare_compile_only,
    "device": _prepare_device,
    "f64": _prepare_f64,
    "interpreter": _prepare_interpreter,
    "op-by-op": _prepare_op_by_op,
    "random-rounding": _prepare_random_rounding,
    "tpu-precision": _prepare_tpu_precision,
}


def _hlo_of(job: ReplayJob) -> XlaMessage:
    """Return a job's program as an HloModuleProto with the requested matmul precision."""
    module = precision.read_module(_to_hlo(job))
    if job.variant.matmul_precision is None:
        return module
    return emulate.with_matmul_precision(module, job.variant.matmul_precision)


def _to_hlo(job: ReplayJob) -> bytes:
    if job.form == HLO:
        return job.program
    try:
        return jaxapi.stablehlo_to_hlo(job.program)
    except ValueError as error:
        raise CompileError(f"the program has no HLO: {error}") from error


def _to_stablehlo(module: bytes) -> bytes:
    try:
        return jaxapi.hlo_to_stablehlo(module)
    except ValueError as error:
        raise CompileError(f"the HLO module has no StableHLO: {error}") from error


def _compiled(job: ReplayJob, stablehlo: bytes) -> LoadedModule:
    try:
        return compile_partitioned(
            stablehlo,
            devices=devices.find_devices(job.variant.device, job.devices),
            partitioning=job.partitioning,
            name=job.name,
            compiler_options=dict(job.variant.options),
        )
    except CompileError as error:
        if _NO_SUCH_OPTION not in error.message:
            raise
        # No other program, variant or device would help.
        raise CompileError(error.message, hint=_OTHER_OPTION) from error


_NO_SUCH_OPTION: Final = "No such compile option"
_OTHER_OPTION: Final = (
    "this version of XLA has no option of that name: correct or omit it in --xla-flag, or in "
    "xla-flags= of --a, --b or --reference"
)


def _prepared(module: LoadedModule, notes: tuple[str, ...] = ()) -> Prepared:
    return Prepared(
        run=lambda inputs: module.run(_as_taken(inputs, module)),
        from_cache=module.from_cache,
        device=devices.name_devices(module.devices),
        environment=devices.environment(module.device),
        notes=notes,
    )


def _as_taken(inputs: Sequence[Any], module: LoadedModule) -> list[Any]:
    """Return the inputs in the precision that the module takes; XLA does not check them."""
    signatures = [Signature(shape, dtype) for shape, dtype in module.parameters]
    actual, raised = [], []
    for value, parameter in zip(inputs, signatures, strict=False):
        if not isinstance(value, np.ndarray):  # parts, which are checked when they are placed
            actual.append(parameter)
            raised.append(value)
            continue
        is_raised = precision.is_raised(value.dtype, parameter.dtype)
        raised.append(value.astype(parameter.dtype) if is_raised else value)
        actual.append(Signature(value.shape, raised[-1].dtype))
    if actual != signatures or len(inputs) != len(signatures):
        raise ExecutionError(
            f"the inputs ({', '.join(map(str, actual))}) do not match the parameters of the "
            f"module ({', '.join(map(str, signatures))})",
            hint="the file is damaged, or was assembled by hand",
        )
    return raised
