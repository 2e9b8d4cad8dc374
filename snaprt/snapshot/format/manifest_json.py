"""Writes a manifest as JSON, and believes none of it when it reads it again; it knows no files.

A value of another kind than its field has is an error here, so that nothing later trips over it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from snaprt.snapshot.format import schema


def to_json(manifest: schema.Manifest) -> bytes:
    """Serialize a manifest as UTF-8 JSON."""
    body = {
        "format": schema.FORMAT_NAME,
        "version": [schema.major_version(manifest.arrays), schema.FORMAT_MINOR],
        **vars(manifest),
    }
    # Without indentation, and with the parts of it as they are, Python encodes it in C.
    return json.dumps(body, ensure_ascii=False, default=vars).encode("utf-8", "backslashreplace")


def from_json(text: bytes) -> schema.Manifest:
    """Parse a manifest; keys of a newer minor version are ignored.

    Raises:
        ValueError: It is not JSON, a key is missing or has a value of another kind.
    """
    try:
        body = json.loads(text)
        execution = dict(body["execution"])
        execution["device"] = _record(schema.DeviceRecord, execution["device"])
        execution["devices"] = tuple(
            _record(schema.DeviceRecord, one) for one in execution["devices"]
        )
        return schema.Manifest(
            execution=_record(schema.Execution, execution),
            module={
                name: _record(schema.MemberRecord, one) for name, one in body["module"].items()
            },
            arrays=tuple(_record(schema.ArrayRecord, one) for one in body["arrays"]),
            shardings=tuple(
                _record(schema.ShardingRecord, one) for one in body.get("shardings", ())
            ),
            proof=_record(schema.ProofRecord, body.get("proof", {})),
            trace_error=(
                _record(schema.TraceErrorRecord, body["trace_error"])
                if body.get("trace_error")
                else None
            ),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _record(kind: type, values: Mapping[str, Any]) -> Any:
    """Build a dataclass of ``kind``: lists become tuples, what it does not know is left out.

    A key that an older minor version did not write may be missing: its field has a default.
    """
    known: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name not in values and _has_default(field):
            continue
        known[field.name] = _as_tuple(values[field.name])
        _check_kind(field, known[field.name])
    return kind(**known)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


_KINDS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "Role": lambda value: value in schema.ROLES,
    "int": lambda value: isinstance(value, int),
    "bool": lambda value: isinstance(value, bool),
    "float": lambda value: isinstance(value, (int, float)),
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(_whole(n) for n in value),
    "tuple[str, ...]": lambda value: _words(value),
    "tuple[tuple[str, ...], ...]": lambda value: (
        isinstance(value, tuple) and all(map(_words, value))
    ),
    "tuple[tuple[int, int], ...] | None": lambda value: (
        value is None or (isinstance(value, tuple) and all(map(_range, value)))
    ),
    "Mapping[str, float]": lambda value: (
        isinstance(value, dict) and all(isinstance(one, (int, float)) for one in value.values())
    ),
    "tuple[Mapping[str, Any], ...]": lambda value: (
        isinstance(value, tuple) and all(isinstance(one, dict) for one in value)
    ),
    "Mapping[str, Any]": lambda value: isinstance(value, dict),
    "Mapping[str, str]": lambda value: (
        isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
    ),
}
"""Annotation of a field to the test of a value that came out of JSON."""


def _words(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


def _range(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_whole, value))


def _whole(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _check_kind(field: dataclasses.Field[Any], value: Any) -> None:
    test = _KINDS.get(str(field.type))
    if test is not None and not test(value):
        raise TypeError(f"{field.name} should be {field.type}, not {value!r:.60}")
