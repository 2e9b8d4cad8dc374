"""The trace that JAX binds every eager operation on while a thread runs lazily.

It turns each operation into a node and hands back lazy arrays. It decides what cannot be
recorded; it does not know how graphs are compiled or run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from snaprt import jaxapi, metrics
from snaprt.lazy.array import LazyArray
from snaprt.lazy.graph import Edge, Graph, Literal, Node, Placement
from snaprt.lazy.operation import operation


class LazyTrace(jaxapi.Trace):
    """Record operations into ``graph``; one instance for each thread that runs lazily.

    Args:
        run: Computes the value of a lazy array of this trace: ``run(trace, array, cause)``.
        failed: Is told of an error, and of what was bound, before the error goes on to the user:
            ``failed(trace, error, operation)``.
    """

    def __init__(
        self,
        run: Callable[[LazyTrace, LazyArray, str], None],
        failed: Callable[[LazyTrace, Exception, jaxapi.BoundOperation], None],
    ) -> None:
        super().__init__()
        self.graph = Graph()
        self.recording_time = 0
        self._run = run
        self._failed = failed

    def __eq__(self, other: object) -> bool:
        return other is self or (jaxapi.asked_as_opaque_state() and jaxapi.is_eager(other))

    def __hash__(self) -> int:
        # Equal objects owe each other equal hashes, but nothing hashes an opaque trace state, and
        # jit's fast path must not find an eager entry under a lazy trace.
        return id(self)

    def materialise(self, array: LazyArray, cause: str) -> None:
        """Compute the value of ``array``, which this trace recorded."""
        self._run(self, array, cause)

    def process_primitive(self, primitive: Any, args: Sequence[Any], params: Any, /) -> Any:
        """Record one operation and return its results as lazy arrays."""
        started = time.perf_counter_ns()
        try:
            results = self._record(primitive, args, params)
        except Exception as error:
            self._failed(self, error, jaxapi.BoundOperation(primitive, args, params))
            raise
        if isinstance(results, str):
            return self._run_at_once(primitive, args, params, cause=results)
        self.recording_time += time.perf_counter_ns() - started
        return results if primitive.multiple_results else results[0]

    def _record(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any]
    ) -> list[LazyArray] | str:
        """Record the operation and return its results, or why a graph cannot hold it."""
        cause = _must_run_at_once(primitive, args, params)
        if cause is not None:
            return cause
        avals = [a.aval if type(a) is LazyArray else jaxapi.typeof(a) for a in args]
        if not all(map(jaxapi.is_array_aval, avals)):
            return "ref"
        context = jaxapi.operation_context()
        what = operation(primitive, params, context)
        x64 = jaxapi.x64_enabled()
        results, effects = what.evaluate(primitive, avals, params, x64)
        if not all(map(jaxapi.is_array_aval, results)):
            return "ref"
        operands = tuple([self._operand(arg) for arg in args])
        placement = _placement(operands, what.devices, x64)
        if placement is None:
            return "devices"
        graph = self.graph
        with graph.lock:
            node = Node(
                number=next(graph.numbers),
                primitive=primitive,
                params=params,
                operands=operands,
                avals=results,
                effects=effects,
                placement=placement,
                operation=what,
                source=jaxapi.source_info(),
                context=context,
            )
            arrays = [LazyArray(self, aval, node, index) for index, aval in enumerate(results)]
            graph.add(node, arrays)
        return arrays

    def _operand(self, arg: Any) -> Edge | Literal | jax.Array:
        if isinstance(arg, LazyArray):
            value = arg._value
            if value is not None:
                return value
            if arg._trace is not self:  # another thread's: its graph is not ours to extend
                return arg.materialise("thread")
            assert arg._node is not None
            return Edge(arg._node, arg._index)
        if isinstance(arg, jax.Array):
            return arg
        if jaxapi.host_literal(arg):
            return Literal(arg)
        return _transfer(arg)

    def _run_at_once(self, primitive: Any, args: Sequence[Any], params: Any, cause: str) -> Any:
        """Run an operation that no graph can hold, after the operands it needs."""
        if cause == "device_put" and not any(isinstance(a, jax.Array) for a in args):
            return _counted_transfer(
                lambda: jaxapi.evaluate_call("process_primitive", primitive, args, params)
            )
        concrete = [a.materialise(cause) if isinstance(a, LazyArray) else a for a in args]
        metrics.counter_add(f"eager::{primitive.name}")
        return jaxapi.evaluate_call("process_primitive", primitive, concrete, params)

    def stage_value(self, val: Any) -> Any:
        """Lift a host value into an array; it is copied to the device at once."""
        return val if isinstance(val, jax.Array) else _transfer(val)

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any
    ) -> Any:
        """Record the function itself: derivatives are taken by the traces inside this one."""
        with jaxapi.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        """Record the function itself: derivatives are taken by the traces inside this one."""
        with jaxapi.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_call(self, primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        """Record the body of a call."""
        with jaxapi.set_current_trace(self):
            return f.call_wrapped(*tracers)

    def process_shard_map(self, primitive: Any, fun: Any, args: Any, **params: Any) -> Any:
        """Run an eager `shard_map` at once; inside `jit` it is recorded like any operation."""
        concrete = [a.materialise("shard_map") if isinstance(a, LazyArray) else a for a in args]
        return jaxapi.evaluate_call("process_shard_map", primitive, fun, concrete, **params)

    def cur_qdd(self, x: Any) -> Any:
        """Return the quasi-dynamic data of ``x``, as the eager trace does (JAX 0.10)."""
        return jaxapi.evaluate_call("cur_qdd", x)


def _transfer(value: Any) -> jax.Array:
    return _counted_transfer(lambda: [jaxapi.to_device(value)])[0]


def _counted_transfer(send: Callable[[], list[jax.Array]]) -> list[jax.Array]:
    with metrics.timed("TransferToDeviceTime"):
        arrays = send()
    metrics.metric_add("OutboundData", sum(array.nbytes for array in arrays))
    return arrays


def _must_run_at_once(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> str | None:
    """Return the cause for which an operation cannot wait, or ``None``."""
    if primitive.name == "device_put" and (
        any(device is not None for device in params["devices"])
        or not any(isinstance(arg, LazyArray) for arg in args)
    ):
        return "device_put"
    if params.get("compiler_options_kvs"):  # XLA takes them for a whole program alone
        return "compiler_options"
    return None


def _placement(
    operands: Sequence[Edge | Literal | jax.Array], named: tuple[Any, ...] | None, x64: bool
) -> Placement | None:
    """Return where an operation runs, or ``None`` where its operands contradict each other.

    Args:
        operands: What it works on.
        named: The devices that its own parameters name, if they do.
        x64: Whether 64-bit types are enabled.
    """
    pinned = named
    for operand in operands:
        devices: tuple[Any, ...] | None = None
        if type(operand) is Edge:
            placement = operand.node.placement
            if placement.committed:
                devices = placement.devices
        elif type(operand) is not Literal and operand.committed:  # type: ignore[union-attr]
            devices = jaxapi.devices_of_sharding(operand.sharding)  # type: ignore[union-attr]
        if devices is not None:
            if pinned is not None and pinned != devices:
                return None
            pinned = devices
    return _interned(pinned, jaxapi.default_device(), x64)


_placements: dict[Any, Placement] = {}


def _interned(pinned: tuple[Any, ...] | None, default_device: Any, x64: bool) -> Placement:
    key = (pinned, None if pinned is not None else default_device, x64)
    placement = _placements.get(key)
    if placement is None:
        placement = _placements[key] = Placement(pinned is not None, pinned or (), key[1], x64)
    return placement
