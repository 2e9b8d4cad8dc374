import gc
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

from snaprt.host import after_import
from snaprt.host.after_import import call_after_import

NAME = "a_module_to_wait_for"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with the module; afterwards all is as it was."""
    (tmp_path / f"{NAME}.py").write_text("import sys\nvalue = 1\nfinders = list(sys.meta_path)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    sys.modules.pop(NAME, None)


@pytest.fixture
def called() -> list[object]:
    return []


def test_the_action_is_called_once_when_the_modules_code_has_run(folder, called):
    before = list(sys.meta_path)
    call_after_import(NAME, lambda: called.append(sys.modules[NAME].value))
    assert called == []
    module = importlib.import_module(NAME)
    assert called == [1]
    assert sys.meta_path == before
    importlib.reload(module)
    assert called == [1]


def test_a_module_that_is_there_already_has_its_action_at_once(folder, called):
    importlib.import_module(NAME)
    before = list(sys.meta_path)
    call_after_import(NAME, lambda: called.append("now"))
    assert called == ["now"]
    assert sys.meta_path == before


def test_the_module_is_what_it_would_have_been(folder, called):
    expected = importlib.import_module(NAME)
    del sys.modules[NAME]
    call_after_import(NAME, lambda: called.append("now"))
    module = importlib.import_module(NAME)
    assert type(module.__loader__) is type(expected.__loader__)
    assert module.__spec__.loader is module.__loader__
    assert module.__spec__ == expected.__spec__
    assert inspect.getsource(module) == inspect.getsource(expected)


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("ending", ["", "raise ValueError('no')"])
def test_the_garbage_collector_is_paused_while_the_module_is_imported(
    folder, called, is_enabled, ending
):
    (folder / f"{NAME}.py").write_text(f"import gc\nseen = gc.isenabled()\nprint(seen)\n{ending}\n")
    call_after_import(NAME, lambda: called.append(gc.isenabled()))
    was_enabled = gc.isenabled()
    try:
        gc.enable() if is_enabled else gc.disable()
        if ending:
            with pytest.raises(ValueError, match="no"):
                importlib.import_module(NAME)
        else:
            assert importlib.import_module(NAME).seen is False
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()
    assert called == ([] if ending else [False])


def test_looking_for_the_module_is_not_importing_it(folder, called):
    call_after_import(NAME, lambda: called.append("now"))
    spec = importlib.util.find_spec(NAME)
    assert spec.loader.get_filename(NAME) == spec.origin
    assert called == []
    importlib.import_module(NAME)
    assert called == ["now"]


def test_other_modules_are_left_alone(folder, called):
    (folder / "another_module.py").write_text("")
    call_after_import(NAME, lambda: called.append("now"))
    importlib.import_module("another_module")
    assert called == []


def test_an_import_that_fails_does_not_count_and_may_be_tried_again(folder, called):
    path = folder / f"{NAME}.py"
    path.write_text("1 / 0\n")
    call_after_import(NAME, lambda: called.append("now"))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    assert called == []
    path.write_text("value = 22\n")
    assert importlib.import_module(NAME).value == 22
    assert called == ["now"]


def test_a_module_that_is_nowhere_is_reported_as_ever(folder, called):
    (folder / f"{NAME}.py").unlink()
    call_after_import(NAME, lambda: called.append("now"))
    with pytest.raises(ModuleNotFoundError, match=NAME):
        importlib.import_module(NAME)
    assert called == []


def test_what_the_action_raises_comes_out_of_the_import(folder):
    def refuse() -> None:
        raise LookupError("refused")

    call_after_import(NAME, refuse)
    with pytest.raises(LookupError, match="refused"):
        importlib.import_module(NAME)


def test_a_namespace_package_in_its_place_is_imported_without_the_action(folder, called):
    (folder / f"{NAME}.py").unlink()
    (folder / NAME).mkdir()
    call_after_import(NAME, lambda: called.append("now"))
    assert importlib.import_module(NAME).__path__
    assert called == []


def test_a_finder_put_before_it_later_has_its_turn_once(folder, called):
    class Counting:
        def find_spec(self, name, path=None, target=None):
            if name == NAME:
                called.append("asked")

    call_after_import(NAME, lambda: called.append("now"))
    sys.meta_path.insert(0, Counting())
    importlib.import_module(NAME)
    assert called == ["asked", "now"]


@pytest.mark.parametrize("ending", ["", "raise ValueError('no')\n"])
def test_a_module_of_ours_that_imports_it_is_complete_before_the_action(
    folder, called, monkeypatch, ending
):
    monkeypatch.setattr(after_import, "_OWN", ("ours_",))
    (folder / "ours_outer.py").write_text(f"import ours_inner\nvalue = 2\n{ending}")
    (folder / "ours_inner.py").write_text(f"import {NAME}\n")
    call_after_import(NAME, lambda: called.append(hasattr(sys.modules["ours_outer"], "value")))
    if ending:
        with pytest.raises(ValueError, match="no"):
            importlib.import_module("ours_outer")
    else:
        importlib.import_module("ours_outer")
    assert called == [True]
    for name in ("ours_outer", "ours_inner"):
        sys.modules.pop(name, None)
