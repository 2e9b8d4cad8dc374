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

from snaprt.errors import SnaprtError
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
class Stretch:
    """A region of a frame, with the clean values at its start."""

    frame: ComputationFrame
    region: Region
    known_values: Values

    @property
    def work(self) -> list[XlaMessage]:
        """Return its instructions that compute something."""
        return self.frame.line.work(self.region.start, self.region.stop)

    @property
    def results(self) -> tuple[int, ...]:
        """Return the values that it hands on."""
        return self.frame.line.results(self.region.start, self.region.stop)

    def part(self, region: Region, tapped: Values) -> Stretch:
        """Return a region of it, with those of the values known here and tapped that it needs."""
        line = self.frame.line
        live = set(line.live(region.start))
        values = {
            value: array
            for value, array in self.known_values.items()
            if line.by_id[value.instruction].opcode == "parameter"
        }
        for source in (self.known_values, tapped):
            values |= {value: array for value, array in source.items() if value.instruction in live}
        return Stretch(self.frame, region, values)

    def piece(self, regions: Sequence[Region] = ()) -> Piece:
        """Return it as a piece that also returns the values live where some regions in it end."""
        line = self.frame.line
        results = [
            result
            for part in regions or [self.region]
            for result in line.results(part.start, part.stop)
        ]
        return Piece(tuple(dict.fromkeys(results)), frozenset(line.live(self.region.start)))

    def place(self, instruction: XlaMessage) -> InstructionPlace:
        """Describe one of its instructions."""
        return self.frame.line.place(instruction, self.frame.names)


def whole_of(frame: ComputationFrame) -> Stretch:
    """Return all of a frame."""
    return Stretch(frame, Region(0, len(frame.line.order)), frame.arguments)


@dataclasses.dataclass(frozen=True, eq=False)
class Healed:
    """A stretch that goes wrong as a whole, but not with any cut in it."""

    stretch: Stretch
    whole: Pair  # its results


