"""Test that the order of lines, printers and files has no influence on the root."""

import random

import pytest
from failures import FAILURES
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose import diagnose

seeds = st.integers(0, 1 << 32)
every_failure = pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)


def written(folder, **logs):
    for old in folder.iterdir():
        old.unlink()
    for name, lines in logs.items():
        (folder / f"{name}.log").write_text("".join(f"{line}\n" for line in lines))
    return folder


def check(found, failure):
    assert found.reason == failure.reason
    scope = {name: found.scope.get(name) for name in failure.scope}
    assert scope == failure.scope
    assert found.root_line is not None
    assert failure.root in found.root_line.text


@every_failure
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_one_log_woven_of_all_voices(tmp_path_factory, failure, seed):
    folder = tmp_path_factory.mktemp("job")
    check(diagnose(written(folder, job=failure.woven(random.Random(seed)))), failure)


@every_failure
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_one_voice_after_another(tmp_path_factory, failure, seed):
    folder = tmp_path_factory.mktemp("job")
    check(diagnose(written(folder, job=failure.concatenated(random.Random(seed)))), failure)


@every_failure
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_files_of_several_voices_in_any_order(tmp_path_factory, failure, seed):
    draw = random.Random(seed)
    folder = tmp_path_factory.mktemp("job")
    logs = {}
    for lines in failure.voices.values():
        logs.setdefault(f"part-{draw.randrange(3)}", []).extend(lines)
    written(folder, **logs)
    paths = sorted(folder.iterdir())
    draw.shuffle(paths)
    check(diagnose(paths), failure)


@every_failure
def test_the_names_and_order_of_files_do_not_matter(tmp_path, failure):
    answers = set()
    for names in (sorted(failure.voices), sorted(failure.voices, reverse=True)):
        written(
            tmp_path, **{f"{chr(97 + at)}": failure.voices[name] for at, name in enumerate(names)}
        )
        for paths in (sorted(tmp_path.iterdir()), sorted(tmp_path.iterdir(), reverse=True)):
            found = diagnose(paths)
            check(found, failure)
            answers.add(
                (
                    found.reason,
                    found.action,
                    found.confidence,
                    found.fingerprint,
                    str(dict(found.scope)),
                )
            )
    assert len(answers) == 1


@every_failure
def test_the_same_files_in_another_order_give_the_very_same(tmp_path, failure):
    paths = sorted(written(tmp_path, **failure.voices).iterdir())
    assert diagnose(paths).to_json() == diagnose(paths[::-1]).to_json()


@every_failure
def test_what_precedes_it_does_not_hide_it(tmp_path, failure):
    """Test thousands of lines of routine output with all digits."""
    chatter = [
        f"[rank{number % 4}]: took {number} ms to gather bucket {number % 17}"
        for number in range(5000)
    ]
    woven = failure.woven(random.Random(1))
    check(diagnose(written(tmp_path, job=chatter + woven + chatter)), failure)


def test_a_code_of_zero_does_not_hide_another(tmp_path):
    """Test pairs of lines that differ only in numbers but have opposite meanings."""
    pairs = [
        ("container trainer exited with code 0", "container trainer exited with code 137"),
        (
            "NVRM: Xid (PCI:0000:4e:00): 92, pid=7, name=python, x",
            "NVRM: Xid (PCI:0000:4e:00): 79, pid=7, name=python, x",
        ),
        ("Retry 1/5: Connection refused", "Retry 5/5: Connection refused"),
        ("errors: 0", "errors: 3"),
    ]
    for harmless, harmful in pairs:
        alone = diagnose(written(tmp_path, job=[harmful]))
        for lines in (
            [harmless, harmful],
            [harmful, harmless],
            [harmless] * 50 + [harmful] + [harmless] * 50,
        ):
            found = diagnose(written(tmp_path, job=lines))
            assert found.reason == alone.reason, lines
            assert found.decided_by == alone.decided_by, lines
