import csv
import gzip
from functools import partial

import pytest
from normalised_rows import notes_of, read_file, unix_s
from slurm_records import FIELDS, record, write_records

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.slurm.sacct import SOURCE


@pytest.fixture
def write(tmp_path):
    return partial(write_records, tmp_path)


def test_a_job_with_all_that_is_known_of_it(write):
    path = write(record(ExitCode="0:9", state="FAILED", Reason="NonZeroExitCode"))
    assert SOURCE.recognises(path)
    reading, (row,) = read_file(SOURCE, path)
    assert [unix_s(row.pop(name)) for name in ("submit_at", "start_at", "end_at")] == [
        100,
        160,
        400,
    ]
    assert row == {
        "cluster": "alpha", "job_id": "7", "attempt": 0, "name": "train", "username": "ann", "pool": "gpu",
        "state": "FAILED", "reason": "NonZeroExitCode", "exit_code": 137, "run_s": 240.0, "queue_s": 60.0,
        "reported_duration_s": 240.0, "gpu_num": 8.0, "node_num": 1, "cpu_num": 64.0, "mem_gb": 500.0,
        "gpu_model": None, "nodes": ["n1", "n2"], "zone_offset": "",
    }  # fmt: skip
    assert [
        (cluster.name, cluster.source, cluster.utc_offset_h) for cluster in reading.clusters
    ] == [("alpha", "slurm", 0.0)]
    assert not reading.notes


def test_any_fields_in_any_order(write):
    path = write("COMPLETED|7_3|1000|1060|a|b", header="State|JobID|Start|End|JobName")
    assert SOURCE.recognises(path)
    reading, (row,) = read_file(SOURCE, path)
    assert (row["job_id"], row["name"], row["run_s"], row["cluster"]) == ("7_3", "a|b", 60, "jobs")
    columns = {
        "cluster",
        "job_id",
        "attempt",
        "name",
        "state",
        "reason",
        "start_at",
        "end_at",
        "run_s",
        "zone_offset",
    }
    assert reading.columns == columns


def test_what_no_field_gives_is_absent(write):
    reading, _ = read_file(SOURCE, write("7|COMPLETED", header="JobIDRaw|State"))
    assert reading.columns == {"cluster", "job_id", "attempt", "state", "reason", "zone_offset"}


@pytest.mark.parametrize(
    "name",
    [
        "a|b|c", "|", "line one\nline | two", "\n", "7|8|x\nfoo", 'say "hi"', "it's", "tab\there", "cr\rhere", "ünï",
        "none\x1f", "",
    ],
)  # fmt: skip
def test_names_may_hold_anything_where_they_stand_last(write, name):
    path = write(record("7", JobName=name), record("8"))
    _, rows = read_file(SOURCE, path)
    assert [(row["job_id"], row["name"]) for row in rows] == [
        ("7", name.rstrip("\n")),
        ("8", "train"),
    ]


def test_a_name_that_is_no_utf8(write):
    _, (row,) = read_file(SOURCE, write(record(JobName="a\udcffb")))
    assert row["name"] == "a\ufffdb"


def test_a_name_with_the_separator_in_the_middle_of_a_record(write):
    header = "JobID|JobName|State|Start|End|ExitCode"
    path = write("1|a|COMPLETED|b|COMPLETED|10|20|0:0", "2|x\ny|FAILED|10|20|1:0", header=header)
    _, rows = read_file(SOURCE, path)
    assert [(row["name"], row["state"], row["run_s"]) for row in rows] == [
        ("a|COMPLETED|b", "COMPLETED", 10),
        ("x\ny", "FAILED", 10),
    ]


def test_free_text_that_cannot_be_told_apart_is_refused(write):
    path = write("1|COMPLETED|a|b|c", header="JobID|State|JobName|WorkDir")
    with pytest.raises(
        BadTrace, match=r"jobs\.txt, line 2: .*cannot be told.*JobName as the last field"
    ):
        read_file(SOURCE, path)


def test_free_text_that_is_not_read_may_hold_the_separator(write):
    header = "JobID|Constraints|State|Start|End|SubmitLine"
    _, (row,) = read_file(SOURCE, write("1|a100|h100|COMPLETED|10|20|sbatch x", header=header))
    assert (row["state"], row["run_s"]) == ("COMPLETED", 10)


@pytest.mark.parametrize("separator", [",", "^", "\x1f", "||", "\t"])
def test_any_separator(write, separator):
    lines = [line.replace("|", separator) for line in (FIELDS, record(alloc="gres/gpu=2", req=""))]
    path = write(lines[1], header=lines[0])
    assert SOURCE.recognises(path)
    _, (row,) = read_file(SOURCE, path)
    assert (row["gpu_num"], row["name"]) == (2, "train")


