import ast
import json
import re
import sys
from pathlib import Path

import pytest
from programs import run_program

import snaprt
from snaprt import jaxapi

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("snaprt", "cache", "replay") for path in (ROOT / folder).rglob("*.py")
)

#: Names of JAX that are not public API: what begins with one underscore, the modules of JAX that
#: its stability promise leaves out, and everything in jaxlib but its version (`jaxlib.version`).
NOT_PUBLIC = re.compile(
    r"(jax|jaxlib)\.(\w+\.)*_(?!_)|jax\.interpreters\b|jax\.lib\.(?!__version__)|jaxlib\.(?!(version\.)?__version__|version$)"
)
JAX_API = ROOT / "snaprt" / "jaxapi"


def modules_named_in(tree: ast.AST) -> set[str]:
    """Everything imported, and every dotted name that starts with jax or jaxlib."""
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            named.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith(("jax.", "jaxlib.")):
                named.add(dotted)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named.update(a.value for a in node.args if isinstance(a, ast.Constant))
    return named


def test_jaxapi_alone_uses_names_of_jax_that_are_not_public():
    found = {}
    for path in SOURCES:
        if path.is_relative_to(JAX_API):
            continue
        names = modules_named_in(ast.parse(path.read_text(encoding="utf-8")))
        private = sorted(name for name in names if NOT_PUBLIC.match(name))
        if private:
            found[str(path.relative_to(ROOT))] = private
    assert found == {}


def test_the_rest_uses_every_public_name_of_jaxapi_and_none_of_its_files():
    used, text_of_jaxapi = set(), "".join(path.read_text() for path in JAX_API.rglob("*.py"))
    for path in SOURCES:
        if path.is_relative_to(JAX_API):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxapi":
                used.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert not node.module.startswith("snaprt.jaxapi."), path
                if node.module == "snaprt.jaxapi":
                    used.update(alias.name for alias in node.names)
    own = {
        name
        for name, value in vars(jaxapi).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("snaprt.jaxapi")
    }
    assert all(hasattr(jaxapi, name) for name in used)
    in_jaxapi_alone = {name for name in own - used if text_of_jaxapi.count(name) == 1}
    assert in_jaxapi_alone == set()


def test_errors_settings_and_metrics_use_the_standard_library_alone():
    for name in ("errors", "settings", "metrics/__init__", "metrics/report", "host/whole_files"):
        tree = ast.parse((ROOT / "snaprt" / f"{name}.py").read_text(encoding="utf-8"))
        tops = {module.split(".")[0] for module in modules_named_in(tree)}
        assert tops - {"snaprt"} <= sys.stdlib_module_names, name


@pytest.fixture(scope="module")
def modules_after_import_snaprt() -> set[str]:
    code = "import json, sys; import snaprt; print(json.dumps(sorted(sys.modules)))"
    shown = run_program(code)
    return set(json.loads(shown.stdout))


@pytest.mark.parametrize(
    "unwanted",
    [
        *("jax", "jaxlib", "numpy", "torch", "click", "rich", "snaprt.cli", "snaprt_replay"),
        "sqlite_utils",
    ],
)
def test_import_snaprt_does_not_import(unwanted, modules_after_import_snaprt):
    assert unwanted not in modules_after_import_snaprt


def test_the_public_names_are_these():
    assert snaprt.__all__ == [
        "CompilationProfiler",
        "CompileError",
        "DeviceError",
        "ExecutionError",
        "GraphBreakError",
        "MpDeviceLoader",
        "NoCompileError",
        "ProcessError",
        "RankError",
        "SnaprtError",
        "SnapshotError",
        "StepTrace",
        "Trace",
        "UsageError",
        "__version__",
        "add_step_closure",
        "compile_times",
        "disable",
        "dump_now",
        "eager_mode",
        "enable",
        "explain",
        "fork_rng",
        "get_rng_state",
        "get_xla_supported_devices",
        "is_eager_mode",
        "is_master_ordinal",
        "lazy",
        "manual_seed",
        "mark_step",
        "master_print",
        "metrics",
        "next_key",
        "no_compile",
        "optimizer_step",
        "record",
        "register_hlo_snapshot_callback",
        "set_rng_state",
        "spawn",
        "start_server",
        "sync",
        "wait_device_ops",
        "xla_device",
    ]


def test_every_public_name_is_there_and_listed_and_an_unknown_one_is_not():
    for name in [*snaprt.__all__, "cache", "replay"]:
        assert getattr(snaprt, name) is getattr(snaprt, name)
        assert name in dir(snaprt)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = snaprt.nonsense


def test_type_checkers_see_the_names_that_are_loaded_at_first_use():
    tree = ast.parse((ROOT / "snaprt" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    loaded = {
        name: where if ":" in where else f"snaprt:{name}" for name, where in snaprt._WHERE.items()
    }
    assert seen == {**loaded, "explain": "snaprt.explain.cuts:explain"}


@pytest.mark.parametrize(
    "first",
    [
        "import snaprt",
        "from snaprt import lazy",
        "from snaprt.runtime.step import mark_step",
        "import snaprt.trace.array",
        "from snaprt.runtime.lazy_scope import lazy",
        "import snaprt; snaprt.enable(); snaprt.disable()",
    ],
)
def test_lazy_is_a_scope_and_a_decorator_whatever_was_imported_first(first):
    code = f"""{first}
import snaprt, jax.numpy as jnp
@snaprt.lazy()
def double(x):
    return x + x
with snaprt.lazy():
    x = jnp.ones(2)
print(type(x).__name__, type(double(x)).__name__, type(x + x).__name__)
"""
    assert run_program(code).stdout.split() == ["LazyArray", "LazyArray", "ArrayImpl"]


def test_every_module_says_in_its_first_line_what_it_is_for():
    for path in SOURCES:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring, path
        assert docstring.splitlines()[0].endswith((".", ":", ";", ",")) or "\n" in docstring, path


def test_no_module_of_ours_is_named_after_nothing():
    assert not [path for path in SOURCES if path.stem in ("utils", "helpers", "manager", "common")]
