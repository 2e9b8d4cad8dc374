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


def checked_steps(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[int, int | None] | None:
    """Return the first and the last step that an option names; no last one for all that follow."""
    if text is None:
        return None
    found = _STEPS.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(
            f"{text!r} is no range of steps, such as 10-14, 10- or 10", context, option
        )
    first = int(found[1])
    last = int(found[3]) if found[3] else None if found[2] else first
    if last is not None and last < first:
        raise click.BadParameter(f"{text!r} ends before it begins", context, option)
    return first, last


class RunProfiled:
    """The profile of this process, from the program's own import of JAX on.

    Args:
        folder: Where to write the profile; None for no profile.
        steps: The first and the last step to profile; None for the whole run.

    Raises:
        UsageError: The folder cannot be written to, or there is none for the steps.
    """

    def __init__(self, folder: Path | None, steps: tuple[int, int | None] | None) -> None:
        self._session: ProfileSession | None = None
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

        steps = None if self._steps is None else Steps(*self._steps)
        self._session = ProfileSession(
            self._folder, steps, settings.get("SNAPRT_PROFILE_TIMEOUT"), _tell
        )
        self._session.listen()

    def end(self) -> None:
        """Stop the profile, if there is one."""
        if self._session is not None:
            self._session.end()


def _tell(message: str) -> None:
    output.log.print(f"snaprt: {message}")