def test_a_separator_after_each_record_as_parsable_prints_it(write):
    path = write(record("7") + "|", record("8", JobName="a|b") + "|", header=FIELDS + "|")
    _, rows = read_file(SOURCE, path)
    assert [row["name"] for row in rows] == ["train", "a|b"]


def test_carriage_returns_byte_order_marks_and_compression(tmp_path):
    text = "\ufeff" + "\r\n".join([FIELDS, record("7"), record("8"), ""])
    plain, packed = tmp_path / "jobs.txt", tmp_path / "jobs.txt.gz"
    plain.write_text(text, newline="")
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (plain, packed):
        assert SOURCE.recognises(path)
        _, rows = read_file(SOURCE, path)
        assert [(row["job_id"], row["name"]) for row in rows] == [("7", "train"), ("8", "train")]


def test_a_compressed_file_that_is_damaged_or_of_another_kind(tmp_path):
    packed = tmp_path / "jobs.txt.gz"
    packed.write_bytes(
        gzip.compress("\n".join([FIELDS, *(record(str(n)) for n in range(3000)), ""]).encode())[
            :-2000
        ]
    )
    with pytest.raises(BadTrace, match=r"jobs\.txt\.gz: The file cannot be read"):
        read_file(SOURCE, packed)
    other = tmp_path / "jobs.json.zst"
    other.write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(BadTrace):
        read_file(SOURCE, other)


def test_steps_are_no_jobs(write):
    path = write(
        record("7"), record("7.batch"), record("7.extern"), record("7.0"), record("8.interactive")
    )
    reading, rows = read_file(SOURCE, path)
    assert [row["job_id"] for row in rows] == ["7"]
    assert notes_of(reading) == {"slurm-steps": 4}


def test_arrays_and_heterogeneous_jobs(write):
    waiting = ("100", "Unknown", "Unknown")
    path = write(
        record("14", "5_0"),
        record("5", "5_1"),
        record("20", "20_[5-9%2]", "PENDING", waiting, alloc=""),
        record("30", "30+0"),
        record("31", "30+1"),
    )
    reading, rows = read_file(SOURCE, path)
    assert [row["job_id"] for row in rows] == ["14", "20", "30", "31", "5"]
    assert notes_of(reading) == {"slurm-pending-arrays": 1, "slurm-heterogeneous": 2}


def test_waiting_and_running_jobs(write):
    path = write(
        record(
            "1",
            state="PENDING",
            times=(100, "Unknown", "Unknown"),
            alloc="",
            NodeList="None assigned",
        ),
        record("2", state="RUNNING", times=(100, 150, "Unknown")),
    )
    _, (waiting, running) = read_file(SOURCE, path)
    assert (waiting["gpu_num"], waiting["start_at"], waiting["queue_s"], waiting["nodes"]) == (
        8,
        None,
        None,
        None,
    )
    assert (running["queue_s"], running["end_at"], running["run_s"]) == (50, None, None)
    assert running["reported_duration_s"] == 240


def test_a_job_cancelled_while_it_waited_never_started(write):
    path = write(record(state="CANCELLED by 1000", times=(100, 160, 160), alloc="", ElapsedRaw="0"))
    reading, (row,) = read_file(SOURCE, path)
    assert (row["state"], row["start_at"], row["run_s"], row["queue_s"]) == (
        "CANCELLED",
        None,
        None,
        None,
    )
    assert (unix_s(row["end_at"]), row["gpu_num"], row["reported_duration_s"]) == (160, 8, None)
    assert notes_of(reading) == {"slurm-never-started": 1}


def test_a_job_of_no_length_that_had_its_nodes_did_start(write):
    _, (row,) = read_file(SOURCE, write(record(times=(100, 160, 160))))
    assert (row["run_s"], row["queue_s"]) == (0, 60)


def test_runs_of_a_requeued_job_are_attempts_in_any_order(write):
    path = write(
        record("7", times=(900, 960, 990)),
        record("8"),
        record("7", state="NODE_FAIL", times=(100, 160, 400)),
        record("7", state="REQUEUED", times=(405, 500, 890)),
    )
    reading, rows = read_file(SOURCE, path)
    assert [(row["job_id"], row["attempt"], row["state"], row["queue_s"]) for row in rows] == [
        ("7", 0, "NODE_FAIL", 60),
        ("7", 1, "PREEMPTED", 95),
        ("7", 2, "COMPLETED", 60),
        ("8", 0, "COMPLETED", 60),
    ]
    assert rows[0]["reason"] == "NodeFailure"
    assert notes_of(reading) == {"slurm-requeued": 2}


