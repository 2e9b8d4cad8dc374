"""Read the files that XLA itself dumps.

For a module named ``module_NNNN.NAME``, an execution writes to the folder of ``--xla_dump_to``

- ``.snapshot.FINGERPRINT.pb``, with ``--xla_dump_hlo_snapshots``: an HloSnapshot, that is, the
  optimized module, the arguments and the results;
- ``.execution_NNNN.hlo_unoptimized_snapshot.pb``, with ``--xla_dump_hlo_unoptimized_snapshots``,
  instead of the former: the module before optimization and the arguments, no results. Two runs of
  one program can write both into one folder. With ``--xla_dump_hlo_as_proto`` and without
  ``--xla_dump_hlo_as_text``, the arguments follow the message instead of being part of it
  (xla/runtime/large_hlo_snapshot_serialization/serialization.h).

With ``--xla_dump_hlo_as_proto``, compilation also writes ``.before_optimizations.hlo.pb``.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt.hlo.literals import (
    TOKEN,
    dtype_of,
    leaf_shapes,
    literal_leaves,
    literal_to_array,
    read_literal,
)
from snaprt.hlo.proto import (
    HloInputs,
    HloModuleProto,
    HloProto,
    HloSnapshot,
    HloUnoptimizedSnapshot,
    XlaMessage,
    parse,
    serialize,
)
from snaprt.host.regular_files import read_file
from snaprt_replay.hlo.hlo_module import (
    entry_computation,
    library_calls,
    parameters,
    root_instruction,
)
from snaprt_replay.load import sniff
from snaprt_replay.load.case import Case, Signature, name_arrays, same_bits
from snaprt_replay.load.modules import without_effects
from snaprt_replay.load.restore import restore

_Arrays = tuple[np.ndarray, ...]


def load_hlo_snapshot(path: Path) -> Case:
    """Load an HloSnapshot: the optimized module, the arguments and the results of one execution.

    If an unoptimized snapshot of the same execution is next to it, the module is taken from there:
    it is the program as the user wrote it, which any device can compile.

    Raises:
        SnapshotError: The file is damaged or foreign, or its module cannot be replayed.
    """
    snapshot = parse(HloSnapshot, read_file(path), path)
    inputs, unread = _arguments(snapshot.arguments, path)
    outputs, notes = _recorded_results(snapshot, path)
    module, source = _module_of_snapshot(path, snapshot, inputs or ())
    platform = snapshot.execution_platform
    environment = {"platform": platform} if platform else {}
    notes = (*source, *unread, *notes)
    return _load(path, sniff.HLO_SNAPSHOT, module, notes, inputs, outputs, environment)


def load_unoptimized_snapshot(path: Path) -> Case:
    """Load an HloUnoptimizedSnapshot: the module before optimization, and the arguments.

    If the HloSnapshot of the same execution is next to it, the results are taken from there.

    Raises:
        SnapshotError: The file is damaged or foreign, ran on several devices, or its module cannot
            be replayed.
    """
    module, inputs, unread = read_unoptimized_snapshot(path)
    outputs: _Arrays | None = None
    note = "XLA records no results with an unoptimized module"
    for neighbor in _beside(path, ".snapshot.*.pb"):
        results = _results_of_same_execution(neighbor, module.name, inputs or ())
        if results is not None:
            outputs, note = results, f"the results are those of {neighbor.name}"
            break
    form, notes = sniff.HLO_UNOPTIMIZED_SNAPSHOT, (note, *unread)
    return _load(path, form, module, notes, inputs, outputs)


def read_unoptimized_snapshot(path: Path) -> tuple[XlaMessage, _Arrays | None, Sequence[str]]:
    """Read an HloUnoptimizedSnapshot.

    Returns:
        The module, the arguments if the file has all of them, and notes on those it lacks.

    Raises:
        SnapshotError: The file is damaged or foreign, or ran on several devices.
    """
    content = memoryview(read_file(path))
    message, literals = sniff.unoptimized_snapshot(content)
    snapshot = parse(HloUnoptimizedSnapshot, message, path)
    if len(snapshot.partitions) > 1:
        raise SnapshotError(
            f"{path}: the program ran on {len(snapshot.partitions)} devices at once.",
            hint="XLA's snapshots can be replayed only for programs on one device; record with "
            "snaprt.",
        )
    partition = snapshot.partitions[0] if snapshot.partitions else HloInputs()
    if not partition.arguments_descriptors:
        return snapshot.hlo_module, *_arguments(partition.arguments, path)
    values: list[np.ndarray] = []
    for number, descriptor in enumerate(partition.arguments_descriptors):
        size = descriptor.argument_size_bytes
        with _naming(path, f"argument {number}"):
            values += read_literal(literals[:size])
        literals = literals[size:]
    return snapshot.hlo_module, tuple(values), ()


def load_hlo_module(path: Path) -> Case:
    """Load a bare module: an HloProto, as ``--xla_dump_hlo_as_proto`` writes, or HloModuleProto.

    Raises:
        SnapshotError: The file is neither, is damaged, or its module cannot be replayed.
    """
    content = read_file(path)
    for message_type, module_of in _BARE_MODULES:
        try:
            module = module_of(parse(message_type, content, path))
            entry_computation(module)
        except SnapshotError:
            continue
        return _load(path, sniff.HLO_MODULE, module)
    raise SnapshotError(
        f"{path}: not a complete xla.HloProto or xla.HloModuleProto message.",
        hint="The file is truncated, damaged, or of another kind; dump it again.",
    )


def load_hlo_text(path: Path) -> Case:
    """Load a module written as HLO text: ``HloModule NAME, ...``.

    Raises:
        SnapshotError: XLA's parser rejects the text, or constants are missing from it.
    """
    try:
        text = read_file(path).decode()
        if _ELIDED.search(text):
            raise SnapshotError(
                f"{path}: large constants are missing from the text (`constant({{...}})`).",
                hint="Dump it with --xla_dump_large_constants, or as a proto with "
                "--xla_dump_hlo_as_proto.",
            )
        proto = jaxapi.parse_hlo_text(text)
    except ValueError as error:  # UnicodeDecodeError is one
        raise SnapshotError(
            f"{path}: this XLA cannot parse the HLO text: {error}",
            hint="HLO text changes between versions of XLA; try the jaxlib that wrote it.",
        ) from error
    return _load(path, sniff.HLO_TEXT, parse(HloModuleProto, proto, path))


_ELIDED = re.compile(r"constant\(\{\.\.\.\}\)")
_BARE_MODULES: Sequence[tuple[type[XlaMessage], Callable[[XlaMessage], XlaMessage]]] = (
    (HloModuleProto, lambda module: module),
    (HloProto, lambda proto: proto.hlo_module),
)


def _arrays(literals: Iterable[XlaMessage], path: Path, what: str = "argument") -> _Arrays:
    values = []
    leaves = (leaf for literal in literals for leaf in literal_leaves(literal))
    for number, leaf in enumerate(leaves):
        with _naming(path, f"{what} {number}"):
            values.append(literal_to_array(leaf))
    return tuple(values)


def _arguments(literals: Sequence[XlaMessage], path: Path) -> tuple[_Arrays | None, Sequence[str]]:
    unread = [str(n) for n, literal in enumerate(literals) if not literal.shape.element_type]
    if not unread:
        return _arrays(literals, path), ()
    return None, [
        f"XLA wrote no value for argument {', '.join(unread)} because it could not read it back: "
        "pass the inputs with --inputs, or random ones with --random"
    ]


def _recorded_results(snapshot: XlaMessage, path: Path) -> tuple[_Arrays | None, Sequence[str]]:
    is_there = snapshot.HasField("result") and snapshot.result.shape.element_type
    outputs = _arrays([snapshot.result], path, "result") if is_there else ()
    with _naming(path):
        root = root_instruction(entry_computation(snapshot.hlo.hlo_module))
    expected = [leaf for leaf in leaf_shapes(root.shape) if leaf.element_type != TOKEN]
    if len(outputs) == len(expected):
        return outputs, ()
    return None, [
        f"the file holds {len(outputs)} of {len(expected)} results: the execution failed, an "
        "input was donated, or the file is truncated; there is nothing to compare with"
    ]


def _module_of_snapshot(
    path: Path, snapshot: XlaMessage, inputs: _Arrays
) -> tuple[XlaMessage, Sequence[str]]:
    """Return the best available module for an HloSnapshot, and a note on where it is from."""
    own = snapshot.hlo.hlo_module
    for neighbor in _beside(path, ".execution_*.hlo_unoptimized_snapshot.pb"):
        with contextlib.suppress(OSError, SnapshotError):  # it may help, and is no reason to fail
            module, arguments, _ = read_unoptimized_snapshot(neighbor)
            if module.name == own.name and arguments is not None and _same(arguments, inputs):
                return module, [f"using the unoptimized module of {neighbor.name}"]
    libraries = library_calls(own)
    if not libraries:
        return own, []
    for neighbor in _beside(path, ".before_optimizations.hlo.pb"):
        unoptimized = _parse_if_possible(HloProto, neighbor)
        if unoptimized is not None and _same_signature(unoptimized.hlo_module, own):
            return unoptimized.hlo_module, [f"using the unoptimized module of {neighbor.name}"]
    return own, [
        f"the optimized module calls device libraries ({', '.join(libraries)}): it replays only "
        f"on {snapshot.execution_platform or 'such a device'}. To dump the module before "
        "optimization next to it, add --xla_dump_hlo_as_proto"
    ]


def _results_of_same_execution(path: Path, name: str, inputs: _Arrays) -> _Arrays | None:
    snapshot = _parse_if_possible(HloSnapshot, path)
    if snapshot is None or snapshot.hlo.hlo_module.name != name:
        return None
    with contextlib.suppress(SnapshotError):
        if _same(_arrays(snapshot.arguments, path), inputs):
            return _recorded_results(snapshot, path)[0]
    return None


def _beside(path: Path, ending: str) -> Sequence[Path]:
    """Return the files of the same module in the same folder, as XLA names them."""
    match = _MODULE_PREFIX.match(path.name)
    if match is None:
        return ()
    pattern = re.compile(re.escape(match[0]) + re.escape(ending).replace(r"\*", "[^.]*"))
    return sorted(
        candidate for candidate in path.parent.iterdir() if pattern.fullmatch(candidate.name)
    )


_MODULE_PREFIX = re.compile(
    r"module_\d+\..*?(?=\.(snapshot\.[^.]*\.pb|execution_\d+\.hlo_unoptimized_snapshot\.pb"
    r"|before_optimizations\.|cpu_after_|gpu_after_|after_)|$)"
)


def _parse_if_possible(message_type: type[XlaMessage], path: Path) -> XlaMessage | None:
    # A neighbor may help, but is never a reason to fail.
    try:
        return parse(message_type, read_file(path), path)
    except (OSError, SnapshotError):
        return None


def _same(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return len(values) == len(others) and all(map(same_bits, values, others))


def _same_signature(first: XlaMessage, second: XlaMessage) -> bool:
    def signature(module: XlaMessage) -> object:
        shapes = (*module.host_program_shape.parameters, module.host_program_shape.result)
        return module.name, [
            (leaf.element_type, *leaf.dimensions) for shape in shapes for leaf in leaf_shapes(shape)
        ]

    return signature(first) == signature(second)


def _environment(path: Path) -> dict[str, str]:
    """Return the XLA flags that differ from their defaults, if XLA dumped them with the file."""
    for options in _beside(path, ".debug_options"):
        try:
            lines = read_file(options).decode(errors="replace").splitlines()
        except OSError:
            return {}
        flags = [_FLAG.sub(r"--\1=\2", line.strip()) for line in lines if _FLAG.match(line.strip())]
        return {"xla_flags": " ".join(flag for flag in flags if "--xla_dump_" not in flag)}
    return {}


_FLAG = re.compile(r'(\w+): *"?(.*?)"?$')


@contextlib.contextmanager
def _naming(path: Path, value: str = "") -> Iterator[None]:
    """Prepend the names of the file and of a value to the message of an error that lacks them."""
    try:
        yield
    except SnapshotError as error:
        if error.message.startswith(str(path)):
            raise
        where = f"{path}: {value}" if value else str(path)
        raise SnapshotError(f"{where}: {error.message}", hint=error.hint) from error


def _load(
    path: Path,
    form: str,
    module: XlaMessage,
    notes: Sequence[str] = (),
    inputs: _Arrays | None = None,
    outputs: _Arrays | None = None,
    environment: Mapping[str, str] | None = None,
) -> Case:
    try:
        with _naming(path):
            changes = restore(module)
            declared = parameters(entry_computation(module))
            are_arrays = [parameter.shape.element_type != TOKEN for parameter in declared]
            alone = without_effects(jaxapi.hlo_to_stablehlo(serialize(module)))
            signature = []
            for parameter in itertools.compress(declared, are_arrays):
                with _naming(path, f"parameter {parameter.parameter_number}, {parameter.name}"):
                    shape = parameter.shape
                    signature.append(Signature(tuple(shape.dimensions), dtype_of(shape)))
    except ValueError as error:
        raise SnapshotError(
            f"{path}: cannot convert its module to StableHLO: {error}",
            hint="Record the program with snaprt instead, or dump its unoptimized module with "
            "--xla_dump_hlo_unoptimized_snapshots.",
        ) from error
    if inputs is not None:
        if len(inputs) == len(are_arrays):
            # XLA writes a token as an array without elements.
            inputs = tuple(itertools.compress(inputs, are_arrays))
        _check_inputs(path, inputs, signature)
    changes = (*changes, *alone.notes)
    conversion = [f"for replay, {'; '.join(changes)}"] if changes else []
    return Case(
        path=path,
        format=form,
        name=module.name,
        stablehlo=alone.stablehlo,
        inputs=None if inputs is None else name_arrays(inputs, "arg"),
        outputs=None if outputs is None else name_arrays(outputs, "out"),
        parameters=tuple(signature),
        environment={**(environment or {}), **_environment(path)},
        notes=(*notes, *conversion),
        with_branches_that_call=alone.with_branches_that_call,
    )


def _check_inputs(path: Path, inputs: _Arrays, signature: Sequence[Signature]) -> None:
    recorded = [Signature(value.shape, value.dtype) for value in inputs]
    if recorded != list(signature):
        raise SnapshotError(
            f"{path}: the recorded arguments ({', '.join(map(str, recorded))}) do not match the "
            f"parameters of the module ({', '.join(map(str, signature))}).",
            hint="XLA omits arguments that it could not read back; record with snaprt.",
        )
