import io
import json
import os
import pty
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from programs import SNAPRT, finish, run_program, start_program

from snaprt.cli.bundle import command, hiding
from snaprt.errors import UsageError

# Runs a command as a bundle does, without collecting anything; leaves with its status.
RUN = """
import json, os, sys
from pathlib import Path
from snaprt.cli.bundle.run import run
folder = Path(sys.argv[1])
ended = run(sys.argv[2:], os.environ, folder / "stdout.txt", folder / "stderr.txt")
(folder / "ended.json").write_text(json.dumps(vars(ended)))
sys.exit(ended.status)
"""
PROGRAM = """
import os, sys
import jax.numpy as jnp
import snaprt

print("begun in", os.path.expanduser("~"), "with", os.environ["MY_TOKEN"], flush=True)
x = jnp.ones((4, 4))
with snaprt.lazy():
    for _ in range(2):
        x = jnp.tanh(x @ x)
        snaprt.mark_step()
print("to stderr", file=sys.stderr)
sys.exit(5)
"""
INTERRUPTED = r"""
import sys, time
try:
    # In one piece: the interrupt may come as soon as it is there.
    sys.stdout.write(f"terminals: {sys.stdout.isatty()} {sys.stderr.isatty()}, begun\n")
    sys.stdout.flush()
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    try:
        time.sleep(0.3)
    except KeyboardInterrupt:
        print("interrupted again")
    sys.exit(7)
"""


def make_bundle(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = (*SNAPRT, "bundle", "--outfile", "run.tar.gz", *words)
    ours = {"JAX_PLATFORMS": "cpu"} | variables
    return run_program(command, folder=folder, status=None, **ours)


def read(path: Path) -> dict[str, str]:
    """Return the texts in a bundle by name; of what is not text, as much as is."""
    with tarfile.open(path) as file:
        return {
            member.name: file.extractfile(member).read().decode(errors="replace") for member in file
        }


class Made:
    """A bundle of PROGRAM, and what the command printed."""

    def __init__(self, folder: Path) -> None:
        (folder / "program.py").write_text(PROGRAM)
        self.folder = folder
        self.home = folder / "ann.smith"
        self.home.mkdir()
        self.done = make_bundle(
            folder,
            "--tidy",
            "--snapshots",
            "--",
            *(sys.executable, "-u", "program.py", "--api-key", "abcdef123456"),
            HOME=str(self.home),
            MY_TOKEN="do-not-tell-anybody",
            SNAPRT_CACHE_DIR=str(self.home / "cache"),
        )
        self.files = {name.removeprefix("run/"): text for name, text in self.read().items()}
        self.manifest = json.loads(self.files["manifest.json"])

    def read(self) -> Mapping[str, str]:
        return read(self.folder / "run.tar.gz")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("bundle"))


def test_the_programs_output_and_status_are_those_without_a_bundle(made: Made):
    assert made.done.returncode == 5, made.done.stderr
    assert made.done.stdout == f"begun in {made.home} with do-not-tell-anybody\n"
    assert "to stderr" in made.done.stderr


def test_a_bundle_has_logs_graphs_metrics_hlo_versions_flags_and_snapshots(made: Made):
    for start in command.CONTENTS:
        assert any(name.startswith(start) for name in made.files), (start, sorted(made.files))
    assert "to stderr" in made.files["stderr.txt"]
    assert "snaprt/compile/obtain.py" in made.files["stderr.txt"]
    assert json.loads(made.files["metrics/end.json"])["counters"]["MarkStep"] == 2
    assert "tanh" in made.files["graphs/graphs.txt"]
    software = json.loads(made.files["software.json"])
    assert software["executable"] == sys.executable
    assert software["jax"]["devices"][0]["platform"] == "cpu"
    assert f"jax=={software_version('jax')}\n" in made.files["packages.txt"]
    assert json.loads(made.files["flags.json"])["XLA_FLAGS"][-1].startswith("--xla_dump_to=")
    assert sum(name.startswith("snapshots/") for name in made.files) == 2


def software_version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)


def test_the_manifest_says_what_ran_how_it_ended_and_what_is_there(made: Made):
    assert (made.manifest["schema"], made.manifest["version"]) == ("snaprt.bundle", 1)
    assert (made.manifest["status"], made.manifest["signal"]) == (5, "")
    assert made.manifest["command"][1:] == ["-u", "program.py", "--api-key", "(hidden)"]
    listed = {row["name"]: row["bytes"] for row in made.manifest["files"]}
    assert listed.keys() == made.files.keys() - {"manifest.json"}
    assert listed["stdout.txt"] == len(made.files["stdout.txt"].encode())


