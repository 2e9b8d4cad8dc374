"""Every environment variable that snaprt reads, one row each.

A row says how the text is understood, what holds where the variable is not set, and what it is
for. ``snaprt help environment`` prints the table, and
``python -m snaprt.cli.environment docs/environment.md`` writes it into the document.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from snaprt import units
from snaprt.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """What the text of a variable may be.

    Attributes:
        parse: Turns the text into a value; raises ValueError for text it does not understand.
        allowed: What ``parse`` understands, in words for the user.
        written: What the text names if it names something that is written later: ``file`` or
            ``folder``; else empty.
    """

    parse: Callable[[str], Any]
    allowed: str
    written: str = ""


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Attributes:
        name: The variable.
        kind: What its text may be.
        help: What it is for, one sentence.
        default: The value where the variable is not set or empty.
        default_text: The default in words for the user; by default the value.
        since: The version of snaprt that first read it.
    """

    name: str
    kind: Kind
    help: str
    default: Any = None
    default_text: str = ""
    since: str = "0.1"

    @property
    def shown_default(self) -> str:
        """The default in words for the user."""
        is_float = isinstance(self.default, float)
        return self.default_text or (f"{self.default:g}" if is_float else str(self.default))


_SWITCH_WORDS: Final = {
    **dict.fromkeys(("1", "true", "on", "yes"), True),
    **dict.fromkeys(("0", "false", "off", "no"), False),
}


