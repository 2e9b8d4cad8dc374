"""Every command in every example's README, and in every tutorial, runs, leaves with the status it
names, and prints what is shown: the lines below a command are parts of lines that must appear, in
any order. A tutorial holds its programs, as blocks with a title.

An example that says `<!-- needs MODULE -->` is skipped where that module is not installed."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/README.md"))
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PROGRAM = re.compile(r'^```python title="(\S+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"<!-- needs (\w+) -->")
STATUS = re.compile(r"#\s*exits with (\d+)\s*$")


def commands(readme):
    """Yield (command, status, expected lines) of a README, in order."""
    for block in BLOCK.findall(readme):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *expected = part.splitlines()
            status = STATUS.search(command)
            yield command, int(status[1]) if status else 0, [line for line in expected if line]


@pytest.mark.ecosystem
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_commands_of_the_readme_do_what_it_says(folder, tmp_path):
    readme = (folder / "README.md").read_text()
    for module in NEEDS.findall(readme):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    shutil.copytree(folder, tmp_path / "example")
    run_commands(readme, tmp_path)


@pytest.mark.ecosystem
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_commands_of_the_tutorial_do_what_it_says(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    (tmp_path / "example").mkdir()
    for name, program in PROGRAM.findall(text):
        (tmp_path / "example" / name).write_text(program, encoding="utf-8")
    run_commands(text, tmp_path)


def run_commands(text, tmp_path):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SNAPRT_CACHE_DIR": str(tmp_path / "cache"),
        "NO_COLOR": "1",
    }
    ran = 0
    for command, status, expected in commands(text):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path / "example",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == status, f"{command}\n{done.stdout}"
        for line in expected:
            assert line.strip() in done.stdout, f"{command}\n{done.stdout}"
        ran += 1
    assert ran


def test_every_example_is_listed_and_has_commands():
    listed = (EXAMPLES / "README.md").read_text()
    for folder in FOLDERS:
        assert f"[{folder.name}]({folder.name}/)" in listed
