from __future__ import annotations

import pytest
from snaprt_replay.run.variants.variants import Variant, parse_variant, with_options

from snaprt.errors import UsageError


@pytest.mark.parametrize("text", ["cpu", "gpu:0", "tpu"])
def test_a_device_is_a_variant(text: str) -> None:
    assert parse_variant(text) == Variant(text, "device", device=text)


@pytest.mark.parametrize("text", ["recorded", "interpreter", "op-by-op"])
def test_a_kind_is_a_variant(text: str) -> None:
    assert parse_variant(text).kind == text


def test_float64_runs_on_the_cpu_for_not_every_device_has_it() -> None:
    assert parse_variant("f64").device == "cpu"


def test_additions_become_options_of_xla() -> None:
    variant = parse_variant("cpu,optimization=0,fast-math,xla-flags=--xla_a=2 --xla_b")
    assert dict(variant.options) == {
        "xla_backend_optimization_level": 0,
        "xla_cpu_enable_fast_math": True,
        "xla_a": 2,
        "xla_b": True,
    }


def test_passes_add_up_and_a_comma_in_a_flag_is_the_flags_own() -> None:
    added = parse_variant("cpu,disable-hlo-pass=fusion,disable-hlo-pass=algsimp")
    written = parse_variant("cpu,xla-flags=--xla_disable_hlo_passes=fusion,algsimp")
    assert added.options == written.options == (("xla_disable_hlo_passes", "fusion,algsimp"),)


def test_an_addition_alone_is_for_the_default_device() -> None:
    assert parse_variant("python=/bin/python").python == "/bin/python"
    assert parse_variant("fast-math").device is None


def test_precisions_are_named() -> None:
    assert parse_variant("tpu-precision=high").precision == "high"
    assert parse_variant("tpu,matmul-precision=highest").matmul_precision == "highest"


def test_options_given_elsewhere_do_not_override_the_variants_own() -> None:
    variant = with_options(parse_variant("cpu,optimization=1"), {"xla_a": 1})
    assert dict(variant.options) == {"xla_a": 1, "xla_backend_optimization_level": 1}


@pytest.mark.parametrize(
    "text",
    [
        *("", "cpux", "cpu,nope=1", "tpu-precision=huge", "cpu,optimization=9"),
        *("cpu,xla-flags=--nope=1", "recorded,fast-math", "cpu,fast-math=1", "python="),
        "cpu,disable-hlo-pass=",
    ],
)
def test_what_is_no_variant_is_refused_with_a_list_of_those_there_are(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_variant(text)
    assert "op-by-op" in caught.value.hint
