"""Narrow a difference down to an instruction.

One round cuts a region into several, runs it with taps at the cuts on both sides (carried inputs:
how large the error is so far), then runs every piece from the reference's values (clean inputs:
which piece makes an error), and continues inside the first piece that makes one, provided that the
suspect gives the same values there as it did before the cut. A round runs four modules, whatever
the number of pieces, and divides the number of instructions by `REGIONS`.

Where every cut makes the error vanish, no single instruction is at fault, but the code that the
compiler generates for several of them: XLA says which of its passes change the piece, and the piece
runs without each of these.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from snaprt.errors import ExecutionError
from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.extract import Piece
from snaprt_replay.localize.findings import (
    FindingKind,
    InstructionPlace,
    PassEffect,
    RegionError,
    ValueDifference,
)
from snaprt_replay.localize.measure import difference
from snaprt_replay.localize.program import Region, between, choose_cuts
from snaprt_replay.localize.session import BudgetSpentError, Order, Session, Side, Values
from snaprt_replay.localize.sides import (
    ENTER,
    ComputationFrame,
    Enter,
    Pair,
    run_both,
    run_clean,
    run_reference,
    run_suspect,
)

COARSE_REGIONS = 8
"""Number of regions into which the whole program is cut: few, so that taps change little."""
REGIONS = 16
"""Number of regions into which a region is cut."""
_FEWER = (2, 4)  # where that many taps remove the error: two parts, cut in the middle or elsewhere
_CLEAR = 0.03  # a region is at fault if its error exceeds this share of the largest error
_LARGEST_CLEAR = 1e4
_BEYOND_CUTTING = 4.0  # and more than this many times the error that cutting alone causes
_MOST_TRIED = 3  # regions that make an error but prove only to amplify rounding inside them


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """Where a search ended."""

    kind: FindingKind  # as of a `Localization`
    places: tuple[InstructionPlace, ...]  # the instructions
    difference: tuple[ValueDifference, ...] = ()  # their last values, compared between the sides
    error: float = 0.0  # the error that they make, or carry in the case of amplification


@dataclasses.dataclass(frozen=True, eq=False)
class Healed:
    """A piece that goes wrong as a whole, but not with any cut in it."""

    frame: ComputationFrame
    piece: Piece
    known_values: Values
    whole: Pair


@dataclasses.dataclass(eq=False)
class Search:
    """The state of one search."""

    session: Session  # runs the pieces
    path: list[RegionError] = dataclasses.field(default_factory=list)  # the regions looked at
    # The outputs' error without taps and with the first taps.
    observer_effect: tuple[float, float] | None = None
    last: tuple[InstructionPlace, ...] = ()  # the instructions searched last
    # A piece that goes wrong only while it is not cut, if the search met one.
    healed: Healed | None = None
    # The region searched last, with its frame and the clean values at its start.
    innermost: tuple[ComputationFrame, Region, Values] | None = None

    def whole(self, frame: ComputationFrame, outputs: Pair) -> Found:
        """Search a frame whose result differs.

        Args:
            frame: The frame.
            outputs: Its result on both sides, run in one piece from the frame's arguments.
        """
        region = Region(0, len(frame.line.order))
        try:
            return self._inside(frame, region, frame.arguments, outputs, 0)
        except BudgetSpentError:
            return Found("unfinished", self.last, error=outputs.error())

    def _inside(
        self, frame: ComputationFrame, region: Region, known_values: Values, whole: Pair, depth: int
    ) -> Found:
        """Search a region that goes wrong on the clean `known_values` and returns `whole`."""
        work = frame.line.work(region.start, region.stop)
        self.last = tuple(
            frame.line.place(instruction, frame.names) for instruction in work[:REGIONS]
        )
        self.innermost = (frame, region, known_values)
        if len(work) <= 1:
            return self._at_one(frame, region, known_values, whole, depth)
        ways = self._ways_to_cut(frame, region, depth)
        if not ways:  # the reference has other instructions here
            return Found("candidates", self.last, _differences(frame, whole), whole.error())
        tapped = self._tap(frame, region, known_values, whole, ways, depth)
        if tapped is None:
            self.healed = Healed(frame, piece_of(frame, region, [region]), known_values, whole)
            return Found("interaction", self.last, _differences(frame, whole), whole.error())
        regions, carried = tapped
        clean = self._clean(frame, regions, known_values, carried)
        errors = [pair.error() for pair in clean]
        chosen = _at_fault(errors)
        if chosen:
            by_cutting = self._by_cutting(frame, regions, known_values, carried)
            chosen = [
                index for index in chosen if errors[index] > _BEYOND_CUTTING * by_cutting[index]
            ]
            if not chosen:
                return Found("candidates", self.last, _differences(frame, whole), whole.error())
        self._note(frame, region, regions, clean, carried, chosen, depth)
        best: Found | None = None
        for index in chosen[:_MOST_TRIED]:
            inner = self._inside(
                frame,
                regions[index],
                known_at(frame, regions[index], known_values, carried.clean()),
                clean[index],
                depth + 1,
            )
            if inner.kind != "amplification":
                return inner
            best = best or inner
        return best or self._amplifying(frame, region, regions, known_values, carried)

    # --- the two tests ---

    def _tap(
        self,
        frame: ComputationFrame,
        region: Region,
        known_values: Values,
        whole: Pair,
        ways: Sequence[Sequence[int]],
        depth: int,
    ) -> tuple[list[Region], Pair] | None:
        """Cut a region and run it with taps on both sides; None if every cut removes the error.

        Returns:
            The regions, and all values that are live at a cut or at the end.
        """
        for cuts in ways:
            regions = between(region, cuts)
            self._tell(frame, region, f"{len(regions)} regions")
            piece = piece_of(frame, region, regions)
            (carried,) = run_both(self.session, frame, [piece], [known_values])
            ends = frame.line.results(region.start, region.stop)
            tapped, untapped = carried.error(*ends), whole.error()
            if depth == 0 and self.observer_effect is None:
                self.observer_effect = (untapped, tapped)
            if tapped > max(1.0, min(untapped, _LARGEST_CLEAR) * _CLEAR) or untapped <= 1.0:
                return regions, carried
        return None

    def _ways_to_cut(
        self, frame: ComputationFrame, region: Region, depth: int
    ) -> Sequence[Sequence[int]]:
        most = REGIONS if depth else COARSE_REGIONS
        ways = [choose_cuts(frame.line, frame.matching, region, most)]
        quarters = choose_cuts(frame.line, frame.matching, region, _FEWER[1])
        ways += [[position] for position in (*quarters[1:2], *quarters[:1], *quarters[2:])]
        return [way for index, way in enumerate(ways) if way and way not in ways[:index]]

    def _clean(
        self,
        frame: ComputationFrame,
        regions: Sequence[Region],
        known_values: Values,
        carried: Pair,
    ) -> list[Pair]:
        """Run each region alone on both sides, from the reference's values at its start."""
        pieces = [piece_of(frame, region, [region]) for region in regions]
        values = [known_at(frame, region, known_values, carried.clean()) for region in regions]
        return run_clean(self.session, frame, pieces, values)

    def _by_cutting(
        self,
        frame: ComputationFrame,
        regions: Sequence[Region],
        known_values: Values,
        carried: Pair,
    ) -> list[float]:
        """Return, for each region, the error that cutting alone causes on the suspect side."""
        pieces = [piece_of(frame, region, [region]) for region in regions]
        values = [known_at(frame, region, known_values, carried.suspect) for region in regions]
        alone = run_suspect(self.session, frame, pieces, values)
        return [
            Pair(results, {value: carried.suspect[value] for value in results}).error()
            for results in alone
        ]

    # --- where it ends ---

    def _at_one(
        self, frame: ComputationFrame, region: Region, known_values: Values, whole: Pair, depth: int
    ) -> Found:
        line = frame.line
        work = line.work(region.start, region.stop)
        sources = line.sources(region.start, region.stop)
        finding = self._among_sources(frame, sources) if sources else None
        if finding is not None:
            return finding
        if not work:  # an output that is a constant, or an input
            place = line.place(line.root, frame.names)
            return Found("instruction", (place,), _differences(frame, whole), whole.error())
        instruction = work[0]
        enter = ENTER.get(instruction.opcode)
        if enter is not None:
            inner = self._enter(enter, frame, instruction, known_values, depth)
            if inner is not None:
                return inner
        place = line.place(instruction, frame.names)
        return Found("instruction", (place,), _differences(frame, whole), whole.error())

    def _among_sources(
        self, frame: ComputationFrame, sources: Sequence[XlaMessage]
    ) -> Found | None:
        """Check the values computed from constants alone, which any region using them contains."""
        ids = tuple(source.id for source in sources if source.id in frame.matching)
        (pair,) = run_both(self.session, frame, [Piece(ids)], [frame.arguments])
        for source_id in ids:
            if pair.error(source_id) > 1.0:
                place = frame.line.place(frame.line.by_id[source_id], frame.names)
                differing = _differences(frame, pair, source_id)
                return Found("instruction", (place,), differing, pair.error(source_id))
        return None

    def _enter(
        self,
        enter: Enter,
        frame: ComputationFrame,
        instruction: XlaMessage,
        known_values: Values,
        depth: int,
    ) -> Found | None:
        """Search inside a loop or a branch; None if each of its steps is correct."""
        if instruction.id not in frame.matching:
            return None
        operands = _operand_values(self.session, frame, instruction, known_values)
        stepped = enter(self.session, frame, instruction, operands)
        if stepped is None:
            return None
        inner, result = stepped
        self._tell(inner, Region(0, len(inner.line.order)), inner.names[-1])
        region = Region(0, len(inner.line.order))
        return self._inside(inner, region, inner.arguments, result, depth + 1)

    def _amplifying(
        self,
        frame: ComputationFrame,
        region: Region,
        regions: Sequence[Region],
        known_values: Values,
        carried: Pair,
    ) -> Found:
        """Follow the error along the cuts to the instruction that increases it most.

        No region makes an error, so run the whole of `region` each time, with more taps where the
        error grows.
        """
        while True:
            growth = [_growth(frame, part, carried) for part in regions]
            steepest = regions[growth.index(max(growth))]
            cuts = choose_cuts(frame.line, frame.matching, steepest, REGIONS)
            if not cuts:
                break
            regions = between(steepest, cuts)
            self._tell(
                frame, steepest, f"{len(regions)} regions, searching for error amplification"
            )
            bounds = between(region, [*_inner_bounds(region, steepest, cuts)])
            (carried,) = run_both(
                self.session, frame, [piece_of(frame, region, bounds)], [known_values]
            )
        work = frame.line.work(steepest.start, steepest.stop)
        ends = frame.line.results(steepest.start, steepest.stop)
        places = tuple(frame.line.place(instruction, frame.names) for instruction in work)
        differing = _differences(frame, carried, *ends)
        return Found("amplification", places, differing, carried.error(*ends))

    # --- what is reported ---

    def _note(
        self,
        frame: ComputationFrame,
        region: Region,
        regions: Sequence[Region],
        clean: Sequence[Pair],
        carried: Pair,
        chosen: Sequence[int],
        depth: int,
    ) -> None:
        for index, (part, pair) in enumerate(zip(regions, clean, strict=True)):
            work = frame.line.work(part.start, part.stop)
            input_ids = frame.line.taken(part.start, part.stop)
            comes_in = carried.error(*input_ids) if input_ids else 0.0
            self.path.append(
                RegionError(
                    first=frame.line.place(work[0], frame.names),
                    last=frame.line.place(work[-1], frame.names),
                    instructions=len(work),
                    depth=depth,
                    made=pair.error(),
                    carried_in=comes_in,
                    carried_out=carried.error(*frame.line.results(part.start, part.stop)),
                    chosen=index in chosen[:1],
                )
            )

    def _tell(self, frame: ComputationFrame, region: Region, what: str) -> None:
        remaining = len(frame.line.work(region.start, region.stop))
        rounds = max(1, math.ceil(math.log(max(remaining, 2), REGIONS)))
        session = self.session
        seconds = session.seconds / max(1, session.compiles)
        estimate = f", about {rounds * 4 * seconds:.0f} s more" if session.compiles else ""
        where = " in ".join(("", *reversed(frame.names)))
        session.tell(f"{remaining} instructions{where}: {what}{estimate}")


