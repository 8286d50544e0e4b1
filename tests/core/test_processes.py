"""Modules that are run in processes of their own."""

import site
import subprocess
import sysconfig
from pathlib import Path

import pytest

import holdfast
from holdfast.core.processes import module_command

FOUND_IN = str(Path(holdfast.__file__).parents[1])


def test_a_process_finds_the_package_where_this_one_did_and_nothing_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "queue.py").write_text("raise SystemExit(7)")
    (python, *safely, _, module), environment = module_command("holdfast.core.words")
    assert module == "holdfast.core.words"
    words = [python, *safely, "-c", "import queue, holdfast; print(holdfast.__file__)"]
    ended = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == holdfast.__file__


def test_what_the_user_has_set_comes_first(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/own:/more")
    assert module_command("holdfast")[1]["PYTHONPATH"] == f"/own:/more:{FOUND_IN}"


def test_an_empty_path_that_the_user_has_set_is_not_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":/own::/more:")
    assert module_command("holdfast")[1]["PYTHONPATH"] == f"/own:/more:{FOUND_IN}"


@pytest.mark.parametrize("place", ["getsitepackages", "getusersitepackages"])
def test_no_folder_that_python_takes_packages_from_comes_before_the_standard_library(monkeypatch, place):
    """Such as a distribution's dist-packages, those below a virtual environment, and the user's own."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, place, lambda: [FOUND_IN] if place == "getsitepackages" else FOUND_IN)
    assert "PYTHONPATH" not in module_command("holdfast")[1]
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    assert ("PYTHONPATH" in module_command("holdfast")[1]) == (place == "getusersitepackages")


def test_installed_packages_do_not_come_before_the_standard_library(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": FOUND_IN})
    assert "PYTHONPATH" not in module_command("holdfast")[1]
