"""The one place that touches JAX names which are not public API; it must know nothing of snaprt.

Everything here was checked with jax 0.10.2 and 0.12.0; a function that leans on something newer or
older says so. When a new JAX breaks snaprt, this is the file to read and to change.
"""

from __future__ import annotations
