"""Spans of what snaprt does, in the profiles that `jax.profiler` takes for XProf and Perfetto."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import jax

#: Where `jax.profiler` puts its files, and XProf looks for them: a folder for each profile.
PROFILE_RUNS: Final = Path("plugins", "profile")

#: What the name of a file has after the host.
PROFILE_SUFFIX: Final = ".xplane.pb"

_NOTHING: Final = contextlib.nullcontext()
_annotation: Final[Any] = jax.profiler.TraceAnnotation

#: Return whether a profile is being taken; takes about 0.02 us.
is_profiled: Callable[[], bool] = _annotation.is_enabled


def start_profile(folder: Path) -> None:
    """Start a profile without events of Python functions, which make each call slower.

    Raises:
        RuntimeError: Another one is being taken, or the folder has a name that JAX cannot pass on.
    """
    try:
        os.fspath(folder).encode()
    except UnicodeEncodeError:
        raise RuntimeError("the name of the directory is not UTF-8") from None
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)


@contextlib.contextmanager
def profile(folder: Path) -> Iterator[None]:
    """Profile what is inside.

    Raises:
        RuntimeError: Another profile is being taken, or this one cannot be written.
    """
    start_profile(folder)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def span(name: str, **values: Any) -> AbstractContextManager[None]:
    """Return a scope that a profile shows as ``snaprt:NAME``; nothing where no profile is taken.

    Args:
        name: What snaprt does in it.
        values: What the profile says beside the name, such as the graph.
    """
    if not is_profiled():
        return _NOTHING
    annotation: AbstractContextManager[None] = _annotation(f"snaprt:{name}", **values)
    return annotation
