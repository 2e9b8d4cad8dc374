"""An HLO module as a graph that can be edited; it must not know files, devices or JAX.

HloModuleProto is a flat list of computations, each a flat list of instructions in dependency order,
with ids for edges. That makes it the easiest form of a program to cut: `Editor` makes and replaces
instructions, `verify` says whether the result still is a module that XLA can read. XLA itself
answers some malformed modules with a failed CHECK, which ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from snaprt.errors import SnapshotError
from snaprt.snapshot.xla import HloInstructionProto, XlaMessage

_CUSTOM_CALL = "custom-call"
_LOW_BITS = 2**32 - 1


def entry_computation(module: XlaMessage) -> XlaMessage:
    """Return the module's entry computation; raise SnapshotError if it has none."""
    for computation in module.computations:
        if computation.id == module.entry_computation_id:
            return computation
    raise SnapshotError(
        f"HLO module {module.name!r} has no entry computation.",
        hint="The file is damaged or of another kind.",
    )


def root_instruction(computation: XlaMessage) -> XlaMessage:
    """Return the instruction that gives the computation's result; raise SnapshotError if none."""
    for instruction in reversed(computation.instructions):
        if instruction.id == computation.root_id:
            return instruction
    raise SnapshotError(f"HLO computation {computation.name!r} has no root instruction.")


def parameters(computation: XlaMessage) -> list[XlaMessage]:
    """Return the computation's parameter instructions in order of their number."""
    found = [one for one in computation.instructions if one.opcode == "parameter"]
    return sorted(found, key=lambda instruction: instruction.parameter_number)


def instructions(module: XlaMessage) -> Iterator[XlaMessage]:
    """Yield every instruction of every computation of the module."""
    for computation in module.computations:
        yield from computation.instructions


def library_calls(module: XlaMessage) -> tuple[str, ...]:
    """Return the targets of custom calls that a compiler put there: ``__cublas$gemm`` and such."""
    targets = {one.custom_call_target for one in instructions(module) if one.opcode == _CUSTOM_CALL}
    return tuple(sorted(target for target in targets if target.startswith("__")))


class Editor:
    """Make new instructions for a module, and replace those it has.

    Args:
        module: The HloModuleProto to edit in place.
    """

    def __init__(self, module: XlaMessage) -> None:
        self.module = module
        # XLA keeps the low half of an id alone where it numbers instructions again.
        self._last_id = max((one.id & _LOW_BITS for one in instructions(module)), default=0)

    def new(
        self,
        opcode: str,
        shape: XlaMessage,
        operands: Sequence[XlaMessage],
        *,
        like: XlaMessage,
        dimensions: Sequence[int] = (),
    ) -> XlaMessage:
        """Return a new instruction, not yet in any computation.

        Args:
            opcode: XLA's name of the operation.
            shape: The result's ShapeProto; it is copied.
            operands: The instructions it reads, in order.
            like: The instruction it is made for, which lends its metadata and part of its name.
            dimensions: What the operation uses the field `dimensions` for.
        """
        self._last_id += 1
        instruction = HloInstructionProto(
            name=f"{like.name}.{opcode}.{self._last_id}",
            opcode=opcode,
            id=(like.id & ~_LOW_BITS) | self._last_id,
            operand_ids=[operand.id for operand in operands],
            dimensions=dimensions,
        )
        instruction.shape.CopyFrom(shape)
        if like.HasField("metadata"):
            instruction.metadata.CopyFrom(like.metadata)
        return instruction

    def replace_each(
        self, computation: XlaMessage, replace: Callable[[XlaMessage], Sequence[XlaMessage]]
    ) -> None:
        """Put what `replace` returns for each instruction in its place, in order.

        The last of them usually keeps the old id, so that the users of the old value read it.
        """
        kept: list[XlaMessage] = []
        for instruction in computation.instructions:
            kept.extend(replace(instruction))
        # Copies, because clearing the field may free what the list refers to.
        copies = []
        for instruction in kept:
            copies.append(HloInstructionProto())
            copies[-1].CopyFrom(instruction)
        computation.ClearField("instructions")
        computation.instructions.extend(copies)


def verify(module: XlaMessage) -> None:
    """Check that a module is one that XLA can read.

    Raises:
        SnapshotError: It has no entry or root, a value is used before it is defined, an id or a
            parameter number is used twice, or a call leads nowhere. The message names the place.
    """
    entry_computation(module)
    defined_computations: set[int] = set()
    for computation in module.computations:
        _verify_computation(computation, defined_computations)
        if computation.id in defined_computations:
            raise _malformed(computation, "has the id of another computation")
        defined_computations.add(computation.id)


def _verify_computation(computation: XlaMessage, callable_ids: set[int]) -> None:
    defined: set[int] = set()
    low_ids: set[int] = set()
    names: set[str] = set()
    for instruction in computation.instructions:
        place = f"has an instruction {instruction.name!r} that"
        missing = [one for one in instruction.operand_ids if one not in defined]
        if missing:
            raise _malformed(computation, f"{place} reads {missing[0]}, which is not defined yet")
        uncallable = [one for one in instruction.called_computation_ids if one not in callable_ids]
        if uncallable:
            raise _malformed(computation, f"{place} calls {uncallable[0]}, which is not there")
        if instruction.id & _LOW_BITS in low_ids:
            raise _malformed(computation, f"{place} shares its id with another")
        if instruction.name in names:
            raise _malformed(computation, f"{place} shares its name with another")
        if not instruction.opcode:
            raise _malformed(computation, f"{place} has no operation")
        defined.add(instruction.id)
        low_ids.add(instruction.id & _LOW_BITS)
        names.add(instruction.name)
    if computation.root_id not in defined:
        raise _malformed(computation, "has no root instruction")
    numbers = [one.parameter_number for one in parameters(computation)]
    if numbers != list(range(len(numbers))):
        raise _malformed(computation, f"numbers its parameters {numbers}")


def _malformed(computation: XlaMessage, what: str) -> SnapshotError:
    return SnapshotError(
        f"Not a well-formed HLO module: computation {computation.name!r} {what}.",
        hint="The file is damaged, or was written by a version of XLA that snaprt does not know.",
    )
