import gzip
import shutil
import tempfile
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast.core.errors import BadUse, HoldfastError, NotFound
from holdfast.trace.errors import BadTrace
from holdfast.trace.loading import LoadOptions, load
from holdfast.trace.store import convert

DATA = Path(__file__).parents[2] / "../shared/data"
NOW_S = datetime(2024, 1, 1, tzinfo=UTC).timestamp()
SEREN = "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n"
KALOS = (
    "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,"
    "fail_time,stop_time,duration,queue,gpu_time\n"
)


def seren(*ids, day=1, gpus=8):
    return SEREN + "".join(
        f"{one},u1,1,{gpus},16,SFT,COMPLETED,2023-03-0{day} 08:00:00+08:00,2023-03-0{day} 08:00:10+08:00,"
        f"2023-03-0{day} 08:01:50+08:00,100,10,{100 * gpus}\n"
        for one in ids
    )


def kalos(*ids):
    return KALOS + "".join(
        f"{one},u2,2,16,32,100,,Pretrain,FAILED,2023-06-01 00:00:00+00:00,2023-06-01 00:00:10+00:00,"
        "2023-06-01 00:01:50+00:00,2023-06-01 00:01:50+00:00,,110,10,1760\n"
        for one in ids
    )


@pytest.fixture
def files(tmp_path):
    def write(**contents):
        for name, content in contents.items():
            (tmp_path / f"{name}.csv").write_text(content)
        return tmp_path

    return write


def counts(trace):
    return dict(
        trace.query("SELECT cluster, count(*) AS n FROM jobs GROUP BY ALL ORDER BY ALL").rows()
    )


def test_two_clusters_are_one_trace(files):
    folder = files(s=seren(1, 2), k=kalos("a"))
    with load(folder / "s.csv", str(folder / "k.csv"), now_s=NOW_S) as trace:
        assert counts(trace) == {"Kalos": 1, "Seren": 2}
        assert list(trace.clusters) == ["Seren", "Kalos"]
        assert trace.has("mem_gb", cluster="Kalos")
        assert not trace.has("mem_gb", cluster="Seren")
        assert trace.has("mem_gb")
        assert not trace.has("mem_gb", "name")
        assert trace.compared == frozenset()
        assert trace.notes == []


def test_durations_are_runs_or_as_released(files):
    folder = files(k=kalos("a"))
    for duration, seconds in (("run", 100), ("released", 110)):
        with load(folder / "k.csv", duration=duration, now_s=NOW_S) as trace:
            ((found, gpu_time_s, outcome),) = trace.query(
                "SELECT duration_s, gpu_time_s, outcome FROM jobs"
            ).rows()
        assert (found, gpu_time_s, outcome) == (seconds, 16 * seconds, "failed")


def test_files_of_one_cluster_are_joined_and_doubles_are_found(files):
    folder = files(a=seren(1, 2), b=seren(2, 3))
    with load(folder / "a.csv", folder / "b.csv", now_s=NOW_S) as trace:
        assert counts(trace) == {"Seren": 3}
        (note,) = trace.notes
        assert (note.check, note.rows, note.examples) == ("repeated-job-id", 1, ("2",))


def test_files_of_one_cluster_with_other_columns_are_joined_by_name(files):
    folder = files(a=seren("a1"), k=kalos("k1", "k2"))
    with load(f"X={folder}/a.csv", now_s=NOW_S) as trace:
        convert(trace, folder / "store")
    with load(folder / "store", f"X={folder}/k.csv", now_s=NOW_S) as trace:
        rows = list(
            trace.query("SELECT job_id, type, gpu_num, mem_gb FROM jobs ORDER BY job_id").rows()
        )
        assert str(rows) == str(
            [
                ("a1", "SFT", 8.0, float("nan")),
                ("k1", "Pretrain", 16.0, 200.0),
                ("k2", "Pretrain", 16.0, 200.0),
            ]
        )
        assert trace.has("mem_gb", cluster="X")
        assert trace.clusters["X"].node_num == 286, "what the first said"


def test_a_folder_is_read_whole_and_what_nobody_knows_is_passed_over(files):
    folder = files(a=seren(1))
    (folder / "README.md").write_text("# not jobs\n")
    (folder / ".hidden.csv").write_text(seren(9))
    (folder / "later").mkdir()
    (folder / "later" / "b.csv").write_text(seren(2))
    with load(folder, now_s=NOW_S) as trace:
        assert counts(trace) == {"Seren": 2}


