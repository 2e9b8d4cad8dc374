import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'snaprt[torch]'")
pytest.importorskip("torchax", reason="torchax is not installed: pip install 'snaprt[torch]'")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
