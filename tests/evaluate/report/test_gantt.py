import re
import xml.etree.ElementTree as ET

import pytest
from sample_evaluations import made_timeline

from holdfast.evaluate.report.gantt import LEFT, ROWS, WIDTH, gantt
from holdfast.evaluate.types.timeline import (
    Begin,
    End,
    EngineSpan,
    MetricSpan,
    RequestSpan,
    timeline_of,
)

LIMIT_BYTES = 500_000


def test_it_is_svg_with_a_row_an_engine_and_a_lane_beside_them():
    picture = gantt(made_timeline(engines=4))
    svg = ET.fromstring(picture.svg)
    names = [text.text for text in svg.iter("text")]
    assert [name for name in names if name.startswith("engine ")] == [
        f"engine {number}" for number in range(4)
    ]
    assert {"all engines", "nodes reading", "metrics", "judge", "time (s)"} <= set(names)
    assert svg.get("aria-label").startswith("Engines over time: 4 engines over")
    assert picture.note == ""


def test_widths_are_times():
    picture = gantt(
        timeline_of(
            [
                Begin(started_at_s=0.0, suite="s", tasks=["a"]),
                EngineSpan(what="load", engine=0, node=0, t0=0.0, t1=10.0),
                EngineSpan(what="serve", engine=0, node=0, t0=10.0, t1=40.0),
                RequestSpan(engine=0, task=0, sample=0, t0=10.0, t1=30.0),
                End(state="done", t1=40.0),
            ]
        )
    )
    row = {
        path.get("class"): path.get("d")
        for path in ET.fromstring(picture.svg).iter("path")
        if "v" in path.get("d")
    }
    quarter = (WIDTH - LEFT) / 4

    def ends(path):
        begin, end = re.match(r"M([\d.]+) [\d.]+H([\d.]+)", path).groups()
        return pytest.approx((float(begin), float(end)), abs=0.1)

    assert (LEFT, LEFT + quarter) == ends(row["load l3"])
    assert (LEFT + quarter, LEFT + 3 * quarter) == ends(row["s1 l3"])
    said = [
        (key, name, share.replace("\N{NO-BREAK SPACE}", "")) for key, name, share in picture.legend
    ]
    assert said == [("s1", "a", "50%"), ("load", "loading", "25%"), ("idle", "idle", "25%")]


def test_it_stays_small_whatever_happens():
    flicker = [Begin(started_at_s=0.0, suite="s", tasks=[f"t{n}" for n in range(20)])]
    for engine in range(ROWS):
        flicker += [
            RequestSpan(
                engine=engine, task=(slot + engine) % 20, sample=0, t0=float(slot), t1=slot + 0.9
            )
            for slot in range(240)
        ]
        flicker += [
            MetricSpan(node=0, task=0, sample=0, t0=float(slot), t1=slot + 0.5)
            for slot in range(0, 240, 3)
        ]
    flicker.append(End(state="done", t1=240.0))
    worst = gantt(timeline_of(flicker))
    assert 100_000 < len(worst.svg.encode()) < LIMIT_BYTES


def test_thousands_of_engines_share_rows():
    picture = gantt(made_timeline(engines=2048, samples=6000, tasks=60))
    names = [text.text for text in ET.fromstring(picture.svg).iter("text")]
    assert "0 to 31" in names
    assert picture.note == "A row is 32 engines."
    assert len(picture.svg.encode()) < LIMIT_BYTES


def test_without_engines_there_is_no_picture():
    assert gantt(timeline_of([])) is None


def test_names_are_in_the_legend_alone():
    lines = [
        Begin(started_at_s=0.0, suite="s", tasks=["<b>&"]),
        RequestSpan(engine=0, task=0, sample=0, t0=0.0, t1=1.0),
    ]
    picture = gantt(timeline_of(lines))
    assert "<b>" not in picture.svg
    assert "&lt;b" not in picture.svg
    assert picture.legend[0][1] == "<b>&"  # the template escapes it
