"""The pipeline on one page: each call of a jitted function, seen by the recorder, run by JAX.

JAX runs every program here, by the way it would have taken: what it is called with, what it
compiles and what it returns are its own. A call is looked at closely only when something of it is
to be recorded, or when it is not clear which program it runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, overload

import jax

from snaprt import jaxapi
from snaprt.compile.executable import artifacts_of, new_number
from snaprt.compile.key import module_digest
from snaprt.compile.lower import FLAG_NAME, flag_of
from snaprt.compile.module import run_elsewhere
from snaprt.errors import SnapshotError
from snaprt.graph.artifacts import ModuleArtifacts
from snaprt.host.identities import identity
from snaprt.host.interruptions import raise_if_interrupted
from snaprt.host.whole_files import named_path
from snaprt.runtime import repro, resting
from snaprt.runtime.events import is_followed, run_followed
from snaprt.snapshot.recorder import flags
from snaprt.snapshot.recorder.conditions import names_in, parse_conditions
from snaprt.snapshot.recorder.pending import about_to_donate, hold_inputs
from snaprt.snapshot.recorder.plan import (
    Plan,
    check_plan,
    current_plan,
    plan_with,
    set_thread_plan,
)
from snaprt.snapshot.recorder.progress import find_smallest, is_watched_closely
from snaprt.snapshot.recorder.ranks.sharing import tell_plan
from snaprt.snapshot.recorder.record import Recorder, Resting, SameEachTime, process_recorder

#: How many kinds of calls of a function are remembered.
MAX_KINDS = 256

#: What a computer has, or it ends the process.
_SURE_BYTES = 1 << 28

#: How often who waits for a compilation looks whether it has ended.
_LOOK_SECONDS = 0.05

_WITHOUT = contextlib.nullcontext()


@dataclass(frozen=True, eq=False)
class JitExecutable:
    """A program that JAX has lowered for some arguments, and compiles once."""

    number: int  # counts the executables of this process, lazy graphs included
    graph_id: str  # the first 16 hexadecimal digits of the digest of its StableHLO
    lowered: jax.stages.Lowered  # the program, which holds its executable when it is compiled
    module: jaxapi.JitModule
    calls_native: bool  # whether it calls functions that are no part of XLA
    name: str
    devices: tuple[jaxapi.Device, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    donated: tuple[int, ...]
    # Held by the thread whose call has JAX compile it. That thread may ask for it again: a signal.
    first_run: Any = field(default_factory=threading.RLock, repr=False)

    @property
    def is_watched(self) -> bool:
        """Whether its last result says that another one has a NaN or an infinity."""
        return self.module.output_names[-1:] == (FLAG_NAME,)

    @property
    def is_compiled(self) -> bool:
        """Whether XLA has compiled it."""
        return jaxapi.is_compiled(self.lowered)

    @property
    def is_pure(self) -> bool:
        """Whether an execution does nothing but compute its results."""
        return self.module.is_pure

    @functools.cached_property
    def starts_surely(self) -> bool:
        """Whether no call of it fails, once it is compiled: if an execution does, its results do.

        On a GPU, a call finds out that there is no memory for its results.
        """
        if self.calls_native or not self.is_pure:
            return False
        if [device.platform for device in self.devices] != ["cpu"]:
            return False
        loaded = jaxapi.loaded_executable(self.lowered.compile())
        memory = {} if loaded is None else jaxapi.executable_memory(loaded)
        return bool(memory) and sum(memory.values()) < _SURE_BYTES

    def artifacts(self) -> ModuleArtifacts:
        """Return the program in the forms in which it is recorded; the first call makes them."""
        return _artifacts(self)

    def run_again(self, inputs: Sequence[Any], device: jaxapi.Device | None) -> Sequence[Any]:
        """Run it once more, as whoever observes it may ask; see the recorder's `Executable`."""
        if device is None:
            return jaxapi.run_jit_module(self.lowered, inputs)
        return run_elsewhere(self, inputs, device)


