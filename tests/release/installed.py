"""Checks an installed snaprt: run by ``.ci/run`` where only the built wheel is installed.

``python installed.py CHECKOUT`` runs outside the checkout. It compares the installed files with
those that git has, and then uses the commands: record a plain program, replay what it recorded.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

# Where each package lies in the checkout: as in pyproject.toml.
PACKAGES = ("snaprt", "cache/snaprt_cache", "replay/snaprt_replay")

PROGRAM = """\
import jax, jax.numpy as jnp

step = jax.jit(lambda x: jnp.tanh(x @ x.T))
print(step(jnp.arange(12.0).reshape(3, 4)).sum())
"""


def missing_files(checkout: Path) -> list[str]:
    """Return the files of the packages in git that the installed distribution lacks."""
    tracked = subprocess.run(
        ["git", "-C", str(checkout), "ls-files", *PACKAGES],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    places = {package: PurePosixPath(package).parent for package in PACKAGES}
    wanted = {
        str(PurePosixPath(file).relative_to(place))
        for file in tracked
        for package, place in places.items()
        if file.startswith(f"{package}/")
    }
    installed = {str(file) for file in importlib.metadata.files("snaprt") or ()}
    return sorted(wanted - installed)


def run(*words: str | Path, folder: Path) -> str:
    """Run a command in a folder and return what it printed; print it all where it fails."""
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(
            f"{' '.join(map(str, words))}: status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def main() -> None:
    """Run all checks; the exit status is not 0 where one fails."""
    checkout = Path(sys.argv[1])
    import snaprt

    if Path(snaprt.__file__).is_relative_to(checkout):
        sys.exit("this is the checkout, not the wheel")
    missing = missing_files(checkout)
    if missing or not (Path(snaprt.__file__).parent / "py.typed").is_file():
        sys.exit(f"the wheel lacks: {', '.join(missing) or 'py.typed'}")
    shown = importlib.metadata.metadata("snaprt").get_payload()
    relative = re.findall(r"\]\((?!https://|#)([^)]*)\)", shown)
    if relative or not shown.startswith("# snaprt"):
        sys.exit(f"PyPI would show links that lead nowhere: {', '.join(relative) or 'no text'}")
    command = Path(sys.executable).with_name("snaprt")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["SNAPRT_CACHE_DIR"] = str(folder / "cache")
        version = run(command, "--version", folder=folder).split()[-1]
        if version != importlib.metadata.version("snaprt"):
            sys.exit(f"snaprt --version says {version}")
        readme = (checkout / "README.md").read_text(encoding="utf-8")
        (snippet,) = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
        run(sys.executable, "-c", snippet, folder=folder)
        checks = json.loads(run(command, "doctor", "--json", folder=folder))["checks"]
        (folder / "step.py").write_text(PROGRAM, encoding="utf-8")
        run(command, "run", "--record", "--dump", "dump", "--", "step.py", folder=folder)
        files = sorted((folder / "dump").glob("*.inputs.snap"))
        if not files:
            sys.exit("nothing was recorded")
        run(command, "replay", "--html", "report.html", *files, folder=folder)
        run(command, "report", "--help", folder=folder)
        page = (folder / "report.html").stat().st_size
    print(f"snaprt {version}: {len(checks)} checks of doctor, {len(files)} executions replayed,")
    print(f"a page of {page:,} bytes, no file of the packages missing")


main()
