"""What every test shares: a cache of its own, and a thread that starts and ends eager."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before snaprt is imported: its consoles read the width once, and pytest-xdist sets one.
os.environ.pop("COLUMNS", None)

# Where the environment turns bytecode off, each program that a test starts compiles the sources of
# snaprt again, and those of JAX unless its installer has: up to two seconds of every start.
if sys.dont_write_bytecode:
    bytecode = tempfile.TemporaryDirectory(prefix="snaprt-tests-bytecode-")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = bytecode.name
    sys.dont_write_bytecode = False

# A shell starts a command in the background with Ctrl-C ignored, and so would every program that
# a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker still has one when the others end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the tests, and the processes they start, away from the user's own cache."""
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    about_the_cache = [name for name in os.environ if name.startswith("SNAPRT_CACHE")]
    for name in (
        "XLA_FLAGS",
        "SNAPRT_DUMP_DIR",
        "SNAPRT_METRICS_FILE",
        *about_the_cache,
    ):
        patch.delenv(name, raising=False)
    patch.setenv("SNAPRT_CACHE_DIR", str(folder))
    yield folder
    patch.undo()


@pytest.fixture
def no_persistent_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in this test whatever an earlier test has compiled, so that counts are exact."""
    monkeypatch.setenv("SNAPRT_CACHE", "0")


@pytest.fixture
def little_optimization() -> Iterator[None]:
    """Let XLA compile in half the time, where it matters which programs there are, not how fast."""
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.fixture(scope="session")
def recorded_on_8_devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the snapshots of ``several_devices.PROGRAM``."""
    from programs import finish
    from several_devices import PROGRAM, record

    folder = tmp_path_factory.mktemp("devices")
    finish(record(PROGRAM, folder, 8))
    return folder


@pytest.fixture(autouse=True)
def eager_thread() -> Iterator[None]:
    """Leave the thread eager, with nothing pending, and the counters at zero."""
    import snaprt

    snaprt.metrics.clear_all()
    yield
    snaprt.disable()
    if "snaprt.runtime.step" in sys.modules:  # what failed may keep arrays of its thread alive
        sys.modules["snaprt.runtime.step"].thread_trace().begin()
    if "jax" in sys.modules:  # a callback that failed would fail the next test that waits for all
        sys.modules["jax._src.dispatch"].runtime_tokens.clear()
