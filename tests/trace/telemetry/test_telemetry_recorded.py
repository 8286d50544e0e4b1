import json
import os

import duckdb
import pytest

from holdfast.core.errors import BadUse
from holdfast.trace.errors import BadTrace
from holdfast.trace.telemetry.attach import value_counts
from holdfast.trace.telemetry.inputs import telemetry_in
from holdfast.trace.telemetry.long import open_long, summary_of_long
from holdfast.trace.telemetry.metrics import metric_named
from holdfast.trace.telemetry.recorded import form_of
from holdfast.trace.telemetry.scan import scan_wide


def read(path):
    """Read by metric: the values of each device by time; also return the checks of the notes."""
    (given,) = telemetry_in(path)
    found, checks = {}, []
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for source in open_long(connection, given):
            summary, rows = summary_of_long(connection, source, "C")
            checks += [note.check for note in summary.notes]
            sentences = [note.sentence for note in summary.notes if note.check == "telemetry-empty"]
            assert all(source.metric.name in sentence for sentence in sentences)
            names = [device.name for device in summary.devices]
            sql = f'SELECT device, epoch("at"), value FROM ({rows}) ORDER BY ALL'
            for device, at_s, value in connection.execute(sql).fetchall():
                found.setdefault(source.metric.name, []).append((names[device], at_s, value))
    return found, checks


AT = 1740823200.0


def test_nvidia_smi(tmp_path):
    path = tmp_path / "n1.csv"
    path.write_text(
        "timestamp, index, name, utilization.gpu [%], memory.used [MiB], power.draw [W]\n"
        "2025/03/01 10:00:00.000, 0, NVIDIA H100, 50 %, 10 MiB, 300.50 W\n"
        "2025/03/01 10:00:00.000, 1, NVIDIA H100, 51 %, 20 MiB, [N/A]\n"
    )
    found, _ = read(path)
    assert found == {
        "GPU_UTIL": [("n1-0", AT, 50), ("n1-1", AT, 51)],
        "FB_USED": [("n1-0", AT, 10), ("n1-1", AT, 20)],
        "POWER_USAGE": [("n1-0", AT, 300.5)],
    }
    path.write_text("timestamp, index, power.draw [W]\n2025/03/01 10:00:00.000, 0, [N/A]\n")
    assert read(path) == ({}, ["telemetry-empty"])
    path.write_text("timestamp, utilization.gpu [%]\n2025/03/01 10:00:00.000, 50 %\n")
    with pytest.raises(BadTrace, match="identifies the GPU of a row"):
        read(path)


def test_long_csv(tmp_path):
    path = tmp_path / "GPU_UTIL.csv"
    path.write_text(
        "time,gpu,value\n2025-03-01T10:00:00Z,0,50\n1740823200000,1,51\n1740823215,1,52\n"
    )
    assert read(path)[0] == {"GPU_UTIL": [("0", AT, 50), ("1", AT, 51), ("1", AT + 15, 52)]}
    path = tmp_path / "all.csv"
    path.write_text("ts,hostname,gpu,metric,value\n1740823200,n1,0,DCGM_FI_DEV_POWER_USAGE,300\n")
    assert read(path)[0] == {"POWER_USAGE": [("n1-0", AT, 300)]}
    path.write_text("ts,hostname,gpu,metric,value\n1740823200,n1,0,DCGM_FI_DEV_POWER_USAGE,many\n")
    with pytest.raises(BadTrace, match="line 2, column 'value': 'many' is not a number"):
        read(path)
    path.write_text("ts,gpu,value\n1740823200,0,50\n")
    with pytest.raises(BadUse, match="names no metric that is known"):
        read(path)


def test_dcgmi_dmon(tmp_path):
    path = tmp_path / "n1.txt"
    path.write_text(
        "#Entity   GPUTL   SMACT\nID\nGPU 0     50   0.25\nGPU 1     51   N/A\n"
        "GPU 0     52   0.5\n#Entity   GPUTL   SMACT\nID\nGPU 1     53   0.5\n"
    )  # fmt: skip
    os.utime(path, (AT, AT))
    found, checks = read(path)
    assert found == {
        "GPU_UTIL": [("n1-0", AT - 1, 50), ("n1-0", AT, 52), ("n1-1", AT - 1, 51), ("n1-1", AT, 53)],
        "SM_ACTIVE": [("n1-0", AT - 1, 25), ("n1-0", AT, 50), ("n1-1", AT, 50)],
    }  # fmt: skip
    assert set(checks) == {"telemetry-times"}


