"""Every environment variable that snaprt reads, in one table; knows nothing of who reads them.

A row says how the text is understood, what holds where the variable is not set, and what it is
for. ``snaprt help environment`` prints the table; ``docs/environment.md`` explains the rows.
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
class Setting:
    """One environment variable.

    Attributes:
        name: The variable.
        parse: Turns its text into a value; raises ValueError for text it does not understand.
        allowed: What ``parse`` understands, in words for the user.
        default: The value where the variable is not set or empty.
        default_text: The default in words for the user.
        help: What it is for, one sentence.
        since: The version of snaprt that first read it.
    """

    name: str
    parse: Callable[[str], Any]
    allowed: str
    default: Any
    default_text: str
    help: str
    since: str = "0.1"


_SWITCH_WORDS: Final = {
    **dict.fromkeys(("1", "true", "on", "yes"), True),
    **dict.fromkeys(("0", "false", "off", "no"), False),
}


def _switch(text: str) -> bool:
    try:
        return _SWITCH_WORDS[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def _on_off(name: str, meaning: str, *, default: bool = False) -> Setting:
    return Setting(
        name,
        _switch,
        allowed="on, off (or 1, 0, true, false, yes, no)",
        default=default,
        default_text="on" if default else "off",
        help=meaning,
    )


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


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(text)
        return word

    return parse


def _verbosities(text: str) -> tuple[tuple[str, int], ...]:
    entries = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
    if not all(name.strip() for name, _, _ in entries):
        raise ValueError(text)
    return tuple((name.strip(), _count(level)) for name, _, level in entries)


_NEURON_SNAPSHOT: Final = ("0", "1", "on_nrt_error", "on_nrt_error_hybrid", "on_nrt_error_cpu")

_CACHE_MODES: Final = ("read-write", "read-only", "fail-on-miss", "refresh", "off")


SETTINGS: Final[tuple[Setting, ...]] = (
    _on_off(
        "GET_TENSORS_OPBYOP",
        "Where a value is read, compile and run each operation it needs on its own.",
    ),
    Setting(
        "LOCAL_RANK",
        _number,
        allowed="a number, 0 or more; any other text counts as not set",
        default=None,
        default_text="the first of its machine",
        help="Which of the processes of its machine this is, as torchrun and others say it.",
    ),
    Setting(
        "NEURON_DUMP_HLO_SNAPSHOT",
        _one_of(*_NEURON_SNAPSHOT),
        allowed="1, 0, ON_NRT_ERROR, ON_NRT_ERROR_HYBRID, ON_NRT_ERROR_CPU",
        default="0",
        default_text="0",
        help="Record every execution (1), or those that fail, as PyTorch NeuronX does.",
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
        _path,
        allowed="a file in a directory that exists",
        default=None,
        default_text="the standard error stream",
        help="Append what PT_XLA_DEBUG tells to this file instead.",
    ),
    Setting(
        "PT_XLA_DEBUG_LEVEL",
        _count,
        allowed="0, 1, 2 or more",
        default=None,
        default_text="2 where PT_XLA_DEBUG is on, else 0",
        help="1 tells of compilations, 2 of executions as well.",
    ),
    Setting(
        "PT_XLA_DEBUG_MAX_FRAME",
        _count,
        allowed="a number of frames",
        default=8,
        default_text="8",
        help="How many frames of the stack PT_XLA_DEBUG shows at most.",
    ),
    Setting(
        "RANK",
        _number,
        allowed="a number, 0 or more; any other text counts as not set",
        default=None,
        default_text="`jax.process_index()`",
        help="Which of the processes of a job this is, as torchrun and others say it.",
    ),
    _on_off(
        "SNAPRT_CACHE", "Keep compiled programs on disk and use those that are there.", default=True
    ),
    Setting(
        "SNAPRT_AUTO_STEP_BYTES",
        units.parse_size,
        allowed="bytes, such as 500M or 10G",
        default=1 << 30,
        default_text="1G",
        help="How many bytes pending operations hold or compute before an automatic step.",
    ),
    Setting(
        "SNAPRT_AUTO_STEP_SIZE",
        _count,
        allowed="a number of operations; 0 for no automatic steps",
        default=1000,
        default_text="1000",
        help="How many operations are pending at most where a program marks no steps.",
    ),
    Setting(
        "SNAPRT_CACHE_DIR",
        _path,
        allowed="a directory; it is made where it does not exist",
        default=None,
        default_text="snaprt's folder in the user's cache directory",
        help="The directory of the compile cache.",
    ),
    Setting(
        "SNAPRT_CACHE_KEY_FILE",
        _path,
        allowed="a file of 16 bytes or more that others may not read",
        default=None,
        default_text="entries are not signed",
        help="The key with which entries of the compile cache are signed.",
    ),
    Setting(
        "SNAPRT_CACHE_MAX_SIZE",
        _limit,
        allowed="bytes, such as 500M or 10G; 0 for no limit",
        default=10 << 30,
        default_text="10G",
        help="Maximum total size of the compile cache; what is worth least is evicted.",
    ),
    Setting(
        "SNAPRT_CACHE_MODE",
        _one_of(*_CACHE_MODES),
        allowed=", ".join(_CACHE_MODES),
        default="read-write",
        default_text="read-write",
        help="Whether programs read the compile cache, write to it, and may compile at all.",
    ),
    Setting(
        "SNAPRT_CACHE_REMOTE",
        _url,
        allowed="s3://bucket/prefix, gs://..., az://..., https://host/path or file:///folder",
        default=None,
        default_text="no remote",
        help="A cache that a team shares, asked for what is not in the directory.",
    ),
    Setting(
        "SNAPRT_CACHE_REMOTE_TIMEOUT",
        _seconds,
        allowed="seconds, 0 or more",
        default=2.0,
        default_text="2",
        help="How long a program waits at most for an entry of the remote cache.",
    ),
    _on_off(
        "SNAPRT_CACHE_SHARED",
        "Use a directory that others write to, and of it only what is signed with the key.",
    ),
    Setting(
        "SNAPRT_CACHE_WAIT",
        _seconds,
        allowed="seconds, 0 or more",
        default=600.0,
        default_text="600",
        help="How long to wait at most while another process compiles the same program.",
    ),
    Setting(
        "SNAPRT_COLLECT",
        _path,
        allowed="a directory; it is made where it does not exist",
        default=None,
        default_text="programs are compiled and run",
        help="Write the programs that a lazy run wants here instead of running them.",
    ),
    Setting(
        "SNAPRT_DEBUG_FUNCTION",
        _text,
        allowed="the name of a function or of a method, such as train_step or Model.loss",
        default=None,
        default_text="every graph",
        help="Limit files of graphs and PT_XLA_DEBUG to graphs with operations of this function.",
    ),
    Setting(
        "SNAPRT_DUMP_DIR",
        _path,
        allowed="a directory; it is made where it does not exist",
        default=None,
        default_text="no recording",
        help="Record snapshots into this directory, as if XLA_FLAGS asked for it.",
    ),
    _on_off(
        "SNAPRT_JAX_CACHE", "Put the compile cache under jax.jit, in every process that uses JAX."
    ),
    _on_off(
        "SNAPRT_LAZY", "Whether `snaprt run` runs the program lazily when it is not told by --lazy."
    ),
    Setting(
        "SNAPRT_MAX_GRAPH_SIZE",
        _count,
        allowed="a number of operations; 0 for no limit",
        default=100_000,
        default_text="100000",
        help="Run what is pending once so many operations are, those in jitted functions counted.",
    ),
    Setting(
        "SNAPRT_METRICS_FILE",
        _path,
        allowed="a file in a directory that exists; .txt for the report, else JSON",
        default=None,
        default_text="nothing is written",
        help="Write the metrics to this file when the process ends.",
    ),
    _on_off(
        "SNAPRT_PREFETCH",
        "Load what the program used last time while Python still imports and traces.",
        default=True,
    ),
    Setting(
        "SNAPRT_RECOMPILE_LIMIT",
        _count,
        allowed="a number; 0 for no warning",
        default=8,
        default_text="8",
        help="Warn when a place of the program had programs compiled again in this many steps.",
    ),
    _on_off(
        "SNAPRT_RECORD_DEDUPE",
        "Store an array that several snapshots hold once, in a folder beside them.",
    ),
    Setting(
        "SNAPRT_RECORD",
        _text,
        allowed="conditions, such as name=train, every=10; nan (docs/recording.md has the words)",
        default=None,
        default_text="every execution, where there is a directory to record into",
        help="Record the executions for which one of these conditions holds.",
    ),
    Setting(
        "SNAPRT_RECORD_HOLD",
        _one_of("device", "hybrid", "host"),
        allowed="device, hybrid, host",
        default="device",
        default_text="device",
        help="Where inputs are held until it is known how their execution ended.",
    ),
    _on_off(
        "SNAPRT_RECORD_JIT", "Record calls of jitted functions, in every process that uses JAX."
    ),
    Setting(
        "SNAPRT_RECORD_KEEP_BYTES",
        units.parse_size,
        allowed="bytes, such as 500M or 10G",
        default=1 << 30,
        default_text="1G",
        help="Past this, the executions that SNAPRT_RECORD_KEEP_LAST holds go to disk.",
    ),
    Setting(
        "SNAPRT_RECORD_KEEP_LAST",
        _count,
        allowed="a number of executions, 0 for none",
        default=0,
        default_text="0",
        help="Hold the last executions, and write them when something fails or on SIGUSR1.",
    ),
    Setting(
        "SNAPRT_RECORD_MAX_BYTES",
        _limit,
        allowed="bytes, such as 500M or 10G; 0 for no limit",
        default=None,
        default_text="no limit",
        help="How many bytes of snapshots a process writes at most.",
    ),
    Setting(
        "SNAPRT_RECORD_MAX_FILES",
        _count,
        allowed="a number of files, 0 for no limit",
        default=0,
        default_text="no limit",
        help="How many snapshots a process writes at most.",
    ),
    Setting(
        "SNAPRT_RECORD_MAX_RATE",
        _limit,
        allowed="bytes a second, such as 100M; 0 for no limit",
        default=None,
        default_text="no limit",
        help="How many bytes a second are recorded at most, over ten seconds.",
    ),
    Setting(
        "SNAPRT_RECORD_MIN_FREE",
        units.parse_size,
        allowed="bytes, such as 500M or 10G",
        default=0,
        default_text="0",
        help="Bytes to leave free on the disk that snapshots are written to.",
    ),
    _on_off("SNAPRT_RECORD_STOP", "Stop the program when a NaN or an error was recorded."),
    Setting(
        "SNAPRT_REPRO_AFTER",
        _one_of("compile", "run"),
        allowed="compile, run",
        default=None,
        default_text="nothing is done",
        help="Save programs that cannot be compiled, or also those that fail while they run.",
    ),
    Setting(
        "SNAPRT_REPRO_DIR",
        _path,
        allowed="a directory; it is made where it does not exist",
        default=Path("snaprt-repro"),
        default_text="snaprt-repro, in the current directory",
        help="Where SNAPRT_REPRO_AFTER has programs saved.",
    ),
    Setting(
        "SNAPRT_REPRO_LEVEL",
        _one_of("1", "2", "3", "4"),
        allowed="1, 2, 3, 4",
        default="2",
        default_text="2",
        help="1 saves them, 2 minifies them, 3 minifies in the background, 4 also compares each "
        "new program.",
    ),
    Setting(
        "SNAPRT_SLOW_COMPILE",
        _seconds,
        allowed="seconds; 0 for no warning",
        default=10.0,
        default_text="10",
        help="Warn when a lazy program has been compiling for so long.",
    ),
    Setting(
        "SNAPRT_TRACE",
        _path,
        allowed="a directory; it is made where it does not exist",
        default=None,
        default_text="nothing is written",
        help="Write a folder for each graph here, and a page that links them.",
    ),
    _on_off("SYNC_TENSORS_OPBYOP", "At a step, compile and run each operation on its own."),
    _on_off("TF_CPP_LOG_THREAD_ID", "Whether a line of the log says which thread wrote it."),
    Setting(
        "TF_CPP_MIN_LOG_LEVEL",
        _number,
        allowed="a number, 0 to 3; any other text counts as not set",
        default=None,
        default_text="no log of snaprt's, unless TF_CPP_VMODULE asks",
        help="0 logs when each compilation begins and ends; 1 to 3 leave it to Python's logging.",
    ),
    Setting(
        "TF_CPP_VMODULE",
        _verbosities,
        allowed="name=level,... such as compile=1,operations=2",
        default=(),
        default_text="no log of snaprt's, unless TF_CPP_MIN_LOG_LEVEL is 0",
        help="How much each module logs: 1 the steps of a compilation, 2 each operation too.",
    ),
    _on_off(
        "XLA_DOWNCAST_BF16",
        "Lazy programs compute float32 arrays as bfloat16, and float64 ones as float32.",
    ),
    Setting(
        "XLA_FLAGS",
        _text,
        allowed="flags of XLA, separated by spaces",
        default="",
        default_text="empty",
        help="XLA's own flags; snaprt acts on --xla_dump_hlo_snapshots with --xla_dump_to.",
    ),
    _on_off("XLA_HLO_DEBUG", "Put the Python stack of each operation, as of now, into the module."),
    _on_off(
        "XLA_IR_DEBUG", "Note the Python stack of each operation each time that it is recorded."
    ),
    Setting(
        "XLA_MAX_ASYNC_QUEUE",
        _count,
        allowed="a number of closures, 0 for no limit",
        default=100,
        default_text="100",
        help="A step that adds more closures than this in the background waits for earlier ones.",
    ),
    Setting(
        "XLA_METRICS_FILE",
        _path,
        allowed="a file in a directory that exists, STDERR or STDOUT",
        default=None,
        default_text="nothing is written",
        help="Append the report of the metrics to this file after every step.",
    ),
    Setting(
        "XLA_SAVE_TENSORS_FILE",
        _path,
        allowed="a file in a directory that exists",
        default=None,
        default_text="nothing is written",
        help="Append each graph to this file before it runs.",
    ),
    Setting(
        "XLA_SAVE_TENSORS_FMT",
        _one_of("text", "dot", "hlo"),
        allowed="text, dot, hlo",
        default="text",
        default_text="text",
        help="How XLA_SAVE_TENSORS_FILE has the graphs: text, Graphviz, or HLO.",
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
        return setting.parse(text)
    except ValueError as error:
        raise UsageError(
            f"the environment variable {name} is {text!r}, which is not allowed",
            hint=f"Allowed: {setting.allowed}. Unset it for the default: {setting.default_text}.",
        ) from error


def check() -> None:
    """Look at every variable of the table as it is set now.

    Raises:
        UsageError: The text of one is not one that it allows.
    """
    for name in _BY_NAME:
        get(name)


def for_rank(path: Path) -> Path:
    """Return the file that this process writes where ``path`` is asked for.

    Of the processes of a job each has its own: where RANK is set, its number ends the name, as
    PyTorch/XLA has it.
    """
    rank = get("RANK")
    return path if rank is None else path.with_name(f"{path.name}.{rank}")
