"""Test which files belong to a job: files, folders, patterns, rotated parts in order, and ranks."""

import json
import os

import pytest

from holdfast.core.errors import NotFound
from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.files import find_files


def write(folder, *names, text="step 1 loss 2.1\n"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(found, folder):
    return [str(file.path.relative_to(folder)) for file in found.files]


def test_a_named_file_is_read_whatever_its_name(tmp_path):
    write(tmp_path, "what.ever")
    assert names(find_files([tmp_path / "what.ever"]), tmp_path) == ["what.ever"]


def test_a_folder_stands_for_the_logs_in_it_and_below(tmp_path):
    logs = [
        "rank-0.log",
        "a/stdout",
        "a/b/stderr.log",
        "c/slurm-811.out",
        "c/train.err",
        "dmesg.txt",
        "x.log.gz",
        "kern.log",
    ]
    write(
        tmp_path, *logs, "train.py", "weights.pt", "a/model.safetensors", "README", "a/b/data.bin"
    )
    found = find_files([tmp_path])
    assert sorted(names(found, tmp_path)) == sorted(logs)
    assert found.notes == ()


def test_a_folder_within_folders_without_end_is_left(tmp_path):
    write(tmp_path, "/".join(["f"] * 5) + "/near.log", "/".join(["f"] * 40) + "/far.log")
    assert names(find_files([tmp_path]), tmp_path) == ["f/f/f/f/f/near.log"]


def test_links_in_a_circle_end(tmp_path):
    write(tmp_path, "a/x.log")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "itself.log").symlink_to(tmp_path / "itself.log")
    found = find_files([tmp_path])
    assert names(found, tmp_path) == ["a/x.log"]
    assert len(found.notes) == 1


def test_a_file_given_twice_or_through_a_link_is_read_once(tmp_path):
    write(tmp_path, "x.log")
    (tmp_path / "latest.log").symlink_to("x.log")
    assert (
        len(
            find_files(
                [tmp_path / "x.log", tmp_path, tmp_path / "latest.log", f"{tmp_path}/*.log"]
            ).files
        )
        == 1
    )


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*.log", ["a.log", "b.log"]),
        ("**/*.log", ["a.log", "b.log", "n/c.log"]),
        ("[ab].log", ["a.log", "b.log"]),
        ("n", ["n/c.log"]),
        ("?", ["n/c.log"]),
    ],
)
def test_patterns(tmp_path, pattern, wanted):
    write(tmp_path, "a.log", "b.log", "n/c.log", "n/d.pt")
    assert names(find_files([f"{tmp_path}/{pattern}"]), tmp_path) == wanted


def test_a_name_that_only_looks_like_a_pattern_is_a_name(tmp_path):
    write(tmp_path, "job[7].log", "job7.log")
    assert names(find_files([tmp_path / "job[7].log"]), tmp_path) == ["job[7].log"]


@pytest.mark.parametrize("path", ["no.log", "*.log", "no/folder"])
def test_nothing_there(tmp_path, path):
    with pytest.raises(NotFound, match=r"There is no log at .*\. Give a log file"):
        find_files([tmp_path / path])


def test_no_path_at_all():
    with pytest.raises(NotFound, match="no path given"):
        find_files([])


def test_a_name_that_is_no_text(tmp_path):
    log = tmp_path / os.fsdecode(b"rank-3.\xff\xfe.log")
    log.write_text("KeyError: 'a'\n")
    found = diagnose(tmp_path)
    assert (found.reason, found.scope, found.root_line.file) == ("KeyError", {"rank": 3}, str(log))
    json.dumps(found.to_json()).encode()


def test_what_is_missing_beside_what_is_there_is_named(tmp_path):
    write(tmp_path, "a.log")
    found = find_files([tmp_path / "a.log", tmp_path / "b.log"])
    assert len(found.files) == 1
    assert any("b.log" in note for note in found.notes)


def test_an_empty_folder_has_no_logs(tmp_path):
    assert find_files([tmp_path]).files == ()


def test_parts_of_a_rotated_log_are_one_and_the_oldest_comes_first(tmp_path):
    write(tmp_path, "x.log", "x.log.1", "x.log.2.gz", "x.log.10.zst", "y.log")
    found = find_files([tmp_path])
    assert names(found, tmp_path) == ["x.log.10.zst", "x.log.2.gz", "x.log.1", "x.log", "y.log"]
    assert len({file.group for file in found.files}) == 2


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-3.log", 3),
        ("rank_3.out", 3),
        ("rank3.err", 3),
        ("rank.3.txt", 3),
        ("rank-3.log.1", 3),
        ("rank-3.log.gz", 3),
        ("logs/none_x7ab12/attempt_0/3/stderr.log", 3),
        ("attempt_1/0/stdout.log", 0),
        ("attempt_1/0/error.json", 0),
        ("attempt_1/0/rank-5.log", 5),
        ("3/stderr.log", None),
        ("ranking.log", None),
        ("rank-of-teachers.log", None),
        ("attempt_x/3/stderr.log", None),
    ],
)
def test_whose_output_a_file_is(tmp_path, name, rank):
    write(tmp_path, name, text='{"message": {"message": "x"}}\n')
    (file,) = find_files([tmp_path]).files
    assert file.rank == rank


def test_of_json_files_in_a_folder_only_records_are_read(tmp_path):
    write(tmp_path, "config.json", "trainer_state.json", "metrics.jsonl", text='{"loss": 2.1}\n')
    write(tmp_path, "sacct.json", text='{"jobs": []}')
    write(tmp_path, "error.json", text='{"message": {"message": "x"}}')
    write(tmp_path, "journal.json", text='{"MESSAGE": "x"}\n')
    write(tmp_path, "container.json", text='{"log": "x\\n", "stream": "stderr"}\n')
    found = find_files([tmp_path])
    assert names(found, tmp_path) == ["container.json", "error.json", "journal.json", "sacct.json"]
    assert found.notes == ()
