"""Draw charts: as SVG in the page's colours, and as PDF and PNG for a paper.

The input is `holdfast.trace.charts.Figure` objects. The output is matplotlib figures, SVG text or
files. The modules, in the order in which a chart passes through them:

| module | one idea |
|---|---|
| `look` | define colours, dashes and sizes of the page and of a paper |
| `ticks` | plan an axis: limits and ticks, numbers and durations in words |
| `plan` | describe a panel before drawing: axes, legend keys, and the function that draws inside |
| `curves`, `bars` (and boxes), `heatmap` | make the plan of one kind of panel each |
| `text` | measure text, and clean text for display |
| `frame` | lay out margins, axes, keys and titles around a plan |
| `drawing` | put panels side by side: `draw` |
| `export` | write compact SVG for a page or a file, PDF and PNG for a paper |

The layout is computed once, from the data and from text widths. This is ten times faster than
matplotlib's constrained layout, which draws and measures repeatedly.
"""

from holdfast.trace.figures.drawing import draw
from holdfast.trace.figures.export import standalone, svg, write_paper

__all__ = ["draw", "standalone", "svg", "write_paper"]
