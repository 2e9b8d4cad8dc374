"""Profiles a run of ``snaprt run``: the options, and the folder that they name.

Does not import JAX before the program does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from snaprt import after_import, settings
from snaprt.cli import output
from snaprt.errors import UsageError

if TYPE_CHECKING:
    from snaprt.runtime.profile_session import ProfileSession

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
        raise ValueError("is no range of steps, such as 10-14, 10- or 10")
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
            _tell("there is no profile: the program has not imported JAX")


def _tell(message: str) -> None:
    output.log.print(f"snaprt: {message}")