def _at_fault(errors: Sequence[float]) -> list[int]:
    """Return the indices of the regions that make an error, in order; the first is likeliest."""
    largest = min(max(errors), _LARGEST_CLEAR)
    return [index for index, error in enumerate(errors) if error > max(1.0, largest * _CLEAR)]


def piece_of(frame: ComputationFrame, region: Region, regions: Sequence[Region]) -> Piece:
    """Return a region as a piece that also returns the values live where its parts end."""
    results = [result for part in regions for result in frame.line.results(part.start, part.stop)]
    return Piece(tuple(dict.fromkeys(results)), frozenset(frame.line.live(region.start)))


def known_at(
    frame: ComputationFrame, region: Region, known_values: Values, tapped: Values
) -> Values:
    """Return the clean values at a region's start: those already known, and those of taps."""
    live = set(frame.line.live(region.start))
    return {
        **{
            value: array
            for value, array in known_values.items()
            if _is_parameter(frame, value.instruction)
        },
        **{
            value: array
            for source in (known_values, tapped)
            for value, array in source.items()
            if value.instruction in live
        },
    }


def _is_parameter(frame: ComputationFrame, instruction: int) -> bool:
    return frame.line.by_id[instruction].opcode == "parameter"


def _operand_values(
    session: Session, frame: ComputationFrame, instruction: XlaMessage, known_values: Values
) -> list[Values]:
    """Return the clean values of an instruction's operands, in order."""
    ids = tuple(dict.fromkeys(instruction.operand_ids))
    known_ids = frozenset(value.instruction for value in known_values)
    (values,) = run_reference(session, frame, [Piece(ids, known_ids)], [known_values])
    return [
        {value: array for value, array in values.items() if value.instruction == operand}
        for operand in instruction.operand_ids
    ]


