"""What keeping an entry is worth: the seconds it saves for each byte it takes, and how lately.

A figure that needs no renewing: it halves with every half-life since the last use for all entries
alike, so that their order stays and an index over it gives the next to evict. (The idea is that of
Cao and Irani's GreedyDual-Size, 1997.) Knows numbers only.
"""

from __future__ import annotations

import math
from typing import Final

#: An entry not used for so long is worth half of one used just now that saves as much per byte.
HALF_LIFE_SECONDS: Final = 7 * 86400.0
#: What an entry saves at least, so that one of unknown cost is worth something.
_LEAST_SECONDS: Final = 0.001


def worth_of(seconds: float, stored_bytes: float, last_used: float) -> float:
    """Return what keeping an entry is worth, comparable with that of others only.

    Args:
        seconds: What making it cost, and what its hits have saved so far.
        stored_bytes: The size of its file.
        last_used: When it was made or last hit, Unix time in seconds.
    """
    per_byte = max(seconds, _LEAST_SECONDS) / max(stored_bytes, 1.0)
    return math.log2(per_byte) + last_used / HALF_LIFE_SECONDS
