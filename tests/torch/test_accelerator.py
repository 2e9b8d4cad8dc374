"""`torch.accelerator` and the module of the device answer for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import snaprt.torch
from snaprt.errors import UsageError

DEVICE = snaprt.torch.device()
PLACES = [torch.accelerator, torch.get_device_module("jax")]


def _number(name: str) -> Any:
    return getattr(torch.accelerator, name, lambda: 0)()


def test_a_script_that_asks_for_the_accelerator_gets_the_device() -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None
    assert found.type == DEVICE.type
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 1
    assert torch.ones(2, device=found).device == DEVICE


@pytest.mark.parametrize("place", PLACES)
def test_synchronizing_runs_what_is_recorded(place: Any) -> None:
    with snaprt.torch.lazy():
        y = torch.ones(2, device=DEVICE) * 3
        steps = snaprt.metrics.counter_value("MarkStep") or 0
        place.synchronize()
        assert (snaprt.metrics.counter_value("MarkStep") or 0) == steps + 1
    assert y.tolist() == [3, 3]


def test_memory_is_what_jax_knows_of_it() -> None:
    x = torch.ones(1000, device=DEVICE)
    used, peak = _number("memory_allocated"), _number("max_memory_allocated")
    assert peak >= used
    assert (used >= 4 * x.numel()) == bool(_number("memory_stats"))  # JAX knows none on a CPU
    for name in ("empty_cache", "empty_host_cache", "reset_peak_memory_stats"):
        _number(name)


@pytest.mark.parametrize("place", PLACES)
def test_another_device_is_an_error(place: Any) -> None:
    place.synchronize(0)
    place.synchronize(DEVICE)
    torch.accelerator.set_device_index(0)
    with pytest.raises(UsageError, match="there is no device of index 1"):
        place.synchronize(1)
    with pytest.raises(UsageError, match="there is no device of index 1"):
        torch.accelerator.set_device_index(1)


def test_the_state_of_random_numbers_is_kept_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    with torch.random.fork_rng():
        first = torch.rand(3, device=DEVICE)
    assert torch.equal(torch.rand(3, device=DEVICE), first)


def test_tensors_are_not_pinned() -> None:
    assert not torch.ones(2, device=DEVICE).is_pinned()