def test_neither_tokens_nor_the_home_directory_are_in_a_bundle(made: Made):
    assert made.files["stdout.txt"] == "begun in ~ with (hidden: MY_TOKEN)\n"
    shown = json.loads(made.files["environment.json"])
    assert shown["MY_TOKEN"] == shown["HOME"] == "(hidden)"
    assert shown["JAX_PLATFORMS"] == "cpu"
    assert shown["SNAPRT_CACHE_DIR"] == "~/cache"
    for name, text in made.files.items():
        for secret in ("do-not-tell", "ann.smith", "abcdef123456"):
            assert secret not in text, name


def test_tidy_leaves_the_bundle_alone(made: Made):
    assert sorted(path.name for path in made.folder.iterdir()) == [
        "ann.smith",
        "program.py",
        "run.tar.gz",
    ]
    assert (made.folder / "run.tar.gz").stat().st_mode & 0o077 == 0


def test_a_snapshot_in_a_bundle_can_be_read(made: Made, tmp_path: Path):
    from snaprt.snapshot.format.places import snapshots_in
    from snaprt.snapshot.format.read import open_snapshot

    with tarfile.open(made.folder / "run.tar.gz") as file:
        member = next(one for one in file if "/snapshots/" in one.name)
        (tmp_path / "one.pack").write_bytes(file.extractfile(member).read())
    paths = snapshots_in(tmp_path / "one.pack")
    assert open_snapshot(paths[0]).manifest.execution.redacted == ("paths",)


def test_after_ctrl_c_the_bundle_is_written_with_what_the_program_did_then(tmp_path: Path):
    words = (*SNAPRT, "bundle", "--outfile", "run.tar.gz", "--show-secrets", sys.executable, "-c")
    process = start_program(words, INTERRUPTED, folder=tmp_path, JAX_PLATFORMS="cpu", A_TOKEN="abc")
    begun = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    done = finish(process, status=7)
    shown, told = done.stdout, done.stderr
    files = read(tmp_path / "run.tar.gz")
    assert (
        files["run/stdout.txt"] == begun + shown == "terminals: False False, begun\ninterrupted\n"
    )
    manifest = json.loads(files["run/manifest.json"])
    assert (manifest["status"], manifest["interrupted"], manifest["hidden"]) == (7, True, False)
    assert json.loads(files["run/environment.json"])["A_TOKEN"] == "abc"
    assert "nothing ran lazily" in told
    (working,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert (working / "stdout.txt").read_text() == files["run/stdout.txt"]
    assert str(working) in told


def test_the_status_of_a_killed_program_is_the_one_that_a_shell_gives(tmp_path: Path):
    kill = "import os, signal; print('here', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    words = (tmp_path, sys.executable, "-c", kill)
    done = run_program(RUN, *words, status=128 + signal.SIGKILL)
    assert done.stdout == "here\n"
    assert json.loads((tmp_path / "ended.json").read_text())["signal"] == "SIGKILL"
    assert (tmp_path / "stdout.txt").read_text() == "here\n"


def test_flags_that_dump_or_lie_in_a_file_stay_as_they_are(tmp_path: Path, monkeypatch):
    for number, (flags, added) in enumerate(
        [("", True), ("--xla_a=1", True), ("--xla_dump_to=mine", False), ("flags.txt", False)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setenv("XLA_FLAGS", flags)
        found = command._environment(folder, hlo=False, vmodule=None, snapshots=False)["XLA_FLAGS"]
        assert found.split() == [*flags.split(), *[f"--xla_dump_to={folder}/hlo"] * added]


def test_a_disk_that_is_full_leaves_no_bundle_and_says_where_the_files_are(tmp_path: Path):
    code = f"""
import resource, sys
from snaprt.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(main(["bundle", "--outfile", "run.tar.gz", "--tidy", "--", {sys.executable!r}, "-c",
               "import random; print(random.randbytes(9000).hex())"]))
"""
    done = run_program(code, folder=tmp_path, status=2, JAX_PLATFORMS="cpu")
    assert "error: cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    (left,) = tmp_path.iterdir()
    assert f"the program's files are in {left}" in done.stderr
    assert len(done.stdout) == 18001  # all of it, though the file of it is cut off


def test_a_command_that_is_not_there_is_said_and_nothing_is_left(tmp_path: Path):
    done = make_bundle(tmp_path, "--", "no-such-program-here")
    assert done.returncode == 2
    assert "error: cannot run no-such-program-here: No such file" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path):
    touch = "import pathlib; pathlib.Path('ran').touch()"
    done = make_bundle(tmp_path, "--outfile", "nowhere/run.tar.gz", sys.executable, "-c", touch)
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "hint: name a file in an existing, writable directory" in done.stderr
    assert list(tmp_path.iterdir()) == []


def run_under_terminal(folder: Path, code: str, meanwhile: Callable[[int, int], None]) -> str:
    """Run ``code`` by RUN in a terminal of its own; return what the terminal showed."""
    words = [sys.executable, "-c", RUN, str(folder), sys.executable, "-c", code]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, words)
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            if b"begun" in piece:
                meanwhile(pid, terminal)
            shown += piece
    except OSError:  # the program has closed its terminal
        pass
    os.waitpid(pid, 0)
    return shown.decode()


def test_ctrl_c_reaches_the_program_once_and_it_ends_by_itself(tmp_path: Path):
    def press_ctrl_c(_: int, terminal: int) -> None:
        os.write(terminal, b"\x03")

    shown = run_under_terminal(tmp_path, INTERRUPTED, press_ctrl_c)
    kept = (tmp_path / "stdout.txt").read_text()
    assert kept == "terminals: True True, begun\ninterrupted\n"
    assert "terminals: True True, begun\r\n" in shown
    ended = json.loads((tmp_path / "ended.json").read_text())
    assert (ended["status"], ended["interrupted"]) == (7, True)


def test_a_signal_to_snaprt_alone_goes_to_the_program(tmp_path: Path):
    run_under_terminal(tmp_path, INTERRUPTED, lambda pid, _: os.kill(pid, signal.SIGINT))
    kept = (tmp_path / "stdout.txt").read_text()
    assert kept == "terminals: True True, begun\ninterrupted\n"


def test_the_third_request_to_end_kills_a_program_that_ignores_them(tmp_path: Path):
    requests = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    code = f"""
import signal, time
for number in {[int(number) for number in requests]}:
    signal.signal(number, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(60)
"""

    def ask(pid: int, _: int) -> None:
        for number in requests:
            os.kill(pid, number)

    run_under_terminal(tmp_path, code, ask)
    assert json.loads((tmp_path / "ended.json").read_text())["signal"] == "SIGKILL"


def test_a_reader_that_goes_away_ends_the_program_as_without_us(tmp_path: Path):
    code = "import itertools\nfor n in itertools.count(): print(n)"
    words = [sys.executable, "-c", RUN, str(tmp_path), sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 1
    assert "BrokenPipeError" in (tmp_path / "stderr.txt").read_text()


def test_what_has_the_shape_of_a_secret_is_hidden_and_the_rest_stays():
    variables = {"HOME": "/home/anna", "USER": "anna", "HF_TOKEN": "s3cr3t-thing"}
    hides = hiding.hiding(variables, "quokka.example.org")
    for text, shown in {
        "file:///home/anna/x.py:3": "file://~/x.py:3",
        "/home/annabel/x": "/home/annabel/x",
        "by anna on annapurna": "by (user) on annapurna",
        "it is s3cr3t-thing!": "it is (hidden: HF_TOKEN)!",
        "hf_" + "a" * 30: "(hidden)",
        "Authorization: Bearer abcdefghij.k": "Authorization: Bearer (hidden)",
        "https://me:pass@host/x": "https://(hidden)@host/x",
        '{"password": "hunter22"}': '{"password": "(hidden)"}',
        "tokens: 123456, key=value": "tokens: 123456, key=value",
        "quokka.example.org:80 and quokka:80": "(host):80 and (host):80",
    }.items():
        assert hides.text(text) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("XLA_FLAGS", True),
        ("SNAPRT_LAZY", True),
        ("RANK", True),
        ("SNAPRT_CACHE_REMOTE", False),
        ("TPU_WORKER_HOSTNAMES", False),
        ("SNAPRT_API_KEY", False),
        ("EDITOR", False),
    ],
)
def test_a_variable_is_shown_if_it_is_known_to_be_harmless(name: str, shown: bool):
    assert hiding.is_harmless(name) is shown


