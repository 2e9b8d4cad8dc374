"""Whether a program can run under the environment as it is set; does not know the program."""

from __future__ import annotations

from typing import Final

from snaprt import settings
from snaprt.errors import UsageError

# What names a file that is written later, perhaps when a long run is over, and how it is named.
_FILES_WRITTEN: Final = {
    "PT_XLA_DEBUG_FILE": "PT_XLA_DEBUG_FILE",
    "SNAPRT_METRICS_FILE": "--metrics or SNAPRT_METRICS_FILE",
    "XLA_METRICS_FILE": "XLA_METRICS_FILE",
    "XLA_SAVE_TENSORS_FILE": "XLA_SAVE_TENSORS_FILE",
}
_FOLDERS_WRITTEN: Final = {
    "SNAPRT_DUMP_DIR": "--dump or SNAPRT_DUMP_DIR",
    "SNAPRT_TRACE": "SNAPRT_TRACE",
}


def check_environment() -> None:
    """Look at every setting before a program runs, and not when it is first needed.

    Raises:
        UsageError: One has a value that is not allowed, or names what cannot be written.
    """
    settings.check()
    for variable, named_by in _FILES_WRITTEN.items():
        path = settings.get(variable)
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(
                f"cannot write {path}: there is no directory {path.absolute().parent}",
                hint=f"Name a file in a directory that exists with {named_by}.",
            )
    for variable, named_by in _FOLDERS_WRITTEN.items():
        path = settings.get(variable)
        if path is not None and path.exists() and not path.is_dir():
            raise UsageError(
                f"cannot write into {path}: it is no directory",
                hint=f"Name a directory, or one that can be made, with {named_by}.",
            )
