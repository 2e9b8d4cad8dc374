"""A file that the system refused to write: the error, and what the user can do about it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from snaprt.errors import SnaprtError, UsageError

_SPACE: Final = "free some space"
_PERMISSIONS: Final = "change the permissions"
#: Where nothing but another place helps, as on a read-only file system, there is no row.
REMEDIES: Final[Mapping[int | None, str]] = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: f"{_SPACE} or raise the disk quota",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def remedy(error: OSError, elsewhere: str) -> str:
    """Return a hint for a file that could not be written, in lower case and without a period.

    Args:
        error: How the system refused.
        elsewhere: How to name another place, such as ``use another folder``.
    """
    known = REMEDIES.get(error.errno)
    return elsewhere if known is None else f"{known}, or {elsewhere}"


def remedy_sentence(error: OSError, elsewhere: str) -> str:
    """Return the hint of `remedy` as a sentence."""
    hint = remedy(error, elsewhere)
    return f"{hint[:1].upper()}{hint[1:]}."


@contextlib.contextmanager
def writing(
    what: str,
    elsewhere: str = "name a file in an existing directory",
    *,
    kind: type[SnaprtError] = UsageError,
    hint: Callable[[OSError, str], str] = remedy_sentence,
) -> Iterator[None]:
    """Make an error of ours where the system refuses what is done inside.

    Args:
        what: What is done, such as ``save outputs to FILE``.
        elsewhere: How to name another place, see `remedy`.
        kind: The error.
        hint: Makes its hint: `remedy` or `remedy_sentence`.
    """
    try:
        yield
    except OSError as error:
        raise kind(
            f"cannot {what}: {error.strerror or error}", hint=hint(error, elsewhere)
        ) from error
