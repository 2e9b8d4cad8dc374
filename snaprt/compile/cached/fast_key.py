"""Notes in the cache: which module, and so which executable, a recorded program becomes.

With a note, a program whose digest is known is loaded without being lowered. A note is an entry of
the cache like any other, and as well verified.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import jax
from snaprt_cache.key import Key, KeyPart
from snaprt_cache.store import Cache

from snaprt import jaxapi, metrics
from snaprt.compile.key import PROGRAM, Subject, key_of
from snaprt.compile.lower import digest_of_lowering
from snaprt.graph.digest import Unstable
from snaprt.graph.program import Placement, Program

_log = logging.getLogger("snaprt.cache")

#: What the cache calls the entries of notes.
KIND: Final = "note"


#: Nothing that a note counts comes near it.
_MAX_NUMBER: Final = 1 << 24


#: In place of what a program donates: its note is of the one that was compiled last, whatever that
#: donates. Which inputs are free may change by chance, and so differ from one start to the next.
ANY_DONATION: Final = (-1,)


@dataclass(frozen=True)
class Note:
    """What is known of a program before it is lowered."""

    executable: Key
    graph_id: str
    arguments: int
    results: int
    device_ids: tuple[int, ...]
    donated: tuple[int, ...] = ()  # in the note of `ANY_DONATION`, the inputs that are


def note_key(
    program: Program, promoted: frozenset[int], is_watched: bool, cache: Cache
) -> Key | None:
    """Return the key of the program's note; ``None``, counted by its reason, where it has none."""
    try:
        digest = digest_of_lowering(program, promoted, is_watched)
    except Unstable as reason:
        metrics.counter_add(f"UnstableProgram::{reason}")
        return None
    except Exception as error:  # a form of JAX's that is not foreseen: the module decides
        _log.info("cannot compute the digest of a program: %r", error)
        metrics.counter_add(f"UnstableProgram::{type(error).__name__}")
        return None
    return key_of_program(digest, program.placement, cache)


def key_of_program(digest: str, placement: Placement, cache: Cache) -> Key:
    """Return the key of the note of the program with that digest."""
    devices = devices_of_placement(placement)
    return key_of(Subject(PROGRAM, digest, cache.folder, devices, kind=KIND))


def devices_of_placement(placement: Placement) -> tuple[jaxapi.Device, ...]:
    """Return the devices that a program at ``placement`` runs on."""
    if placement.devices:
        return placement.devices
    default = placement.default_device
    if default is None or isinstance(default, str):
        return (jax.local_devices(backend=default)[0],)
    return (default,)


def read_note(cache: Cache, key: Key) -> Note | None:
    """Return the note of that key, or ``None`` where there is none that can be read."""
    entry = cache.get(key, counted=False)
    if entry is None:
        return None
    try:
        content = json.loads(entry.payload)
        return Note(
            executable=Key(tuple([KeyPart(*map(_text, part)) for part in content["executable"]])),
            graph_id=_text(content["graph_id"]),
            arguments=_number(content["arguments"]),
            results=_number(content["results"]),
            device_ids=tuple(map(_number, content["device_ids"])),
            donated=tuple(map(_number, content.get("donated", ()))),
        )
    except (ValueError, KeyError, TypeError) as error:
        cache.discard(key, f"cannot read its note: {error!r}")
        return None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise TypeError(f"{value!r} is no count, index or id")
    return value


def read_note_of(
    cache: Cache, key: Key, program: Program, arguments: int, results: int
) -> Note | None:
    """Return the note as `read_note` does; one that cannot be of ``program`` is discarded."""
    note = read_note(cache, key)
    if note is not None and not fits(note, program, arguments, results):
        cache.discard(key, "its note is not of this program")
        return None
    return note


def fits(note: Note, program: Program, arguments: int, results: int) -> bool:
    """Return whether a note can be of a program, with so many arguments and results."""
    client = devices_of_placement(program.placement)[0].client
    return (
        (note.arguments, note.results) == (arguments, results)
        and all(index < len(program.inputs) for index in note.donated)
        and bool(note.device_ids)
        and {device.id for device in client.devices()}.issuperset(note.device_ids)
    )


def write_note(cache: Cache, key: Key, note: Note, name: str) -> bool:
    """Store ``note`` under ``key``, and say whether it is there now."""
    content = {
        "executable": [[part.name, part.value] for part in note.executable.parts],
        "graph_id": note.graph_id,
        "arguments": note.arguments,
        "results": note.results,
        "device_ids": note.device_ids,
        "donated": note.donated,
    }
    return cache.put(key, json.dumps(content).encode(), {"name": name, "kind": KIND}, counted=False)


def devices_by_id(ids: Sequence[int], platform_of: jaxapi.Device) -> tuple[jaxapi.Device, ...]:
    """Return the devices of these ids on the platform of another device.

    Raises:
        KeyError: There is no such device any more.
    """
    devices = {device.id: device for device in platform_of.client.devices()}
    return tuple(devices[number] for number in ids)
