"""Every environment variable that snaprt reads, one row each.

A row says how the text is understood, what holds where the variable is not set, and what it is
for. ``snaprt help environment`` prints the table, and
``python -m snaprt.cli.environment docs/reference/environment.md`` writes it into the document.
"""

from __future__ import annotations

import functools
import os
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from snaprt import units
from snaprt.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """What the text of a variable may be."""

    # Turns the text into a value; raises ValueError for text it does not understand.
    parse: Callable[[str], Any]
    allowed: str  # what ``parse`` understands, in words for the user
    # What the text names if it names something that is written later: ``file`` or ``folder``; else
    # empty.
    written: str = ""


@dataclass(frozen=True)
class Setting:
    """One environment variable."""

    name: str  # the variable
    kind: Kind  # what its text may be
    help: str  # what it is for, one sentence
    default: Any = None  # the value where the variable is not set or empty
    default_text: str = ""  # the default in words for the user; by default the value
    since: str = "0.1"  # the version of snaprt that first read it

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
    return Path(os.path.expanduser(text))  # an unknown user's "~name" is a name like others


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return min(value, units.MOST_SECONDS)


def _duration(text: str) -> float:
    seconds = units.parse_duration(text)
    if not seconds:
        raise ValueError(text)
    return min(seconds, units.MOST_SECONDS)


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
    urllib.parse.urlsplit(text)  # a bracket that does not close, for one, is a ValueError
    return text.strip()


def _count_and_action(default: str, other: str) -> Callable[[str], tuple[int, str]]:
    def parse(text: str) -> tuple[int, str]:
        count, _, action = text.strip().partition(":")
        if action not in ("", default, other):
            raise ValueError(text)
        return _count(count), action or default

    return parse


def _text(text: str) -> str:
    return text


def _verbosities(text: str) -> tuple[tuple[str, int], ...]:
    entries = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
    if not all(name.strip() for name, _, _ in entries):
        raise ValueError(text)
    return tuple((name.strip(), _count(level)) for name, _, level in entries)


FOLDER: Final = Kind(_path, "a directory; created if it does not exist", "folder")
FILE: Final = Kind(_path, "a file in an existing directory", "file")
SIZE: Final = Kind(units.parse_size, "bytes, such as 500M or 10G")
LIMIT: Final = Kind(_limit, "bytes, such as 500M or 10G; 0 for no limit")
SECONDS: Final = Kind(_seconds, "seconds, 0 or more")
NUMBER: Final = Kind(_number, "a number, 0 or more; any other text counts as unset")


def _one_of(*words: str) -> Kind:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in map(str.lower, words):
            raise ValueError(text)
        return word

    return Kind(parse, ", ".join(words))


def _several_of(*words: str) -> Kind:
    def parse(text: str) -> tuple[str, ...]:
        chosen = {word.strip().lower() for word in text.split(",") if word.strip()}
        if not chosen <= set(words):
            raise ValueError(text)
        return tuple(word for word in words if word in chosen)

    return Kind(parse, f"some of {', '.join(words)}, with commas between them")


def _on_off(name: str, meaning: str, *, default: bool = False) -> Setting:
    kind = Kind(_switch, "on, off (or 1, 0, true, false, yes, no)")
    return Setting(name, kind, meaning, default, "on" if default else "off")


#: The forms in which SNAPRT_TRACE writes a graph, by their files.
TRACE_FORMS: Final = (
    *("graph.svg", "graph.txt", "graph.dot"),
    *("jaxpr.txt", "module.stablehlo.mlir", "optimised.hlo"),
)