@functools.lru_cache(maxsize=8)
def _artifacts(executable: JitExecutable) -> ModuleArtifacts:
    _wait_while_compiled(executable)
    compiled = None
    with contextlib.suppress(Exception):  # it cannot be compiled: nothing ran
        compiled = executable.lowered.compile()  # else it is by now: this is what JAX runs
    return artifacts_of(executable.lowered, compiled)


@contextlib.contextmanager
def _compiling(executable: JitExecutable) -> Iterator[None]:
    """Let the recorder's thread wait for this thread's run to compile a program.

    It is entered before that thread hears of the run.
    """
    is_first = executable.first_run.acquire(blocking=False)  # else another thread compiles it, too
    try:
        yield
    finally:
        if is_first:
            executable.first_run.release()


def _wait_while_compiled(executable: JitExecutable) -> None:
    """Wait for the call that compiles it.

    JAX would compile it a second time for this thread where a setting is of the caller's thread
    alone, such as its mesh. It does not wait for the run as a whole: its callbacks may wait for
    the recorder's thread. Nor where that is waited for: perhaps by the thread of the call.
    """
    writer = process_recorder().writer
    while not executable.is_compiled and not writer.is_awaited:
        if executable.first_run.acquire(timeout=_LOOK_SECONDS):
            executable.first_run.release()
            return


@dataclass(frozen=True)
class _Traced:
    """What is known of a traced function."""

    # Its executables, by the identity of what was lowered.
    lowered: dict[int, JitExecutable] = field(default_factory=dict)
    # Which of them each kind of call runs.
    kinds: dict[Any, JitExecutable] = field(default_factory=dict)


# JAX forgets a traced function when nobody holds it any more, and so do we.
_traced: weakref.WeakKeyDictionary[Any, _Traced] = weakref.WeakKeyDictionary()


def executable_ahead(ahead: jaxapi.CompiledAhead) -> JitExecutable:
    """Return the executable of a program that was compiled ahead of time: always the same."""
    if ahead.known is None:
        ahead.known = _described(ahead.lowered, ahead.like)
    return ahead.known


def _described(lowered: jax.stages.Lowered, call: jaxapi.FlatCall) -> JitExecutable:
    module = jaxapi.describe_jit_module(lowered, call)
    stablehlo = jaxapi.stablehlo_without_locations(lowered)
    return JitExecutable(
        new_number(),
        module_digest(stablehlo)[:16],
        lowered,
        module,
        b"custom_call" in stablehlo,
        module.name,
        module.devices,
        module.input_names,
        module.output_names,
        module.donated,
    )


def executable_of(call: jaxapi.FlatCall) -> JitExecutable:
    """Return the executable that JAX runs for a call: the same object for the same program.

    Raises:
        Exception: Whatever JAX raises for a program that it cannot lower.
    """
    traced = _traced.setdefault(call.params["jaxpr"], _Traced())
    kind = jaxapi.kind_of_flat_call(call)
    if kind in traced.kinds:
        return traced.kinds[kind]
    lowered = jaxapi.lower_jit_call(call)
    identity = jaxapi.identity_of_lowered(lowered)
    executable = traced.lowered.get(identity)
    if executable is None:
        executable = traced.lowered[identity] = _described(lowered, call)
    if len(traced.kinds) >= MAX_KINDS:
        traced.kinds.clear()
    traced.kinds[kind] = executable
    return executable


jaxapi.know_users_jits()  # before the user jits what is to be recorded

#: How many functions are remembered; a program with more pays for a closer look at each call.
MAX_FUNCTIONS = resting.MAX_FUNCTIONS

_NOT_ARRAYS = "its inputs or results include values that are not arrays"
_log = logging.getLogger("snaprt.jit")


class _Known(NamedTuple):
    """What calls of one kind run, and one of them without its arguments, if it captured nothing."""

    executable: JitExecutable
    like: jaxapi.FlatCall | None


