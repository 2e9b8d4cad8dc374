"""The image: what its build needs reaches it, and, where it can be built, it runs."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import jax, jax.numpy as jnp
print(jax.jit(lambda x: jnp.tanh(x @ x.T))(jnp.ones((8, 8))).sum())
"""


def test_what_the_wheel_is_built_from_is_not_ignored():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, wheel = pyproject["project"], pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "README.md", "hatch_build.py", *project["license-files"]}
    needed |= {package.partition("/")[0] for package in wheel["packages"]}
    kept = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert needed == kept


def test_the_extras_of_the_image_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (named,) = re.findall(r"/src\[(.*?)\]", (ROOT / "Dockerfile").read_text())
    assert set(named.split(",")) <= set(extras["optional-dependencies"])


@pytest.fixture(scope="module")
def buildah(tmp_path_factory):
    """Return what runs buildah on a storage of its own, which has the image `localhost/base`.

    ``CONTAINER_ROOT`` names a folder with the root file system of a Linux with Python and venv,
    such as debootstrap makes; ``CONTAINER_VOLUMES`` what is mounted for pip while the image is
    built, as ``/host:/container:ro``, separated by spaces.
    """
    root = os.environ.get("CONTAINER_ROOT")
    if not root or shutil.which("buildah") is None:
        pytest.skip("needs buildah, and CONTAINER_ROOT with a root file system")
    storage = tmp_path_factory.mktemp("storage")

    def run(*words):
        done = subprocess.run(
            ["buildah", "--root", storage / "root", "--runroot", storage / "run", *words],
            env={**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    base = run("from", "scratch")
    subprocess.run(["cp", "-a", f"{root}/.", run("mount", base)], check=True)
    run("umount", base)
    run("commit", "--quiet", base, "localhost/base")
    yield run
    run("rm", "--all")
    run("rmi", "--all", "--force")


@pytest.mark.ecosystem
def test_the_image_records_replays_and_starts_from_the_cache_of_its_volume(buildah, tmp_path):
    volumes = [
        word for one in os.environ.get("CONTAINER_VOLUMES", "").split() for word in ("-v", one)
    ]
    arguments = ("--network", "host", "--build-arg", "BASE=localhost/base")
    buildah("build", *arguments, *volumes, "--tag", "localhost/snaprt", ROOT)
    container = buildah("from", "localhost/snaprt")
    wanted = "{{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Volumes}}"
    assert buildah("inspect", "--format", wanted, container) == "[snaprt] map[/cache:{}]"

    (tmp_path / "work").mkdir()
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "work" / "train.py").write_text(PROGRAM)
    mounts = ("-v", f"{tmp_path}/work:/work", "-v", f"{tmp_path}/cache:/cache")

    def snaprt(*words):
        return buildah("run", *mounts, "--workingdir", "/work", container, "--", "snaprt", *words)

    assert "failed" not in snaprt("doctor")
    snaprt("run", "--record", "--dump", "dump", "--", "train.py")
    assert "MATCH" in snaprt("replay", "dump")
    assert list((tmp_path / "cache").rglob("*.sqlite"))