@dataclasses.dataclass(eq=False)
class Search:
    """The state of one search."""

    session: Session  # runs the pieces
    path: list[RegionError] = dataclasses.field(default_factory=list)  # the regions looked at
    # The outputs' error without taps and with the first taps.
    observer_effect: tuple[float, float] | None = None
    last: tuple[InstructionPlace, ...] = ()  # the instructions searched last
    # A stretch that goes wrong only while it is not cut, if the search met one.
    healed: Healed | None = None
    innermost: Stretch | None = None  # the one searched last

    def whole(self, frame: ComputationFrame, outputs: Pair) -> Found:
        """Search a frame whose result differs.

        Args:
            frame: The frame.
            outputs: Its result on both sides, run in one piece from the frame's arguments.
        """
        try:
            return self._inside(whole_of(frame), outputs, 0)
        except BudgetSpentError:
            return Found("unfinished", self.last, error=outputs.error())

    def _inside(self, stretch: Stretch, whole: Pair, depth: int) -> Found:
        """Search a stretch that goes wrong on its clean values and returns `whole`."""
        frame, work = stretch.frame, stretch.work
        self.last = tuple(map(stretch.place, work[:REGIONS]))
        self.innermost = stretch
        if len(work) <= 1:
            return self._at_one(stretch, whole, depth)
        ways = self._ways_to_cut(stretch, depth)
        if not ways:  # the reference has other instructions here
            return Found("candidates", self.last, _differences(frame, whole), whole.error())
        tapped = self._tap(stretch, whole, ways, depth)
        if tapped is None:
            self.healed = Healed(stretch, whole)
            return Found("interaction", self.last, _differences(frame, whole), whole.error())
        regions, carried = tapped
        clean_values = carried.clean()
        parts = [stretch.part(region, clean_values) for region in regions]
        # Each alone on both sides, from the reference's values at its start.
        clean = run_clean(self.session, frame, *_pieces_and_values(parts))
        errors = [pair.error() for pair in clean]
        chosen = _at_fault(errors)
        if chosen:
            by_cutting = self._by_cutting(stretch, regions, carried)
            chosen = [
                index for index in chosen if errors[index] > _BEYOND_CUTTING * by_cutting[index]
            ]
            if not chosen:
                return Found("candidates", self.last, _differences(frame, whole), whole.error())
        self._note(parts, clean, carried, chosen, depth)
        best: Found | None = None
        for index in chosen[:_MOST_TRIED]:
            inner = self._inside(parts[index], clean[index], depth + 1)
            if inner.kind != "amplification":
                return inner
            best = best or inner
        return best or self._amplifying(stretch, regions, carried)

    # --- the two tests ---

    def _tap(
        self, stretch: Stretch, whole: Pair, ways: Sequence[Sequence[int]], depth: int
    ) -> tuple[list[Region], Pair] | None:
        """Cut a stretch and run it with taps on both sides; None if every cut removes the error.

        Returns:
            The regions, and all values that are live at a cut or at the end.
        """
        for cuts in ways:
            regions = between(stretch.region, cuts)
            self._tell(stretch, f"{len(regions)} regions")
            carried = self._run_tapped(stretch, regions)
            tapped, untapped = carried.error(*stretch.results), whole.error()
            if depth == 0 and self.observer_effect is None:
                self.observer_effect = (untapped, tapped)
            if tapped > max(1.0, min(untapped, _LARGEST_CLEAR) * _CLEAR) or untapped <= 1.0:
                return regions, carried
        return None

    def _run_tapped(self, stretch: Stretch, regions: Sequence[Region]) -> Pair:
        """Return all values of both sides that are live where one of its regions ends."""
        (carried,) = run_both(
            self.session, stretch.frame, [stretch.piece(regions)], [stretch.known_values]
        )
        return carried

    def _ways_to_cut(self, stretch: Stretch, depth: int) -> Sequence[Sequence[int]]:
        frame, most = stretch.frame, REGIONS if depth else COARSE_REGIONS
        ways = [choose_cuts(frame.line, frame.matching, stretch.region, most)]
        quarters = choose_cuts(frame.line, frame.matching, stretch.region, _FEWER[1])
        ways += [[position] for position in (*quarters[1:2], *quarters[:1], *quarters[2:])]
        return [way for index, way in enumerate(ways) if way and way not in ways[:index]]

    def _by_cutting(
        self, stretch: Stretch, regions: Sequence[Region], carried: Pair
    ) -> list[float]:
        """Return, for each region, the error that cutting alone causes on the suspect side."""
        parts = [stretch.part(region, carried.suspect) for region in regions]
        alone = run_suspect(self.session, stretch.frame, *_pieces_and_values(parts))
        return [
            Pair(results, {value: carried.suspect[value] for value in results}).error()
            for results in alone
        ]

    # --- where it ends ---

    def _at_one(self, stretch: Stretch, whole: Pair, depth: int) -> Found:
        frame, region = stretch.frame, stretch.region
        sources = frame.line.sources(region.start, region.stop)
        finding = self._among_sources(frame, sources) if sources else None
        if finding is not None:
            return finding
        # Without any work, it is an output that is a constant, or an input.
        instruction = next(iter(stretch.work), frame.line.root)
        enter = ENTER.get(instruction.opcode) if stretch.work else None
        if enter is not None:
            inner = self._enter(enter, stretch, instruction, depth)
            if inner is not None:
                return inner
        place = stretch.place(instruction)
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
        self, enter: Enter, stretch: Stretch, instruction: XlaMessage, depth: int
    ) -> Found | None:
        """Search inside a loop or a branch; None if each of its steps is correct."""
        if instruction.id not in stretch.frame.matching:
            return None
        operands = _operand_values(self.session, stretch, instruction)
        stepped = enter(self.session, stretch.frame, instruction, operands)
        if stepped is None:
            return None
        frame, result = stepped
        inner = whole_of(frame)
        self._tell(inner, frame.names[-1])
        return self._inside(inner, result, depth + 1)

    def _amplifying(self, stretch: Stretch, regions: Sequence[Region], carried: Pair) -> Found:
        """Follow the error along the cuts to the instruction that increases it most.

        No region makes an error, so run all of `stretch` each time, with more taps where the error
        grows.
        """
        frame = stretch.frame
        while True:
            growth = [_growth(frame, part, carried) for part in regions]
            steepest = dataclasses.replace(stretch, region=regions[growth.index(max(growth))])
            cuts = choose_cuts(frame.line, frame.matching, steepest.region, REGIONS)
            if not cuts:
                break
            regions = between(steepest.region, cuts)
            self._tell(steepest, f"{len(regions)} regions, searching for error amplification")
            bounds = _inner_bounds(stretch.region, steepest.region, cuts)
            carried = self._run_tapped(stretch, between(stretch.region, bounds))
        ends = steepest.results
        differing = _differences(frame, carried, *ends)
        places = tuple(map(steepest.place, steepest.work))
        return Found("amplification", places, differing, carried.error(*ends))

    # --- what is reported ---

    def _note(
        self,
        parts: Sequence[Stretch],
        clean: Sequence[Pair],
        carried: Pair,
        chosen: Sequence[int],
        depth: int,
    ) -> None:
        for index, (part, pair) in enumerate(zip(parts, clean, strict=True)):
            work = part.work
            self.path.append(
                RegionError(
                    first=part.place(work[0]),
                    last=part.place(work[-1]),
                    instructions=len(work),
                    depth=depth,
                    made=pair.error(),
                    carried_in=_carried_in(part.frame, part.region, carried),
                    carried_out=carried.error(*part.results),
                    chosen=index in chosen[:1],
                )
            )

    def _tell(self, stretch: Stretch, what: str) -> None:
        remaining = len(stretch.work)
        rounds = max(1, math.ceil(math.log(max(remaining, 2), REGIONS)))
        session = self.session
        seconds = session.seconds / max(1, session.compiles)
        estimate = f", about {rounds * 4 * seconds:.0f} s more" if session.compiles else ""
        where = " in ".join(("", *reversed(stretch.frame.names)))
        session.tell(f"{remaining} instructions{where}: {what}{estimate}")