def _growth(frame: ComputationFrame, region: Region, carried: Pair) -> float:
    """Return how much larger the error is where a region ends than where it starts."""
    input_ids = frame.line.taken(region.start, region.stop)
    comes_in = carried.error(*input_ids) if input_ids else 0.0
    goes_out = carried.error(*frame.line.results(region.start, region.stop))
    # Where almost no error comes in, the first rounding would look like the steepest growth.
    return goes_out / max(comes_in, 1e-2) if math.isfinite(goes_out) else math.inf


def _inner_bounds(region: Region, steepest: Region, cuts: Sequence[int]) -> list[int]:
    bounds = [steepest.start, *cuts, steepest.stop]
    return [bound for bound in bounds if region.start < bound < region.stop]


def _differences(
    frame: ComputationFrame, pair: Pair, *instructions: int
) -> tuple[ValueDifference, ...]:
    """Compare the values of some instructions, by default of all, between the sides."""
    names: Mapping[int, str] = {
        instruction.id: instruction.name for instruction in frame.line.order
    }
    return tuple(
        difference(
            ".".join(map(str, (names[value.instruction], *value.path))),
            pair.reference[value],
            array,
            pair.moved.get(value),
        )
        for value, array in pair.suspect.items()
        if not instructions or value.instruction in instructions
    )


