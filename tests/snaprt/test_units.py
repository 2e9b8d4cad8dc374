import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaprt import settings
from snaprt.cli.cache.words import Size
from snaprt.units import format_duration, format_size, format_spans, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("7B", 7),
        ("500M", 500 << 20),
        ("500 MiB", 500 << 20),
        ("500MB", 500_000_000),
        ("1.5g", 3 << 29),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_means_the_same_in_a_variable_and_in_an_option(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: int
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_MAX_SIZE", text)
    assert parse_size(text) == settings.get("SNAPRT_CACHE_MAX_SIZE") == expected
    assert Size().convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["", "M", "-1", "1e3", "5 apples", "1KBB", "\u0665M"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 the message is the caller's
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250us", 250e-6),
        ("1.5 ms", 1.5e-3),
        ("30", 30),
        ("5m", 300),
        ("5min", 300),
        ("2w", 1209600),
    ],
)
def test_a_duration_is_read(text: str, expected: float) -> None:
    assert parse_duration(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "s", "5 months", "-3s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 the message is the caller's
        parse_duration(text)


@given(st.integers(0, 10**17))
def test_a_size_that_is_shown_is_read_back_to_a_twentieth(count: int) -> None:
    assert parse_size(format_size(count)) == pytest.approx(count, rel=0.05, abs=0.5)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        *((0.0, "0.00 s"), (12e-6, "12 us"), (0.0015, "1.5 ms"), (0.25, "0.25 s")),
        *((59.0, "59.00 s"), (270.0, "4.5 min"), (7200.0, "2.0 h")),
    ],
)
def test_a_duration_is_shown_in_its_unit(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_runs_of_numbers_are_shown_as_spans() -> None:
    assert format_spans({8, 7, 5, 2, 1, 0}) == "0-2, 5, 7-8"
    assert format_spans([]) == ""
