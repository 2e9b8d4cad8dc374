import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from programs import run_program

from snaprt.cli.main import group

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
AT_THE_ROOT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = [*(ROOT / name for name in AT_THE_ROOT), *PAGES]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(path):
    links = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_site_has_every_document_in_its_menu():
    menu = re.findall(r"[:-] (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES}
    elsewhere = {"index.md", "examples/README.md", *AT_THE_ROOT}
    assert {page for page in menu if page not in elsewhere} == pages


def test_the_python_of_the_readme_runs_as_it_stands(tmp_path):
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


BLOCK = re.compile(
    r"^```console\n(.*?)^```|^```sh\n(.*?)^```|^((?: {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL
)
#: A command of snaprt, after variables that are set for it; with its continued lines.
COMMAND = re.compile(r"^ *(?:\w+=\S+ +)*snaprt ((?:.*\\\n)*.*)$", re.MULTILINE)


def commands_of(path):
    """Yield the words after ``snaprt`` in each command that a document shows."""
    for console, commands, indented in BLOCK.findall(path.read_text(encoding="utf-8")):
        prompted = re.findall(r"^\$ ((?:.*\\\n)*.*)$", console, re.MULTILINE)
        for command in COMMAND.findall("\n".join([commands, indented, *prompted])):
            joined = re.sub(r" *\\\n *", " ", command)
            yield shlex.split(re.split(r" [|>&] ?| \d?>", joined)[0], comments=True)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_is_shown_exists_with_its_options(path):
    for words in commands_of(path):
        command, context = group, click.Context(group)
        while words and isinstance(command, click.Group) and words[0][:1] != "-":
            name = words.pop(0)
            command = command.get_command(context, name)
            assert command is not None, f"snaprt {name}"
        known = {
            option for parameter in command.get_params(context) for option in parameter.opts
        } | {option for parameter in command.params for option in parameter.secondary_opts}
        ours = words[: words.index("--")] if "--" in words else words
        shown = {word.partition("=")[0] for word in ours if word.startswith("--")}
        assert shown - known - {"--version", "--help"} == set(), words


@pytest.mark.ecosystem
@pytest.mark.parametrize(
    "page",
    [
        "explanation/comparison.md",
        "explanation/lazy-runtime.md",
        "how-to/debug-modes.md",
        "how-to/many-processes.md",
        "how-to/slow-start.md",
    ],
)
def test_the_python_of_the_page_runs(page, tmp_path):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    record = (
        "def step(x): return x * 2\nimport jax, snaprt\nwith snaprt.record(): jax.jit(step)(1.0)"
    )
    run_program(record, folder=tmp_path, SNAPRT_DUMP_DIR="dump")
    for path in (tmp_path / "dump").iterdir():  # name.PLACE.inputs.snap, as the page calls it
        path.rename(path.with_name("step." + ".".join(path.name.split(".")[-2:])))
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)):
        (tmp_path / f"block{number}.py").write_text(code, encoding="utf-8")
        run_program(tmp_path / f"block{number}.py", folder=tmp_path)
