from pathlib import Path

import pytest

from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths, holdfast_home, ledger_at, ledger_url


@pytest.mark.parametrize("run_id", ["", "..", "../x", "a/b", ".hidden", "a\n", "x" * 65])
def test_a_run_id_names_no_other_folder(run_id):
    with pytest.raises(BadUse, match="is not a run id"):
        RunPaths(Path("/home"), run_id)


def test_an_empty_home_variable_means_the_default(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_HOME", "")
    assert holdfast_home() == tmp_path / ".holdfast"


def test_a_home_that_is_a_file_is_named(monkeypatch, tmp_path):
    (tmp_path / "f").write_text("")
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "f"))
    with pytest.raises(BadUse, match=f"^HOLDFAST_HOME={tmp_path}/f is a file; give a folder.$"):
        holdfast_home()


def test_a_ledger_is_named_by_its_url_or_its_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("a b?.db", "sub/l.db", str(tmp_path / "x.db")):
        with Ledger.open(ledger_at(name)):
            assert (tmp_path / name).is_file()
    assert ledger_at("postgresql+psycopg://h/d") == "postgresql+psycopg://h/d"


@pytest.mark.parametrize("name", ["with space", "50%20off", "what?", "a#b", "a&b=c", "ünï+x"])
def test_the_ledger_lies_in_a_home_of_any_name(tmp_path, name):
    with Ledger.open(ledger_url(tmp_path / name)):
        assert (tmp_path / name / "ledger.db").is_file()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
