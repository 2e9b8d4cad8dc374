"""What a process is asked to run, and the messages that carry job and answer over a socket.

A message is the length of a JSON text, the text, then the bits of the arrays, one after the other.
Both ends may run different versions of Python and NumPy.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from snaprt import jaxapi
from snaprt_replay.floatbits import dtype_named
from snaprt_replay.run.variants.variants import Variant

#: The forms of a program: a serialized HloModuleProto, or any form of StableHLO.
HLO, STABLEHLO = "hlo", "stablehlo"

#: An array, or a sequence of the parts of it that the devices hold.
Spread = Any

_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayJob:
    """A program to run once or several times."""

    variant: Variant  # how to run it; any but ``recorded``
    program: bytes  # in the form that ``form`` names
    inputs: Sequence[Spread]  # in parameter order; variants of higher precision convert them
    form: str = HLO  # `HLO` (with default layouts) or `STABLEHLO`
    repeat: int = 1  # how often to run it
    name: str = ""  # what the compile cache's index calls it
    devices: int = 1  # on how many devices it runs; more than one only with the kind ``device``
    partitioning: jaxapi.Partitioning | None = None  # how XLA was told to partition it
    graph_id: str = ""  # what joins its profile with snapshots; "" if it is not known
    profile: str = ""  # the folder for a profile of one more run, after the others; "" for none


def send_job(connection: socket.socket, job: ReplayJob) -> None:
    """Send a job to the process that runs it."""
    message = {
        "variant": dataclasses.asdict(job.variant),
        "form": job.form,
        "repeat": job.repeat,
        "name": job.name,
        "devices": job.devices,
        "graph_id": job.graph_id,
        "profile": job.profile,
        "partitioning": job.partitioning and dataclasses.asdict(job.partitioning),
    }
    send(connection, message, [np.frombuffer(job.program, np.uint8), *job.inputs])


def receive_job(connection: socket.socket) -> ReplayJob:
    """Return the next job; raise EOFError if the other end is gone."""
    message, (program, *inputs) = receive(connection)
    variant = message.pop("variant")
    variant["options"] = tuple((name, value) for name, value in variant["options"])
    partitioning = message.pop("partitioning")
    if partitioning is not None:
        for side in ("parameters", "results"):
            partitioning[side] = tuple(partitioning[side])
        partitioning = jaxapi.Partitioning(**partitioning)
    return ReplayJob(
        variant=Variant(**variant),
        program=program.tobytes(),
        inputs=inputs,
        partitioning=partitioning,
        **message,
    )


def send(connection: socket.socket, message: Mapping[str, Any], arrays: Sequence[Any] = ()) -> None:
    """Send JSON values, and arrays of any dtype and shape; lists of arrays may be nested.

    An array that occurs several times is sent once.
    """
    distinct: dict[int, np.ndarray] = {}
    numbers: dict[int, int] = {}

    def number(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return [number(part) for part in value]
        distinct[id(value)] = value
        return numbers.setdefault(id(value), len(numbers))

    places = [number(value) for value in arrays]
    values = [np.ascontiguousarray(array).reshape(array.shape) for array in distinct.values()]
    kinds = [{"dtype": value.dtype.name, "shape": value.shape} for value in values]
    text = json.dumps({"message": message, "arrays": kinds, "places": places}).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    for value in values:
        if value.size:
            connection.sendall(value.reshape(-1).view(np.uint8).data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[Any]]:
    """Return the next message and its arrays; raise EOFError if the other end is gone."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size).tobytes())
    content = json.loads(_read(connection, length).tobytes())
    arrays = []
    for kind in content["arrays"]:
        dtype, shape = dtype_named(kind["dtype"]), tuple(kind["shape"])
        bits = _read(connection, dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        arrays.append(bits.view(dtype).reshape(shape))

    def array(place: Any) -> Any:
        return [array(part) for part in place] if isinstance(place, list) else arrays[place]

    return content["message"], [array(place) for place in content["places"]]


def _read(connection: socket.socket, size: int) -> np.ndarray:
    content = np.empty(size, np.uint8)
    view, filled = content.data, 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if not count:
            raise EOFError("the other process has exited")
        filled += count
    return content
