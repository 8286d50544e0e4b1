"use strict";
// The loss as a chart that can be zoomed, and the profile. Beside each is the same without a script: a drawing, a table.

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

// The profile: one chart a metric, the mean within the band from the lowest to the highest device.
const profile = document.getElementById("profile-charts");
const PROFILE_MS = 15000;
let profileCharts = [];
let profileAt = -PROFILE_MS;

function amount(value, unit) {
  if (value === null || value === undefined) return "";
  if (!unit.startsWith("B")) return `${Number(value.toPrecision(4))} ${unit}`;
  const power = Math.max(0, Math.min(5, Math.floor(Math.log10(Math.abs(value) || 1) / 3)));
  return `${Number((value / 1000 ** power).toPrecision(3))} ${["", "k", "M", "G", "T", "P"][power]}${unit}`;
}

function profileChart(curve) {
  const box = document.createElement("article");
  const title = document.createElement("h3");
  title.textContent = curve.metric.replaceAll("_", " ");
  const meaning = document.createElement("p");
  meaning.className = "small muted";
  meaning.textContent = curve.meaning;
  box.append(title, meaning);
  profile.append(box);
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--hair") }, ticks: { stroke: colour("--hair") } };
  const edge = { stroke: colour("--c0"), width: 0.5, points: { show: false } };
  const numbers = (plot, values) => values.map((value) => amount(value, curve.unit));
  return new uPlot({
    width: box.clientWidth, height: 160, legend: { show: false }, cursor: { show: false },
    axes: [axis, { ...axis, size: 84, values: numbers }],
    series: [{}, { ...edge, label: "lowest" }, { stroke: colour("--c0"), width: 2, label: "mean", points: { show: curve.mean.length < 2 } }, { ...edge, label: "highest" }],
    bands: [{ series: [3, 1], fill: `${colour("--c0")}33` }],
  }, [curve.times_s, curve.low, curve.mean, curve.high], box);
}

async function drawProfile(isDue) {
  if (!isDue && performance.now() - profileAt < PROFILE_MS) return;
  profileAt = performance.now();
  const answer = await fetch(profile.dataset.source);
  if (!answer.ok) return;
  const { curves } = await answer.json();
  if (!curves.length) return;
  for (const one of profileCharts) one.destroy();
  profile.replaceChildren();
  profile.hidden = false;
  profileCharts = curves.map(profileChart);
}

if (profile) {
  drawProfile(true);
  document.addEventListener("holdfast:fresh", () => drawProfile(false));
  document.addEventListener("holdfast:theme", () => drawProfile(true));
  addEventListener("resize", () => { for (const one of profileCharts) one.setSize({ width: one.root.parentElement.clientWidth, height: 160 }); });
}

if (holder) {
  draw();
  document.addEventListener("holdfast:fresh", draw);
  document.addEventListener("holdfast:theme", draw);
  addEventListener("resize", () => { if (chart) chart.setSize({ width: holder.clientWidth, height: 280 }); });
}
