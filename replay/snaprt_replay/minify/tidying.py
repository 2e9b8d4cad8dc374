"""Take out of a cut program what does nothing: tuples taken apart again, parameters never read.

It must not know why the program was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import (
    Editor,
    called_computations,
    entry_computation,
    instructions,
    parameters,
    reached,
    root_instruction,
)


def tidy(modules: Sequence[XlaMessage], inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Tidy modules that take the same inputs, in place, and return the inputs still read."""
    for module in modules:
        _fold_tuples(module)
    read = set().union(*(_read_parameters(module) for module in modules))
    kept = [number for number in range(len(inputs)) if number in read]
    numbers = {old: new for new, old in enumerate(kept)}
    for module in modules:
        _keep(module, numbers)
        _name_parameters(module)
    return tuple(inputs[number] for number in kept)


def _fold_tuples(module: XlaMessage) -> None:
    entry = entry_computation(module)
    by_id = {one.id: one for one in entry.instructions}
    folded: dict[int, int] = {}
    for one in entry.instructions:
        one.operand_ids[:] = [folded.get(operand, operand) for operand in one.operand_ids]
        if one.opcode == "get-tuple-element":
            source = by_id[one.operand_ids[0]]
            if source.opcode == "tuple":
                folded[one.id] = source.operand_ids[one.tuple_index]


def _used(entry: XlaMessage) -> set[int]:
    by_id = {one.id: one for one in entry.instructions}
    return reached([entry.root_id], lambda one: by_id[one].operand_ids)


def _read_parameters(module: XlaMessage) -> set[int]:
    entry = entry_computation(module)
    used = _used(entry)
    return {one.parameter_number for one in parameters(entry) if one.id in used}


def _keep(module: XlaMessage, numbers: Mapping[int, int]) -> None:
    """Keep what the root depends on and the parameters of these numbers, numbered anew."""
    entry = entry_computation(module)
    used = _used(entry)

    def replace(one: XlaMessage) -> list[XlaMessage]:
        if one.opcode != "parameter":
            return [one] if one.id in used else []
        if one.parameter_number not in numbers:
            return []
        one.parameter_number = numbers[one.parameter_number]
        return [one]

    Editor(module).replace_each(entry, replace)
    shapes = [one.shape for one in parameters(entry)]
    for signature in (entry.program_shape, module.host_program_shape):
        signature.ClearField("parameters")
        signature.parameters.extend(shapes)
        signature.ClearField("parameter_names")
        signature.parameter_names.extend(f"p{number}" for number in range(len(shapes)))
    _drop_uncalled(module, entry)


def _name_parameters(module: XlaMessage) -> None:
    """Give parameters short names: theirs grow with every cut."""
    entry = entry_computation(module)
    taken = {one.name for one in instructions(module)}
    for one in (*parameters(entry), root_instruction(entry)):
        name = f"arg{one.parameter_number}" if one.opcode == "parameter" else "outputs"
        while name in taken and name != one.name:
            name += "_"
        taken.add(name)
        one.name = name


def _drop_uncalled(module: XlaMessage, entry: XlaMessage) -> None:
    called = {one.id for one in called_computations(module, [entry.id])}
    kept = []
    for computation in module.computations:
        if computation.id in called:
            kept.append(type(computation)())
            kept[-1].CopyFrom(computation)
    module.ClearField("computations")
    module.computations.extend(kept)
