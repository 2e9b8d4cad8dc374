"""Puts a cache in the place of JAX's own, and calls of ours before a compilation or a load.

Checked with jax 0.10.2 and 0.12.0: each program passes ``compile_or_get_cached`` once before it
first runs, and ``backend_compile_and_load`` where no cache has it.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax._src import cache_key as _cache_key
from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import distributed as _distributed
from jaxlib.mlir import ir

from snaprt.host.interruptions import raise_if_interrupted
from snaprt.jaxapi.compiler.executables import compile_options
from snaprt.jaxapi.compiler.known_lowerings import (
    Lowering,
    NotLowered,
    always_lower,
    lowering_of,
    stands_for,
)
from snaprt.jaxapi.compiler.modules import bytecode_without_locations, stablehlo_text
from snaprt.jaxapi.installation import Device, device_list
from snaprt.jaxapi.tracing.traces import once


@dataclass(frozen=True)
class Compilation:
    """What JAX is about to compile, in the parts that make an executable."""

    name: str  # the module's name, such as ``jit_train_step``
    # The module as bytecode: without source locations, and with functions named by their order, for
    # their names come from Python and change nothing.
    module: bytes
    options: bytes  # serialized compile options, without where to dump or to cache
    topology: bytes  # what identifies the topology of the devices, in all processes alike
    extra: str  # what JAX's hook for additions to the key returns
    devices: tuple[Device, ...]
    written: Any  # the module as JAX has it, with source locations
    digest: str | None = None  # of ``module``, where that is not there
    lowering: Lowering | None = None  # what the module was lowered from, where that was asked about


JitExecutable = tuple[Any, int]
"""What JAX takes from its cache: an executable that is loaded, and the seconds its making took."""


def load_jit_executable(payload: bytes, devices: Sequence[Device]) -> JitExecutable:
    """Load what JAX puts into its cache, as JAX does when it finds it there."""
    packed = _compilation_cache.decompress_executable(payload)
    serialized, seconds = _compilation_cache.extract_executable_and_time(packed)
    return devices[0].client.deserialize_executable(serialized, device_list(devices)), seconds


class _OwnCache(threading.local):
    """Whether this thread keeps what it compiles elsewhere."""

    bypassed = False
    bypasses_jaxs = False


_own_cache = _OwnCache()
_log = logging.getLogger("snaprt.cache")
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_compilation_cache(
    cache: Any,
    key_of: Callable[[Compilation], str | None],
    loaded: Callable[[str, Sequence[Device]], JitExecutable | None],
    compiled: Callable[[BaseException | None], None],
) -> None:
    """Put ``cache`` in the place of JAX's compilation cache, whatever directory JAX was given.

    Checked with jax 0.10.2 and 0.12.0: JAX makes its cache at the first compilation, unless one is
    there. It asks `get_cache_key` for every key.

    Args:
        cache: Has ``get`` and ``put`` as JAX's ``CacheInterface``.
        key_of: Returns the string by which JAX asks the cache for a compilation; None if it is not
            to ask.
        loaded: Returns what is behind a string where it has been loaded for these devices already.
        compiled: Called after every compilation or load, in its thread, with the error it ended
            with.
    """

    def get_cache_key(
        module: Any, devices: np.ndarray, options: Any, client: Any, *ignored: Any, **kwargs: Any
    ) -> str | None:
        if _own_cache.bypassed:
            return None
        try:
            digest = stands_for(module)
            arguments = (module, *ignored, *kwargs.values())
            compilation = Compilation(
                name=module_name(module),
                module=b"" if digest else _module_of_compilation(*arguments),
                options=_options_of_compilation(options, client),
                topology=_topology(devices),
                extra=_cache_key.custom_hook(),
                devices=tuple(devices.flat),
                written=module,
                digest=digest,
                lowering=lowering_of(module),
            )
            return key_of(compilation)
        except Exception as error:  # whatever this JAX does otherwise: the program goes on
            raise_if_interrupted(error)
            _log.warning("compiling a program without the compile cache: %r", error)
            return None

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            compiled(sys.exc_info()[1])

    write = _compiler._cache_write

    def cache_write(
        key: str, seconds: float, name: str, backend: Any, executable: Any, *callbacks: Any
    ) -> None:
        if _distributed.global_state.process_id == 0:
            write(key, seconds, name, backend, executable, *callbacks)
            return
        # JAX leaves it to process 0; others would compile what is theirs alone at every start.
        if any(callbacks) or seconds < _config.persistent_cache_min_compile_time_secs.value:
            return
        try:
            _compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
        except Exception as error:
            if _config.raise_persistent_cache_errors.value:
                raise
            _log.warning("cannot store %s in the compile cache: %r", name, error)

    get_from_cache = _compilation_cache.get_executable_and_time

    def get_executable_and_time(
        cache_key: str, compile_options: Any, backend: Any, executable_devices: Any, *callbacks: Any
    ) -> Any:
        # Callbacks into Python are bound to an executable as it is loaded (JAX 0.12).
        ready = None if any(callbacks) else loaded(cache_key, tuple(executable_devices))
        if ready is not None:
            return ready
        return get_from_cache(cache_key, compile_options, backend, executable_devices, *callbacks)

    compile_and_load = _compiler.backend_compile_and_load

    def backend_compile_and_load(backend: Any, module: Any, *arguments: Any, **kwargs: Any) -> Any:
        if stands_for(module) is not None:
            raise NotLowered
        return compile_and_load(backend, module, *arguments, **kwargs)

    _compilation_cache.reset_cache()
    _compilation_cache._cache = cache
    _compilation_cache._cache_initialized = True
    _compilation_cache.get_cache_key = get_cache_key  # type: ignore[assignment]
    _compilation_cache.get_executable_and_time = get_executable_and_time
    _compiler._cache_write = cache_write  # type: ignore[assignment]
    _compiler.backend_compile_and_load = backend_compile_and_load
    jax.monitoring.register_event_duration_secs_listener(heard)


@once
def _heed_bypass() -> None:
    get_cache_key = _compilation_cache.get_cache_key

    @functools.wraps(get_cache_key)
    def key_or_none(*arguments: Any, **kwargs: Any) -> str | None:
        return None if _own_cache.bypasses_jaxs else get_cache_key(*arguments, **kwargs)

    _compilation_cache.get_cache_key = key_or_none  # type: ignore[assignment]


@contextmanager
def without_compilation_cache(*, keeps_jaxs: bool = False) -> Iterator[None]:
    """Keep what is compiled inside the context out of a cache of ours under JAX.

    Args:
        keeps_jaxs: Whether JAX's own cache is used, for what is not to be serialized: on a CPU, a
            copy of an executable that was loaded calls functions that it lacks.
    """
    _heed_bypass()
    before = _own_cache.bypassed, _own_cache.bypasses_jaxs
    _own_cache.bypassed, _own_cache.bypasses_jaxs = True, not keeps_jaxs
    try:
        yield
    finally:
        _own_cache.bypassed, _own_cache.bypasses_jaxs = before


class _Collector:
    """Takes the place of a hash object, and keeps what it is fed."""

    def __init__(self) -> None:
        self.content = b""

    def update(self, content: bytes) -> None:
        self.content += content


def _hashed(feed: Callable[..., Any], *arguments: Any) -> bytes:
    collector = _Collector()
    feed(collector, *arguments)
    return collector.content


def _topology(devices: np.ndarray) -> bytes:
    """Return what identifies the topology of ``devices``, the same in each process of a job."""
    if jax.process_count() == 1:
        return _hashed(_cache_key._hash_accelerator_config, devices)
    # XLA's fingerprint differs between the processes of a job.
    client_devices = devices.flat[0].client.devices()
    described = [
        [getattr(device, name, None) for name in ("id", "process_index", "device_kind", "coords")]
        for device in client_devices
    ]
    return repr((described, [device.id for device in devices.flat])).encode()


def _module_of_compilation(module: Any, *ignored: Any) -> bytes:
    if _config.compilation_cache_include_metadata_in_key.value:
        return _hashed(_cache_key._hash_computation, module, *ignored)
    return _hashed(_cache_key._hash_computation, _without_names(module), *ignored)


def _without_names(module: Any) -> Any:
    with module.context, ir.Location.unknown():
        anonymous = module.operation.clone()
        anonymous.attributes["sym_name"] = ir.StringAttr.get("module")
        operations = list(anonymous.regions[0].blocks[0].operations)
        symbols = [operation for operation in operations if "sym_name" in operation.attributes]
        private = [operation for operation in symbols if _is_private(operation)]
        prefix = "snaprt"
        while any(
            _name(operation).startswith(f"{prefix}.")
            for operation in symbols
            if not _is_private(operation)
        ):
            prefix += "_"
        # A function of the user's may have one of these names: first all get names that none has.
        longest = max([len(_name(operation)) for operation in symbols], default=0)
        for form in ("_" * longest + ".{}", prefix + ".{}"):
            for number, function in enumerate(private):
                old, new = _name(function), form.format(number)
                ir.SymbolTable.replace_all_symbol_uses(old, new, anonymous.operation)
                ir.SymbolTable.set_symbol_name(function, new)
        return anonymous


def _name(function: Any) -> str:
    return str(function.attributes["sym_name"].value)


def _is_private(operation: Any) -> bool:
    attributes = operation.attributes
    return (
        operation.operation.name == "func.func"
        and "sym_visibility" in attributes
        and attributes["sym_visibility"].value == "private"
        # XLA knows some of its own functions by their names.
        and not _name(operation).startswith("xla.")
    )


# Options that say where XLA writes and what it logs, beside those that JAX leaves out itself.
_OPTIONS_WITHOUT_EFFECT: Mapping[str, str | bool | int] = {
    "xla_detailed_logging": False,
    "xla_enable_dumping": False,
    "xla_gpu_dump_autotune_logs_to": "",
    "xla_gpu_dump_autotune_results_to": "",
    "xla_gpu_experimental_autotune_cache_mode": 0,
    "xla_gpu_kernel_cache_file": "",
    "xla_gpu_per_fusion_autotune_cache_dir": "",
}


def options_in_effect(devices: Sequence[Device]) -> bytes:
    """Return XLA's options for programs over ``devices``, without where to dump or to cache."""
    return _options_of_compilation(compile_options(devices), devices[0].client)


