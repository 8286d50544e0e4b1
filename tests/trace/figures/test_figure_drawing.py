import itertools
import re
import struct
import subprocess
import sys
import warnings
from xml.etree import ElementTree

import numpy as np
import pytest
import sample_charts

from holdfast.trace.charts import Axis, Bars, Figure, Lines, Series
from holdfast.trace.figures import draw, standalone, svg, write_paper
from holdfast.trace.figures.bars import plan_bars
from holdfast.trace.figures.curves import vertices
from holdfast.trace.figures.export import panels
from holdfast.trace.figures.look import DARK, DASHES, LIGHT, PAGE, SERIES_COLOURS
from holdfast.trace.figures.ticks import plan_axis

FIGURES = sample_charts.all_figures()


def test_what_failed_is_never_green():
    green = PAGE.colours["s3"]
    for parts in (("completed", "cancelled", "failed", "preempted"), ("cancelled", "failed")):
        colours = {name: PAGE.part(name, place) for place, name in enumerate(parts)}
        assert len(set(colours.values())) == len(parts)
        assert {name for name, colour in colours.items() if colour == green} <= {"completed"}
    bars = Bars(
        title="", value=Axis(label="share"), groups=["a"],
        parts={"cancelled": np.array([0.5]), "x": np.array([0.1]), "failed": np.array([0.5])},
    )  # fmt: skip
    keys = {key.label: key.colour for key in plan_bars(bars, PAGE, width_in=4.0).keys}
    assert keys["failed"] == PAGE.colours["s2"]


def ecdf_of_corners(across, up, at):
    """Return the height of a curve just to the right of each `at`."""
    places = [np.flatnonzero(across <= value)[-1] for value in at]
    return up[places]


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(7)
    return np.sort(1 + np.rint(np.exp(random.normal(4, 2, 500))))


def cdf(data):
    values, counts = np.unique(data, return_counts=True)
    return Series(label="n", x=values, y=np.cumsum(counts) / len(data), style="step")


def test_the_corners_of_a_cdf_are_the_cdf(data):
    series = cdf(data)
    x = plan_axis(Axis(label="x"), series.x, length_pt=250, gap_pt=40)
    y = plan_axis(Axis(label="y", low=0, high=1), series.y, length_pt=150, gap_pt=26)
    across, up = vertices(series, x, y)
    at = np.linspace(data[0] - 0.5, x.high, 999)
    before = at < data[0]
    expected = [np.mean(data <= value) for value in at]
    assert np.allclose(
        ecdf_of_corners(across, up, at[~before]), np.array(expected)[~before], rtol=0, atol=1e-12
    )
    assert (across[0], up[0]) == (data[0], 0.0)  # it rises from nothing
    assert (across[-1], up[-1]) == (x.high, 1.0)  # and holds to the end


def test_zeros_enter_a_logarithmic_axis_at_their_share():
    series = Series(label="", x=np.array([0.0, 2, 30]), y=np.array([0.4, 0.7, 1.0]), style="step")
    x = plan_axis(Axis(label="x", scale="log", low=1), series.x, length_pt=250, gap_pt=40)
    y = plan_axis(Axis(label="y"), series.y, length_pt=150, gap_pt=26)
    across, up = vertices(series, x, y)
    assert (across[0], up[0]) == (1.0, 0.4)
    assert (up > 0).all()


def test_a_step_that_is_no_cdf_is_left_as_it_is():
    series = Series(label="", x=np.array([1.0, 2, 3]), y=np.array([5.0, 3, 4]), style="step")
    assert not series.cumulative
    x = plan_axis(Axis(label="x"), series.x, length_pt=250, gap_pt=40)
    across, up = vertices(series, x, x)
    assert across.tolist() == [1, 2, 2, 3, 3]
    assert up.tolist() == [5, 5, 3, 3, 4]


