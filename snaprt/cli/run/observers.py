"""What ``snaprt run`` observes of a run: the graph breaks that it explains, and its profile.

Does not import JAX before the program does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from snaprt import settings
from snaprt.cli import output
from snaprt.errors import UsageError
from snaprt.host import after_import
from snaprt.host.whole_files import named_path, write_whole, writing

if TYPE_CHECKING:
    from snaprt.explain.cuts import Collector, GraphBreakRow, GraphBreakRows
    from snaprt.runtime.profile_session import ProfileSession

SCHEMA: Final = "snaprt.explain"
VERSION: Final = 1


class RunExplained:
    """What happens in this process from the program's own import of JAX on.

    Args:
        shown: Whether to print it at the end, to stderr.
        file: Where to write it as JSON, if anywhere.

    Raises:
        UsageError: The file cannot be written.
    """

    def __init__(self, *, shown: bool, file: Path | None) -> None:
        self._shown = shown
        self._file = None if file is None else named_path(file)
        self._rows: GraphBreakRows | None = None
        self._collector: Collector | None = None
        if self._file is not None:
            output.refuse_unwritable(self._file, "file", "--explain-json")
        if shown or file is not None:
            after_import.call_after_import("jax", self._begin)

    def _begin(self) -> None:
        from snaprt.explain.cuts import Collector, GraphBreakRows
        from snaprt.runtime.events import subscribe

        self._rows = GraphBreakRows()
        self._collector = Collector(self._rows.add)
        subscribe(self._collector)

    def program_ended(self) -> None:
        """Call what still runs by its name: the end, and not a step that the program marked."""
        if self._collector is not None:
            self._collector.at_steps = "end"

    def end(self) -> None:
        """Say what happened."""
        rows = () if self._rows is None else self._rows()
        if self._file is not None:
            content = {"schema": SCHEMA, "version": VERSION, "places": list(_places(rows))}
            try:
                with writing(f"write {self._file}", "name another file with --explain-json"):
                    write_whole(self._file, (json.dumps(content, indent=2) + "\n").encode())
            except UsageError as error:
                _tell(str(error))  # the program's own work is done and its exit status stays
        if not self._shown:
            return
        output.log.print()
        if not rows:
            output.log.print("nothing ran lazily: run with --lazy, or use snaprt.lazy()")
            return
        from snaprt.explain.cuts import explain_rows

        output.log.print(explain_rows(rows))


def _places(rows: tuple[GraphBreakRow, ...]) -> Iterator[dict[str, Any]]:
    from snaprt.runtime.graph_breaks import describe_break

    for row in rows:
        place = row.place
        yield {
            "cause": row.cause,
            "operation": row.operation or None,
            "file": None if place is None else place.file,
            "line": None if place is None else place.line,
            "function": None if place is None else place.function,
            "times": row.times,
            "graphs": row.graphs,
            "operations": row.operations,
            "fewest_operations": row.fewest,
            "most_operations": row.most,
            "compiled": row.compiled,
            "loaded": row.loaded,
            "advice": describe_break(row.cause).advice or None,
        }


_STEPS: Final = re.compile(r"(\d+)(?:(-)(\d*))?")


def checked_steps(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """Return a range of steps as it is written, for it is passed on."""
    try:
        _first_and_last("0" if text is None else text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} {error}", context, option) from error
    return text


def _first_and_last(text: str) -> tuple[int, int | None]:
    """Return the first and the last step of a range; no last one for all that follow.

    Raises:
        ValueError: What is wrong with it.
    """
    steps = _STEPS.fullmatch(text)
    if steps is None:
        raise ValueError("is not a range of steps such as 10-14, 10- or 10")
    first, last = int(steps[1]), int(steps[3]) if steps[3] else None
    if last is not None and last < first:
        raise ValueError("ends before it begins")
    return first, last if steps[2] else first


class RunProfiled:
    """The profile of this process, from the program's own import of JAX on.

    Args:
        folder: Where to write the profile; None for no profile.
        steps: The steps to profile, as `checked_steps` returns them; None for the whole run.

    Raises:
        UsageError: The folder cannot be written to, or there is none for the steps.
    """

    def __init__(self, folder: Path | None, steps: str | None) -> None:
        self._session: ProfileSession | None = None
        self._is_asked_for = folder is not None
        self._steps = steps
        if folder is None:
            if steps is not None:
                raise UsageError(
                    "--profile-steps needs a directory", hint="Name one with --profile DIR."
                )
            return
        self._folder = output.writable(folder, "--profile")
        after_import.call_after_import("jax", self._begin)

    def _begin(self) -> None:
        from snaprt.runtime.profile_session import ProfileSession, Steps

        steps = None if self._steps is None else Steps(*_first_and_last(self._steps))
        self._session = ProfileSession(
            self._folder, steps, settings.get("SNAPRT_PROFILE_TIMEOUT"), _tell
        )
        self._session.listen()

    def end(self) -> None:
        """Stop the profile, if there is one."""
        if self._session is not None:
            self._session.end()
        elif self._is_asked_for:
            _tell("no profile was written: the program did not import JAX")


def _tell(message: str) -> None:
    output.log.print(f"snaprt: {message}")
