"use strict";
// The loss as a chart that can be zoomed. The drawing below it is the same, for a browser without scripts.

const holder = document.getElementById("loss-chart");
const SIGNS = { spike: "✶", rollback: "◀", restart: "|" };
let chart = null;

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function table(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.flatMap((line) => ["low", "high"].map((name) => {
    const column = new Array(steps.length).fill(undefined);
    line.steps.forEach((step, index) => { column[at.get(step)] = line[name][index]; });
    return column;
  }));
  return [steps, ...columns];
}

function marks(found) {
  return { hooks: { draw: [(plot) => {
    const pen = plot.ctx;
    pen.save();
    pen.font = `${12 * devicePixelRatio}px sans-serif`;
    pen.textAlign = "center";
    for (const mark of found) {
      const x = plot.valToPos(mark.step, "x", true);
      if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
      pen.strokeStyle = colour(mark.kind === "rollback" ? "--muted" : "--bad");
      pen.fillStyle = colour("--ink");
      pen.setLineDash([4, 4]);
      pen.beginPath();
      pen.moveTo(x, plot.bbox.top);
      pen.lineTo(x, plot.bbox.top + plot.bbox.height);
      pen.stroke();
      pen.fillText(SIGNS[mark.kind], x, plot.bbox.top - 4);
    }
    pen.restore();
  }] } };
}

async function draw() {
  const answer = await fetch(holder.dataset.source);
  if (!answer.ok) return;
  const found = await answer.json();
  const drawing = document.getElementById("loss-drawing");
  if (!found.lines.length) return;
  const zoom = chart && { min: chart.scales.x.min, max: chart.scales.x.max };
  const wasWhole = !chart || (zoom.min <= chart.data[0][0] && zoom.max >= chart.data[0].at(-1));
  if (chart) chart.destroy();
  holder.hidden = false;
  if (drawing) drawing.setAttribute("hidden", "");
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--hair") }, ticks: { stroke: colour("--hair") } };
  chart = new uPlot({
    width: holder.clientWidth, height: 280, padding: [18, 12, 0, 0], scales: { x: { time: false } },
    legend: { show: false }, axes: [axis, axis], plugins: [marks(found.marks)],
    series: [{ label: "step" }, ...found.lines.flatMap((line, index) => ["lowest", "highest"].map((name) => ({
      label: `attempt ${line.attempt}, ${name}`, stroke: colour(`--c${index % 4}`), width: 1.3, spanGaps: true, points: { show: line.steps.length < 2 },
    })))],
  }, table(found.lines), holder);
  if (!wasWhole) chart.setScale("x", zoom);
}

if (holder) {
  draw();
  document.addEventListener("holdfast:fresh", draw);
  document.addEventListener("holdfast:theme", draw);
  addEventListener("resize", () => { if (chart) chart.setSize({ width: holder.clientWidth, height: 280 }); });
}