def test_what_has_no_logarithm_is_a_gap():
    series = Series(label="", x=np.array([0.0, 1, 2, 3]), y=np.array([5.0, 0, 7, 9]))
    log = plan_axis(Axis(label="x", scale="log"), series.x, length_pt=250, gap_pt=40)
    across, up = vertices(series, log, log)
    assert across.tolist() == [1, 2, 3]
    assert np.isnan(up[0])
    assert up[1:].tolist() == [7, 9]


def test_the_path_in_the_svg_lies_on_the_cdf(data):
    """Lay out, draw, compact to relative tenths of a point, and read the path back."""
    figure = Figure(
        panels=[Lines(x=Axis(label="x"), y=Axis(label="y", low=0, high=1), series=[cdf(data)])]
    )
    (drawn,) = panels(figure, "a", "a")
    paths = re.findall(r'<path d="(M[^"z]*)"[^>]*style="[^"]*var\(--s1\)', drawn.svg)
    path = max(paths, key=len)
    x, y = (float(value) for value in re.match(r"M(\S+?) (-?[\d.]+)", path).groups())
    points = [(x, y)]
    for command, first, second in re.findall(r"([hvl])(-?[\d.]+)(?:\s?(-?[\d.]+))?", path[1:]):
        x += float(first) if command in "hl" else 0
        y += float(first) if command == "v" else float(second) if command == "l" else 0
        points.append((x, y))
    left, top, right, bottom = drawn.box
    wide, high = np.diff(drawn.x_ends)[0], np.diff(drawn.y_ends)[0]
    heights = [
        drawn.y_ends[1] - (y / drawn.height_pt - top) / (bottom - top) * high for _, y in points
    ]
    places = [
        drawn.x_ends[0] + (x / drawn.width_pt - left) / (right - left) * wide for x, _ in points
    ]
    point_x = 0.2 * wide / (drawn.width_pt * (right - left))
    assert len(points) > 100
    for at, height in zip(places, heights, strict=True):
        least, most = np.mean(data <= at - point_x), np.mean(data <= at + point_x)
        assert least - 0.002 <= height <= most + 0.002


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_and_its_texts_are_apart_and_inside(name):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        drawn = draw(FIGURES[name])
        drawn.dpi = 300  # at a lower resolution, hinting makes text wider than in print
        canvas = FigureCanvasAgg(drawn)
        canvas.draw()
        renderer = canvas.get_renderer()
        frame = drawn.bbox
        for axes in drawn.axes:
            for axis in (axes.xaxis, axes.yaxis):
                boxes = [
                    label.get_window_extent(renderer)
                    for label in axis.get_ticklabels()
                    if label.get_text()
                ]
                upright = all(label.get_rotation() == 0 for label in axis.get_ticklabels())
                for one, other in itertools.pairwise(boxes):
                    assert not upright or not one.overlaps(other), (name, one, other)
                for box in boxes:
                    assert box.x0 >= frame.x0 - 5
                    assert box.x1 <= frame.x1 + 5
            for text in axes.texts:
                assert text.get_window_extent(renderer).x1 <= frame.x1 + 5
        texts = [text.get_window_extent(renderer) for text in drawn.texts]
    for one, other in itertools.combinations(texts, 2):
        assert not one.padded(-3).overlaps(other.padded(-3)), name
    for box in texts:
        assert frame.x0 - 5 <= box.x0 < box.x1 <= frame.x1 + 6, name
        assert frame.y0 - 5 <= box.y0 < box.y1 <= frame.y1 + 5, name


@pytest.mark.parametrize("name", FIGURES)
def test_svg_is_well_formed_compact_and_the_same_again(name):
    inline = svg(FIGURES[name], name, f"{name} & <co>")
    assert svg(FIGURES[name], name, f"{name} & <co>") == inline
    assert len(inline) < (60_000 if name == "edges" else 25_000)
    alone = standalone(inline)
    root = ElementTree.fromstring(alone)
    assert "var(--" not in alone
    assert LIGHT["ink"] in alone
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert all(one.startswith(f"{name}-") for one in ids)
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert "#0000" not in inline  # no stand-in is left


