import pytest

from holdfast.core.page import DARK, LIGHT, KeyFigure, template, time_bars


def test_bars_add_up_as_printed():
    found = time_bars([("a", "A", "first", 100.0), ("b", "B", "", 100.0), ("b", "C", "", 100.0)])
    assert (found.total, found.unit) == ("5.0", "min")
    assert [bar.key for bar in found.bars] == ["a", "b", "b"]
    assert sum(float(bar.amount) for bar in found.bars) == pytest.approx(5.0)
    assert sum(float(bar.share) for bar in found.bars) == pytest.approx(100.0)
    assert {bar.width for bar in found.bars} == {"33.33%"}


def test_no_time_gives_bars_of_no_width():
    found = time_bars([("a", "A", "", 0.0)])
    assert (found.bars[0].width, found.bars[0].share, found.total) == ("0.00%", "0.0", "0.0")
    assert time_bars([]).bars == ()


def test_a_page_is_the_shell_with_the_parts_in_it(tmp_path):
    path = tmp_path / "own.html.j2"
    path.write_text(
        '{% extends "page.html.j2" %}{% import "parts.html.j2" as parts %}'
        "{% block title %}T{% endblock %}{% block body %}{{ parts.figures(figures) }}"
        '{{ parts.facts([("name", "<b>")]) }}{{ parts.bars(["x", "s", "%"], bars, "share") }}{% endblock %}'
    )
    bars = time_bars([("k", "n", "m", 1.0)]).bars
    page = template(path).render(figures=[KeyFigure("Jobs", "3 & 4")], bars=bars)
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("default-src 'none'") == 1
    assert "<dd>3 &amp; 4</dd>" in page
    assert "<dd>&lt;b&gt;</dd>" in page
    assert '<i class="k" style="width:100.00%"></i>' in page
    assert all(f"--{name}: {colour};" in page for name, colour in [*LIGHT.items(), *DARK.items()])