def test_a_cluster_is_called_as_the_user_says(files):
    folder = files(a=seren(1), b=seren(1))
    with load(f"before={folder}/a.csv", f"after={folder}/b.csv", now_s=NOW_S) as trace:
        assert counts(trace) == {"after": 1, "before": 1}
        assert [(note.cluster, note.check) for note in trace.notes] == [
            ("before", "assumed-size"),
            ("after", "assumed-size"),
        ]
        assert "2,288 GPUs of Seren" in trace.notes[0].sentence
    with load(f"mine={folder}/a.csv", capacity=["mine=3x9"], now_s=NOW_S) as trace:
        cluster = trace.clusters["mine"]
        assert (cluster.node_num, cluster.gpus_per_node, cluster.gpu_num) == (3, 9, 27)
        assert trace.notes == []


def test_a_path_may_hold_an_equals_sign(files, tmp_path):
    folder = files(a=seren(1))
    odd = tmp_path / "run=3"
    odd.mkdir()
    shutil.copy(folder / "a.csv", odd / "a.csv")
    with load(str(odd / "a.csv"), now_s=NOW_S) as trace:
        assert counts(trace) == {"Seren": 1}


def test_several_clusters_become_one_under_a_name(files):
    header = "job_id,cluster,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    row = (
        "1,{},u,v,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-09 18:41:02,1,0\n"
    )
    folder = files(h=header + row.format("Venus") + row.format("Earth"))
    with load(f"Helios={folder}/h.csv", now_s=NOW_S) as trace:
        assert counts(trace) == {"Helios": 2}
        assert sorted(trace.query("SELECT job_id FROM jobs")["job_id"]) == ["Earth/1", "Venus/1"]
        assert trace.clusters["Helios"].gpu_num == (133 + 143) * 8


def test_a_trace_to_compare_with_is_marked(files):
    folder = files(s=seren(1), k=kalos("a"))
    with load(folder / "s.csv", compare=[folder / "k.csv"], now_s=NOW_S) as trace:
        assert trace.compared == {"Kalos"}
    with load(folder / "s.csv", compare={"Other": folder / "k.csv"}, now_s=NOW_S) as trace:
        assert trace.compared == {"Other"}
    with pytest.raises(BadUse, match="Seren is to be compared with itself"):
        load(folder / "s.csv", compare=[folder / "s.csv"], now_s=NOW_S)


def test_a_capacity_needs_no_name_where_there_is_one_cluster(files):
    folder = files(s=seren(1), k=kalos("a"))
    with load(folder / "s.csv", compare=[folder / "k.csv"], capacity=["2x8"], now_s=NOW_S) as trace:
        assert trace.clusters["Seren"].gpu_num == 16
        assert trace.clusters["Kalos"].gpu_num == 2416
    with load(
        folder / "s.csv", compare=[folder / "k.csv"], capacity=["Kalos=2x8"], now_s=NOW_S
    ) as trace:
        assert (trace.clusters["Seren"].gpu_num, trace.clusters["Kalos"].gpu_num) == (2288, 16)
    with pytest.raises(BadUse, match="The cluster of '2x8' is unknown"):
        load(folder / "s.csv", folder / "k.csv", capacity=["2x8"], now_s=NOW_S)
    with pytest.raises(
        BadUse, match=r"'Philly=2x8' names the cluster Philly, .* Give one of Seren, Kalos"
    ):
        load(folder / "s.csv", folder / "k.csv", capacity=["Philly=2x8"], now_s=NOW_S)
    with pytest.raises(BadUse, match=r"given for 'Sern'\. The clusters are Seren"):
        load(folder / "s.csv", capacity={"Sern": "2x8"}, now_s=NOW_S)
    for wrong in ("2", "2x", "0x8", "x", "2x8x2", "-2x8", "twox8"):
        with pytest.raises(BadUse, match="Expected NODESxGPUS, such as 286x8"):
            load(folder / "s.csv", capacity={"Seren": wrong}, now_s=NOW_S)


def test_telemetry_is_attached_to_its_cluster(files, monkeypatch):
    from holdfast.trace import telemetry

    attached = []
    monkeypatch.setattr(
        telemetry,
        "attach",
        lambda trace, where, *, cluster, **more: attached.append((cluster, where, more)),
    )
    monkeypatch.setenv("HOLDFAST_HOME", "/home")
    folder = files(s=seren(1), k=kalos("a"))
    url = "http://me:secret@prometheus:9090/?a=b"
    with load(
        folder / "s.csv", compare=[folder / "k.csv"], metrics=["here", "Kalos=there", url], metrics_step_s=60,
        now_s=NOW_S,
    ) as trace:  # fmt: skip
        first_s, last_s = (
            trace.query(f"SELECT epoch({end}) AS s FROM jobs WHERE cluster = 'Seren'")["s"][0]
            for end in ("min(start_at)", "max(end_at)")
        )
    assert attached[:2] == [
        ("Seren", "here", {"progress": None}),
        ("Kalos", "there", {"progress": None}),
    ]
    (cluster, where, more) = attached[2]
    assert (cluster, where, more["folder"]) == (
        "Seren",
        url,
        Path("/home/telemetry/prometheus-9090-a-b"),
    )
    span = more["span"]
    assert span.start_s <= first_s < span.start_s + 60
    assert span.end_s - 60 < last_s <= span.end_s
    assert (span.step_s, span.start_s % 60, span.end_s % 60) == (60, 0, 0)


