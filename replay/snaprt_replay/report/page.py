"""Write reports as one self-contained page, see `snaprt.pages`.

The template engine escapes text from files, and `shown` makes it printable.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from importlib import resources
from typing import Final

import jinja2
from markupsafe import Markup

from snaprt import pages, shown
from snaprt_replay.compare.results import IDENTICAL, MISMATCH, OutputComparison, Place, Verdict
from snaprt_replay.localize.findings import error_text, place_text
from snaprt_replay.report import charts, text
from snaprt_replay.report.model import DEVICE_COLUMNS, ErrorGrid, Report, Status, worst_first

_PACKAGE: Final = "snaprt_replay.report"

#: How many outputs are drawn; the table has all of them.
_DRAWN: Final = 12

#: How many files are shown in full; with more, only those that are not ok.
_SHOWN: Final = 50

_STATUS: Final[dict[Verdict, Status]] = {IDENTICAL: "ok", MISMATCH: "bad"}


def page(reports: Sequence[Report]) -> str:
    """Return the page of one or several reports as HTML."""
    style = _style()
    template = _environment().get_template("page.html.j2")
    return template.render(
        style=Markup(style),
        style_digest=pages.style_digest(style),
        title=_title(reports),
        device_columns=DEVICE_COLUMNS,
        reports=[
            _Shown(f"r{number}", report, len(reports) <= _SHOWN or report.headline.status != "ok")
            for number, report in enumerate(reports, 1)
        ],
    )


def _title(reports: Sequence[Report]) -> str:
    if len(reports) != 1:
        return f"{len(reports)} files replayed"
    return f"{reports[0].headline.word}: {reports[0].module or reports[0].path}"


@functools.cache
def _style() -> str:
    # "</" inside a style element may end it: a test checks that there is none.
    return resources.files(_PACKAGE).joinpath("page.css").read_text(encoding="utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = pages.environment(_PACKAGE, shown.visible)
    environment.filters.update(
        name=shown.name,
        sentence=shown.sentence,
        times=error_text,
        instruction=place_text,
        number=_number,
        place=_place,
    )
    return environment


@dataclasses.dataclass(frozen=True, eq=False)
class _Drawn:
    """An output with its drawings."""

    identity: str
    output: OutputComparison
    grid: ErrorGrid | None

    @functools.cached_property
    def histogram(self) -> Markup | None:
        if len(self.output.ulp_octaves) < 2:  # all are equal
            return None
        return charts.ulp_histogram(f"{self.identity}-ulp", self.output)

    @functools.cached_property
    def error_map(self) -> Markup | None:
        # A map with a single cell says no more than the table.
        if self.grid is None or len(self.grid.errors) == 1 or not any(self.grid.errors):
            return None
        return charts.error_map(f"{self.identity}-map", self.output.name, self.grid)

    @property
    def shades(self) -> list[tuple[str, str]]:
        return charts.shade_legend(self.grid) if self.grid is not None else []

    @functools.cached_property
    def special_map(self) -> Markup | None:
        if self.grid is None or not any(self.grid.specials):
            return None
        return charts.special_map(f"{self.identity}-special", self.output.name, self.grid)

    @property
    def specials(self) -> list[tuple[str, str]]:
        return charts.special_legend(self.grid) if self.grid is not None else []

    @property
    def box(self) -> str:
        return charts.box_text(self.grid) if self.grid is not None else ""

    @property
    def worth_drawing(self) -> bool:
        return self.output.differing > 0 or self.special_map is not None


class _Shown:
    """A report with the properties that the template uses."""

    def __init__(self, identity: str, report: Report, in_full: bool) -> None:
        self.identity = identity
        self.report = report
        self.in_full = in_full

    @functools.cached_property
    def outputs(self) -> list[_Drawn]:
        comparison = self.report.comparison
        if comparison is None:
            return []
        grids = [*self.report.grids, *[None] * len(comparison.outputs)]
        return [
            _Drawn(f"{self.identity}-o{number}", comparison.outputs[number], grids[number])
            for number in worst_first(comparison.outputs)
        ]

    @functools.cached_property
    def drawn(self) -> list[_Drawn]:
        return [output for output in self.outputs if output.worth_drawing][:_DRAWN]

    @property
    def compiled(self) -> list[str]:
        compiled = self.report.compiled
        return [] if compiled is None else list(text.compiled_lines(compiled))

    @property
    def scale(self) -> charts.ErrorScale:
        assert self.report.localization is not None
        return charts.ErrorScale(self.report.localization.path)

    @functools.cached_property
    def neighborhood(self) -> Markup | None:
        around = self.report.neighborhood
        if around is None:
            return None
        return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(
            charts.neighborhood(f"{self.identity}-graph", around),
            charts.neighborhood(f"{self.identity}-narrow", around, charts.NARROW),
        )

    @staticmethod
    def status(output: OutputComparison) -> Status:
        return _STATUS.get(output.verdict, "caution")


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _place(place: Place | None) -> str:
    return f"[{', '.join(map(str, place.index))}]" if place and place.index else ""