def _options_of_compilation(options: Any, client: Any) -> bytes:
    options = copy.deepcopy(options)  # the compiler gets the original
    build_options = options.executable_build_options
    flags = build_options.debug_options
    for name, value in _OPTIONS_WITHOUT_EFFECT.items():
        if hasattr(type(flags), name):
            setattr(flags, name, value)
    return _hashed(
        _cache_key._hash_serialized_compile_options,
        options,
        client.platform == "gpu",  # whose processes share entries
    )


#: What may be the address of an object, in the text of a module.
_ADDRESS: Final = re.compile(r"(?<![\w.])\d{9,20}(?![\w.])")


@dataclass(frozen=True)
class PlannedCompilation:
    """A program that JAX is about to compile or to load."""

    name: str  # the module's, such as ``jit_train_step``
    devices: tuple[Device, ...]
    options: bytes  # serialized compile options, without where to dump or to cache
    module: Any  # MLIR, with source locations


def before_compile_or_load(call: Callable[[PlannedCompilation], None]) -> None:
    """Call ``call`` before each program that JAX compiles or loads.

    What it raises goes to the user. Programs that snaprt compiles for itself are left out.
    """
    always_lower()
    original = _compiler.compile_or_get_cached

    @functools.wraps(original)
    def compile_or_get_cached(
        backend: Any, module: Any, devices: Any, options: Any, *arguments: Any, **kwargs: Any
    ) -> Any:
        if not _own_cache.bypassed:
            serialized = _options_of_compilation(options, backend)
            call(PlannedCompilation(module_name(module), tuple(devices.flat), serialized, module))
        return original(backend, module, devices, options, *arguments, **kwargs)

    _compiler.compile_or_get_cached = compile_or_get_cached  # type: ignore[assignment]


def before_compile(call: Callable[[Any, bool], None]) -> None:
    """Call ``call`` before XLA compiles a module; what it raises goes to the user.

    Its arguments are the module and whether snaprt compiles it for itself, as for a lazy graph.
    """
    always_lower()
    original = _compiler.backend_compile_and_load

    @functools.wraps(original)
    def backend_compile_and_load(backend: Any, module: Any, *arguments: Any, **kwargs: Any) -> Any:
        call(module, _own_cache.bypassed)
        return original(backend, module, *arguments, **kwargs)

    _compiler.backend_compile_and_load = backend_compile_and_load


def module_name(module: Any) -> str:
    """Return the name of a module in MLIR, as in ``jit_train_step``."""
    return str(module.operation.attributes["sym_name"].value)


def content_in_any_process(module: Any, *, names_objects: bool) -> bytes:
    """Return a module's content without source locations.

    Args:
        module: MLIR.
        names_objects: Whether it names objects of this process by their addresses, which are left
            out.
    """
    if not names_objects:
        return bytecode_without_locations(module)
    return _ADDRESS.sub("", stablehlo_text(module)).encode()
