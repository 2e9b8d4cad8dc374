"""Programs written for PyTorch/XLA, unmodified, under ``snaprt run --torch``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from programs import SNAPRT, run_program

PROGRAMS = Path(__file__).parent / "xla_programs"


def _run(
    *words: object, folder: Path, options: tuple[str, ...] = ("--lazy",), status: int | None = 0
) -> subprocess.CompletedProcess[str]:
    command = (*SNAPRT, "run", "--torch", *options, "--", *map(str, words))
    return run_program(command, folder=folder, status=status)


def _numbers(output: str, name: str) -> list[float]:
    return [float(text) for text in re.findall(rf"^{name} (.*)$", output, re.MULTILINE)]


@pytest.mark.slow
def test_the_device_is_xla_in_threads_and_spawned_processes(tmp_path: Path) -> None:
    shown = _run(PROGRAMS / "names_of_the_device.py", folder=tmp_path).stdout
    expected = "xla xla:0 True [2.0, 3.0]"
    assert shown.splitlines() == [f"{at} {expected}" for at in ("main", "thread", "process 0")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "plain_arguments", "arguments"),
    [
        ("mnist_processes.py", (), ()),
        ("one_device.py", ("plain.pt",), ("ours.pt",)),
        ("step_scopes.py", (), ()),
        ("compiled_steps.py", (), ()),
        ("chosen_device.py", ("--device", "cpu"), ("--device", "xla")),
    ],
)
def test_losses_are_those_of_pytorch_on_the_cpu(
    program: str, plain_arguments: tuple[str, ...], arguments: tuple[str, ...], tmp_path: Path
) -> None:
    on_cpu = (str(PROGRAMS / "on_cpu.py"), str(PROGRAMS / program), *plain_arguments)
    expected = run_program(on_cpu, folder=tmp_path).stdout
    shown = _run(PROGRAMS / program, *arguments, folder=tmp_path).stdout
    losses = _numbers(expected, "loss")
    assert len({*losses}) >= 4
    assert _numbers(shown, "loss") == pytest.approx(losses, rel=1e-5)
    assert _numbers(shown, "accuracy") == _numbers(expected, "accuracy")
    if program == "mnist_processes.py":
        assert "Metric: CompileTime" in shown
        assert "Counter: MarkStep" in shown
