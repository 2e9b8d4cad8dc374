"""docs/explanation/comparison.md names the default tolerances that hold."""

from pathlib import Path

from snaprt_replay.compare.tolerance import DEFAULTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "comparison.md"


def test_every_row_of_the_table_of_defaults_is_documented() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    for default in DEFAULTS:
        first_type = default.types.split(",")[0].split(" ")[0]
        row = next(line for line in rows if line.startswith(f"| {first_type}"))
        assert f"| {default.epsilons:g} eps" in row
        assert f"| {default.max_ulp} |" in row
        assert default.reason in row