def _switch(text: str) -> bool:
    try:
        return _SWITCH_WORDS[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def _path(text: str) -> Path:
    if "\0" in text:
        raise ValueError(text)
    return Path(text).expanduser()


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _limit(text: str) -> int | None:
    return units.parse_size(text) or None


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _url(text: str) -> str:
    scheme, separator, rest = text.strip().partition("://")
    if not (scheme.isalnum() and separator and rest):
        raise ValueError(text)
    return text.strip()


def _text(text: str) -> str:
    return text


def _verbosities(text: str) -> tuple[tuple[str, int], ...]:
    entries = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
    if not all(name.strip() for name, _, _ in entries):
        raise ValueError(text)
    return tuple((name.strip(), _count(level)) for name, _, level in entries)


FOLDER: Final = Kind(_path, "a directory; it is made where it does not exist", "folder")
FILE: Final = Kind(_path, "a file in a directory that exists", "file")
SIZE: Final = Kind(units.parse_size, "bytes, such as 500M or 10G")
LIMIT: Final = Kind(_limit, "bytes, such as 500M or 10G; 0 for no limit")
SECONDS: Final = Kind(_seconds, "seconds, 0 or more")
NUMBER: Final = Kind(_number, "a number, 0 or more; any other text counts as not set")


def _one_of(*words: str) -> Kind:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in map(str.lower, words):
            raise ValueError(text)
        return word

    return Kind(parse, ", ".join(words))


def _on_off(name: str, meaning: str, *, default: bool = False) -> Setting:
    kind = Kind(_switch, "on, off (or 1, 0, true, false, yes, no)")
    return Setting(name, kind, meaning, default, "on" if default else "off")


SETTINGS: Final = (
    _on_off(
        "GET_TENSORS_OPBYOP",
        "Where a value is read, compile and run each operation it needs on its own.",
    ),
    Setting(
        "LOCAL_RANK",
        NUMBER,
        "Which of the processes of its machine this is, as torchrun and others say it.",
        default_text="the first of its machine",
    ),
    Setting(
        "NEURON_DUMP_HLO_SNAPSHOT",
        _one_of("1", "0", "ON_NRT_ERROR", "ON_NRT_ERROR_HYBRID", "ON_NRT_ERROR_CPU"),
        "Record every execution (1), or those that fail, as PyTorch NeuronX does.",
        default="0",
    ),
    _on_off(
        "NEURON_FRAMEWORK_DEBUG", "Off: NEURON_DUMP_HLO_SNAPSHOT counts as not set.", default=True
    ),
    _on_off(
        "NEURON_NC0_ONLY_SNAPSHOT",
        "With NEURON_DUMP_HLO_SNAPSHOT, record the first device of rank 0 alone.",
    ),
    _on_off("NEURON_USE_EAGER_DEBUG_MODE", "The same as XLA_USE_EAGER_DEBUG_MODE."),
    _on_off("PT_XLA_DEBUG", "Log each compilation and execution, as PyTorch/XLA does."),
    Setting(
        "PT_XLA_DEBUG_FILE",
        FILE,
        "Append what PT_XLA_DEBUG tells to this file instead.",
        default_text="the standard error stream",
    ),
    Setting(
        "PT_XLA_DEBUG_LEVEL",
        Kind(_count, "0, 1, 2 or more"),
        "1 tells of compilations, 2 of executions as well.",
        default_text="2 where PT_XLA_DEBUG is on, else 0",
    ),
    Setting(
        "PT_XLA_DEBUG_MAX_FRAME",
        Kind(_count, "a number of frames"),
        "How many frames of the stack PT_XLA_DEBUG shows at most.",
        default=8,
    ),
    Setting(
        "RANK",
        NUMBER,
        "Which of the processes of a job this is, as torchrun and others say it.",
        default_text="`jax.process_index()`",
    ),
    _on_off(
        "SNAPRT_CACHE", "Keep compiled programs on disk and use those that are there.", default=True
    ),
    Setting(
        "SNAPRT_AUTO_STEP_BYTES",
        SIZE,
        "How many bytes pending operations hold or compute before an automatic step.",
        default=1 << 30,
        default_text="1G",
    ),
    Setting(
        "SNAPRT_AUTO_STEP_SIZE",
        Kind(_count, "a number of operations; 0 for no automatic steps"),
        "How many operations are pending at most where a program marks no steps.",
        default=1000,
    ),
    Setting(
        "SNAPRT_CACHE_DIR",
        FOLDER,
        "The directory of the compile cache.",
        default_text="snaprt's folder in the user's cache directory",
    ),
    Setting(
        "SNAPRT_CACHE_KEY_FILE",
        Kind(_path, "a file of 16 bytes or more that others may not read"),
        "The key with which entries of the compile cache are signed.",
        default_text="entries are not signed",
    ),
    Setting(
        "SNAPRT_CACHE_MAX_SIZE",
        LIMIT,
        "Maximum total size of the compile cache; what is worth least is evicted.",
        default=10 << 30,
        default_text="10G",
    ),
    Setting(
        "SNAPRT_CACHE_MODE",
        _one_of("read-write", "read-only", "fail-on-miss", "refresh", "off"),
        "Whether programs read the compile cache, write to it, and may compile at all.",
        default="read-write",
    ),
    Setting(
        "SNAPRT_CACHE_REMOTE",
        Kind(_url, "s3://bucket/prefix, gs://..., az://..., https://host/path or file:///folder"),
        "A cache that a team shares, asked for what is not in the directory.",
        default_text="no remote",
    ),
    Setting(
        "SNAPRT_CACHE_REMOTE_TIMEOUT",
        SECONDS,
        "How long a program waits at most for an entry of the remote cache.",
        default=2.0,
    ),
    _on_off(
        "SNAPRT_CACHE_SHARED",
        "Use a directory that others write to, and of it only what is signed with the key.",
    ),
    Setting(
        "SNAPRT_CACHE_WAIT",
        SECONDS,
        "How long to wait at most while another process compiles the same program.",
        default=600.0,
    ),
    _on_off(
        "SNAPRT_CHECK_RANKS",
        "Before a program of several processes first runs, compare what each is about to run.",
    ),
    Setting(
        "SNAPRT_CHECK_RANKS_TIMEOUT",
        SECONDS,
        "How long SNAPRT_CHECK_RANKS waits for all ranks to reach a program.",
        default=60.0,
    ),
    Setting(
        "SNAPRT_COLLECT",
        FOLDER,
        "Write the programs that a lazy run wants here instead of running them.",
        default_text="programs are compiled and run",
    ),
    Setting(
        "SNAPRT_DEBUG_FUNCTION",
        Kind(_text, "the name of a function or of a method, such as train_step or Model.loss"),
        "Limit files of graphs and PT_XLA_DEBUG to graphs with operations of this function.",
        default_text="every graph",
    ),
    Setting(
        "SNAPRT_DUMP_DIR",
        FOLDER,
        "Record snapshots into this directory, as if XLA_FLAGS asked for it.",
        default_text="no recording",
    ),
    _on_off(
        "SNAPRT_JAX_CACHE", "Put the compile cache under jax.jit, in every process that uses JAX."
    ),
    _on_off(
        "SNAPRT_LAZY", "Whether `snaprt run` runs the program lazily when it is not told by --lazy."
    ),
    Setting(
        "SNAPRT_MAX_GRAPH_SIZE",
        Kind(_count, "a number of operations; 0 for no limit"),
        "Run what is pending once so many operations are, those in jitted functions counted.",
        default=100_000,
    ),
    Setting(
        "SNAPRT_METRICS_FILE",
        Kind(_path, "a file in a directory that exists; .txt for the report, else JSON", "file"),
        "Write the metrics to this file when the process ends.",
        default_text="nothing is written",
    ),
    _on_off(
        "SNAPRT_PREFETCH",
        "Load what the program used last time while Python still imports and traces.",
        default=True,
    ),
    Setting(
        "SNAPRT_RECOMPILE_LIMIT",
        Kind(_count, "a number; 0 for no warning"),
        "Warn when a place of the program had programs compiled again in this many steps.",
        default=8,
    ),
    _on_off(
        "SNAPRT_RECORD_DEDUPE",
        "Store an array that several snapshots hold once, in a folder beside them.",
    ),
    Setting(
        "SNAPRT_RECORD",
        Kind(
            _text, "conditions, such as name=train, every=10; nan (docs/recording.md has the words)"
        ),
        "Record the executions for which one of these conditions holds.",
        default_text="every execution, where there is a directory to record into",
    ),
    Setting(
        "SNAPRT_RECORD_HOLD",
        _one_of("device", "hybrid", "host"),
        "Where inputs are held until it is known how their execution ended.",
        default="device",
    ),
    _on_off(
        "SNAPRT_RECORD_JIT", "Record calls of jitted functions, in every process that uses JAX."
    ),
    Setting(
        "SNAPRT_RECORD_KEEP_BYTES",
        SIZE,
        "Past this, the executions that SNAPRT_RECORD_KEEP_LAST holds go to disk.",
        default=1 << 30,
        default_text="1G",
    ),
    Setting(
        "SNAPRT_RECORD_KEEP_LAST",
        Kind(_count, "a number of executions, 0 for none"),
        "Hold the last executions, and write them when something fails or on SIGUSR1.",
        default=0,
    ),
    Setting(
        "SNAPRT_RECORD_MAX_BYTES",
        LIMIT,
        "How many bytes of snapshots a process writes at most.",
        default_text="no limit",
    ),
    Setting(
        "SNAPRT_RECORD_MAX_FILES",
        Kind(_count, "a number of files, 0 for no limit"),
        "How many snapshots a process writes at most.",
        default=0,
        default_text="no limit",
    ),
    Setting(
        "SNAPRT_RECORD_MAX_RATE",
        Kind(_limit, "bytes a second, such as 100M; 0 for no limit"),
        "How many bytes a second are recorded at most, over ten seconds.",
        default_text="no limit",
    ),
    Setting(
        "SNAPRT_RECORD_MIN_FREE",
        SIZE,
        "Bytes to leave free on the disk that snapshots are written to.",
        default=0,
    ),
    _on_off("SNAPRT_RECORD_STOP", "Stop the program when a NaN or an error was recorded."),
    Setting(
        "SNAPRT_REPRO_AFTER",
        _one_of("compile", "run"),
        "Save programs that cannot be compiled, or also those that fail while they run.",
        default_text="nothing is done",
    ),
    Setting(
        "SNAPRT_REPRO_DIR",
        FOLDER,
        "Where SNAPRT_REPRO_AFTER has programs saved.",
        default=Path("snaprt-repro"),
        default_text="snaprt-repro, in the current directory",
    ),
    Setting(
        "SNAPRT_REPRO_LEVEL",
        _one_of("1", "2", "3", "4"),
        "1 saves them, 2 minifies them, 3 minifies in the background, 4 also compares each "
        "new program.",
        default="2",
    ),
    Setting(
        "SNAPRT_SLOW_COMPILE",
        Kind(_seconds, "seconds; 0 for no warning"),
        "Warn when a lazy program has been compiling for so long.",
        default=10.0,
    ),
    Setting(
        "SNAPRT_TRACE",
        FOLDER,
        "Write a folder for each graph here, and a page that links them.",
        default_text="nothing is written",
    ),
    _on_off("SYNC_TENSORS_OPBYOP", "At a step, compile and run each operation on its own."),
    _on_off("TF_CPP_LOG_THREAD_ID", "Whether a line of the log says which thread wrote it."),
    Setting(
        "TF_CPP_MIN_LOG_LEVEL",
        Kind(_number, "a number, 0 to 3; any other text counts as not set"),
        "0 logs when each compilation begins and ends; 1 to 3 leave it to Python's logging.",
        default_text="no log of snaprt's, unless TF_CPP_VMODULE asks",
    ),
    Setting(
        "TF_CPP_VMODULE",
        Kind(_verbosities, "name=level,... such as compile=1,operations=2"),
        "How much each module logs: 1 the steps of a compilation, 2 each operation too.",
        default=(),
        default_text="no log of snaprt's, unless TF_CPP_MIN_LOG_LEVEL is 0",
    ),
    _on_off(
        "XLA_DOWNCAST_BF16",
        "Lazy programs compute float32 arrays as bfloat16, and float64 ones as float32.",
    ),
    Setting(
        "XLA_FLAGS",
        Kind(_text, "flags of XLA, separated by spaces"),
        "XLA's own flags; snaprt acts on --xla_dump_hlo_snapshots with --xla_dump_to.",
        default="",
        default_text="empty",
    ),
    _on_off("XLA_HLO_DEBUG", "Put the Python stack of each operation, as of now, into the module."),
    _on_off(
        "XLA_IR_DEBUG", "Note the Python stack of each operation each time that it is recorded."
    ),
    Setting(
        "XLA_MAX_ASYNC_QUEUE",
        Kind(_count, "a number of closures, 0 for no limit"),
        "A step that adds more closures than this in the background waits for earlier ones.",
        default=100,
    ),
    Setting(
        "XLA_METRICS_FILE",
        Kind(_path, "a file in a directory that exists, STDERR or STDOUT", "file"),
        "Append the report of the metrics to this file after every step.",
        default_text="nothing is written",
    ),
    Setting(
        "XLA_SAVE_TENSORS_FILE",
        FILE,
        "Append each graph to this file before it runs.",
        default_text="nothing is written",
    ),
    Setting(
        "XLA_SAVE_TENSORS_FMT",
        _one_of("text", "dot", "hlo"),
        "How XLA_SAVE_TENSORS_FILE has the graphs: text, Graphviz, or HLO.",
        default="text",
    ),
    _on_off("XLA_SYNC_WAIT", "Every mark_step waits until the devices have finished."),
    _on_off("XLA_USE_32BIT_LONG", "Lazy programs compute 64-bit integers with 32 bits."),
    _on_off("XLA_USE_BF16", "Lazy programs compute float32 and float64 arrays as bfloat16."),
    _on_off(
        "XLA_USE_EAGER_DEBUG_MODE", "Compile and run each operation as soon as it is recorded."
    ),
)


class Texts:
    """The texts of some environment variables as they are now, to see whether one has changed.

    For what is asked at every execution: `os.environ.get` takes half a microsecond for a variable
    that is not set. CPython keeps them, encoded, in a dictionary that it changes in place.
    """

    def __init__(self, *names: str) -> None:
        variables: Any = getattr(os.environ, "_data", os.environ)
        is_encoded = variables is not os.environ
        self._get = variables.get
        self._keys = [os.environ.encodekey(name) if is_encoded else name for name in names]

    def now(self) -> list[Any]:
        """Return the texts, equal to those of an earlier call exactly where nothing changed."""
        return list(map(self._get, self._keys))


# What XLA_METRICS_FILE takes in the place of a file.
_STREAMS: Final = ("STDERR", "STDOUT")
_BY_NAME: Final = {setting.name: setting for setting in SETTINGS}


def get(name: str) -> Any:
    """Return the value of the environment variable ``name`` as it is set now.

    A variable that is set to nothing counts as not set.

    Raises:
        UsageError: The text of the variable is not one that it allows.
        KeyError: The table has no row of this name.
    """
    setting = _BY_NAME[name]
    text = os.environ.get(name, "")
    if not text.strip():
        return setting.default
    try:
        return setting.kind.parse(text)
    except ValueError as error:
        raise UsageError(
            f"the environment variable {name} is {text!r}, which is not allowed",
            hint=f"Allowed: {setting.kind.allowed}. "
            f"Unset it for the default: {setting.shown_default}.",
        ) from error


def places_written() -> dict[str, tuple[Path, str]]:
    """Return what the variables that are set name to be written: ``file`` or ``folder``.

    Every variable is looked at.

    Raises:
        UsageError: The text of one is not one that it allows.
    """
    values = {name: get(name) for name in _BY_NAME}
    return {
        setting.name: (values[setting.name], setting.kind.written)
        for setting in SETTINGS
        if setting.kind.written
        and os.environ.get(setting.name, "").strip()
        and str(values[setting.name]) not in _STREAMS
    }


def for_rank(path: Path) -> Path:
    """Return the file that this process writes where ``path`` is asked for.

    Of the processes of a job each has its own: where RANK is set, its number ends the name, as
    PyTorch/XLA has it.
    """
    rank = get("RANK")
    return path if rank is None else path.with_name(f"{path.name}.{rank}")