@pytest.mark.parametrize("kind", ["matrix", "vector"])
def test_a_saved_answer_of_prometheus(tmp_path, kind):
    labels = {"__name__": "DCGM_FI_DEV_GPU_UTIL", "gpu": "3", "Hostname": "n1"}
    samples = {"values": [[AT, "50"]]} if kind == "matrix" else {"value": [AT, "50"]}
    answer = {
        "status": "success",
        "data": {"resultType": kind, "result": [{"metric": labels, **samples}]},
    }
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(answer))
    assert read(path)[0] == {"GPU_UTIL": [("n1-3", AT, 50)]}
    path.write_text(json.dumps(answer)[:-20])
    with pytest.raises(BadTrace, match="expected an answer of Prometheus"):
        read(path)


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("scalar", [AT, "1"]),
        ("matrix", [{"metric": {"gpu": "0"}, "histograms": [[AT, {}]]}]),
        ("matrix", [{"metric": {"gpu": "0"}, "values": [[AT, "many"]]}]),
    ],
)
def test_an_answer_without_series_of_samples_is_refused(tmp_path, kind, result):
    path = tmp_path / "GPU_UTIL.json"
    path.write_text(json.dumps({"data": {"resultType": kind, "result": result}}))
    with pytest.raises(BadTrace, match="expected an answer of Prometheus, series with values"):
        read(path)


def test_exposition_text(tmp_path):
    path = tmp_path / "scrape.prom"
    path.write_text(
        "# HELP DCGM_FI_DEV_GPU_UTIL x\n"
        'DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} 50 1740823200000\n'
        'DCGM_FI_DEV_GPU_UTIL{gpu="1",Hostname="n1"} 51\nunknown_metric 1\n'
    )
    os.utime(path, (AT + 15, AT + 15))
    found, checks = read(path)
    assert found == {"GPU_UTIL": [("n1-0", AT, 50), ("n1-1", AT + 15, 51)]}
    assert checks == ["telemetry-times"]


def test_what_is_none_of_these(tmp_path):
    path = tmp_path / "GPU_UTIL.csv"
    path.write_text("Time,n1-0,n1-1\n2025-03-01T10:00:00Z,50,51\n")
    assert form_of(path) is None
    assert telemetry_in(path)[0].form == "wide"


@pytest.mark.parametrize("column", ["gpu", "index", "Value", "uuid"])
def test_a_wide_file_with_the_columns_of_a_long_one_is_refused(tmp_path, column):
    path = tmp_path / "GPU_UTIL.csv"
    path.write_text(f"Time,n1-0,{column}\n2025-03-01T10:00:00Z,50,51\n")
    with pytest.raises(BadTrace, match=f"its column '{column.lower()}' is no device"):
        scan_wide(path, metric_named("GPU_UTIL")[0])


def test_a_wide_file_whose_times_repeat_is_refused(tmp_path):
    path = tmp_path / "GPU_UTIL.csv"
    rows = [f"2025-03-01T10:00:0{second}Z,50" for second in (0, 0, 1, 1)]
    path.write_text("\n".join(["Time,x", *rows, ""]))
    with pytest.raises(BadTrace, match="2 rows repeat a time and 2 do not"):
        scan_wide(path, metric_named("GPU_UTIL")[0])


@pytest.mark.parametrize(
    ("values", "read_as"), [((0.5, 0.25), [25, 50]), ((0, 1), [0, 1]), ((0.5, 50), [1, 50])]
)
def test_utilisation_as_a_ratio_is_known_by_its_fractions(tmp_path, values, read_as):
    path = tmp_path / "GPU_UTIL.csv"
    rows = [f"2025-03-01T10:00:0{second}Z,{value}" for second, value in enumerate(values)]
    path.write_text("\n".join(["Time,x", *rows, ""]))
    assert value_counts(path).values.tolist() == read_as
    path.write_text("\n".join(["time,gpu,value", *(row.replace(",", ",0,") for row in rows), ""]))
    assert value_counts(path).values.tolist() == read_as
