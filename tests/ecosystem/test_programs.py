"""Programs as users of other libraries write them do under snaprt what they do without it."""

import pytest
from ecosystem_runs import FEW_MODES, PROGRAMS, difference, missing_libraries, run

#: What is known to differ, by program and mode, and why.
DIFFERS = {
    ("chex_dataclass", "lazy"): "the errors of checkify are not thrown lazily",
}

pytestmark = pytest.mark.ecosystem


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request):
    missing = missing_libraries(PROGRAMS[request.param])
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; see the extra 'ecosystem'")
    return request.param


@pytest.fixture(scope="module")
def plain(program, tmp_path_factory):
    """Return what the program does plainly, and a folder that its other runs share."""
    folder = tmp_path_factory.mktemp(program)
    ran = run(PROGRAMS[program], FEW_MODES["plain"], folder)
    assert ran.status == 0, ran.errors
    return ran, folder


@pytest.mark.parametrize("mode", [mode for mode in FEW_MODES if mode != "plain"])
def test_a_program_does_what_it_does_plainly(program, plain, mode, request):
    if (program, mode) in DIFFERS:
        request.applymarker(pytest.mark.xfail(reason=DIFFERS[program, mode], strict=True))
    ran, folder = plain
    other = run(PROGRAMS[program], FEW_MODES[mode], folder)
    assert difference(ran, other, rounds=FEW_MODES[mode].rounds) is None


@pytest.mark.full
def test_the_report_finds_no_difference(capsys):
    import report

    assert report.main([]) == (1 if DIFFERS else 0), capsys.readouterr().err