def test_bad_rows_fail_or_are_dropped_with_a_note(files):
    folder = files(s=seren(1) + "2,u1,one\n")
    with pytest.raises(BadTrace, match="line 3"):
        load(folder / "s.csv", now_s=NOW_S)
    with load(folder / "s.csv", bad_rows="drop", now_s=NOW_S) as trace:
        assert counts(trace) == {"Seren": 1}
        assert [(note.check, note.rows, note.action) for note in trace.notes] == [
            ("unreadable-row", 1, "dropped")
        ]


def test_jobs_of_a_span_of_submissions(files):
    folder = files(a=seren(1, day=1), b=seren(2, day=2), c=seren(3, day=3))
    for since, until, ids in (
        ("2023-03-02", None, ["2", "3"]),
        (None, "2023-03-02T00:00:00", ["1"]),
        ("2023-03-02", "2023-03-03T08:00:00+08:00", ["2"]),
    ):
        with load(folder, since=since, until=until, now_s=NOW_S) as trace:
            assert trace.query("SELECT job_id FROM jobs ORDER BY 1")["job_id"].tolist() == ids
            convert(trace, folder / f"store-{since}-{until}")
    with load(folder / "store-2023-03-02-None", since="2023-03-03", now_s=NOW_S) as trace:
        assert counts(trace) == {"Seren": 1}
    with pytest.raises(BadUse, match="since is 'soon'"):
        load(folder, since="soon", now_s=NOW_S)