SETTINGS: Final = (
    _on_off(
        "GET_TENSORS_OPBYOP",
        "When a value is read, compile and run each operation that it depends on separately.",
    ),
    Setting(
        "LOCAL_RANK",
        NUMBER,
        "Rank of this process on its machine, as set by torchrun and other launchers.",
        default_text="the first on its machine",
    ),
    Setting(
        "NEURON_DUMP_HLO_SNAPSHOT",
        _one_of("1", "0", "ON_NRT_ERROR", "ON_NRT_ERROR_HYBRID", "ON_NRT_ERROR_CPU"),
        "Record every execution (1), or only those that fail, as PyTorch NeuronX does.",
        default="0",
    ),
    _on_off(
        "NEURON_FRAMEWORK_DEBUG", "Set to off to ignore NEURON_DUMP_HLO_SNAPSHOT.", default=True
    ),
    _on_off(
        "NEURON_NC0_ONLY_SNAPSHOT",
        "With NEURON_DUMP_HLO_SNAPSHOT, record only the first device of rank 0.",
    ),
    _on_off("NEURON_USE_EAGER_DEBUG_MODE", "Same as XLA_USE_EAGER_DEBUG_MODE."),
    _on_off("PT_XLA_DEBUG", "Log each compilation and execution, as PyTorch/XLA does."),
    Setting(
        "PT_XLA_DEBUG_FILE",
        FILE,
        "Append the output of PT_XLA_DEBUG to this file.",
        default_text="standard error",
    ),
    Setting(
        "PT_XLA_DEBUG_LEVEL",
        Kind(_count, "0, 1, 2 or more"),
        "Level of PT_XLA_DEBUG: 1 logs compilations, 2 also logs executions.",
        default_text="2 if PT_XLA_DEBUG is on, else 0",
    ),
    Setting(
        "PT_XLA_DEBUG_MAX_FRAME",
        Kind(_count, "a number of frames"),
        "Maximum number of stack frames that PT_XLA_DEBUG shows.",
        default=8,
    ),
    Setting(
        "RANK",
        NUMBER,
        "Rank of this process in the job, as set by torchrun and other launchers; used where JAX "
        "knows only one process.",
        default_text="`jax.process_index()`",
    ),
    _on_off("SNAPRT_CACHE", "Store compiled programs on disk and reuse them.", default=True),
    _on_off(
        "SNAPRT_AUTO_EAGER",
        "Run a thread eagerly while nearly all its graphs are new, and leave small jitted "
        "functions to JAX, if the program marks no steps.",
        default=True,
    ),
    Setting(
        "SNAPRT_AUTO_STEP_BYTES",
        SIZE,
        "Start an automatic step when pending operations hold or compute this many bytes.",
        default=1 << 30,
        default_text="1G",
    ),
    Setting(
        "SNAPRT_AUTO_STEP_SIZE",
        Kind(_count, "a number of operations; 0 for no automatic steps"),
        "Start an automatic step after this many pending operations if the program marks no steps.",
        default=1000,
    ),
    Setting(
        "SNAPRT_CACHE_DIR",
        FOLDER,
        "Directory of the compile cache.",
        default_text="snaprt's directory in the user's cache directory",
    ),
    Setting(
        "SNAPRT_CACHE_KEY_FILE",
        Kind(_path, "a file of at least 16 bytes that other users cannot read"),
        "Key that signs the entries of the compile cache.",
        default_text="entries are not signed",
    ),
    Setting(
        "SNAPRT_CACHE_MAX_SIZE",
        LIMIT,
        "Maximum total size of the compile cache; the least valuable entries are evicted.",
        default=10 << 30,
        default_text="10G",
    ),
    Setting(
        "SNAPRT_CACHE_MODE",
        _one_of("read-write", "read-only", "fail-on-miss", "refresh", "off"),
        "Whether programs read the compile cache, write to it, and are allowed to compile.",
        default="read-write",
    ),
    Setting(
        "SNAPRT_CACHE_REMOTE",
        Kind(_url, "s3://bucket/prefix, gs://..., az://..., https://host/path or file:///folder"),
        "Remote cache to query for entries that are not in the cache directory.",
        default_text="no remote",
    ),
    Setting(
        "SNAPRT_CACHE_REMOTE_TIMEOUT",
        SECONDS,
        "Maximum wait for an entry from the remote cache.",
        default=2.0,
    ),
    _on_off(
        "SNAPRT_CACHE_SHARED",
        "Share the cache directory with other users; use only entries signed with the key.",
    ),
    Setting(
        "SNAPRT_CACHE_WAIT",
        SECONDS,
        "Maximum wait while another process compiles the same program.",
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
        "Write the programs of a lazy run to this directory instead of running them.",
        default_text="programs are compiled and run",
    ),
    Setting(
        "SNAPRT_DEBUG_FUNCTION",
        Kind(_text, "the name of a function or method, such as train_step or Model.loss"),
        "Limit graph files and PT_XLA_DEBUG to graphs with operations of this function.",
        default_text="every graph",
    ),
    Setting(
        "SNAPRT_DUMP_DIR",
        FOLDER,
        "Record snapshots into this directory, as if XLA_FLAGS requested it.",
        default_text="no recording",
    ),
    _on_off(
        "SNAPRT_JAX_CACHE", "Use the compile cache for jax.jit in every process that uses JAX."
    ),
    _on_off(
        "SNAPRT_LAZY",
        "Whether `snaprt run` runs programs lazily when --lazy and --no-lazy are not given.",
    ),
    Setting(
        "SNAPRT_LOG_FILE",
        FILE,
        "Append snaprt's log to this file, at level INFO unless a TF_CPP variable is set.",
        default_text="Python's logging; stderr if a TF_CPP variable asks for more than warnings",
    ),
    Setting(
        "SNAPRT_MAX_GRAPH_SIZE",
        Kind(_count, "a number of operations; 0 for no limit"),
        "Run pending operations once there are this many, including those in jitted functions.",
        default=100_000,
    ),
    Setting(
        "SNAPRT_METRICS_FILE",
        Kind(_path, "a file in an existing directory; .txt for the report, else JSON", "file"),
        "Write the metrics to this file at exit.",
        default_text="nothing is written",
    ),
    Setting(
        "SNAPRT_NO_COMPILE_AFTER",
        Kind(
            _count_and_action("raise", "warn"),
            "a number of steps, such as 100; or 100:warn for a warning",
        ),
        "Raise an error if XLA compiles after this many steps, or calls of one jitted function.",
        default_text="programs may always compile",
    ),
    _on_off(
        "SNAPRT_PREFETCH",
        "Preload the programs of the last run while Python imports and traces.",
        default=True,
    ),
    Setting(
        "SNAPRT_PROFILE_TIMEOUT",
        SECONDS,
        "How long `snaprt run --profile` waits for a profile to stop.",
        default=60.0,
    ),
    Setting(
        "SNAPRT_RECOMPILE_LIMIT",
        Kind(
            _count_and_action("warn", "eager"),
            "a number, such as 8; 8:eager to run new graphs of the place op by op from then on; "
            "0 for no limit",
        ),
        "Warn when one place in the program causes recompilation in this many steps.",
        default=(8, "warn"),
        default_text="8",
    ),
    _on_off(
        "SNAPRT_RECORD_DEDUPE",
        "Store arrays that several snapshots share once, in a folder next to them.",
    ),
    Setting(
        "SNAPRT_RECORD",
        Kind(_text, "conditions, such as name=train, every=10; nan (see docs/how-to/record.md)"),
        "Record only executions that meet at least one of these conditions.",
        default_text="every execution, if a directory to record into is set",
    ),
    Setting(
        "SNAPRT_RECORD_HOLD",
        _one_of("device", "hybrid", "host"),
        "Where to hold inputs until their execution ends.",
        default="device",
    ),
    _on_off(
        "SNAPRT_RECORD_JIT", "Record calls of jitted functions, in every process that uses JAX."
    ),
    Setting(
        "SNAPRT_RECORD_KEEP_BYTES",
        SIZE,
        "Write the executions held by SNAPRT_RECORD_KEEP_LAST to disk beyond this size.",
        default=1 << 30,
        default_text="1G",
    ),
    Setting(
        "SNAPRT_RECORD_KEEP_LAST",
        Kind(_count, "a number of executions; 0 for none"),
        "Hold the last N executions and write them on a failure or SIGUSR1.",
        default=0,
    ),
    Setting(
        "SNAPRT_RECORD_MAX_BYTES",
        LIMIT,
        "Maximum size of the snapshots that a process writes.",
        default_text="no limit",
    ),
    Setting(
        "SNAPRT_RECORD_MAX_FILES",
        Kind(_count, "a number of files; 0 for no limit"),
        "Maximum number of snapshots that a process writes.",
        default=0,
        default_text="no limit",
    ),
    Setting(
        "SNAPRT_RECORD_MAX_RATE",
        Kind(_limit, "bytes per second, such as 100M; 0 for no limit"),
        "Maximum rate of recording in bytes per second, averaged over ten seconds.",
        default_text="no limit",
    ),
    Setting(
        "SNAPRT_RECORD_MIN_FREE",
        SIZE,
        "Bytes to leave free on the disk that holds the snapshots.",
        default=0,
    ),
    Setting(
        "SNAPRT_RECORD_QUEUE_BYTES",
        SIZE,
        "Maximum size of the arrays that wait to be written; beyond it, the program waits.",
        default_text="2G, or a quarter of the free memory if that is more",
    ),
    _on_off("SNAPRT_RECORD_STOP", "Stop the program once a NaN or an error is recorded."),
    Setting(
        "SNAPRT_REPRO_AFTER",
        _one_of("compile", "run"),
        "Save programs that fail to compile (compile), or also those that fail to run (run).",
        default_text="nothing is saved",
    ),
    Setting(
        "SNAPRT_REPRO_DIR",
        FOLDER,
        "Directory for the programs that SNAPRT_REPRO_AFTER saves.",
        default=Path("snaprt-repro"),
        default_text="snaprt-repro, in the current directory",
    ),
    Setting(
        "SNAPRT_REPRO_LEVEL",
        _one_of("1", "2", "3", "4"),
        "1 saves programs, 2 minifies them, 3 minifies in the background, 4 also compares each "
        "new program.",
        default="2",
    ),
    Setting(
        "SNAPRT_SLOW_COMPILE",
        Kind(_seconds, "seconds; 0 for no warning"),
        "Warn when compiling a lazy program takes longer than this.",
        default=10.0,
    ),
    _on_off(
        "SNAPRT_SPECULATE",
        "Run the first calls of jitted functions while JAX traces them; drop wrong results.",
    ),
    _on_off(
        "SNAPRT_STEADY",
        "Make every lazy scope steady: trace functions that JAX transforms once, as jax.jit does.",
    ),
    Setting(
        "SNAPRT_STEADY_CHECK",
        Kind(_count, "a number of calls; 0 for never"),
        "How often a function in a steady scope is traced again, to see whether it has changed.",
        default=100,
    ),
    _on_off(
        "SNAPRT_TORCH_PACK",
        "Pack small gradients and optimizers' states of PyTorch, so that a step has few arrays.",
        default=True,
    ),
    Setting(
        "SNAPRT_TRACE",
        FOLDER,
        "Write a folder for each graph to this directory, and a page that links them.",
        default_text="nothing is written",
    ),
    Setting(
        "SNAPRT_TRACE_FORMS",
        _several_of(*TRACE_FORMS),
        "Limit what SNAPRT_TRACE writes of each graph to these files.",
        default=TRACE_FORMS,
        default_text="all of them",
    ),
    Setting(
        "SNAPRT_WATCHDOG",
        Kind(_duration, "a duration of more than 0, such as 90s, 5m or 1h"),
        "Write the stacks of each process when no execution or step ends for this long.",
        default_text="no watchdog",
    ),
    _on_off("SYNC_TENSORS_OPBYOP", "At a step, compile and run each operation separately."),
    _on_off("TF_CPP_LOG_THREAD_ID", "Include the thread ID in log lines."),
    Setting(
        "TF_CPP_MIN_LOG_LEVEL",
        Kind(_number, "a number, 0 to 3; any other text counts as unset"),
        "0 logs the start and end of each compilation; 1 to 3 leave it to the level of the logger "
        "`snaprt`.",
        default_text="no log from snaprt, unless TF_CPP_VMODULE is set",
    ),
    Setting(
        "TF_CPP_VMODULE",
        Kind(_verbosities, "name=level,... such as compile=1,operations=2"),
        "Log level by module: 1 logs the steps of a compilation, 2 also logs each operation.",
        default=(),
        default_text="no log from snaprt, unless TF_CPP_MIN_LOG_LEVEL is 0",
    ),
    Setting(
        "WORLD_SIZE",
        NUMBER,
        "Number of processes in the job, as set by torchrun and other launchers.",
        default_text="the number that `jax.distributed` reports",
    ),
    _on_off(
        "XLA_DOWNCAST_BF16",
        "Lazy programs compute float32 arrays as bfloat16 and float64 arrays as float32.",
    ),
    Setting(
        "XLA_FLAGS",
        Kind(_text, "XLA flags, separated by spaces"),
        "XLA's own flags; snaprt uses --xla_dump_hlo_snapshots together with --xla_dump_to.",
        default="",
        default_text="empty",
    ),
    _on_off("XLA_HLO_DEBUG", "Put the current Python stack of each operation into the module."),
    _on_off("XLA_IR_DEBUG", "Save the Python stack of each operation every time it is recorded."),
    Setting(
        "XLA_MAX_ASYNC_QUEUE",
        Kind(_count, "a number of closures; 0 for no limit"),
        "Maximum number of pending closures; a step that adds more waits for earlier ones.",
        default=100,
    ),
    Setting(
        "XLA_METRICS_FILE",
        Kind(_path, "a file in an existing directory, STDERR or STDOUT", "file"),
        "Append the metrics report to this file after every step.",
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
        "Format of the graphs in XLA_SAVE_TENSORS_FILE: text, Graphviz or HLO.",
        default="text",
    ),
    _on_off("XLA_SYNC_WAIT", "Make every mark_step wait until the devices have finished."),
    _on_off("XLA_USE_32BIT_LONG", "Lazy programs compute 64-bit integers as 32-bit integers."),
    _on_off("XLA_USE_BF16", "Lazy programs compute float32 and float64 arrays as bfloat16."),
    _on_off(
        "XLA_USE_EAGER_DEBUG_MODE", "Compile and run each operation as soon as it is recorded."
    ),
)


