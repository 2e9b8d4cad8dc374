"""Send messages and arrays between two processes; it must not know what they mean.

A message is the length of a JSON text, the text, then the bits of the arrays one after the other.
Both ends may run different versions of Python and NumPy.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from snaprt_replay.floatbits import dtype_named

_LENGTH = struct.Struct("<Q")


def send(
    connection: socket.socket, message: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()
) -> None:
    """Send a message of JSON values, and arrays of any dtype and shape with it."""
    values = [np.ascontiguousarray(array).reshape(array.shape) for array in arrays]
    told = [{"dtype": value.dtype.name, "shape": value.shape} for value in values]
    text = json.dumps({"message": message, "arrays": told}).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    for value in values:
        if value.size:
            connection.sendall(value.reshape(-1).view(np.uint8).data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the next message and its arrays.

    Raises:
        EOFError: The other end is gone.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size).tobytes())
    content = json.loads(_read(connection, length).tobytes())
    arrays = []
    for told in content["arrays"]:
        dtype, shape = dtype_named(told["dtype"]), tuple(told["shape"])
        bits = _read(connection, dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        arrays.append(bits.view(dtype).reshape(shape))
    return content["message"], arrays


def _read(connection: socket.socket, size: int) -> np.ndarray:
    content = np.empty(size, np.uint8)
    view, filled = content.data, 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if not count:
            raise EOFError("the other process is gone")
        filled += count
    return content
