"""Programs as users of other libraries write them do under snaprt what they do without it.

Run: python -m pytest -m ecosystem -n auto --dist=load
"""

import pytest
from ecosystem_runs import (
    DIFFERS,
    FEW_MODES,
    MODES,
    PROGRAMS,
    difference,
    missing_libraries,
    run,
)
from programs import SNAPRT, run_program

pytestmark = pytest.mark.ecosystem


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_does_what_it_does_plainly(program, tmp_path):
    missing = missing_libraries(PROGRAMS[program])
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install -e '.[ecosystem]'")
    plain = run(PROGRAMS[program], FEW_MODES["plain"], tmp_path)
    assert plain.status == 0, plain.errors
    differences = {
        name: found
        for name, mode in FEW_MODES.items()
        if name != "plain"
        and (found := difference(plain, run(PROGRAMS[program], mode, tmp_path), mode))
    }
    known = {mode for of, mode in DIFFERS if of == program}
    assert differences.keys() == known, "\n\n".join(
        f"{mode}: {found}" for mode, found in differences.items()
    )


def test_recorded_executions_that_check_for_errors_are_replayed(tmp_path):
    """Equinox's `error_if` calls Python in a branch that no execution takes."""
    pytest.importorskip("diffrax")
    recorded = run(PROGRAMS["diffrax_oscillator"], MODES["record"], tmp_path)
    assert recorded.status == 0, recorded.errors
    result = run_program(SNAPRT, "replay", tmp_path / "dump")
    rows = [line.split()[0] for line in result.stdout.splitlines() if "inputs.snap" in line]
    assert len(rows) > 3
    assert set(rows) == {"MATCH"}
