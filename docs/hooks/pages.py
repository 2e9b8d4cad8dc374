"""What the site has besides this folder: the README as its home page, and what the pages link to.

A hook of MkDocs, named in mkdocs.yml. Links in the documents are paths in the repository, so that
they work on GitHub, too. Here each becomes a link to a page of the site: the examples keep their
paths, and a linked source file becomes a page that shows it.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
HOME = "README.md"
_LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
_LANGUAGES = {".py": "python", ".sql": "sql"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose sources lie outside this folder."""
    waiting = [HOME, *(f"docs/{page.src_uri}" for page in files.documentation_pages())]
    added = set(waiting)
    while waiting:
        source = waiting.pop()
        if not source.startswith("docs/"):
            files.append(File.generated(config, _uri(source), content=_markdown(source)))
        for target in _targets(source) if source.endswith(".md") else ():
            if target not in added and not target.startswith("docs/"):
                added.add(target)
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make each link to a file of the repository one to its page."""
    source = _source(page.file.src_uri)

    def to_page(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        if target is None:
            return link[0]
        return link[1] + os.path.relpath(_uri(target), page.file.src_uri + "/..") + link[3]

    return _LINK.sub(to_page, markdown)


def _targets(source: str) -> Iterator[str]:
    """Yield the files of the repository that the document at ``source`` links to."""
    for link in _LINK.finditer((ROOT / source).read_text(encoding="utf-8")):
        target = _target(source, link[2])
        if target is not None:
            yield target


def _target(source: str, link: str) -> str | None:
    """Return the file, as a path in the repository, that ``link`` in ``source`` leads to."""
    if "://" in link:
        return None
    path = PurePosixPath(os.path.normpath(PurePosixPath(source).parent / link))
    if (ROOT / path).is_dir():
        path /= "README.md"
    return str(path) if (ROOT / path).is_file() else None


def _markdown(source: str) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".md"):
        return text
    language = _LANGUAGES.get(PurePosixPath(source).suffix, "text")
    return f"# {source}\n\n````{language}\n{text}````\n"


def _uri(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path == HOME:
        return "index.md"
    path = path.removeprefix("docs/")
    is_page = path.endswith(".md") or (ROOT / "docs" / path).exists()
    return path if is_page else f"{path.lstrip('.')}.md"


def _source(uri: str) -> str:
    """Return the file of the repository that the page at ``uri`` shows."""
    if uri == "index.md":
        return HOME
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri
