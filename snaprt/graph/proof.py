"""What tells the executable of a program from others: plain data, to be read without JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """What tells which executable ran; snapshots hold it as it is."""

    fingerprint: str = ""  # XLA's own; it changes where an executable is loaded from a cache
    optimised_hlo: str = ""  # BLAKE3 in hex, see `proof_of`; empty where the platform hides it
    aliases: tuple[str, ...] = ()  # `result <- parameter` for each shared piece of memory
