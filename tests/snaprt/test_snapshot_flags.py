"""XLA_FLAGS: read as XLA reads them, checked before XLA does, and settled with it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from programs import run_program

from snaprt.errors import UsageError
from snaprt.snapshot.recorder import flags

ON = "--xla_dump_hlo_snapshots --xla_dump_to=dump"


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("", None),
        ("--xla_dump_to=dump", None),
        (ON, "dump"),
        ("--xla_dump_to=dump --xla_dump_hlo_snapshots=true --xla_cpu_enable_fast_math=0", "dump"),
        ("--xla_dump_to=dump --xla_dump_hlo_snapshots=1", "dump"),
        ("--xla_dump_to=dump --xla_dump_hlo_snapshots=True", "dump"),
        ("--xla_dump_to=dump --xla_dump_hlo_snapshots=false", None),
        ("--xla_dump_to=dump --xla_dump_hlo_snapshots=0", None),
        (ON + " --xla_dump_hlo_snapshots=false", None),
        (ON + " --xla_dump_to=other", "other"),
        ("  --xla_dump_hlo_snapshots\n\t--xla_dump_to=dump ", "dump"),
        ("--xla_dump_hlo_snapshots --xla_dump_to='my dump'", "my dump"),
        ('--xla_dump_hlo_snapshots --xla_dump_to="my \\"dump\\""', 'my "dump"'),
        ("--no--xla_dump_hlo_snapshots --xla_dump_to=dump", None),
        ("--xla_dump_hlo_snapshots_of_mine --xla_dump_to=dump", None),
    ],
)
def test_the_folder_is_the_one_that_the_flags_name(variable: str, folder: str | None) -> None:
    expected = None if folder is None else Path(folder).absolute()
    assert flags.dump_folder_of(variable) == expected


def test_the_variable_may_name_a_file_of_flags(tmp_path: Path) -> None:
    (tmp_path / "flags").write_text("--xla_dump_hlo_snapshots\n--xla_dump_to=/dump\n")
    assert flags.dump_folder_of(str(tmp_path / "flags")) == Path("/dump")
    assert flags.dump_folder_of(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("--xla_dump_hlo_snapshots", "add --xla_dump_to=DIR"),
        ("--xla_dump_hlo_snapshots --xla_dump_to=", "add --xla_dump_to=DIR"),
        ("--xla_dump_hlo_snapshots --xla_dump_to=-", "--xla_dump_to=-, which is not a directory"),
        ("--xla_dump_hlo_snapshots --xla_dump_to=sponge", "not a directory"),
        ("--xla_dump_hlo_snapshots=maybe --xla_dump_to=dump", "true, false, 1, 0"),
    ],
)
def test_flags_that_ask_for_the_impossible_are_an_error(variable: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        flags.dump_folder_of(variable)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("variable", "for_xla"),
    [
        ("", ""),
        ("--xla_dump_to=dump", "--xla_dump_to=dump"),
        (ON, ""),
        (ON + " --xla_cpu_enable_fast_math=1", "--xla_cpu_enable_fast_math=1"),
        (ON + " --xla_dump_hlo_as_text", "--xla_dump_to=dump --xla_dump_hlo_as_text"),
        ("--xla_dump_to='a b' " + ON + " --xla_dump_hlo_pass_re='x y'",
         "--xla_dump_to='a b' --xla_dump_to=dump --xla_dump_hlo_pass_re='x y'"),
    ],
)  # fmt: skip
def test_xla_gets_every_flag_but_ours(variable: str, for_xla: str) -> None:
    assert flags.without_ours(variable) == for_xla


REAL_FLAGS = (
    "--xla_cpu_enable_fast_math=true --xla_gpu_autotune_level=2 --xla_dump_hlo_as_proto "
    "--xla_force_host_platform_device_count=8 --xla_cpu_use_thunk_runtime=1 "
    "--xla_backend_optimization_level=1 --xla_dump_hlo_pass_re=.* --xla_dump_to=/tmp/x "
    "--xla_dump_hlo_unoptimized_snapshots=false --xla_gpu_cuda_data_dir=/usr/local/cuda"
)


@pytest.mark.parametrize("variable", ["", ON, REAL_FLAGS, "/no/such/file", "words --xla_dump_to=x"])
def test_flags_that_xla_takes_are_not_complained_of(variable: str) -> None:
    flags.check_flags(variable)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (
            "--xla_cpu_enable_fast_mth=true",
            "XLA does not know --xla_cpu_enable_fast_mth in XLA_FLAGS\n"
            "hint: did you mean --xla_cpu_enable_fast_math?",
        ),
        ("--xla_dump_hlo_snapshot --xla_dump_to=d", "did you mean --xla_dump_hlo_snapshots?"),
        ("--xla_one_thing=1 --other", "does not know --xla_one_thing, --other in XLA_FLAGS"),
        ("--xla_gpu_autotune_level=high", "the value 'high' of the flag --xla_gpu_autotune_level"),
    ],
)
def test_a_flag_that_would_end_the_process_is_named_first(variable: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        flags.check_flags(variable)
    assert said in str(error.value)


PRELUDE = """
import os, sys
from snaprt.snapshot.recorder import flags
from snaprt.snapshot.recorder.plan import current_plan
import jax, jax.numpy as jnp
def compile_and_run():
    flags.take_over()
    lowered = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((4, 4)))
    lowered.compile(flags.compiler_overrides() or None)(jnp.ones((4, 4)))
"""


def run(program: str, variable: str, *, folder: Path, status: int = 0) -> str:
    program = PRELUDE + textwrap.dedent(program)
    return run_program(program, folder=folder, status=status, XLA_FLAGS=variable).stdout


def test_xla_writes_no_snapshots_where_snaprt_does_and_the_variable_stays(tmp_path: Path) -> None:
    program = "compile_and_run(); print(os.environ['XLA_FLAGS'], current_plan().folder.name)"
    assert run(program, ON, folder=tmp_path) == f"{ON} dump\n"
    assert list(tmp_path.iterdir()) == []


def test_the_other_dump_flags_still_reach_xla(tmp_path: Path) -> None:
    run("compile_and_run()", ON + " --xla_dump_hlo_as_text", folder=tmp_path)
    dumped = [path.name for path in (tmp_path / "dump").iterdir()]
    assert any(name.endswith("_lambda.before_optimizations.txt") for name in dumped)
    assert not any(".snapshot." in name for name in dumped)


def test_flags_set_by_the_script_before_the_first_execution_count(tmp_path: Path) -> None:
    program = f"""
        os.environ["XLA_FLAGS"] = {ON!r}
        compile_and_run()
        print(current_plan().folder.name)
    """
    assert run(program, "", folder=tmp_path) == "dump\n"
    assert list(tmp_path.iterdir()) == []


def test_where_xla_had_parsed_its_flags_before_our_compiles_override_them(tmp_path: Path) -> None:
    run("jnp.ones(3) + 1; compile_and_run()", ON, folder=tmp_path)
    snapshots = [path.name for path in (tmp_path / "dump").glob("*.snapshot.*")]
    assert snapshots  # of what ran before
    assert not any("_lambda" in name for name in snapshots)
    assert not list((tmp_path / "dump").glob("*_lambda.*.txt"))


def test_an_unknown_flag_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    program = """
        from snaprt.errors import UsageError
        try:
            compile_and_run()
        except UsageError as error:
            print(error.message)
            sys.exit(2)
    """
    said = run(program, "--xla_dump_hlo_snapshotz --xla_dump_to=dump", folder=tmp_path, status=2)
    assert said == "XLA does not know --xla_dump_hlo_snapshotz in XLA_FLAGS\n"