def test_the_same_id_on_another_cluster_is_another_job(write):
    reading, rows = read_file(SOURCE, write(record("7"), record("7", Cluster="beta")))
    assert [(row["cluster"], row["attempt"]) for row in rows] == [("alpha", 0), ("beta", 0)]
    assert [cluster.name for cluster in reading.clusters] == ["alpha", "beta"]


def test_restarts_are_told_where_there_is_only_the_last_run(write):
    _, (row,) = read_file(SOURCE, write("7|COMPLETED|2", header="JobID|State|Restarts"))
    assert row["attempt"] == 2


def test_exports_that_overlap_hold_no_job_twice(write):
    path = write(
        record("1", state="PENDING", times=(100, "Unknown", "Unknown")),
        record("2", state="RUNNING", times=(100, 160, "Unknown")),
        record("3"),
        FIELDS,
        record("1", times=(100, 160, 200)),
        record("2", times=(100, 160, 300)),
        record("3"),
    )
    reading, rows = read_file(SOURCE, path)
    assert [(row["job_id"], row["state"], row["attempt"]) for row in rows] == [
        (job_id, "COMPLETED", 0) for job_id in "123"
    ]
    assert notes_of(reading) == {"slurm-recorded-twice": 3}


def test_one_odd_name_changes_nothing_of_the_others(write):
    # The database splits a regular file; with one odd name, Python splits the file.
    waiting = ("100", "Unknown", "Unknown")
    records = [
        record("1", state="PENDING", times=waiting, alloc="", NodeList="None assigned", JobName=""),
        record(
            "2",
            state="CANCELLED by 7",
            times=(100, 300, 300),
            alloc="",
            ElapsedRaw="0",
            JobName='"q"',
        ),
        record(
            "3",
            "9_1",
            state="NODE_FAIL",
            times=("2023-03-01T00:18:22", "2023-03-01T01:18:22Z", "Unknown"),
        ),
        record(
            "4",
            alloc="cpu=3,gres/gpu:1g.5gb=1,mem=3T",
            ExitCode="0:15",
            Cluster="",
            Account="",
            User="",
        ),
        record("4.batch"),
        record("5", alloc="", req="", NodeList="", Reason="", ExitCode="", ElapsedRaw=""),
    ]
    regular, regular_rows = read_file(SOURCE, write(*records))
    odd, odd_rows = read_file(SOURCE, write(*records, record("6", JobName="odd|one")))
    assert odd_rows[:-1] == regular_rows
    assert notes_of(odd) == notes_of(regular)
    assert [row["job_id"] for row in regular_rows] == list("12345")


@pytest.mark.parametrize("name", ["a*b.txt", "a?b.txt", "a[1]b.txt", "it's.txt"])
def test_a_file_of_any_name(write, name):
    write(record("8"), name="a1b.txt")
    _, rows = read_file(SOURCE, write(record("7"), name=name))
    assert [row["job_id"] for row in rows] == ["7"]


def test_gpus_that_slurm_was_not_told_to_record(write):
    reading, _ = read_file(SOURCE, write(record(alloc="cpu=4,node=1")))
    assert not reading.notes


def test_shards_and_unknown_states_are_told(write):
    path = write(record("1", alloc="cpu=4,gres/shard=2"), record("2", state="DREAMING"))
    reading, (_, odd) = read_file(SOURCE, path)
    assert odd["state"] == "UNKNOWN"
    assert notes_of(reading) == {"slurm-gpu-shares": 1, "slurm-unknown-state": 1}
    assert reading.notes[1].examples == ("DREAMING",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"Start": "soon"}, r"line 3, column 'Start': expected a time .*, not 'soon'\."),
        ({"End": "9" * 18}, r"line 3, column 'End': expected a time .*, not '9+'\."),
        ({"End": "9" * 30}, r"line 3, column 'End': expected a time .*, not '9+'\."),
        (
            {"Submit": "2023-13-01T00:00:00"},
            r"line 3, column 'Submit': expected a time .*, not '2023-13-.*'\.",
        ),
        (
            {"Submit": "20230301T000000"},
            r"line 3, column 'Submit': expected a time .*, not '20230301T000000'\.",
        ),
        ({"ExitCode": "x"}, r"line 3, column 'ExitCode': expected an exit code .*, not 'x'\."),
        ({"AllocTRES": "cpu"}, r"line 3, column 'AllocTRES': expected resources .*, not 'cpu'\."),
        (
            {"NodeList": "n[1-"},
            r"line 3, column 'NodeList': expected a list of nodes .*, not 'n\[1-'\.",
        ),
        ({"ElapsedRaw": "x"}, r"line 3, column 'ElapsedRaw': expected seconds, .*, not 'x'\."),
    ],
)
def test_a_field_that_cannot_be_read_is_told_with_its_place(write, wrong, message):
    path = write(record("7"), record("8", **wrong), record("9"))
    with pytest.raises(BadTrace, match=message + r" Export again") as caught:
        read_file(SOURCE, path)
    assert caught.value.line == 3
    reading, rows = read_file(SOURCE, path, bad_rows="drop")
    assert [row["job_id"] for row in rows] == ["7", "9"]
    assert notes_of(reading) == {"unreadable-row": 1}
    assert "line 3" in reading.notes[0].examples[0]


