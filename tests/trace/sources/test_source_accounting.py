import pytest
from normalised_rows import notes_of, read_file, unix_s
from source_files import read_in_order

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.accounting import lsf, pbs, swf
from holdfast.trace.sources.published import simulators
from holdfast.trace.twin import calibration, draw, export

SWF = """; Version: 2.2
; UnixStartTime: 1700000000
; Queue: 1 gpu
 1 0 10 3600 8 -1 -1 8 7200 -1 1 3 1 -1 1 1 -1 -1
 2 60 0 60 16 -1 -1 16 7200 -1 0 4 1 -1 2 1 -1 -1
 3 120 500 0 -1 -1 -1 4 7200 -1 5 4 1 -1 -1 1 -1 -1
 4 130 5 50 4 -1 -1 4 7200 -1 2 4 1 -1 1 1 -1 -1
"""


@pytest.fixture
def write(tmp_path):
    def written(text, name="jobs.txt"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return written


def test_the_standard_workload_format(write):
    path = write(SWF)
    assert swf.SOURCE.recognises(path)
    reading, rows = read_in_order(swf.SOURCE, path)
    assert [(row["job_id"], row["state"], row["pool"], row["cpu_num"], row["run_s"]) for row in rows] == [
        ("1", "COMPLETED", "gpu", 8, 3600),
        ("2", "FAILED", "2", 16, 60),
        ("3", "CANCELLED", None, 4, None),
    ]  # fmt: skip
    assert unix_s(rows[0]["start_at"]) == 1700000010
    assert rows[2]["start_at"] is None
    assert "gpu_num" not in reading.columns
    assert notes_of(reading) == {"swf-partial": 1, "swf-processors": 1}
    assert swf.SOURCE.recognises(write(SWF.splitlines()[3]))
    reading, rows = read_in_order(swf.SOURCE, write("; Note: a processor is a GPU\n" + SWF))
    assert [row["gpu_num"] for row in rows] == [8, 16, 4]
    with pytest.raises(BadTrace, match="line 8: expected 18 numbers"):
        read_in_order(swf.SOURCE, write(SWF + " 5 x\n"))


def test_the_accounting_of_pbs(write):
    job = "user=ann jobname=x queue=gpu ctime=1709287200 start=1709287260"
    path = write(
        "03/01/2024 10:00:00;Q;901.srv;queue=gpu\n"
        f"03/01/2024 10:01:00;S;901.srv;{job}\n"
        f"03/01/2024 11:01:00;E;901.srv;{job} exec_host=n1/0*8+n2/0*8 Resource_List.ncpus=16 "
        "Resource_List.select=2:ncpus=8:ngpus=4 end=1709290860 Exit_status=0\n"
        f"03/01/2024 11:01:00;E;902.srv;{job} Resource_List.ngpus=4 end=1709290860 Exit_status=271\n"
        f"03/01/2024 11:01:00;E;903.srv;{job} Resource_List.nodes=2:ppn=8:gpus=2+1:gpus=1 end=1709290860 "
        "Exit_status=-29\n"
        "03/01/2024 10:00:00;Q;904.srv;queue=gpu\n"
        "03/01/2024 10:10:00;D;904.srv;requestor=ann\n"
        f"03/01/2024 10:01:00;S;905.srv;{job} Resource_List.select=1:ngpus=1\n"
        "03/01/2024 10:01:00;L;license;floating license hour:3\n"
    )
    assert pbs.SOURCE.recognises(path)
    reading, rows = read_file(pbs.SOURCE, path)
    assert [(row["job_id"], row["state"], row["gpu_num"], row["run_s"]) for row in rows] == [
        ("901.srv", "COMPLETED", 8, 3600),
        ("902.srv", "CANCELLED", 4, 3600),
        ("903.srv", "TIMEOUT", 5, 3600),
        ("904.srv", "CANCELLED", 0, None),
        ("905.srv", "RUNNING", 1, None),
    ]
    first = rows[0]
    assert (first["queue_s"], first["nodes"], first["cpu_num"]) == (60, ["n1", "n2"], 16)
    assert rows[1]["exit_code"] == 143
    assert not reading.notes
    with pytest.raises(BadTrace, match="line 1: expected TIME;TYPE;ID"):
        read_file(pbs.SOURCE, write("what\n"))


def test_an_array_of_pbs_is_its_tasks(write):
    job = "ctime=1709287200 start=1709287260 Resource_List.ngpus=4 end=1709290860 Exit_status=0"
    ids = (
        "902[].srv",
        "903[].srv",
        "903[].srv",
        "903[1].srv",
        "903[2].srv",
        "903[].srv",
        "904[].srv",
    )
    kinds = ("Q", "Q", "S", "E", "E", "E", "E")
    path = write(
        "".join(f"03/01/2024 11:01:00;{kind};{one};{job}\n" for kind, one in zip(kinds, ids, strict=True))
    )  # fmt: skip
    _, rows = read_file(pbs.SOURCE, path)
    told = [(row["job_id"], row["state"]) for row in rows]
    assert told == [
        ("902[].srv", "PENDING"),
        ("903[1].srv", "COMPLETED"),
        ("903[2].srv", "COMPLETED"),
    ]


def test_quotes_of_pbs_need_not_be_closed(write):
    path = write(
        '03/01/2024 11:01:00;E;901.srv;user=ann account="my lab" jobname=ann\'s"x ctime=1709287200 '
        "start=1709287260 Resource_List.ngpus=4 end=1709290860 Exit_status=0\n"
    )
    _, ((row),) = read_file(pbs.SOURCE, path)
    assert (row["name"], row["gpu_num"], row["run_s"]) == ("ann's\"x", 4, 3600)


def acct(job=901, start=1709287260, status=64, exit_status=0, info=0, asked="", hosts=("n1", "n2")):
    usage = ["0"] * 19
    fields = [
        '"JOB_FINISH"', '"10.1"', 1709290860, job, 1000, 33816579, 8, 1709287200, 0, 0, start, '"ann"', '"gpu"',
        '"res"',
        '""', '""', '"h"', '"/home"', '""', '"o"', '""', '"f"', 0, len(hosts), *(f'"{host}"' for host in hosts), status,
        60.0, '"say ""hi"""', '"x num=100"', *usage, '""', '"p"', exit_status, 8, '""', '""', 0, 0, 0, '""', '""', '""',
        '""', -1, '""', info, '""', 0, '"select[type == local] ' + asked + '"',
    ]  # fmt: skip
    return " ".join(map(str, fields)) + "\n"


def test_the_accounting_of_lsf(write):
    path = write(
        acct(asked="rusage[ngpus_physical=4.00]")
        + acct(902, status=32, exit_status=256, asked="rusage[ngpus_physical=1.00/task]")
        + acct(903, status=32, exit_status=143, info=5, asked="num=2:mode=shared")
        + acct(904, start=0, status=32, info=14, hosts=())
        + '"EVENT_ADRSV_FINISH" "10.1" 1709290860 1\n'
    )
    assert lsf.SOURCE.recognises(path)
    reading, rows = read_in_order(lsf.SOURCE, path)
    assert [(row["job_id"], row["state"], row["gpu_num"], row["exit_code"]) for row in rows] == [
        ("901", "COMPLETED", 8, 0),
        ("902", "FAILED", 8, 1),
        ("903", "TIMEOUT", 4, 143),
        ("904", "CANCELLED", 0, 0),
    ]
    assert (rows[0]["name"], rows[0]["run_s"], rows[0]["queue_s"]) == ('say "hi"', 3600, 60)
    assert (rows[3]["start_at"], rows[3]["run_s"]) == (None, None)
    assert notes_of(reading) == {"lsf-other-records": 1}
    with pytest.raises(BadTrace, match="line 1: expected the fields of a JOB_FINISH record"):
        read_in_order(lsf.SOURCE, write('"JOB_FINISH" "10.1" 1709290860 901\n'))


@pytest.mark.parametrize(
    ("form", "source"), [("swf", swf), ("tiresias", simulators), ("tethys", simulators)]
)
def test_what_export_writes_is_read(tmp_path, form, source):
    drawn = draw(calibration("kalos"), 200, seed=1)
    names = "job_id submit_s queue_s duration_s gpu_num node_num cpu_num type user state"
    columns = {name: getattr(drawn, name) for name in names.split()}
    path = tmp_path / "x.csv"
    written = export(columns, path, form, name="Kalos", zone="+08:00")
    assert source.SOURCE.recognises(path)
    _, rows = read_in_order(source.SOURCE, path)
    assert len(rows) == written
    gpus = drawn.gpu_num[drawn.gpu_num > 0]
    assert sum(row["gpu_num"] for row in rows) == pytest.approx(gpus.sum(), rel=0.01)
