"""Runs a program for PyTorch/XLA with plain PyTorch on the CPU: ``python on_cpu.py PROGRAM``."""

import contextlib
import runpy
import sys
import types

import torch


class Names(types.ModuleType):
    """Every module of torch_xla: its names mean what they do for one CPU."""

    __path__ = ()
    MpDeviceLoader = staticmethod(lambda loader, device: loader)

    def __getattr__(self, name):
        known = KNOWN.get(name)
        if known is None:
            raise AttributeError(name)
        return known


class RateTracker:
    def add(self, count):
        pass

    def rate(self):
        return 1.0

    global_rate = rate


class SampleGenerator:
    def __init__(self, data, sample_count):
        self.items = [data] * sample_count

    def __iter__(self):
        return iter(self.items)


def add_step_closure(closure, args=(), run_async=False):
    closure(*args)


def nothing(*args, **kwargs):
    pass


KNOWN = {
    "device": lambda: torch.device("cpu"),
    "xla_device": lambda: torch.device("cpu"),
    "optimizer_step": lambda optimizer, barrier=False: optimizer.step(),
    "add_step_closure": add_step_closure,
    "mark_step": nothing,
    "sync": nothing,
    "step": contextlib.nullcontext,
    "compile": lambda function, **_: function,
    "launch": lambda function, args=(): function(0, *args),
    "spawn": lambda function, args=(), nprocs=None: function(0, *args),
    "world_size": lambda: 1,
    "is_master_ordinal": lambda: True,
    "master_print": print,
    "mesh_reduce": lambda tag, value, reduce: reduce([value]),
    "broadcast_master_param": nothing,
    "save": torch.save,
    "metrics_report": lambda: "Metric: CompileTime",
    "RateTracker": RateTracker,
    "SampleGenerator": SampleGenerator,
    "print_training_update": nothing,
    "wait_device_ops": nothing,
    "manual_seed": torch.manual_seed,
}
for module in (
    *("core", "core.xla_model", "debug", "debug.metrics", "distributed", "runtime", "test"),
    *("distributed.parallel_loader", "distributed.xla_multiprocessing", "test.test_utils"),
    *("utils", "utils.utils"),
):
    sys.modules[f"torch_xla.{module}"] = Names(f"torch_xla.{module}")
sys.modules["torch_xla"] = Names("torch_xla")

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
