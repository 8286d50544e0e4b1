import pytest

from holdfast.core.errors import BadUse, NotFound
from holdfast.evaluate.types.suite import TaskEntry, load_suite


def test_names_with_limits_and_harnesses():
    suite = load_suite(
        "mmlu, gsm8k:100,arc:0.25,inspect:inspect_evals/gpqa@diamond:10,group::inner"
    )
    assert suite.entries == (
        TaskEntry(name="mmlu"),
        TaskEntry(name="gsm8k", limit=100),
        TaskEntry(name="arc", limit=0.25),
        TaskEntry(name="inspect_evals/gpqa@diamond", harness="inspect", limit=10),
        TaskEntry(name="group::inner"),
    )
    assert suite.name == "mmlu+gsm8k+arc"
    assert load_suite(["mmlu", "gsm8k:100"]).entries == suite.entries[:2]


def write(folder, text):
    path = folder / "nightly.toml"
    path.write_text(text)
    return str(path)


def test_a_file_with_defaults_and_tables(tmp_path):
    (tmp_path / "own").mkdir()
    path = write(
        tmp_path,
        """
        include_paths = ["own"]
        confirm_unsafe_code = true
        limit = 200
        chat_template = true
        system_instruction = "Think."
        options = { fewshot_random_seed = 7, bootstrap_iters = 10 }

        [[tasks]]
        name = "gsm8k"
        num_fewshot = 5

        [[tasks]]
        name = "mmlu"
        limit = 0.1
        chat_template = false
        options = { bootstrap_iters = 0 }
        """,
    )
    suite = load_suite(path)
    common = {"system_instruction": "Think."}
    assert suite.name == "nightly"
    assert suite.include_paths == (str(tmp_path / "own"),)
    assert suite.confirm_unsafe_code
    assert suite.entries == (
        TaskEntry(
            name="gsm8k",
            limit=200,
            num_fewshot=5,
            chat_template=True,
            options={"fewshot_random_seed": 7, "bootstrap_iters": 10},
            **common,
        ),
        TaskEntry(
            name="mmlu",
            limit=0.1,
            options={"fewshot_random_seed": 7, "bootstrap_iters": 0},
            **common,
        ),
    )
    assert load_suite([path]) == suite


def test_a_file_of_names(tmp_path):
    suite = load_suite(write(tmp_path, 'name = "mine"\nlimit = 5\ntasks = ["gsm8k", "mmlu:0.5"]'))
    assert suite.name == "mine"
    assert suite.entries == (TaskEntry(name="gsm8k", limit=5), TaskEntry(name="mmlu", limit=0.5))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it has no tasks"),
        ("tasks = []", "it has no tasks"),
        ("tasks = 3", "tasks is 3: it must be a list"),
        ("tasks = [3]", r"tasks\[0\] is 3: it must be a name or a table"),
        ("[[tasks]]\nlimit = 3", r"tasks\[0\]: it has no name"),
        ('tasks = ["a"]\nlimits = 3', "no key 'limits'. Did you mean 'limit'"),
        (
            '[[tasks]]\nname = "a"\nnum_fewshots = 3',
            r"tasks\[0\]: there is no key 'num_fewshots'. Did you mean 'num_fewshot'",
        ),
        (
            '[[tasks]]\nname = "a"\nlimit = "ten"',
            r"tasks\[0\]: limit is 'ten': it must be a number above 0",
        ),
        ('[[tasks]]\nname = "a"\nlimit = 2.5', r"tasks\[0\]: limit is 2.5"),
        ('[[tasks]]\nname = "a"\nlimit = 0', r"tasks\[0\]: limit is 0"),
        ('[[tasks]]\nname = "a"\nlimit = true', r"tasks\[0\]: limit is True"),
        (
            '[[tasks]]\nname = "a"\nnum_fewshot = -1',
            "num_fewshot is -1: it must be a whole number, 0 or more",
        ),
        ('[[tasks]]\nname = ""', "name is '': it must be a text that is not empty"),
        (
            'tasks = ["a"]\nchat_template = 1',
            "chat_template is 1: it must be true, false or a template's name",
        ),
        (
            'tasks = ["a"]\ninclude_paths = ["nowhere"]',
            r"include_paths is \['nowhere'\]: .* folders that exist",
        ),
        ('tasks = ["a", "a"]', "the task 'a' is listed twice"),
        ("tasks = [", "cannot be read as TOML"),
    ],
)
def test_every_error_names_file_key_value_and_what_is_allowed(text, sentence, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(BadUse, match=sentence) as raised:
        load_suite(path)
    assert path in str(raised.value)


def test_what_is_no_suite(tmp_path):
    with pytest.raises(NotFound, match=r"no suite .*absent.toml"):
        load_suite(str(tmp_path / "absent.toml"))
    with pytest.raises(BadUse, match="at least one task"):
        load_suite(" ,")
    with pytest.raises(BadUse, match=r"x.toml is a suite file"):
        load_suite(["gsm8k", "x.toml"])
    with pytest.raises(BadUse, match="limit is 0"):
        load_suite("gsm8k:0")
    with pytest.raises(BadUse, match="is listed twice"):
        load_suite("gsm8k,gsm8k")
