"""Check the catalog of tasks: lookups, suggestions, and the cache on disk."""

import pytest

from holdfast.core.errors import BadUse, NotFound

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's and its dependencies' own


@pytest.fixture
def builds(monkeypatch):
    """Collect the folders that lm-eval read whole."""
    from lm_eval.tasks._index import TaskIndex

    read = []
    original = TaskIndex.build

    def build(paths, **kwargs):
        read.extend(paths)
        return original(paths, **kwargs)

    monkeypatch.setattr(TaskIndex, "build", staticmethod(build))
    return read


@pytest.fixture
def defaults(monkeypatch, tmp_path):
    """Replace lm-eval's thousands of tasks by a few."""
    from holdfast.evaluate.harness.lm_eval import catalog

    folder = tmp_path / "defaults"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "arc.yaml").write_text("task: arc_easy\ntag: science\n")
    (folder / "gsm.yaml").write_text("task: gsm8k\n")
    (folder / "group.yaml").write_text(
        "group: exams\ntask:\n  - gsm8k\n  - science\n  - task: arc_easy\n"
    )
    monkeypatch.setattr(catalog, "DEFAULT_TASKS", folder)
    return folder


def test_an_unknown_task_is_refused_with_the_nearest_names(world, defaults, tmp_path):
    from holdfast.evaluate.harness.lm_eval.catalog import Catalog

    catalog = Catalog([str(world.tasks)], cache=tmp_path / "cache")
    with pytest.raises(
        BadUse, match=r"no task, group or tag 't_choic'. Did you mean 't_choice' or 't_choices'"
    ):
        catalog.check("t_choic")
    with pytest.raises(BadUse, match=r"'gsm8l'. Did you mean 'gsm8k'"):
        catalog.check("gsm8l")
    with pytest.raises(BadUse, match=r"'zzzzzzzz'. `lm-eval ls tasks`"):
        catalog.check("zzzzzzzz")


def test_lm_evals_own_tasks_are_read_only_when_a_name_needs_them(world, defaults, builds, tmp_path):
    from holdfast.evaluate.harness.lm_eval.catalog import Catalog

    catalog = Catalog([str(world.tasks)], cache=tmp_path / "cache")
    for name in ("t_choice", "t_group", "t_choices"):
        catalog.check(name)
    assert builds == [world.tasks]
    catalog.check("exams")
    assert builds == [world.tasks, defaults]


def test_a_group_of_ones_own_that_names_lm_evals_tasks_finds_them(defaults, tmp_path):
    from holdfast.evaluate.harness.lm_eval.catalog import Catalog

    own = tmp_path / "own"
    own.mkdir()
    (own / "mine.yaml").write_text("group: mine\ntask:\n  - gsm8k\n")
    catalog = Catalog([str(own)], cache=tmp_path / "cache")
    catalog.check("mine")
    assert "gsm8k" in catalog.manager({}, lambda _: None).task_index


def test_the_index_is_kept_and_made_anew_when_a_file_changed(defaults, builds, tmp_path):
    from holdfast.evaluate.harness.lm_eval.catalog import Catalog

    def index():
        catalog = Catalog(cache=tmp_path / "cache")
        catalog.check("gsm8k")
        entries = catalog.manager({}, lambda _: None).task_index
        return {name: (entry.kind, entry.yaml_path, entry.tags) for name, entry in entries.items()}

    first = index()
    assert len(first) == 4
    assert index() == first
    assert builds == [defaults]
    (defaults / "new.yaml").write_text("task: new\n")
    assert set(index()) == {*first, "new"}
    assert builds == [defaults, defaults]
    for kept in (tmp_path / "cache").iterdir():
        kept.write_text('[["gsm8k", "NO KIND", "gsm.yaml", []]]')
    assert set(index()) == {*first, "new"}  # foreign files are ignored


def test_a_kept_index_that_cannot_be_written_costs_time_alone(defaults, builds, tmp_path):
    from holdfast.evaluate.harness.lm_eval.catalog import Catalog

    (tmp_path / "cache").write_text("a file where a folder is wanted")
    Catalog(cache=tmp_path / "cache").check("gsm8k")
    assert builds == [defaults]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    from holdfast.evaluate.harness.lm_eval.catalog import Catalog

    with pytest.raises(NotFound, match=r"no folder .*nowhere"):
        Catalog([str(tmp_path / "nowhere")])


def test_whether_a_task_or_a_part_of_it_runs_code(tmp_path):
    from holdfast.evaluate.harness.lm_eval.catalog import Catalog

    (tmp_path / "code.yaml").write_text("task: code\nunsafe_code: true\n")
    (tmp_path / "prose.yaml").write_text("task: prose\n")
    (tmp_path / "both.yaml").write_text("group: both\ntask: [prose, code]\n")
    catalog = Catalog([str(tmp_path)])
    assert {name: catalog.runs_code(name) for name in ("code", "prose", "both")} == {
        "code": True,
        "prose": False,
        "both": True,
    }
