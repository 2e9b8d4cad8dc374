import importlib.util

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'snaprt[torch]'")
# torchax is not imported here: with some versions of torch, only snaprt.torch can import it.
if importlib.util.find_spec("torchax") is None:
    pytest.skip("torchax is not installed: pip install 'snaprt[torch]'", allow_module_level=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
