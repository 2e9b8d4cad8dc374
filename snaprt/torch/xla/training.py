"""What training scripts for PyTorch/XLA print and log with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from snaprt import metrics
from snaprt.torch.xla.processes import global_ordinal

_SMOOTHING: Final = 0.4


class RateTracker:
    """How many examples a second were trained.

    Args:
        smooth_factor: How much an earlier rate counts in `rate`, between 0 and 1.

    Examples:
        >>> tracker = xm.RateTracker()
        >>> tracker.add(64)
        >>> tracker.global_rate() > 0
        True
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._smoothing = _SMOOTHING if smooth_factor is None else smooth_factor
        self._start = self._asked = time.monotonic()
        self._total = self._since = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Count examples."""
        self._total += count
        self._since += count

    def rate(self) -> float:
        """Return the examples a second since the last call, smoothed."""
        now = time.monotonic()
        rate = self._since / max(now - self._asked, 1e-9)
        if self._rate is not None:
            rate += self._smoothing * (self._rate - rate)
        self._rate, self._asked, self._since = rate, now, 0.0
        return rate

    def global_rate(self) -> float:
        """Return the examples a second since the tracker was made."""
        return self._total / max(time.monotonic() - self._start, 1e-9)


def now(format: str = "%H:%M:%S") -> str:  # noqa: A002 - the name in PyTorch/XLA
    """Return the local time.

    Examples:
        >>> len(xm.now("%H:%M"))
        5
    """
    return datetime.now().strftime(format)


def print_training_update(
    device: Any,
    step: int,
    loss: float,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Print a line about a training step, and write its rates to a summary writer.

    Examples:
        >>> xm.print_training_update(xm.xla_device(), 3, loss=0.5, rate=64.0, global_rate=60.0)
        | Training Device=jax:0/0 Step=3 Loss=0.50000 Rate=64.00 GlobalRate=60.00 Time=...
    """
    _print_line(
        "Training",
        device,
        {
            "Epoch": epoch,
            "Step": step,
            "Loss": f"{loss:.5f}",
            "Rate": f"{rate:.2f}",
            "GlobalRate": f"{global_rate:.2f}",
        },
    )
    rates = {"examples/sec": rate, "average_examples/sec": global_rate}
    write_to_summary(summary_writer, dict_to_write=rates)


def print_test_update(
    device: Any, accuracy: float | None, epoch: int | None = None, step: int | None = None
) -> None:
    """Print a line about an evaluation.

    Examples:
        >>> xm.print_test_update(xm.xla_device(), accuracy=97.5, epoch=2)
        | Test Device=jax:0/0 Epoch=2 Accuracy=97.50 Time=...
    """
    shown = None if accuracy is None else f"{accuracy:.2f}"
    _print_line("Test", device, {"Step": step, "Epoch": epoch, "Accuracy": shown})


def _print_line(kind: str, device: Any, values: Mapping[str, Any]) -> None:
    words = [f"{name}={value}" for name, value in values.items() if value is not None]
    print("|", kind, f"Device={device}/{global_ordinal()}", *words, f"Time={now()}", flush=True)


def get_summary_writer(logdir: str | None) -> Any:
    """Return a TensorBoard writer for a directory; None for no directory.

    Examples:
        >>> xm.get_summary_writer(None) is None
        True
    """
    if not logdir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=logdir)


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, float] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Write numbers, and the counters of snaprt, to a summary writer, if there is one.

    Examples:
        >>> writer = xm.get_summary_writer(None)  # or a directory
        >>> xm.write_to_summary(writer, global_step=3, dict_to_write={"loss": 0.5})
    """
    if summary_writer is None:
        return
    values = dict(dict_to_write or {})
    if write_xla_metrics:
        values |= {name: metrics.counter_value(name) or 0 for name in metrics.counter_names()}
    for name, value in values.items():
        summary_writer.add_scalar(name, value, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Close a summary writer, if there is one.

    Examples:
        >>> xm.close_summary_writer(xm.get_summary_writer(None))
    """
    if summary_writer is not None:
        summary_writer.close()