class _Function:
    """A jitted function that is called.

    Attributes:
        info: JAX's description of it; alive, or another's could take its id.
        again: The function: it shares what JAX has compiled with the user's own.
        kinds: What each kind of call runs.
        is_kept: Whether it is remembered: from its second call on.
        thread: The only one that calls it; None where there are several.
        rests: The executable whose executions may rest: the first.
        resting: What counts those; None where each is to be seen.
        find: Finds an output in what those return, once one has.
    """

    __slots__ = ("again", "find", "fun", "info", "is_kept", "kinds", "resting", "rests", "thread")

    def __init__(self, fun: Any, info: Any, *, is_kept: bool) -> None:
        self.fun = fun
        self.info = info
        self.again = jaxapi.jit_again(fun, info)
        self.kinds: dict[Any, _Known] = {}
        self.is_kept = is_kept
        self.thread: int | None = threading.get_ident()
        self.rests: JitExecutable | None = None
        self.resting: Resting | None = None
        self.find: Callable[[Any], Any] = find_smallest(())[0]

    def kind_of(self, args: Any, kwargs: Any) -> tuple[Any, Sequence[Any]]:
        """Return the kind of a call, and its leaves; None where JAX is to say what is wrong."""
        try:
            return jaxapi.kind_of_jit_call(self.info, args, kwargs)
        except Exception as error:
            raise_if_interrupted(error)
            return None, ()

    def trail(self, trailing: SameEachTime, args: Any, kwargs: Any, results: Any) -> None:
        """Hand a call that JAX has made to the recorder, which counts it."""
        assert self.rests is not None
        try:
            module = self.rests.module
            inputs = jaxapi.leaves_of_call(self.info, args, kwargs)
            if not jaxapi.are_arrays(inputs):
                inputs = jaxapi.jit_module_inputs(self.rests.lowered, module, inputs)
                inputs = hold_inputs(inputs, (), "device")
            elif len(inputs) > len(module.input_names):
                inputs = [inputs[number] for number in module.kept_arguments or ()]
            if trailing.recorded_for or trailing.plan.keep_last:
                outputs = list(_all_outputs(self.rests, jaxapi.leaves_of_results(results)) or ())
            else:
                outputs = self._output_in(results)
            process_recorder().trail(trailing, inputs, outputs)
        except Exception as error:
            raise_if_interrupted(error)
            process_recorder().writer.complain(error)

    def _output_in(self, results: Any) -> list[Any]:
        """Return one array in what a call returned, none where none can say whether it is there."""
        try:
            return [self.find(results)]
        except Exception:  # the first, or another kind of call returns something else
            self.find = find_smallest(results)[0]
        with contextlib.suppress(LookupError):
            return [self.find(results)]
        return []

    def ran(self, kind: Any, executable: JitExecutable, flat: jaxapi.FlatCall) -> None:
        """Learn what a call of a kind ran."""
        if len(self.kinds) >= MAX_KINDS:
            self.kinds.clear()
        self.kinds[kind] = _Known(executable, None if flat.captured else replace(flat, args=()))


class _Call(Sequence[Any]):
    """A call: the inputs of an execution, which are found when they are first looked at."""

    __slots__ = ("_flat", "_inputs", "_unflattened", "executable")

    def __init__(
        self,
        executable: JitExecutable,
        flat: jaxapi.FlatCall | None = None,
        unflattened: tuple[_Function, Any, Any, jaxapi.FlatCall | None, Sequence[Any]]
        | None = None,
    ) -> None:
        """Take the call as JAX lowers it, or what to make that of."""
        self.executable = executable
        self._flat = flat
        self._unflattened = unflattened
        self._inputs: Sequence[Any] | None = None

    def flat(self) -> jaxapi.FlatCall:
        """Return the call as JAX lowers it."""
        if self._flat is None:
            assert self._unflattened is not None
            function, args, kwargs, like, leaves = self._unflattened
            self._flat = (
                jaxapi.flatten_jit_call(function.fun, function.info, args, kwargs)
                if like is None
                else replace(like, args=tuple(leaves))
            )
        return self._flat

    def _arguments(self) -> Sequence[Any]:
        if self._flat is None and self._unflattened is not None:
            like, leaves = self._unflattened[3:]
            if like is not None:  # the arguments alone, which takes half the time
                return leaves
        return self.flat().args

    def inputs(self) -> Sequence[Any]:
        """Return the arrays that go into the module."""
        if self._inputs is None:
            self._inputs = jaxapi.jit_module_inputs(
                self.executable.lowered, self.executable.module, self._arguments()
            )
        return self._inputs

    def outputs(self, results: Sequence[Any]) -> Sequence[Any]:
        """Return the arrays that came out of the module, of which these are the user's."""
        if self.executable.module.has_all_results:
            return results
        return jaxapi.jit_module_outputs(self.executable.lowered, self._arguments, results)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        return self.inputs()[place]

    def __len__(self) -> int:
        return len(self.executable.input_names)

    def __iter__(self) -> Iterator[Any]:
        # Threads that call a function for the first time at once may mix up its programs.
        if [array.shape for array in self.inputs()] != self.executable.module.input_shapes:
            raise SnapshotError(
                f"a call of {self.executable.name} may have run a different program"
            )
        return iter(self.inputs())