_WITHOUT_ANY: Final = "optimization=0"
# Passes to try where a device's compiler does not say which of its passes changed the piece.
_USUAL: Final = ("algsimp", "fusion")
# XLA's names of files dumped between passes: module_0001.NAME.0014.PIPELINE.after_X.before_Y.txt
_AFTER: Final = re.compile(r"\.after_([^.]+)\.before_[^.]+\.txt$")
_NO_PASS: Final = "pipeline-start"


def try_passes(
    session: Session,
    frame: ComputationFrame,
    piece: Piece,
    known_values: Values,
    whole: Pair,
    vary: Callable[[str], Side],
) -> tuple[PassEffect, ...]:
    """Run a piece several times, each time without another compiler pass.

    Args:
        session: Runs it.
        frame: The frame that contains the piece.
        piece: The piece that goes wrong.
        known_values: The values that it takes.
        whole: Its results on both sides.
        vary: Returns the suspect side with an addition to its variant.

    Returns:
        The error under each variant, smallest first.
    """

    def run(side: Side) -> Values:
        ((values,),) = session.run(Order(side, frame.line, [piece], [known_values]))
        return values

    effects = []
    try:
        names = _passes_that_change(run, vary) or _USUAL
        for addition in (_WITHOUT_ANY, *(f"disable-hlo-pass={name}" for name in names)):
            session.tell(f"with {addition}")
            side = vary(addition)
            try:
                error, failed = Pair(run(side), whole.reference, whole.moved).error(), ""
            except ExecutionError as failure:
                error, failed = math.inf, failure.message
            effects.append(PassEffect(side.name, error, failed))
    except BudgetSpentError:
        pass  # report the variants tried until then
    return tuple(sorted(effects, key=lambda effect: effect.error))


def _passes_that_change(
    run: Callable[[Side], Values], vary: Callable[[str], Side]
) -> Sequence[str]:
    """Return the names of the passes that change the piece, in order; none if unknown."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(vary(f"xla-flags=--xla_dump_to={folder} --xla_dump_hlo_pass_re=.*"))
        except ExecutionError:
            return ()
        matches = [_AFTER.search(path.name) for path in sorted(Path(folder).iterdir())]
    names = dict.fromkeys(match[1] for match in matches if match is not None)
    return [name for name in names if name != _NO_PASS]
