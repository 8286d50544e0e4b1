from pathlib import Path

import pytest

from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths, holdfast_home, ledger_url


@pytest.mark.parametrize("run_id", ["", "..", "../x", "a/b", ".hidden", "a\n", "x" * 65])
def test_a_run_id_names_no_other_folder(run_id):
    with pytest.raises(BadUse, match="is not a run id"):
        RunPaths(Path("/home"), run_id)


def test_an_empty_home_variable_means_the_default(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_HOME", "")
    assert holdfast_home() == tmp_path / ".holdfast"


@pytest.mark.parametrize("name", ["with space", "50%20off", "what?", "a#b", "a&b=c", "ünï+x"])
def test_the_ledger_lies_in_a_home_of_any_name(tmp_path, name):
    with Ledger.open(ledger_url(tmp_path / name)):
        assert (tmp_path / name / "ledger.db").is_file()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