def _without_taken(
    flat: jaxapi.FlatCall, of_user: jaxapi.FlatCall, kept: Sequence[int], plan: Plan | None
) -> jaxapi.FlatCall:
    """Return a call on new arrays in the place of those that the user's call would delete.

    The program is to find these gone, whatever runs in the place of its own.
    """
    taken = jaxapi.taken_arguments(of_user, kept)
    if not taken:
        return flat
    args = list(flat.args)
    arrays = [args[place] for place in taken]
    about_to_donate(map(jaxapi.data_of_keys, arrays), "device" if plan is None else plan.hold)
    for place, array in zip(taken, jaxapi.moved(arrays), strict=True):
        args[place] = array
    return replace(flat, args=tuple(args))


class _Watcher:
    """Makes the calls of jitted functions in the threads that are watched."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._functions: dict[int, _Function] = {}
        # Those called before: one that is made, jitted and called once is not kept alive.
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()

    def leaves_to_jax(self, source: str) -> bool:
        """Return whether calls of a function are no executions."""
        return leaves_to_jax(source)

    def leaves_call(self, info: Any, args: Any, kwargs: Any) -> bool:
        """Return whether nothing is wanted of a call, nor of the next ones like it."""
        function = self._functions.get(identity(info))
        if function is None or function.resting is None:
            return False
        kind, leaves = function.kind_of(args, kwargs)
        entry = function.kinds.get(kind)
        if entry is None or entry.executable is not function.rests:
            return False
        if not _may_rest(function.resting, leaves):
            return False
        return function.thread == threading.get_ident() and resting.is_left(identity(info))

    def left(self, info: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Count a call that JAX has made."""
        resting.count(identity(info), args, kwargs, results)

    def _relax(self, function: _Function, executable: JitExecutable, leaves: Sequence[Any]) -> None:
        """Leave to C++ what may be left to it, after a call of a function that was seen."""
        if not _is_recorded() or is_watched_closely() or repro.is_asked_for():
            return
        if function.thread != threading.get_ident():  # that one sees it at its next call
            function.thread = function.resting = None
        elif function.is_kept and function.rests in (None, executable):
            function.rests = executable
            rest = self._recorder.rest(
                executable, starts_surely=self._is_trailed(function, executable)
            )
            if _may_rest(rest, leaves):
                function.resting = rest
                if function.thread != threading.get_ident():  # another has called it meanwhile
                    function.resting = None
                resting.judge(identity(function.info), function, donates=bool(executable.donated))
                return
        resting.relax()

    def call(self, fun: Any, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a jitted function for the user."""
        function = self._functions.get(identity(info)) or self._meet(fun, info)
        jaxapi.pause_watch()
        try:
            kind, leaves = function.kind_of(args, kwargs)
            entry = function.kinds.get(kind)
            known = None
            if entry is not None:
                if not _is_recorded() and not repro.is_asked_for():
                    return run_followed(entry.executable, function.again, args, kwargs)
                leaves, are_arrays = jaxapi.lowered_leaves(leaves)
                if are_arrays:
                    known = self._same_each_time(function, entry.executable)
            flat = None
            if entry is None:
                flags.take_over()  # the script may have set XLA_FLAGS since
                try:
                    with jaxapi.watching_meanwhile():  # what is traced may call for constants
                        flat = jaxapi.flatten_jit_call(fun, info, args, kwargs)
                except Exception:
                    self._recorder.trace_failed(getattr(fun, "__name__", "a function"))
                    raise
                if not jaxapi.is_of_arrays_alone(flat):  # `bind` is asked to run it
                    with jaxapi.watching_meanwhile():
                        return jaxapi.run_jit_call(fun, info, args, kwargs)
                try:
                    executable = _recordable(flat)
                except _NotRecordableError as error:
                    results = function.again(*args, **kwargs)  # or what is wrong, in JAX's words
                    self._missed(flat.params["name"], str(error))
                    return results
                call = _Call(executable, flat)
            else:
                executable, like = entry
                call = _Call(executable, None, (function, args, kwargs, like, leaves))
            try:
                if known is not None:
                    results = self._run_held(
                        known, executable, leaves, function.again, args, kwargs
                    )
                elif (changed := self._changed(call)) is not None:
                    run_changed = functools.partial(self._run_changed, changed)
                    results = jaxapi.with_keys_checked(call.flat(), run_changed)
                    results = call.flat().unflatten(results)
                else:
                    results = self._run(call, function.again, args, kwargs, function.info)
            except Exception as error:
                if jaxapi.forbidden_value(error) is None:
                    raise
                # jax_debug_nans: for the user's own program, JAX finds the operation, and names it.
                results = function.again(*args, **kwargs)
            if function.is_kept and flat is not None and kind is not None:
                function.ran(kind, executable, flat)
        finally:
            jaxapi.resume_watch()
        if known is None or (known.is_trailed and executable.starts_surely):
            self._relax(function, executable, leaves)
        else:
            resting.relax()
        return results

    def _is_trailed(self, function: _Function, executable: JitExecutable) -> bool:
        """Return whether a call that was made says all that the recorder needs, if it asks."""
        module = executable.module
        return (
            module.kept_arguments is not None
            and module.has_all_results
            and len(module.output_names) > 0
            and executable.starts_surely
            and not is_followed()
        )

    def _same_each_time(
        self, function: _Function, executable: JitExecutable
    ) -> SameEachTime | None:
        """Return what is known of a call with arrays, if the same is wanted of each."""
        module = executable.module
        if (
            module.kept_arguments is None
            or not module.has_all_results
            or not executable.is_compiled
            or function.thread != threading.get_ident()
            or is_followed()
            or repro.is_asked_for()
        ):
            return None
        return self._recorder.same_each_time(executable)

    def _run_held(
        self,
        known: SameEachTime,
        executable: JitExecutable,
        leaves: Sequence[Any],
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run one of which the same is wanted each time: what `_run` does, with fewer questions."""
        kept = executable.module.kept_arguments
        assert kept is not None
        token = self._recorder.hold(known, [leaves[number] for number in kept])
        try:
            results = run(*args, **kwargs)
        except Exception as error:
            raise_if_interrupted(error)
            if token is not None:
                self._recorder.failed(token, error)
            raise
        if token is not None:
            outputs = jaxapi.leaves_of_results(results)
            self._hand_over(token, executable, outputs, has_compiled=False)
        return results

    def bind(self, args: tuple[Any, ...], params: dict[str, Any]) -> list[Any]:
        """Run what a transformation outside of ``jit`` has made of a jitted function."""
        resting.see_all()  # they may run the same program
        jaxapi.pause_watch()
        try:
            with jaxapi.evaluating():
                flat = jaxapi.flat_jit_call(args, params)
                try:
                    executable = _recordable(flat)
                except _NotRecordableError as error:
                    results = jaxapi.run_flat_jit_call(flat)
                    self._missed(params["name"], str(error))
                    return results
                call = _Call(executable, flat)
                changed = self._changed(call)
                if changed is not None:
                    return self._run_changed(changed)
                return self._run_flat(call)
        finally:
            jaxapi.resume_watch()

    def call_compiled(
        self,
        name: str,
        ahead: jaxapi.CompiledAhead | None,
        leaves: Any,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call for the user what was compiled ahead of time."""
        jaxapi.pause_watch()
        try:
            if ahead is None:
                results = run(*args, **kwargs)
                self._missed(
                    name,
                    "it was compiled before recording started, or loaded; only calls "
                    "through jax.jit are seen",
                )
                return results
            try:
                executable = executable_ahead(ahead)
                if not executable.module.is_recordable:
                    raise _NotRecordableError(_NOT_ARRAYS)
            except Exception as error:
                raise_if_interrupted(error)
                results = run(*args, **kwargs)
                self._missed(name, str(error))
                return results
            call = _Call(executable, jaxapi.called_with(ahead, leaves))
            return self._run(call, run, args, kwargs)
        finally:
            jaxapi.resume_watch()

    def _missed(self, name: str, reason: str) -> None:
        if _is_recorded():
            self._recorder.missed(name, reason)

    def _meet(self, fun: Any, info: Any) -> _Function:
        with self._lock:
            is_kept = fun in self._met
            # First: it raises where nothing may refer to `fun` weakly, as JAX does in this call.
            # JAX 0.10.2 to 0.12.0 may end the process where such a function is jitted again.
            self._met.add(fun)
            function = _Function(fun, info, is_kept=is_kept)
            if not is_kept:
                return function
            if len(self._functions) >= MAX_FUNCTIONS:
                self._functions.pop(next(iter(self._functions)))
            return self._functions.setdefault(identity(info), function)

    def _changed(self, call: _Call) -> _Call | None:
        """Return the call of another program, where the recorder needs one to learn how it ends."""
        plan = current_plan() if _is_recorded() else None
        module = call.executable.module
        is_watched, withholds = False, bool(module.donated) and repro.needs_inputs()
        if plan is not None:
            may_watch = plan.wants_flag and module.is_pure
            may_withhold = bool(module.donated) and plan.withholds_donation
            if (may_watch or may_withhold) and not self._recorder.ignores(call.executable):
                devices = call.executable.devices
                is_watched = may_watch and self._recorder.wants_flag(devices)
                withholds = may_withhold or withholds
        if withholds and jaxapi.donates_and_keeps(call.flat(), module.kept_arguments or ()):
            return None  # XLA refuses that, and would not without the donation
        for adds_flag in (True, False) if is_watched else (False,):
            if not adds_flag and not withholds:
                return None
            flat = call.flat()
            try:
                if adds_flag:
                    flat = jaxapi.with_result(flat, flag_of, FLAG_NAME)
                if withholds:
                    flat = jaxapi.without_donation(flat)
                executable = _recordable(flat)
                if adds_flag and not executable.is_compiled:
                    executable.lowered.compile()  # JAX finds it; the user is not to see it fail
                break
            except Exception as error:
                raise_if_interrupted(error)
                if adds_flag:
                    self._recorder.has_no_flag(call.executable, error)
        else:
            return None
        if withholds:
            flat = _without_taken(flat, call.flat(), module.kept_arguments or (), plan)
        return _Call(executable, flat)

    def _run_changed(self, call: _Call) -> list[Any]:
        """Run a program in the place of the user's; return the results that are the user's."""
        results = self._run_flat(call)
        return results[:-1] if call.executable.is_watched else results

    def _run_flat(self, call: _Call) -> list[Any]:
        """Run a call as JAX lowers it."""
        flat = call.flat()

        def run(*args: Any) -> list[Any]:
            return jaxapi.run_flat_jit_call(replace(flat, args=args))

        return self._run(call, run, flat.args, {})

    def _run(
        self, call: _Call, run: Callable[..., Any], args: Any, kwargs: Any, info: Any = None
    ) -> Any:
        """Run an execution, and tell how it ends to whoever wants to know.

        Args:
            call: The execution.
            run: Makes the call.
            args: What by position.
            kwargs: And with what else.
            info: What JAX knows of the jit, where arguments may be static.
        """
        handed = (call, run, args, kwargs, info)
        return run_followed(call.executable, self._run_recorded, handed, {})

    def _run_recorded(
        self, call: _Call, run: Callable[..., Any], args: Any, kwargs: Any, info: Any
    ) -> Any:
        token, has_begun = None, False
        is_new = not call.executable.is_compiled
        is_repro_asked_for = repro.is_asked_for()
        try:
            with _compiling(call.executable) if is_new else _WITHOUT:
                if _is_recorded():
                    token = self._recorder.before(call.executable, call)
                has_begun = True
                if token is not None:
                    # XLA may read them when the program has written to them: not what is recorded.
                    args, kwargs = jaxapi.own_arguments(info, args, kwargs)
                results = run(*args, **kwargs)
            if is_repro_asked_for:
                repro.wait_for_failure(results)
        except Exception as error:
            raise_if_interrupted(error)
            if not has_begun:
                raise
            if token is not None:
                self._recorder.failed(token, error)
            stage: repro.Stage = "run" if call.executable.is_compiled else "compile"
            repro.after_failure(stage, call.executable, call, error)
            raise
        if token is not None:
            outputs = call.outputs(jaxapi.leaves_of_results(results))
            self._hand_over(token, call.executable, outputs, has_compiled=is_new)
        if is_repro_asked_for:
            repro.after_run(call.executable, call)
        return results

    def _hand_over(
        self, token: Any, executable: JitExecutable, outputs: Sequence[Any], *, has_compiled: bool
    ) -> None:
        """Hand the outputs of an execution to the recorder."""
        if _all_outputs(executable, outputs) is not None:
            flag = outputs[-1] if executable.is_watched else None
            self._recorder.after(token, outputs, flag, has_compiled=has_compiled)


def _all_outputs(executable: JitExecutable, outputs: Sequence[Any]) -> Sequence[Any] | None:
    """Return the outputs of an execution; None, which is logged, where they are not all."""
    if len(outputs) == len(executable.output_names):
        return outputs
    _log.error(
        "the outputs of %s are not recorded: the arrays of one of its result classes "
        "differ from its constructor's",
        executable.name,
    )
    return None


def _may_rest(rest: Resting | None, leaves: Sequence[Any]) -> bool:
    """Return whether calls like one with these leaves may rest.

    XLA may read the memory of a NumPy array after the program has written to it: what is recorded
    is then another array than what ran.
    """
    trailing = None if rest is None else rest.trailing
    return trailing is None or not trailing.recorded_for or jaxapi.are_arrays(leaves)


class _NotRecordableError(Exception):
    """JAX is to run a call unseen."""


def _recordable(call: jaxapi.FlatCall) -> JitExecutable:
    """Return what a call runs.

    Raises:
        _NotRecordableError: It cannot be lowered, or not arrays alone go in and out.
    """
    try:
        executable = executable_of(call)
    except Exception as error:
        raise_if_interrupted(error)
        raise _NotRecordableError(f"{type(error).__name__}: {error}") from error
    if not executable.module.is_recordable:
        raise _NotRecordableError(_NOT_ARRAYS)
    return executable


def leaves_to_jax(source: str) -> bool:
    """Return whether calls of a function are no executions: those of JAX's own, unless named."""
    return not isinstance(source, jaxapi.UsersSource) and _is_left_to_jax(source, jaxapi.watch())


@functools.lru_cache(maxsize=4096)
def _is_left_to_jax(source: str, names: tuple[str, ...] | None) -> bool:
    if not jaxapi.is_source_of_jax(source):
        return False
    name = source.partition(" at ")[0]
    return not any(re.search(pattern, name) for pattern in names or ())


@functools.cache
def start_watching() -> None:
    """Let JAX ask for each call in threads that are watched; once a process."""
    jaxapi.use_jit_watcher(_Watcher(process_recorder()))


class _Scopes(threading.local):
    """How many scopes of `record` this thread is in."""

    depth = 0


_scopes = _Scopes()
_is_process_recorded = False


def _is_recorded() -> bool:
    """Return whether calls in this thread are recorded, and not only followed by the watchdog."""
    return _is_process_recorded or _scopes.depth > 0


class record(ContextDecorator):  # noqa: N801 - reads as a function, used as a scope and a decorator
    """Record calls of jitted functions inside: ``with snaprt.record(): ...``, ``@snaprt.record()``.

    Each call of a `jax.jit` function from Python is one execution; a function jitted inside it is
    part of it. Results are those of plain JAX. JAX's own functions (`jax.numpy.where`) count only
    if a condition names them. Lazy graphs that run inside are recorded in the same way. Scopes
    nest, and each thread has its own.

    Args:
        when: The conditions, as in SNAPRT_RECORD; separate several with semicolons. By default
            those of SNAPRT_RECORD and related variables, else every execution.
        folder: The folder for the files. By default SNAPRT_DUMP_DIR, else ``snaprt-dump``.

    Raises:
        UsageError: ``when`` is invalid.

    Examples:
        >>> train_step = jax.jit(lambda weights, x: weights - 0.1 * x)
        >>> with snaprt.record(when="name=lambda, first=1", folder="dump"):
        ...     for _ in range(3):
        ...         weights = train_step(jnp.ones(2), jnp.ones(2))
        >>> snaprt.dump_now()  # waits until the files are written
        []
        >>> len(list(Path("dump").glob("*.inputs.snap")))
        1
    """

    def __init__(self, when: str | None = None, folder: str | Path | None = None) -> None:
        self._conditions = None if when is None else parse_conditions(when)
        self._folder = None if folder is None else named_path(folder)
        # One for all calls of a decorated function: `first=2` is twice, not twice a call.
        self._plans: list[Plan] = []
        self._outer: list[Any] = []

    def __enter__(self) -> None:
        flags.take_over()
        start_watching()
        jaxapi.own_what_is_put()  # the writer reads it later
        plan = self._plan()
        outer = set_thread_plan(plan)
        conditions = () if plan is None else plan.conditions
        self._outer.append((outer, jaxapi.set_watch(names_in(conditions))))
        _scopes.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            process_recorder().program_failed(error)
        _scopes.depth -= 1
        outer, watch = self._outer.pop()
        jaxapi.restore_watch(watch)
        set_thread_plan(outer)

    def _plan(self) -> Plan | None:
        """Return the plan of the scope, None for the environment's, which may change in it."""
        if self._conditions is None and self._folder is None and current_plan() is not None:
            return None
        if not self._plans:
            self._plans.append(plan_with(self._conditions, self._folder))
        return self._plans[0]

    def _recreate_cm(self) -> record:
        again = record(folder=self._folder)
        again._conditions, again._plans = self._conditions, self._plans
        return again


def watch_process() -> None:
    """Look at calls of jitted functions in every thread from here on, for SNAPRT_REPRO_AFTER.

    Unlike `record_process`, it records nothing that the environment does not ask for. JAX may be
    about to look for its devices.
    """
    global _is_process_recorded
    _is_process_recorded = True
    start_watching()
    plan = current_plan()
    jaxapi.set_process_watch(names_in(() if plan is None else plan.conditions))


def follow_process() -> None:
    """Follow which calls of jitted functions end, in every thread from here on; record nothing."""
    start_watching()
    if jaxapi.process_watch() is None:
        jaxapi.set_process_watch(())


def record_process() -> None:
    """Record calls of jitted functions in every thread from here on, as the environment says.

    Where it says nothing of what to record, everything is.

    Raises:
        UsageError: A variable has a value that is not allowed.
    """
    flags.take_over()
    check_plan()
    if current_plan() is None and "NEURON_DUMP_HLO_SNAPSHOT" not in os.environ:
        os.environ["SNAPRT_RECORD"] = "all"
    is_watched_already = _is_process_recorded
    watch_process()
    jaxapi.own_what_is_put()
    jaxapi.when_job_is_joined(tell_plan)
    if not is_watched_already:
        process_recorder().say_if_nothing_runs()
    for name, source in () if is_watched_already else jaxapi.jit_calls_under_way():
        if not leaves_to_jax(source):
            process_recorder().missed(name, "recording started while JAX was already calling it")
