"""The Python code of docs/how-to/torch.md runs, from the first block to the last."""

import re
from pathlib import Path

from programs import run_program

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_code_of_the_document_runs(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "how-to" / "torch.md").read_text(encoding="utf-8"))
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks))
    assert "loss " in run_program(script, folder=tmp_path).stdout
