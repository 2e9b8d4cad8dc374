"""What tells objects apart where every microsecond counts."""

from collections.abc import Callable
from typing import Final

#: As `id`, which CPython 3.12 and later report to each audit hook: with that of `filelock`, which
#: JAX imports where it is installed, an `id` takes five times as long. Nor do both go together: the
#: numbers are others.
identity: Final[Callable[[object], int]] = object.__hash__
