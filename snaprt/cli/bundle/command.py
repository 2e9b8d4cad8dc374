"""``snaprt bundle``: runs a program and packs its logs, graphs, metrics and versions.

The order of things: the file is opened, the program runs, what it left is collected, what could be
secret is taken out, the file is put in its place.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

import click

from snaprt.cli import output
from snaprt.cli.bundle import facts
from snaprt.cli.bundle.hiding import Hiding, hiding
from snaprt.cli.bundle.run import ProgramEnd, run
from snaprt.errors import SnaprtError, UsageError
from snaprt.host.whole_files import refuse_device, remedy, remove_leftovers, temporary_name, writing
from snaprt.units import format_size

SCHEMA: Final = "snaprt.bundle"
VERSION: Final = 1

_STDOUT: Final = "stdout.txt"
_STDERR: Final = "stderr.txt"
_SNAPSHOTS: Final = "snapshots"

#: The files of a bundle, by how their names begin, and what they are; `snapshots` on request.
CONTENTS: Final[Mapping[str, str]] = {
    _STDOUT: "standard output of the program",
    _STDERR: "standard error of the program, with snaprt's log",
    "graphs/": "graphs that ran, as written by XLA_SAVE_TENSORS_FILE",
    "trace/": "a folder for each graph, as written by SNAPRT_TRACE, and a page that links them",
    "metrics/": "metrics after each step and at exit",
    "hlo/": "modules that XLA compiled, as written by --xla_dump_to",
    f"{_SNAPSHOTS}/": "recorded executions, for snaprt replay",
    "environment.json": "environment variables",
    "flags.json": "XLA flags, one per entry",
    "machine.json": "system, processor, memory, GPUs, driver",
    "software.json": "versions of Python, JAX and snaprt; JAX's devices and settings",
    "packages.txt": "installed packages, as in pip freeze",
    "manifest.json": "how the program ended and what the bundle contains",
}

_LOG: Final = "compile=1,cache=1,snapshot=1"


@dataclass(frozen=True)
class _Member:
    """A file in the bundle: its name there, what it is, and how many bytes it has."""

    name: str
    what: str
    bytes: int


@dataclass(frozen=True)
class _LeftOut:
    """A file that is not in the bundle, and why."""

    name: str
    reason: str


@click.command("bundle", context_settings={"allow_interspersed_args": False})
@click.option(
    "--outfile",
    required=True,
    type=output.PATH,
    metavar="FILE",
    help="Write the bundle to this gzipped tar file.",
)
@click.option(
    "--outdir",
    type=output.PATH,
    metavar="DIR",
    help="Folder for the working files; it must not exist.  [default: a new folder next to FILE]",
)
@click.option("--tidy", is_flag=True, help="Remove the working files after writing FILE.")
@click.option("--snapshots", is_flag=True, help="Also record executions with their arrays.")
@click.option("--hlo", is_flag=True, help="Save the graphs as HLO instead of text.")
@click.option(
    "--vmodule", metavar="NAME=LEVEL,...", help="Add to TF_CPP_VMODULE, for more logging."
)
@click.option("--show-secrets", is_flag=True, help="Hide nothing.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGS]...")
@click.pass_context
def command(
    context: click.Context,
    outfile: Path,
    outdir: Path | None,
    tidy: bool,
    snapshots: bool,
    hlo: bool,
    vmodule: str | None,
    show_secrets: bool,
    command: tuple[str, ...],
) -> None:
    """Run a program and pack its logs, graphs, metrics, HLO, versions and settings into one file.

    The program keeps its terminal and its exit status. After Ctrl-C, snaprt waits for the program
    to end and still writes the bundle.

    The bundle hides tokens, paths under the home directory, the names of the user and the machine,
    and the values of environment variables that are not known to be harmless. See
    docs/how-to/bundle.md.

    \b
    Example:
      snaprt bundle --outfile run.tar.gz --tidy -- python -u train.py
      snaprt bundle --outfile run.tar.gz --snapshots -- snaprt run --lazy -- train.py
    """
    if not command:
        raise click.UsageError("no program to run", context)
    outfile = outfile.absolute()
    hides = Hiding() if show_secrets else hiding(os.environ)
    with BundleFile(outfile) as bundle:
        folder = _working_folder(outfile, outdir, tidy=tidy)
        started = datetime.datetime.now(datetime.UTC)
        try:
            environment = _environment(folder, hlo=hlo, vmodule=vmodule, snapshots=snapshots)
            ended = run(command, environment, folder / _STDOUT, folder / _STDERR)
            _describe(folder, command, environment, hides)
            members, left_out = _add_files(bundle, folder, hides)
            manifest = {
                "schema": SCHEMA,
                "version": VERSION,
                "command": hides.words(command),
                "directory": hides.text(os.getcwd()),
                "started": started.isoformat(timespec="seconds"),
                **asdict(ended),
                "hidden": not show_secrets,
                "left_out": [asdict(file) for file in left_out],
                "files": [asdict(member) for member in members],
            }
            _add_manifest(bundle, manifest, started.timestamp())
            size = bundle.finish()
        except UsageError:  # nothing has run
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except OSError as error:
            raise SnaprtError(
                f"cannot write {outfile}: {error.strerror or error}",
                hint=f"{remedy(error, 'name another file with --outfile')}; "
                f"the program's files are in {folder}, with nothing hidden",
            ) from error
    if tidy:
        shutil.rmtree(folder, ignore_errors=True)
    _tell(outfile, size, ended, members, left_out, None if tidy else folder)
    context.exit(ended.status)


def _working_folder(outfile: Path, outdir: Path | None, *, tidy: bool) -> Path:
    try:
        if outdir is None and tidy:  # the next bundle removes it where we are killed
            outdir = outfile.with_name(temporary_name(f"{outfile.name}-work"))
        elif outdir is None:
            stem = outfile.name.partition(".")[0]
            return Path(tempfile.mkdtemp(prefix=f"{stem}-", dir=outfile.parent))
        outdir.mkdir(mode=0o700)
    except FileExistsError as error:
        raise UsageError(f"{outdir} already exists", hint="choose another --outdir") from error
    except OSError as error:
        raise UsageError(
            f"cannot create a folder for the working files: {error}",
            hint=remedy(error, "name one with --outdir"),
        ) from error
    return outdir.absolute()


def _environment(
    folder: Path, *, hlo: bool, vmodule: str | None, snapshots: bool
) -> dict[str, str]:
    """Return the program's environment, in which all that is collected is switched on."""
    for name in ("graphs", "metrics", "trace", "hlo"):
        (folder / name).mkdir()
    ours = os.environ
    environment = {
        **ours,
        "XLA_IR_DEBUG": "1",
        "XLA_HLO_DEBUG": "1",
        "TF_CPP_LOG_THREAD_ID": "1",
        "TF_CPP_VMODULE": ",".join(filter(None, (ours.get("TF_CPP_VMODULE") or _LOG, vmodule))),
        "XLA_SAVE_TENSORS_FILE": str(folder / "graphs" / "graphs.txt"),
        "XLA_METRICS_FILE": str(folder / "metrics" / "steps.txt"),
        "SNAPRT_METRICS_FILE": str(folder / "metrics" / "end.json"),
        "SNAPRT_TRACE": str(folder / "trace"),
    }
    if hlo:
        environment["XLA_SAVE_TENSORS_FMT"] = "hlo"
    if snapshots:
        environment["SNAPRT_DUMP_DIR"] = str(folder / _SNAPSHOTS)
    flags = ours.get("XLA_FLAGS", "").strip()
    # What is dumped already stays where it is; and flags may be the name of a file that has them.
    if "--xla_dump_" not in flags and flags[:1] in ("", "-"):
        environment["XLA_FLAGS"] = f"{flags} --xla_dump_to={folder / 'hlo'}".lstrip()
    return environment