@pytest.mark.parametrize("kept", [5, 12, 40, 60])
def test_a_file_that_was_cut_off(write, kept):
    path = write(record("7"), record("8"))
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"alpha") + kept])
    with pytest.raises(BadTrace, match=r"line 3: expected 17 fields.* the file is cut off here"):
        read_file(SOURCE, path)
    _, rows = read_file(SOURCE, path, bad_rows="drop")
    assert [(row["job_id"], row["name"]) for row in rows] == [("7", "train")]


def test_text_before_the_first_record(write):
    with pytest.raises(BadTrace, match="line 2: expected 17 fields"):
        read_file(SOURCE, write("slurmdbd: connection refused", record("7")))


def test_a_line_without_end(write):
    with pytest.raises(BadTrace, match=r"line 3: expected lines shorter than 1 MiB"):
        read_file(SOURCE, write(record("7"), record("8") + "x" * (1 << 20)))


def test_a_name_without_end(write):
    with pytest.raises(BadTrace, match=r"line 2: .* no record ends within 1 MiB"):
        read_file(SOURCE, write(record("7"), *["x" * 1000] * 1100))


@pytest.mark.parametrize(
    "text", ["", "a,b,c\n1,2,3\n", "JobID           State\n------- ----\n7 COMPLETED\n", "\0\1"]
)
def test_other_files_are_not_taken_for_slurm(tmp_path, text):
    path = tmp_path / "jobs.txt"
    path.write_text(text)
    assert not SOURCE.recognises(path)
    with pytest.raises(BadTrace, match="without --noheader"):
        read_file(SOURCE, path)


def test_a_folder_and_a_file_that_is_not_there_are_not_recognised(tmp_path):
    assert not SOURCE.recognises(tmp_path)
    assert not SOURCE.recognises(tmp_path / "none")


def test_a_header_without_any_job(write):
    with pytest.raises(BadTrace, match="holds no job"):
        read_file(SOURCE, write())


def test_many_records_add_up_as_an_independent_count_says(tmp_path):
    path = tmp_path / "jobs.txt"
    names = FIELDS.split("|")
    with path.open("w", newline="") as file:
        file.write(FIELDS + "\n")
        for number in range(3000):
            start = 1_690_000_000 + 37 * number
            gpus = (0, 1, 8, 64)[number % 4]
            tres = f"cpu=4,gres/gpu={gpus},mem=16G,node=1" if gpus else "cpu=4,mem=16G,node=1"
            file.write(
                record(str(number), times=(start - number % 50, start, start + number), alloc=tres)
                + "\n"
            )
    _, rows = read_file(SOURCE, path)
    with path.open() as file:
        expected = list(csv.DictReader(file, fieldnames=names, delimiter="|"))[1:]
    gpus_of = [
        float((row["AllocTRES"] + ",gres/gpu=0").split("gres/gpu=")[1].split(",")[0])
        for row in expected
    ]
    run_of = [float(row["End"]) - float(row["Start"]) for row in expected]
    assert len(rows) == len(expected)
    assert sum(row["gpu_num"] for row in rows) == sum(gpus_of)
    gpu_time_s = sum(gpus * run_s for gpus, run_s in zip(gpus_of, run_of, strict=True))
    assert sum(row["gpu_num"] * row["run_s"] for row in rows) == gpu_time_s
    assert sum(row["queue_s"] for row in rows) == sum(
        float(row["Start"]) - float(row["Submit"]) for row in expected
    )


