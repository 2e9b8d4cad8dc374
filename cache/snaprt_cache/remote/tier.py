"""What the cache asks of a second, slower place for its blobs; knows no place in particular.

A tier carries whole blob files by their name. It promises nothing about what it gives back: who
fetches verifies, as it does with its own disk.
"""

from __future__ import annotations

from typing import Protocol


class Tier(Protocol):
    """A place behind the cache directory, such as a bucket that a team shares.

    No method raises, and none takes longer than the time-out the tier was made with.
    """

    def fetch(self, name: str) -> bytes | None:
        """Return the content of a blob file, unverified; None where there is none to be had.

        Args:
            name: The digest of the entry's key, 64 hexadecimal digits.
        """

    def send(self, name: str, content: bytes) -> None:
        """Have a blob file stored in the background, and return at once.

        Args:
            name: The digest of the entry's key, 64 hexadecimal digits.
            content: The whole file; what is there already under the name stays.
        """

    def close(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for what is still to be stored, and stop."""
