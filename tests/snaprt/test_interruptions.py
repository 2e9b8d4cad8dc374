"""What a program's signal handler raises reaches the program, whatever of ours it interrupts."""

import functools
import signal
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import pytest

import snaprt
from snaprt.compile import executable, obtain
from snaprt.host.interruptions import raise_if_interrupted
from snaprt.jaxapi.compiler import lowered
from snaprt.snapshot.recorder import filing
from snaprt.snapshot.recorder.record import process_recorder


class TooSlowError(Exception):
    pass


def too_slow(*_: object) -> NoReturn:
    raise TooSlowError


class Handler:
    def __call__(self, *_: object) -> NoReturn:
        raise TooSlowError

    def method(self, *_: object) -> NoReturn:
        raise TooSlowError


@pytest.fixture
def interrupt(monkeypatch):
    """Return what makes a function be interrupted by a signal the first time it is called."""
    before = signal.signal(signal.SIGUSR2, too_slow)

    def interrupt(owner: object, name: str) -> None:
        original = getattr(owner, name)
        pending = [signal.SIGUSR2]

        def interrupted(*args, **kwargs):
            if pending:
                signal.raise_signal(pending.pop())
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, interrupted)

    yield interrupt
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    "handler",
    [too_slow, Handler(), Handler().method, functools.partial(too_slow, 1)],
    ids=["function", "object", "method", "partial"],
)
def test_an_error_of_a_handler_is_told_from_others(handler):
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(TooSlowError) as caught:
            signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(TooSlowError):
            raise_if_interrupted(caught.value)
    finally:
        signal.signal(signal.SIGUSR2, before)
    raise_if_interrupted(caught.value)  # it is no handler any more


@pytest.mark.parametrize(
    ("owner", "name"),
    [(lowered, "_lowered"), (obtain.Cache, "put"), (executable, "_timed_call")],
    ids=["lowering", "storing", "running"],
)
def test_a_graph_stays_pending_where_a_signal_interrupts_it(interrupt, owner, name):
    with snaprt.lazy():
        x = jnp.arange(7.0) * 3 + len(name)
        interrupt(owner, name)
        with pytest.raises(TooSlowError):
            x.block_until_ready()
        assert x[1] == 3 + len(name)


def test_a_signal_that_interrupts_the_recorder_interrupts_the_program(interrupt, tmp_path: Path):
    double = jax.jit(lambda x: x * 2)
    with snaprt.record(folder=tmp_path):
        double(1.0)
        interrupt(filing.Filing, "queue")
        with pytest.raises(TooSlowError):
            double(2.0)
        assert double(3.0) == 6.0


def test_a_signal_that_interrupts_an_operation_is_not_recorded_as_its_error(
    interrupt, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("SNAPRT_RECORD", "error")
    with snaprt.lazy():
        interrupt(jnp, "cos")
        with pytest.raises(TooSlowError):
            jax.jit(lambda x: jnp.cos(x))(jnp.ones(3))
    assert process_recorder().flush(60)
    assert list(tmp_path.rglob("*.snap")) == []