def _describe(
    folder: Path, command: Sequence[str], environment: Mapping[str, str], hides: Hiding
) -> None:
    """Write what is known of the machine, the software and the settings beside the rest."""
    software = facts.software(command[0])
    packages = software.pop("packages", {})
    described: dict[str, Any] = {
        "environment.json": hides.environment(environment),
        "flags.json": facts.flags(environment),
        "machine.json": facts.machine(),
        "software.json": software,
    }
    for name, content in described.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    lines = [f"{name}=={version}\n" for name, version in packages.items()]
    (folder / "packages.txt").write_text("".join(lines), encoding="utf-8")


def _add_files(
    bundle: BundleFile, folder: Path, hides: Hiding
) -> tuple[list[_Member], list[_LeftOut]]:
    members: list[_Member] = []
    left_out: list[_LeftOut] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".scratch-") as scratch:
        files = {
            hides.text(path.relative_to(folder).as_posix()): path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
        if hides.rules:
            files = {name: path for name, path in files.items() if not _is_snapshot(name)}
            packed, left_out = _packed_snapshots(folder / _SNAPSHOTS, Path(scratch))
            files |= packed
        for name, path in files.items():
            as_it_is = Hiding() if _is_snapshot(name) else hides
            content = prepared(path, as_it_is, Path(scratch))
            if content is None:
                left_out.append(_LeftOut(name, "it is binary and contains hidden values"))
                continue
            with content:
                length = content.seek(0, os.SEEK_END)
                content.seek(0)
                bundle.add(f"{_root(bundle)}/{name}", content, length, path.stat().st_mtime)
            members.append(_Member(name, _what(name), length))
    return members, left_out


def _is_snapshot(name: str) -> bool:
    return name.startswith(f"{_SNAPSHOTS}/")


def _packed_snapshots(place: Path, scratch: Path) -> tuple[dict[str, Path], list[_LeftOut]]:
    """Pack each execution that was recorded, without paths; return what cannot be shared so."""
    packed: dict[str, Path] = {}
    left_out: list[_LeftOut] = []
    if place.is_dir():
        from snaprt.snapshot.share import pack
        from snaprt.snapshot.share.executions import executions_in

        try:
            for path in executions_in(place):
                out = scratch / f"{path.name.partition('.inputs')[0]}.pack"
                try:
                    pack.pack([path], out, kinds=("paths",))
                    packed[f"{_SNAPSHOTS}/{out.name}"] = out
                except SnaprtError as error:
                    left_out.append(_LeftOut(f"{_SNAPSHOTS}/{path.name}", error.message))
        except SnaprtError as error:
            left_out.append(_LeftOut(_SNAPSHOTS, error.message))
    return packed, left_out


def _add_manifest(bundle: BundleFile, manifest: Mapping[str, Any], moment: float) -> None:
    content = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
    bundle.add(f"{_root(bundle)}/manifest.json", io.BytesIO(content), len(content), moment)


def _root(bundle: BundleFile) -> str:
    """Return the folder that the bundle unpacks into."""
    return bundle.path.name.partition(".")[0] or "bundle"


def _what(name: str) -> str:
    return next((what for start, what in CONTENTS.items() if name.startswith(start)), "")


def _tell(
    outfile: Path,
    size: int,
    ended: ProgramEnd,
    members: Sequence[_Member],
    left_out: Sequence[_LeftOut],
    folder: Path | None,
) -> None:
    how = f"was killed by {ended.signal}" if ended.signal else f"ended with status {ended.status}"
    contents = f"{len(members) + 1} files, {format_size(size)}"
    output.log.print(f"snaprt: the program {how}; wrote {outfile} ({contents})")
    for problem in ended.problems:
        output.log.print(f"snaprt: {problem}")
    for file in left_out:
        output.log.print(f"snaprt: left out {file.name}: {file.reason}")
    if not any(member.name.startswith(("graphs/", "trace/")) for member in members):
        output.log.print(
            "snaprt: the bundle has no graphs because nothing ran lazily; use `snaprt run "
            "--lazy -- SCRIPT`"
        )
    if folder is not None:
        output.log.print(f"snaprt: the working files, with nothing hidden, are in {folder}")


# What is larger is prepared on disk.
_MOST_IN_MEMORY: Final = 64 << 20
_START: Final = 1 << 13
# Text, whatever a program has printed into it.
_TEXT: Final = frozenset((".txt", ".json"))


class BundleFile:
    """A bundle that is being written; leaving the scope before `finish` removes what is there.

    Args:
        path: Where it will be; a file that is there is replaced, also at the end of a link.

    Raises:
        UsageError: Nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))
        self._temporary = self._target.with_name(temporary_name(path.name))
        elsewhere = "name a file in an existing, writable directory: --outfile run.tar.gz"
        refuse_device(path, elsewhere)
        with writing(f"write {path}", elsewhere, hint=remedy):
            if path.is_dir():
                raise IsADirectoryError(0, "it is a directory")
            remove_leftovers(self._target.parent)
            self._file: BinaryIO = self._temporary.open("xb")
        os.chmod(self._temporary, 0o600)
        self._gzip = gzip.GzipFile(filename="", mode="wb", fileobj=self._file, mtime=0)
        self._tar = tarfile.TarFile(mode="w", fileobj=self._gzip, format=tarfile.PAX_FORMAT)

    def add(self, name: str, content: IO[bytes], length: int, modified: float) -> None:
        """Add a member of ``length`` bytes, which are read from ``content``."""
        member = tarfile.TarInfo(name)
        member.size = length
        member.mtime = int(modified)
        self._tar.addfile(member, content)

    def finish(self) -> int:
        """Put the file in its place, and return how many bytes it has."""
        self._tar.close()
        self._gzip.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        size = self._temporary.stat().st_size
        os.replace(self._temporary, self._target)
        return size

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing writes what is buffered, which on a full disk fails once more.
        with contextlib.suppress(OSError, ValueError):
            self._gzip.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def prepared(path: Path, hiding: Hiding, scratch: Path) -> IO[bytes] | None:
    """Return a file as it may be shown, read from its start; ``None`` where it may not at all.

    Text is rewritten line by line. What is not text is taken as it is, or, if something in it would
    be hidden, not at all: a change would damage it.

    Args:
        path: The file.
        hiding: What is hidden.
        scratch: A folder for what is too large for the memory.
    """
    if not hiding.rules:
        return path.open("rb")
    with path.open("rb") as file:
        start = file.read(_START)
        file.seek(0)
        if _is_binary(start) and path.suffix not in _TEXT:
            content = file.read()
            return None if hiding.hides_in(content) else io.BytesIO(content)
        shown = tempfile.SpooledTemporaryFile(_MOST_IN_MEMORY, dir=str(scratch))  # noqa: SIM115
        for line in file:
            text = line.decode("utf-8", "surrogateescape")
            shown.write(hiding.text(text).encode("utf-8", "surrogateescape"))
    shown.seek(0)
    return shown


def _is_binary(start: bytes) -> bool:
    """Return whether what a file begins with is not UTF-8, but for a character that is cut."""
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return len(start) < _START or error.start < _START - 3
    return b"\0" in start