def test_a_span_without_a_beginning_keeps_jobs_of_unknown_submission(files):
    unknown = seren(2).replace("2023-03-01 08:00:00+08:00", "")
    folder = files(a=seren(1), b=unknown)
    for since, until, n in ((None, "2023-03-09", 2), ("2023-02-01", None, 1), (None, None, 2)):
        with load(folder, since=since, until=until, now_s=NOW_S) as trace:
            assert counts(trace) == {"Seren": n}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"duration": "long"}, "duration is 'long'. Allowed: run, released"),
        ({"bad_rows": "keep"}, "bad_rows is 'keep'. Allowed: fail, drop"),
        ({"format": "acne"}, "There is no format 'acne'. Known are store, acme, philly"),
        ({"format": "acme", "column_map": Path("x.toml")}, "Choose one"),
        ({"zone": "Mars/Olympus"}, "no time zone 'Mars/Olympus'"),
        ({"column_map": Path("not-there.toml")}, "not-there.toml"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_read(files, arguments, words):
    folder = files(s=seren(1))
    with pytest.raises(BadUse) as error:
        load(folder / "s.csv", **arguments)
    assert words in str(error.value)


def test_what_is_not_there_or_not_known(files, tmp_path):
    folder = files(s="a,b\n1,2\n")
    with pytest.raises(NotFound, match="no file or folder"):
        load(folder / "nothing.csv")
    with pytest.raises(NotFound, match=r"no file or folder 'nothing\.csv'"):
        load("NAME=nothing.csv")
    with pytest.raises(BadUse, match="is no name of a cluster"):
        load("../x=nothing.csv")
    with pytest.raises(BadUse, match="No job records were given"):
        load()
    with pytest.raises(BadTrace) as error:
        load(folder / "s.csv")
    assert "The format of these job records is not recognised" in str(error.value)
    assert "holdfast trace formats" in str(error.value)
    assert "--map" in str(error.value)
    with pytest.raises(BadTrace, match="No file in this folder"):
        load(folder)
    with pytest.raises(BadTrace, match="missing 'job_id'"):
        load(folder / "s.csv", format="acme")


def test_a_failed_or_closed_load_leaves_nothing_behind(files, monkeypatch):
    folder = files(s=seren(1), bad=SEREN)
    scratch = folder / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(BadTrace):
        load(folder / "s.csv", folder / "bad.csv")
    assert list(scratch.iterdir()) == []
    with load(folder / "s.csv", now_s=NOW_S):
        assert len(list(scratch.iterdir())) == 1
    assert list(scratch.iterdir()) == []
    trace = load(folder / "s.csv", now_s=NOW_S)
    del trace
    assert list(scratch.iterdir()) == []


def test_progress_is_told_by_bytes(files):
    folder = files(s=seren(1), k=kalos("a"))
    told = []
    load(folder, progress=lambda *what: told.append(what), now_s=NOW_S).close()
    sizes = [(folder / name).stat().st_size for name in ("k.csv", "s.csv")]
    assert told == [
        ("Reading k.csv", 0, sum(sizes)),
        ("Reading s.csv", sizes[0], sum(sizes)),
        ("Reading", sum(sizes), sum(sizes)),
        ("Checking", 0, None),
    ]


def test_a_column_map_reads_what_no_adapter_knows(files):
    folder = files(s="id,n\n1,4\n2,8\n", k=kalos("a"))
    (folder / "site.toml").write_text(
        '[columns]\njob_id = "id"\ngpu_num = "n"\n[cluster]\nname = "Site"\n'
    )
    compared = [folder / "k.csv"]
    with load(
        folder / "s.csv", column_map=folder / "site.toml", compare=compared, now_s=NOW_S
    ) as trace:
        assert counts(trace) == {"Kalos": 1, "Site": 2}


def test_a_ledger_is_read_by_its_url_or_its_file(tmp_path):
    from holdfast.core.ledger import Ledger

    path = tmp_path / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    for given in (f"sqlite:///{path}", str(path), f"mine=sqlite:///{path}"):
        with pytest.raises(BadTrace, match="holds no run that was started"):
            load(given)
    with pytest.raises(HoldfastError, match="cannot be opened"):
        load("nonsense://")


def test_every_published_trace_at_once():
    paths = [
        DATA / "philly_sia/philly.csv",
        DATA / "alibaba_v2023_openb/openb_pod_list_default.csv",
    ]
    if not all(path.exists() for path in paths):
        pytest.skip("published traces are not here")
    with load(paths[0], compare=[paths[1]], now_s=NOW_S) as trace:
        assert counts(trace) == {"Philly": 82_247, "openb": 8_152}
        assert trace.compared == {"openb"}


def test_a_job_that_ran_from_one_export_into_the_next_is_there_once(tmp_path):
    header = "JobIDRaw|State|Submit|Start|End|AllocTRES|NNodes|JobName\n"
    (tmp_path / "march.txt").write_text(
        header
        + "1|COMPLETED|1000|1010|1110|gres/gpu=8|1|a\n2|RUNNING|1100|1200|Unknown|gres/gpu=8|1|b\n"
    )
    (tmp_path / "april.txt").write_text(
        header
        + "2|COMPLETED|1100|1200|9000|gres/gpu=8|1|b\n3|NODE_FAIL|2000|2100|3000|gres/gpu=8|1|c\n"
        "3|COMPLETED|3000|3100|4000|gres/gpu=8|1|c\n"
    )
    with load(f"C={tmp_path / 'march.txt'}", f"C={tmp_path / 'april.txt'}") as trace:
        found = trace.query(
            "SELECT job_id, attempt, state, run_s FROM jobs ORDER BY job_id, attempt"
        )
        assert list(found.rows()) == [
            ("1", 0, "COMPLETED", 100.0),
            ("2", 0, "COMPLETED", 7800.0),
            ("3", 0, "NODE_FAIL", 900.0),
            ("3", 1, "COMPLETED", 900.0),
        ]
        assert {"slurm-recorded-twice", "slurm-requeued"} <= {note.check for note in trace.notes}


def test_a_file_that_holds_nothing_to_know_it_by_is_said_to_hold_nothing(tmp_path):
    for name, content, expected in [
        ("empty.csv", b"", "The file is empty"),
        ("cut.csv.gz", gzip.compress(b"job_id,user\n" * 1000)[:-12], "The file cannot be read"),
        ("plain.csv.gz", b"job_id,user\n", "The file cannot be read: Not a gzipped file"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadTrace) as error:
            load(tmp_path / name)
        assert expected in str(error.value)


def test_a_span_ends_after_it_begins(files):
    with pytest.raises(BadUse, match=r"until .* is not after since"):
        load(files(a=seren(1)), since="2023-03-02", until="2023-03-01T23:00:00+00:00")


def test_the_options_keep_their_names_and_defaults():
    assert {option.name: option.default for option in fields(LoadOptions)} == {
        "compare": (), "metrics": (), "reasons": (), "metrics_step_s": 15.0, "metrics_folder": None,
        "format": None, "column_map": None, "types": None, "capacity": (), "zone": None, "duration": "run",
        "since": None, "until": None, "bad_rows": "fail", "memory_limit_mb": 700, "partial": False, "now_s": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [{"bad_rows": "keep"}, {"duration": "long"}, {"zone": "Mars/Olympus"}, {"since": "soon"},
     {"format": "slurm", "column_map": Path("map.toml")}, {"since": "2023-02-01", "until": "2023-01-01"}],
)  # fmt: skip
def test_a_wrong_option_is_refused_before_any_file_is_read(wrong):
    with pytest.raises(BadUse):
        LoadOptions(**wrong)
    with pytest.raises(BadUse):
        load("no/such/file.csv", **wrong)
