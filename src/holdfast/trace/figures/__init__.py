"""Charts as data, drawn: for the page as SVG in its colours, for a paper as PDF and PNG.

Enter `holdfast.trace.charts.Figure` objects; leave matplotlib figures, SVG text or files. The stages, in order:

| module | one idea |
|---|---|
| `look` | colours, dashes and sizes, of the page and of a paper |
| `ticks` | an axis: its limits and its ticks, numbers and durations in words |
| `plan` | what every panel comes to before a stroke is drawn: axes, keys, and who draws inside |
| `curves`, `bars` (and boxes), `heatmap` | a kind of panel each: its plan |
| `text` | the width of text, and text that can be shown |
| `frame` | margins, axes, keys and titles around what a plan draws |
| `drawing` | panels side by side: `draw` |
| `export` | compact SVG for a page or a file, PDF and PNG for a paper |

Nothing measures and nothing lays out twice: ticks, keys and margins are computed from the data and from the widths of
the texts, which is ten times faster than matplotlib's constrained layout.
"""

from holdfast.trace.figures.drawing import draw
from holdfast.trace.figures.export import standalone, svg, write_paper

__all__ = ["draw", "standalone", "svg", "write_paper"]
