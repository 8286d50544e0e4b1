"""Check the page in a real browser: complete, offline, without errors, light and dark, wide, narrow
and in print.
"""

import re
import shutil

import pytest
import sample_report

from holdfast.trace.report import write_report

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PAINTED = """canvas => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] > 200) colours.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
  return colours.size;
}"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("browser") / "report", sample_report.report())


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def opened(browser, written):
    """Open the page without a network; then check that there was no request and no error."""
    contexts, complaints, requests = [], [], []

    def open_(width=1280, height=900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(written.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
    assert set(requests) == {written.as_uri()}


def test_the_page_is_small(written):
    assert written.stat().st_size < 2_000_000


@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_is_there_and_nothing_sticks_out(opened, width):
    page = opened(width)
    drawings = page.locator(".drawing svg")
    assert drawings.count() > 45
    boxes = drawings.evaluate_all(
        "all => all.map(one => { const b = one.getBoundingClientRect(); return [b.width, "
        "b.height]; })"
    )
    assert all(wide > 150 and high > 40 for wide, high in boxes)
    painted = drawings.evaluate_all(
        "all => all.map(one => { const b = one.getBBox(); return b.width * b.height; })"
    )
    assert all(area > 1000 for area in painted)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # Texts of a drawing lie inside it; a cut text is not readable.
    cut = drawings.evaluate_all("""all => all.flatMap(svg => {
      const frame = svg.getBoundingClientRect();
      return [...svg.querySelectorAll("text")].filter(text => {
        const box = text.getBoundingClientRect();
        return box.left < frame.left - 4 || box.right > frame.right + 4;
      }).map(text => text.textContent);
    })""")
    assert cut == []


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_the_contents_stay_in_sight(opened, width):
    page = opened(width)
    page.evaluate("scrollTo(0, 3000)")
    box = page.locator("nav.contents").bounding_box()
    assert (box["y"], box["x"] >= 0) == (0, True)
    assert box["height"] <= (900 if width == 1280 else 60)


def test_no_table_splits_a_word_on_a_narrow_screen(opened):
    page = opened(390)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    split = page.evaluate("""() => [...document.querySelectorAll("td, th")].flatMap(cell => {
      const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), found = [];
      for (let node; (node = walker.nextNode());)
        for (const match of node.data.matchAll(/\\b[A-Za-z]{2,24}\\b/g)) {
          const range = document.createRange();
          range.setStart(node, match.index);
          range.setEnd(node, match.index + match[0].length);
          const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
          if (lines.size > 1) found.push(match[0]);
        }
      return found;
    })""")
    assert split == []


def test_every_explorable_chart_opens_and_is_painted(opened):
    page = opened()
    buttons = page.locator("button.explore")
    panels = page.locator("[data-explorable]")
    assert buttons.count() == panels.count() > 25
    for button in buttons.all():
        button.evaluate("button => button.click()")
    canvases = page.locator("[data-explorable] canvas")
    assert canvases.count() == panels.count()
    empty = {"edges-0", "edges-1", "edges-3"}
    for canvas in canvases.all():
        panel = canvas.evaluate("canvas => canvas.closest('[data-panel]').dataset.panel")
        assert canvas.evaluate(PAINTED) > (3 if panel not in empty else 1), panel
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    for button in buttons.all():
        button.evaluate("button => button.click()")
    assert canvases.count() == 0


def test_the_cursor_tells_the_values_and_zoom_comes_and_goes(opened):
    page = opened()
    panel = page.locator("#panel-durations_0-0")
    panel.locator(".drawing").click()
    over = panel.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    legend = panel.locator(".u-legend").inner_text()
    found = re.search(r"at:?\s*([\d.]+ \w+?)\s*Seren \(n = 450,590\):?\s*([\d.]+?)\s*Kalos", legend)
    assert found, legend
    # The shown value is that of the exact CDF at the shown place, within a pixel.
    amount, unit = found[1].split()
    seconds = float(amount) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit]
    series = sample_report.sample_charts.durations(seed=0).panels[0].series[0]
    low, high = (series.y[series.x <= seconds * factor][-1] for factor in (0.97, 1.03))
    assert low - 1e-4 <= float(found[2]) <= high + 1e-4
    ticks = "figure => { const axis = figure.querySelector('canvas').toDataURL(); return axis; }"
    before = panel.evaluate(ticks)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2 + 5, steps=4)
    page.mouse.up()
    zoomed = panel.evaluate(ticks)
    assert zoomed != before
    over.dblclick()
    assert panel.evaluate(ticks) == before


def test_the_keyboard_is_enough(opened):
    page = opened()
    button = page.locator("#panel-durations_0-0 .explore")
    button.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.className") == "chart"
    legend = page.locator("#panel-durations_0-0 .u-legend")
    page.keyboard.press("ArrowRight")
    first = legend.inner_text()
    page.keyboard.press("ArrowRight")
    assert legend.inner_text() != first
    page.keyboard.press("+")
    page.keyboard.press("0")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "explore"
    assert page.locator("#panel-durations_0-0 canvas").count() == 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== document.body")


def test_a_map_says_what_a_cell_holds(opened):
    page = opened()
    svg = page.locator("#panel-week_8-0 svg")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert re.fullmatch(r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun) hour of the day \d+: [\d,]+ jobs an hour",
                        page.locator("#panel-week_8-0 .tip").inner_text())  # fmt: skip


def test_dark_has_the_dark_colours_also_where_the_scheme_changes_under_an_open_chart(opened):
    page = opened(color_scheme="dark")
    line = page.locator("#panel-durations_0-0 svg path[style*='--s1']").first
    assert line.evaluate("path => getComputedStyle(path).stroke") == "rgb(78, 168, 230)"
    assert (
        page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        == "rgb(21, 23, 26)"
    )
    page.locator("#panel-durations_0-0 .drawing").click()
    dark = page.locator("#panel-durations_0-0 canvas").evaluate("canvas => canvas.toDataURL()")
    page.emulate_media(color_scheme="light")
    assert line.evaluate("path => getComputedStyle(path).stroke") == "rgb(0, 114, 178)"
    # The page receives the event with its next frame.
    page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert (
        page.locator("#panel-durations_0-0 canvas").evaluate("canvas => canvas.toDataURL()") != dark
    )


def test_without_scripts_the_page_is_complete(opened):
    page = opened(java_script_enabled=False)
    assert page.locator(".drawing svg").count() > 45
    assert page.locator("button").count() == 0
    assert page.get_by_text("What the checks found, dropped or mended").is_visible()


def test_on_paper_every_figure_stands_even_where_a_chart_is_open(opened, tmp_path):
    page = opened()
    page.locator("#panel-durations_0-0 .drawing").click()
    page.emulate_media(media="print")
    shown = page.locator(".drawing svg").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect().height)"
    )
    assert all(height > 40 for height in shown)
    assert not page.locator(".chart").first.is_visible()
    assert not page.locator("nav").first.is_visible()
    content = page.pdf(format="A4")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) > 10
    assert len(content) > 200_000