def test_many_points_are_seen_in_every_form(tmp_path):
    from matplotlib.image import imread

    many = np.linspace(1, 9, 200)
    series = [Series(label="", x=many, y=many, style="points")]
    figure = Figure(panels=[Lines(x=Axis(label="x"), y=Axis(label="y"), series=series)])
    _, png = write_paper(figure, tmp_path / "dots")
    pixels = imread(png)[..., :3]
    blue = (pixels[..., 2] > 0.5) & (pixels[..., 0] < 0.6)
    assert blue.sum() > 200 * 20  # each is some pixels
    assert max(path.count("M") for path in re.findall(r'd="([^"]*)"', svg(figure, "n", "n"))) == 200


def test_hover_titles_say_the_values():
    bars = Bars(
        value=Axis(label="wait (s)"), groups=["a<b", "c"], parts={"p": np.array([90.0, 7200.0])}
    )
    titles = re.findall(r"<title>([^<]*)</title>", svg(Figure(panels=[bars]), "n", "n"))
    assert titles == ["a&lt;b: 1.5 min", "c: 2 h"]


def test_numbers_in_words_are_left_alone():
    """Coordinates are rounded; labels, keys, titles and texts for screen readers are not."""
    series = [
        Series(label="mean 3.14159, n = 12.00", x=np.array([1.0, 2]), y=np.array([0.1234, 0.5]))
    ]
    lines = Lines(
        title="(0.12345 up)", x=Axis(label="x 0.98765 y"), y=Axis(label="y 1.00 z"), series=series
    )
    bars = Bars(value=Axis(label="n"), groups=["a 2.71828 b"], parts={"p": np.array([0.0105])})
    text = svg(Figure(panels=[lines, bars]), "n", "about 1.23456 and 7.00 of it")
    for words in (
        "mean 3.14159, n = 12.00",
        "(0.12345 up)",
        "x 0.98765 y",
        "y 1.00 z",
        "a 2.71828 b",
        ">0.0105<",
    ):
        assert words in text, words
    assert 'aria-label="about 1.23456 and 7.00 of it"' in text
    assert "<title>a 2.71828 b: 0.0105</title>" in text


def test_stacked_bars_end_where_their_parts_add_up():
    parts = {"a": np.array([10.0, 0]), "b": np.array([20.0, np.nan]), "c": np.array([5.0, 1])}
    figure = Figure(
        panels=[Bars(value=Axis(label="n"), groups=["g", "h"], parts=parts, stacked=True)]
    )
    bars = [(bar.get_x(), bar.get_width()) for bar in draw(figure).axes[0].patches]
    assert bars == [(0, 10), (10, 20), (30, 5), (0, 1)]


def test_curves_are_told_apart_without_colour_and_colours_without_red_or_green():
    assert len({(number % SERIES_COLOURS, number % len(DASHES)) for number in range(35)}) == 35
    assert set(DARK) == set(LIGHT) == set(PAGE.colours)
    okabe_ito = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"}
    assert okabe_ito < set(LIGHT.values())


@pytest.mark.parametrize(
    ("name", "width_in"), [("durations", 7.0), ("by_type", 3.33), ("outcomes", 7.0), ("week", 3.33)]
)
def test_paper_has_its_width_its_resolution_and_embedded_fonts(tmp_path, name, width_in):
    pdf, png = write_paper(FIGURES[name], tmp_path / "fig.2a")
    assert (pdf.name, png.name) == ("fig.2a.pdf", "fig.2a.png")
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    assert abs(width - width_in * 300) <= 1
    assert height < width * 1.2
    content = pdf.read_bytes()
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", content)
    assert float(box[1]) == pytest.approx(width_in * 72, abs=0.1)


def test_drawing_leaves_pyplot_alone():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sample_charts; from holdfast.trace.figures import svg; "
        "svg(sample_charts.gpus(), 'n', 'n'); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(sample_charts.__file__.rpartition("/")[0])], check=True
    )
