"""What one side of a comparison is, and how a user writes it.

A variant is a kind, or a device, followed by additions: ``cpu,optimization=0,fast-math``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

from snaprt.errors import UsageError
from snaprt_replay.load.case import CompilerOption

VariantKind = Literal[
    "recorded",
    "device",
    "f64",
    "random-rounding",
    "interpreter",
    "op-by-op",
    "tpu-precision",
    "compile-only",
]
PRECISIONS: Final = ("default", "high", "highest")

_DEVICE = re.compile(r"(cpu|gpu|tpu)(:\d+)?")
_HINT = (
    "a variant is recorded, a device (cpu, gpu:0, tpu), f64, random-rounding, interpreter, "
    "op-by-op, tpu-precision=default|high|highest or python=PATH, followed by optional "
    "modifiers after commas: disable-hlo-pass=NAME, xla-flags=--xla_..., optimization=0, "
    "matmul-precision=highest, fast-math"
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to get a program's outputs."""

    text: str  # what the user wrote
    # ``recorded`` takes the outputs from the file; ``device`` compiles the program and runs it;
    # ``f64`` raises it to float64 first; ``random-rounding`` does, and rounds each result at
    # random, otherwise in each run; ``interpreter`` evaluates its StableHLO one operation after the
    # other with the reference implementation; ``op-by-op`` compiles each of its operations alone;
    # ``tpu-precision`` rounds the operands of its dots and convolutions as a TPU does;
    # ``compile-only`` runs nothing.
    kind: VariantKind
    # Where it runs, as `devices.find_device` takes it; None for JAX's choice. What is compiled only
    # may be for a TPU's topology, ``tpu:v5e:2x2``.
    device: str | None = None
    options: tuple[tuple[str, CompilerOption], ...] = ()  # XLA's options by name, without dashes
    python: str | None = None  # the path of another environment's interpreter; None for this one
    precision: str | None = None  # one of `PRECISIONS`: what ``tpu-precision`` emulates
    # One of `PRECISIONS`: what dots and convolutions without a precision of their own ask of the
    # device.
    matmul_precision: str | None = None

    def __str__(self) -> str:
        """Return what the user wrote."""
        return self.text


RECORDED: Final = Variant("recorded", "recorded")


def compile_only(device: str | None, options: Mapping[str, CompilerOption]) -> Variant:
    """Return the variant that compiles a program for a device, which need not be there."""
    text = device or "default"
    return Variant(text, "compile-only", device=device, options=tuple(sorted(options.items())))


def parse_variant(text: str) -> Variant:
    """Read a variant as a user writes it.

    Raises:
        UsageError: It is none; the hint lists what there is.
    """
    # Other commas belong to a flag's value, or are an error that names them.
    first, *additions = re.split(rf",\s*(?=(?:{'|'.join(_ADDITIONS)})(?:[=,]|$))", text.strip())
    variant = _parse_first(text, first)
    for part in additions:
        name, _, value = part.partition("=")
        variant = _ADDITIONS[name](variant, value)
    if variant.kind == "recorded" and additions:
        raise _not_a_variant(text, "recorded outputs cannot be modified")
    return variant


def with_options(variant: Variant, options: Mapping[str, CompilerOption]) -> Variant:
    """Return a variant with values of XLA's options, which its own go before."""
    merged = {**options, **dict(variant.options)}
    return dataclasses.replace(variant, options=tuple(sorted(merged.items())))


def option_value(text: str) -> CompilerOption:
    """Return the value of an XLA option that a user wrote: a bool, a number or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _parse_first(text: str, first: str) -> Variant:
    name, _, value = first.partition("=")
    if _DEVICE.fullmatch(first):
        return Variant(text, "device", device=first)
    if first == "default":
        return Variant(text, "device")
    if first in _KINDS:
        return Variant(text, _KINDS[first], device="cpu" if first in _IN_FLOAT64 else None)
    if name == "tpu-precision":
        return _with_precision(Variant(text, "tpu-precision", device="cpu"), value or "default")
    if name in _ADDITIONS:  # on JAX's choice of device
        return _ADDITIONS[name](Variant(text, "device"), value)
    raise _not_a_variant(text, f"{first!r} is neither a kind nor a device")


_KINDS: Final[Mapping[str, VariantKind]] = {
    "recorded": "recorded",
    "f64": "f64",
    "random-rounding": "random-rounding",
    "interpreter": "interpreter",
    "op-by-op": "op-by-op",
}
# Not every device has float64.
_IN_FLOAT64: Final = ("f64", "random-rounding")


def _with_precision(variant: Variant, value: str) -> Variant:
    return dataclasses.replace(variant, precision=_known_precision(variant, value))


def _with_matmul_precision(variant: Variant, value: str) -> Variant:
    return dataclasses.replace(variant, matmul_precision=_known_precision(variant, value))


def _known_precision(variant: Variant, value: str) -> str:
    if value not in PRECISIONS:
        raise _not_a_variant(variant.text, f"{value!r} is not one of {', '.join(PRECISIONS)}")
    return value


def _with_python(variant: Variant, value: str) -> Variant:
    if not value:
        raise _not_a_variant(variant.text, "python= needs the path of an interpreter")
    return dataclasses.replace(variant, python=value)


def _with_option(variant: Variant, name: str, value: CompilerOption) -> Variant:
    options = {**dict(variant.options), name: value}
    return dataclasses.replace(variant, options=tuple(sorted(options.items())))


def _with_disabled_pass(variant: Variant, value: str) -> Variant:
    if not value:
        raise _not_a_variant(variant.text, "disable-hlo-pass= needs the name of a pass")
    disabled = str(dict(variant.options).get("xla_disable_hlo_passes", ""))
    names = [*filter(None, disabled.split(",")), value]
    return _with_option(variant, "xla_disable_hlo_passes", ",".join(names))


def _with_flags(variant: Variant, value: str) -> Variant:
    for flag in value.split():
        name, equals, setting = flag.lstrip("-").partition("=")
        if not name.startswith("xla_"):
            raise _not_a_variant(variant.text, f"{flag!r} is not an XLA flag")
        # As in XLA_FLAGS: a flag without a value is true.
        variant = _with_option(variant, name, option_value(setting) if equals else True)
    return variant


def _with_optimization(variant: Variant, value: str) -> Variant:
    if value not in ("0", "1", "2", "3"):
        raise _not_a_variant(variant.text, "optimization= takes 0, 1, 2 or 3")
    return _with_option(variant, "xla_backend_optimization_level", int(value))


def _with_fast_math(variant: Variant, value: str) -> Variant:
    if value:
        raise _not_a_variant(variant.text, "fast-math takes no value")
    return _with_option(variant, "xla_cpu_enable_fast_math", True)


_ADDITIONS: Final[Mapping[str, Callable[[Variant, str], Variant]]] = {
    "disable-hlo-pass": _with_disabled_pass,
    "fast-math": _with_fast_math,
    "matmul-precision": _with_matmul_precision,
    "optimization": _with_optimization,
    "python": _with_python,
    "xla-flags": _with_flags,
}


def _not_a_variant(text: str, why: str) -> UsageError:
    return UsageError(f"{text!r} is not a variant: {why}", hint=_HINT)