def raw_environment() -> Any:
    """Return the environment's variables as Python keeps them, to see whether one has changed.

    CPython keeps them, encoded, in a dictionary that it changes in place.
    """
    return getattr(os.environ, "_data", os.environ)


class Texts:
    """The texts of some environment variables as they are now, to see whether one has changed.

    For what is asked at every execution: `os.environ.get` takes half a microsecond for a variable
    that is not set.
    """

    def __init__(self, *names: str) -> None:
        variables = raw_environment()
        is_encoded = variables is not os.environ
        self._get = variables.get
        self._keys = [os.environ.encodekey(name) if is_encoded else name for name in names]

    def now(self) -> list[Any]:
        """Return the texts, equal to those of an earlier call exactly where nothing changed."""
        return list(map(self._get, self._keys))


_told_of_changes: list[Callable[[], None]] = []


def when_changed(tell: Callable[[], None]) -> None:
    """Call ``tell`` from here on in the thread that changes a variable of the environment."""
    _told_of_changes.append(tell)
    if len(_told_of_changes) == 1:
        os.putenv, os.unsetenv = _telling(os.putenv), _telling(os.unsetenv)


def _telling(change: Callable[..., None]) -> Callable[..., None]:
    # An audit hook hears of changes, too, but of each `id` and each frame that is looked at as
    # well: that made both three times as slow everywhere in the process.
    @functools.wraps(change)
    def tell_and_change(*args: Any) -> None:
        for tell in _told_of_changes:
            tell()
        change(*args)

    return tell_and_change


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
    now = _texts_by_name[name].now()
    cached = _known.get(name)
    if cached is None or cached[0] != now:
        cached = _known[name] = now, _value(_BY_NAME[name], os.environ.get(name, ""))
    return cached[1]


#: The values of variables and the texts that they were read from: some are asked for at every cut.
_known: dict[str, tuple[list[Any], Any]] = {}
_texts_by_name: Final = {name: Texts(name) for name in _BY_NAME}


def _value(setting: Setting, text: str) -> Any:
    if not text.strip():
        return setting.default
    try:
        return setting.kind.parse(text)
    except ValueError as error:
        raise UsageError(
            f"the environment variable {setting.name} is {text!r}, which is not allowed",
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
