"""Metrics and profiles under the names of PyTorch/XLA: those of snaprt and of JAX."""

from __future__ import annotations

import jax

from snaprt import metrics
from snaprt.runtime import profile

metrics_report = metrics.metrics_report
short_metrics_report = metrics.short_metrics_report
counter_names = metrics.counter_names
counter_value = metrics.counter_value
metric_names = metrics.metric_names
metric_data = metrics.metric_data
clear_all = clear_counters = clear_metrics = metrics.clear_all

start_trace = jax.profiler.start_trace
stop_trace = jax.profiler.stop_trace
start_server = profile.start_server
Trace = profile.Trace
StepTrace = profile.StepTrace


def executed_fallback_ops() -> list[str]:
    """Return the operations that fell back to the CPU: none does.

    Examples:
        >>> xm.executed_fallback_ops()
        []
    """
    return []
