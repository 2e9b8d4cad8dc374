"""Makes the description of the distribution of README.md: PyPI shows it where no file is beside it.

`hatchling` finds it by its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_TO_A_FILE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def description(readme: str, source: str | None) -> str:
    """Return a text of which no link is relative.

    Args:
        readme: Markdown, with links to files beside it.
        source: Where the repository can be read, such as ``https://github.com/NAME/snaprt``; links
            lead to its branch ``main``. Without it, they become plain text, and pictures go.
    """

    def replaced(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if source is None:
            return "" if mark else text
        return f"{mark}[{text}]({source.rstrip('/')}/{'raw' if mark else 'blob'}/main/{target})"

    return _TO_A_FILE.sub(replaced, readme)


class DescriptionHook(MetadataHookInterface):
    """Fills in ``readme``, which pyproject.toml says is dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the text; ``Source`` of ``[project.urls]`` says where its links lead."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        text = description(readme, source)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