def test_generic_resources_of_slurm_up_to_20_11(write):
    header = "JobID|State|Start|End|NNodes|AllocGRES|ReqGRES"
    path = write(
        "1|COMPLETED|1000|1060|1|gpu:v100:4(S:0-1)|gpu:v100:4", "2|FAILED|1000|1060|2||gpu:4",
        "3|COMPLETED|1000|1060|1|7696487:8|", "4|COMPLETED|1000|1060|1|(null)|", header=header,
    )  # fmt: skip
    _, rows = read_file(SOURCE, path)
    assert [(row["gpu_num"], row["gpu_model"]) for row in rows] == [
        (4, "v100"),
        (8, None),
        (8, None),
        (0, None),
    ]
    # Resources in both TRES and GRES count once.
    path = write(
        "1|COMPLETED|cpu=2,gres/gpu=4|gpu:4",
        "2|COMPLETED|cpu=2|gpu:4",
        header="JobID|State|AllocTRES|AllocGRES",
    )
    _, rows = read_file(SOURCE, path)
    assert [(row["gpu_num"], row["cpu_num"]) for row in rows] == [(4, 2), (4, 2)]
    with pytest.raises(BadTrace, match="line 2, column 'AllocGRES': expected generic resources"):
        read_file(SOURCE, write("1|COMPLETED|gpu:1:2:3", header="JobID|State|AllocGRES"))


def test_a_duration_where_there_are_no_times(write):
    path = write("1|COMPLETED|3600|", "2|RUNNING|60|", header="JobID|State|ElapsedRaw|AllocTRES")
    _, rows = read_file(SOURCE, path)
    assert [row["run_s"] for row in rows] == [3600, None]
    path = write(
        "1|CANCELLED|1000|Unknown|1060|0", header="JobID|State|Submit|Start|End|ElapsedRaw"
    )
    _, (row,) = read_file(SOURCE, path)
    assert row["run_s"] is None


@pytest.mark.parametrize(
    ("header", "cells", "started"),
    [
        ("NodeList", "None assigned", False),
        ("NodeList", "n1", True),
        ("AllocTRES", "", False),
        ("AllocTRES", "cpu=1", True),
        ("User", "ann", False),
    ],
)
def test_a_job_cancelled_while_it_waited_is_known_by_what_there_is(write, header, cells, started):
    lines = f"1|CANCELLED by 5|1000|87400|87400|{cells}"
    _, (row,) = read_file(SOURCE, write(lines, header=f"JobID|State|Submit|Start|End|{header}"))
    assert (row["start_at"] is not None) == started
    lines = f"1|CANCELLED by 5|1000|87400|00:00:00|{cells}"
    path = write(lines, header=f"JobID|State|Submit|Start|Elapsed|{header}")
    _, (row,) = read_file(SOURCE, path)
    assert (row["start_at"] is not None) == started


def test_a_job_that_was_resized_is_one_job_with_its_gpu_time(write):
    path = write(
        record("5", state="RESIZING", times=(1000, 1100, 1200), ElapsedRaw="100", alloc="gres/gpu=8"),
        record("5", state="COMPLETED", times=(1000, 1200, 1500), ElapsedRaw="300", alloc="gres/gpu=4"),
        record("6", state="COMPLETED", times=(1000, 1200, 1500), ElapsedRaw="300"),
    )  # fmt: skip
    reading, (row, _) = read_file(SOURCE, path)
    told = (
        row["attempt"],
        row["state"],
        row["gpu_num"],
        row["run_s"],
        row["queue_s"],
        row["reported_duration_s"],
    )
    assert told == (0, "COMPLETED", 5, 400, 100, 400)
    assert notes_of(reading) == {"slurm-resized": 1}


def test_what_a_csv_writer_quotes(write):
    header = "JobID,State,Start,End,AllocTRES,JobName"
    path = write(
        '1,COMPLETED,1000,1060,"cpu=2,gres/gpu=4","a, ""b""\nc"', header=header, name="jobs.csv"
    )
    assert SOURCE.recognises(path)
    _, (row,) = read_file(SOURCE, path)
    assert (row["gpu_num"], row["run_s"], row["name"]) == (4, 60, 'a, "b"\nc')
    path = write('0,1,COMPLETED,"cpu=2,gres/gpu=4"', header=",JobID,State,AllocTRES")
    assert SOURCE.recognises(path)
    assert read_file(SOURCE, path)[1][0]["gpu_num"] == 4
    path = write('"1";"COMPLETED";"gres/gpu=4"', header='"JobID";"State";"AllocTRES"')
    assert SOURCE.recognises(path)
    assert read_file(SOURCE, path)[1][0]["gpu_num"] == 4
    with pytest.raises(BadTrace, match="line 3: expected 3 fields, found 2"):
        read_file(SOURCE, write('1,COMPLETED,"a,b"', "2,FAILED", header="JobID,State,AllocTRES"))
