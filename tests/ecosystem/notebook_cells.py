"""Runs the cells of a notebook as one program.

    python tests/ecosystem/notebook_cells.py FILE

FILE is one of Jupyter (``.ipynb``) or MyST (``.md``). Each cell prints its number, then what it
prints, then the value of its last expression or the error that it raises; the next cell follows in
any case. Lines that are IPython's (``%matplotlib inline``, ``!pip install``) are left out.
"""

from __future__ import annotations

import ast
import json
import linecache
import re
import sys
from pathlib import Path

SUFFIXES = (".ipynb", ".md")

_MYST_CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_MYST_OPTIONS = re.compile(r"\A(?:---\n.*?^---\n|(?::[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
_OF_IPYTHON = re.compile(r"^(\s*)[%!].*$", re.MULTILINE)


def cells_of(notebook: Path) -> list[str]:
    """Return the Python source of each cell with code."""
    text = notebook.read_text()
    if notebook.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    else:
        sources = [_MYST_OPTIONS.sub("", source) for source in _MYST_CELL.findall(text)]
    return [_OF_IPYTHON.sub(r"\1pass", source) for source in sources]


def run_cell(number: int, source: str) -> None:
    """Run a cell in this module, and print the value of its last expression."""
    file = f"<cell {number}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), globals())
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), file, "eval"), globals())
        if value is not None:
            print(repr(value))


if __name__ == "__main__":
    for _number, _source in enumerate(cells_of(Path(sys.argv[1]))):
        print("cell", _number)
        try:
            run_cell(_number, _source)
        except Exception as _error:
            print(type(_error).__name__, _error)
