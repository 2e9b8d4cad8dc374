"""``snaprt run --record``: an unmodified program, every thread of it, from its import of jax on."""

import subprocess
from pathlib import Path

import pytest
from programs import SNAPRT, run_program

from snaprt.cli.main import main
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot

PROGRAM = """
import sys, threading
print(sorted({"jax", "jaxlib"} & set(sys.modules)))
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

@jax.jit
def step(params, batch):
    return jax.tree.map(lambda w: w - 0.1 * batch.sum(), params)

@jax.jit
def in_a_thread(value):
    return value * 3

mesh = jax.make_mesh((4,), ("data",))
batch = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
mean = jax.jit(jax.shard_map(
    lambda part: jax.lax.pmean(part, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
threads = [threading.Thread(target=lambda: in_a_thread(jnp.float32(n))) for n in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
params = {"w": jnp.ones(3)}
for n in range(3):
    params = step(params, jnp.arange(4.0) + n)
print(np.asarray(params["w"]), np.asarray(mean(batch)))
print(np.asarray(jax.jit(lambda a: (a * a).sum())(batch)), sys.argv[1:])
"""


def run(
    *options: str, folder: Path, source: str = PROGRAM, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(source)
    words = (*options, "program.py", "--epochs", "3")
    cache = folder / "cache"
    return run_program(words, status=None, folder=folder, SNAPRT_CACHE_DIR=cache, **environment)


def recorded(folder: Path) -> list[SnapshotFile]:
    return [open_snapshot(path) for path in sorted(folder.glob("*.inputs.snap"))]


def names(folder: Path) -> list[str]:
    return [snapshot.manifest.execution.name for snapshot in recorded(folder)]


RUN = (*SNAPRT, "run")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program prints when it runs alone."""
    return run(folder=tmp_path_factory.mktemp("alone")).stdout


def test_every_thread_and_device_is_recorded_and_the_program_prints_what_it_prints_alone(
    tmp_path: Path, printed: str
) -> None:
    shown = run(*RUN, "--record", "--dump", "dump", "--", folder=tmp_path)
    assert (shown.stdout, shown.returncode) == (printed, 0), shown.stderr
    assert shown.stdout.startswith("[]\n")
    found = names(tmp_path / "dump")
    assert found.count("step") == 3
    assert found.count("in_a_thread") == 2
    assert found.count("<lambda>") == 8  # of `mean` and the last: one for each device
    assert len(found) == 13
    files = sorted((tmp_path / "dump").glob("*device000000*.inputs.snap"))
    assert main(["replay", *map(str, files)]) == 0


def test_processes_that_the_program_starts_record_too_and_name_the_call_that_they_began_with(
    tmp_path: Path,
) -> None:
    source = """
import multiprocessing, subprocess, sys
if len(sys.argv) == 2:
    import jax

    @jax.jit
    def first(value):
        return value + 1

    @jax.jit
    def second(value):
        return value * 2

    print(second(first(3.0)))
elif __name__ == "__main__":
    print(subprocess.run([sys.executable, "program.py", "alone"], check=True).returncode)
    import jax
    context = multiprocessing.get_context("fork")
    child = context.Process(target=jax.jit(lambda value: value - 1), args=(3.0,))
    child.start()
    child.join(60)
    print(child.exitcode)
"""
    shown = run(*RUN, "--record", "--dump", "dump", "--", folder=tmp_path, source=source)
    assert (shown.stdout, shown.returncode) == ("8.0\n0\n0\n", 0), shown.stderr
    assert names(tmp_path / "dump") == ["<lambda>", "second"]
    assert [line for line in shown.stderr.splitlines() if "is not recorded" in line] == [
        "an execution of first is not recorded: recording started while JAX was already calling it"
    ]


def test_the_lines_of_source_are_those_of_the_program_alone(tmp_path: Path) -> None:
    source = "import jax.numpy as jnp\nprint(float(jnp.tanh(jnp.arange(3.0)).sum()))\n"
    for folder in ("compiled", "cached"):
        shown = run(*RUN, "--lazy", "--dump", folder, folder=tmp_path, source=source)
        assert shown.returncode == 0, shown.stderr
        for one in recorded(tmp_path / folder):
            where = {at.partition(" (")[0] for at in one.manifest.execution.source_locations}
            assert where == {f"{tmp_path / 'program.py'}:2"}


def test_a_dump_directory_that_is_a_file_is_an_error_before_the_program_runs(
    tmp_path: Path,
) -> None:
    shown = run(*RUN, "--record", "--dump", "program.py", folder=tmp_path)
    assert (shown.stdout, shown.returncode) == ("", 2)
    assert "is a file" in shown.stderr


def test_when_alone_records_too_and_without_a_directory_into_one_that_it_names(
    tmp_path: Path,
) -> None:
    shown = run(*RUN, "--when", "name=^step$, execution=1", "--", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "snaprt-dump" in shown.stderr
    (only,) = recorded(tmp_path / "snaprt-dump")
    assert only.array("batch").tolist() == [1.0, 2.0, 3.0, 4.0]


def test_an_error_ends_the_program_as_alone_and_what_it_was_called_with_is_there(
    tmp_path: Path, printed: str
) -> None:
    source = PROGRAM + "step(params, jnp.arange(5.0))\nraise ValueError('diverged')\n"
    shown = run(*RUN, "--when", "error", "--dump", "dump", folder=tmp_path, source=source)
    assert (shown.stdout, shown.returncode) == (printed, 1)
    assert shown.stderr.endswith("ValueError: diverged\n")
    (last,) = recorded(tmp_path / "dump")
    assert last.array("batch").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_flags_that_xla_does_not_know_are_an_error_with_status_2(tmp_path: Path) -> None:
    shown = run(*RUN, "--record", "--", folder=tmp_path, XLA_FLAGS="--xla_nope=1")
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: XLA does not know --xla_nope in XLA_FLAGS")


REPLACES_ITSELF = """
import os, sys, jax
jax.devices()
jax.jit(lambda x: x * 2 + len(sys.argv))(1.0)
if len(sys.argv) == 3:
    os.execv(sys.executable, [sys.executable, __file__])
os._exit(7)
"""


def test_what_ran_before_a_process_is_replaced_or_left_at_once_is_recorded(tmp_path: Path):
    options = (*RUN, "--record", "--dump", "dump")
    shown = run(*options, folder=tmp_path, source=REPLACES_ITSELF)
    assert shown.returncode == 7, shown.stderr
    assert len(recorded(tmp_path / "dump")) == 2


def test_a_function_to_which_no_weak_reference_can_be_made_is_refused_as_by_jax(
    tmp_path: Path,
) -> None:
    source = """
import jax

class Slotted:
    __slots__ = ()
    def __call__(self, value):
        return value + 1

step = jax.jit(Slotted())
for _ in range(4):
    try:
        step(3)
    except TypeError as error:
        print(error)
"""
    ran = run(*RUN, "--record", "--", folder=tmp_path, source=source)
    assert ran.returncode == 0
    assert ran.stdout.count("cannot create weak reference") == 4