def test_what_is_not_text_is_taken_whole_or_left_out(tmp_path: Path):
    hides = hiding.hiding({"HOME": "/home/anna"})
    (tmp_path / "clean.bin").write_bytes(b"\0\xff\1")
    (tmp_path / "leaky.bin").write_bytes(b"\0\xff\1/home/anna/x")
    (tmp_path / "log.txt").write_bytes(b"\0\xff in /home/anna/x\n")
    clean = command.prepared(tmp_path / "clean.bin", hides, tmp_path)
    assert isinstance(clean, io.BytesIO)
    assert clean.read() == b"\0\xff\1"
    assert command.prepared(tmp_path / "leaky.bin", hides, tmp_path) is None
    log = command.prepared(tmp_path / "log.txt", hides, tmp_path)
    assert log is not None
    assert log.read() == b"\0\xff in ~/x\n"


def test_a_bundle_that_is_given_up_leaves_what_was_there(tmp_path: Path):
    path = tmp_path / "run.tar.gz"
    path.write_text("an older one")
    with command.BundleFile(path) as file:
        file.add("run/x", io.BytesIO(b"abc"), 3, 0)
    assert path.read_text() == "an older one"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="it is a directory"):
        command.BundleFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it is a pipe or a device"):
        command.BundleFile(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(path)
    with command.BundleFile(tmp_path / "link") as file:
        file.finish()
    with tarfile.open(path) as written:
        assert written.getnames() == []
    assert (tmp_path / "link").is_symlink()
