"""Check refusals of unusable folders: before any work, and without losses."""

import pytest

from holdfast.core.errors import BadUse
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.run.evaluate import evaluate
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.types.engine import EngineSpec


def options(home, **more) -> EvaluateOptions:
    return EvaluateOptions(
        home=home, engine=EngineSpec(kind="simulated"), evaluation_id="x", **more
    )


def test_a_folder_that_holds_something_else_is_left_as_it_is(tmp_path):
    root = EvaluationPaths(tmp_path, "x").root
    root.mkdir(parents=True)
    (root / "notes.txt").write_text("mine")
    with pytest.raises(BadUse, match=r"holds something else: notes\.txt\. Choose another --id\."):
        evaluate("a", "m", options=options(tmp_path))
    assert [path.name for path in root.iterdir()] == ["notes.txt"]


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadUse, match=r"file/out: Not a directory\. Give another -o\."):
        evaluate("a", "m", options=options(tmp_path, output=tmp_path / "file" / "out"))
    assert not EvaluationPaths(tmp_path, "x").root.exists()


def test_no_model_is_not_the_current_folder(tmp_path):
    with pytest.raises(BadUse, match="No model is named"):
        evaluate("a", "", options=options(tmp_path))
