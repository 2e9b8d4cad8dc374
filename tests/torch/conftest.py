import importlib.util
from pathlib import Path

import pytest

# torchax is not imported here: with some versions of torch, only snaprt.torch can import it.
MISSING = [name for name in ("torch", "torchax") if importlib.util.find_spec(name) is None]


class _Skipped(pytest.Module):
    def collect(self) -> list[pytest.Item]:  # without importing the file
        pytest.skip(f"{' and '.join(MISSING)} not installed: pip install 'snaprt[torch]'")


if MISSING:

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return _Skipped.from_parent(parent, path=module_path)

else:
    import torch

    @pytest.fixture(autouse=True)
    def _seeded() -> None:
        torch.manual_seed(0)