def _at_fault(errors: Sequence[float]) -> list[int]:
    """Return the indices of the regions that make an error, in order; the first is likeliest."""
    largest = min(max(errors), _LARGEST_CLEAR)
    return [index for index, error in enumerate(errors) if error > max(1.0, largest * _CLEAR)]


def _pieces_and_values(parts: Sequence[Stretch]) -> tuple[list[Piece], list[Values]]:
    return [part.piece() for part in parts], [part.known_values for part in parts]


def _operand_values(session: Session, stretch: Stretch, instruction: XlaMessage) -> list[Values]:
    """Return the clean values of an instruction's operands, in order."""
    ids = tuple(dict.fromkeys(instruction.operand_ids))
    piece = Piece(ids, frozenset(value.instruction for value in stretch.known_values))
    (values,) = run_reference(session, stretch.frame, [piece], [stretch.known_values])
    return [
        {value: array for value, array in values.items() if value.instruction == operand}
        for operand in instruction.operand_ids
    ]


def _carried_in(frame: ComputationFrame, region: Region, carried: Pair) -> float:
    """Return the error of what a region takes."""
    input_ids = frame.line.taken(region.start, region.stop)
    return carried.error(*input_ids) if input_ids else 0.0


def _growth(frame: ComputationFrame, region: Region, carried: Pair) -> float:
    """Return how much larger the error is where a region ends than where it starts."""
    comes_in = _carried_in(frame, region, carried)
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
    session: Session, healed: Healed, vary: Callable[[str], Side]
) -> tuple[PassEffect, ...]:
    """Run a stretch several times, each time without another compiler pass.

    Args:
        session: Runs it.
        healed: The stretch, with its results on both sides.
        vary: Returns the suspect side with an addition to its variant.

    Returns:
        The error under each variant, smallest first.
    """
    stretch, whole = healed.stretch, healed.whole

    def run(side: Side) -> Values:
        order = Order(side, stretch.frame.line, [stretch.piece()], [stretch.known_values])
        ((values,),) = session.run(order)
        return values

    effects = []
    try:
        names = _passes_that_change(run, vary) or _USUAL
        for addition in (_WITHOUT_ANY, *(f"disable-hlo-pass={name}" for name in names)):
            session.tell(f"with {addition}")
            side = vary(addition)
            try:
                error, failed = Pair(run(side), whole.reference, whole.moved).error(), ""
            except SnaprtError as failure:
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
        except SnaprtError:
            return ()
        matches = [_AFTER.search(path.name) for path in sorted(Path(folder).iterdir())]
    names = dict.fromkeys(match[1] for match in matches if match is not None)
    return [name for name in names if name != _NO_PASS]
