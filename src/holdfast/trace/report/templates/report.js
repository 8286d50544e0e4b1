"use strict";
// Makes the drawn charts explorable: the page is complete without this script.
(() => {
  const panels = JSON.parse(document.getElementById("panel-data").textContent);
  const dashes = JSON.parse(document.getElementById("dash-data").textContent);
  const open = new Map();
  const STYLES = ["solid", "dashed", "dotted", "dashed", "dashed"];

  // --- numbers, as the drawings show them -------------------------------------------------------------------------

  const plain = (value, digits = 4) =>
    new Intl.NumberFormat("en", { maximumSignificantDigits: Math.abs(value) >= 1000 ? Math.max(digits, 4) : digits }).format(value);
  const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"]];
  const duration = (seconds, digits) => {
    if (!seconds) return "0";
    const [size, unit] = UNITS.find(([size]) => Math.abs(seconds) >= size * 0.9995) || UNITS[4];
    return `${plain(seconds / size, digits)} ${unit}`;
  };
  const number = (value, digits) => {
    const size = Math.abs(value);
    if (size && (size < 1e-4 || size >= 1e12)) return value.toExponential(2);
    for (const [unit, suffix] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= unit && digits) return plain(value / Math.min(unit, unit === 1e4 ? 1e3 : unit), digits) + suffix;
    return plain(value, digits);
  };
  const two = (value) => String(value).padStart(2, "0");
  const moment = (seconds) => {
    const at = new Date(seconds * 1000);
    return `${at.getUTCFullYear()}-${two(at.getUTCMonth() + 1)}-${two(at.getUTCDate())} ${two(at.getUTCHours())}:${two(at.getUTCMinutes())}`;
  };
  const timed = (axis) => axis.scale !== "time" && /\((s|seconds)\)/.test(axis.label);
  const said = (axis, digits) => (value) => {
    if (value === null || value === undefined || !isFinite(value)) return "–";
    if (axis.scale === "time") return moment(value);
    if (axis.ticks) return axis.ticks[Math.round(value)] || "";
    return timed(axis) ? duration(value, digits) : number(value, digits);
  };

  const unpack = ({ unit, log, steps }) => {
    let at = 0;
    return steps.map((step) => {
      if (step === null) return null;
      at += step;
      return log ? 10 ** (at * unit) : at * unit;
    });
  };

  // --- axes ---------------------------------------------------------------------------------------------------------

  const DURATIONS = [1e-3, 0.01, 0.1, 1, 10, 60, 600, 3600, 36e3, 86400, 864e3, 864e4, 864e5];
  const logarithmic = (axis) => axis.scale === "log" || axis.scale === "log2";

  // Round places of a logarithmic axis; as many as have room.
  const places = (axis) => (u, number_, low, high) => {
    const found = [];
    const base = axis.scale === "log2" ? 2 : 10;
    if (timed(axis)) found.push(...DURATIONS);
    else for (let power = Math.floor(Math.log(low) / Math.log(base)); base ** power <= high; power++) found.push(base ** power);
    let inside = found.filter((place) => place >= low * 0.999 && place <= high * 1.001);
    if (inside.length < 3) {
      const step = 10 ** Math.floor(Math.log10((high - low) / 3));
      const wide = [1, 2, 5, 10].map((digit) => digit * step).find((size) => (high - low) / size <= 6);
      inside = [];
      for (let place = Math.ceil(low / wide) * wide; place <= high; place += wide) inside.push(place);
    }
    const every = Math.ceil(inside.length / 8);
    return inside.filter((_, index) => index % every === 0);
  };
  const symmetric = (u, number_, low, high) => {
    const found = [0];
    for (let power = 0; 10 ** power <= Math.max(Math.abs(low), Math.abs(high)); power++) found.push(10 ** power, -(10 ** power));
    return found.filter((place) => place >= low && place <= high).sort((a, b) => a - b);
  };

  // What changed since the tick before, as on the drawing: the hour, the day, the year.
  const MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ");
  const dates = (u, splits, number_, space, step) => splits.map((split, index) => {
    const at = new Date(split * 1000), before = index ? new Date(splits[index - 1] * 1000) : null;
    const day = `${at.getUTCDate()} ${MONTHS[at.getUTCMonth()]}`;
    const newDay = !before || before.getUTCDate() !== at.getUTCDate();
    const newYear = !before || before.getUTCFullYear() !== at.getUTCFullYear();
    if (step < 86400) return `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}${newDay ? `\n${day}` : ""}`;
    const text = step < 28 * 86400 ? day : MONTHS[at.getUTCMonth()];
    return newYear ? `${text}\n${at.getUTCFullYear()}` : text;
  });

  const scaleOf = (axis) => ({
    time: axis.scale === "time",
    distr: logarithmic(axis) ? 3 : axis.scale === "symlog" ? 4 : 1,
    log: axis.scale === "log2" ? 2 : 10,
    range: (u, low, high) => (low === null ? [axis.low, axis.high] : [low, high]),
    auto: false,
    min: axis.low,
    max: axis.high,
  });

  const axisOf = (axis, colour, side) => {
    const made = {
      stroke: colour("muted"),
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      label: timed(axis) ? axis.label.replace(/\s*\((s|seconds)\)/, "") : axis.label,
      labelSize: 18,
      size: side === "x" ? 28 : 58,
      gap: 4,
      grid: { stroke: colour("hair"), width: 1 },
      ticks: { show: false },
    };
    made.values = axis.scale === "time" ? dates : (u, splits) => splits.map(said(axis, 3));
    if (axis.scale === "time") made.size = 40;
    if (logarithmic(axis)) Object.assign(made, { splits: places(axis), filter: (u, splits) => splits });
    if (axis.scale === "symlog") Object.assign(made, { splits: symmetric, filter: (u, splits) => splits });
    return made;
  };

  // --- curves -------------------------------------------------------------------------------------------------------

  const table = (each, panel) => {
    const x = unpack(each.x), y = unpack(each.y);
    if (logarithmic(panel.x)) {
      // A step comes in from the left edge at the height it has there, so the share of zeros is seen.
      let last = -1;
      x.forEach((value, index) => { if (value === null) last = index; });
      if (last >= 0 && each.style === "step") { x.splice(0, last, panel.x.low); y.splice(0, last); x.splice(1, 1); }
      for (let index = x.length - 1; index >= 0; index--) if (x[index] === null) { x.splice(index, 1); y.splice(index, 1); }
    }
    if (each.whole && x.length) {
      if (x[0] > panel.x.low) { x.unshift(panel.x.low); y.unshift(0); }
      if (x[x.length - 1] < panel.x.high) { x.push(panel.x.high); y.push(y[y.length - 1]); }
    }
    return [x, y];
  };

  const curves = (panel, colour) => {
    const tables = [], series = [{ label: "at", value: (u, value) => said(panel.x, 4)(value) }], bands = [];
    for (const each of panel.series) {
      const stroke = colour(`s${each.colour}`);
      const points = each.style === "points";
      tables.push(table(each, panel));
      series.push({
        label: each.label,
        stroke,
        width: each.compared || each.x.steps.length > 600 ? 1.2 : 2,
        dash: dashes[each.dash].map((length) => length * 1.6),
        paths: points ? () => null : each.style === "step" ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear(),
        points: { show: points || tables.at(-1)[0].length < 2, size: 5, fill: stroke },
        value: (u, value) => said(panel.y, 4)(value),
        style: each.style,
        stripe: each.dash,
      });
      if (each.low) {
        const x = unpack(each.x), at = series.length;
        tables.push([x, unpack(each.high)], [x, unpack(each.low)]);
        for (let side = 0; side < 2; side++) series.push({ class: "edge", width: 0, points: { show: false }, label: "" });
        bands.push({ series: [at, at + 1], fill: colour(`s${each.colour}`) + "2e" });
      }
    }
    return { data: uPlot.join(tables, tables.map(() => [0, 2])), series, bands };
  };

  // The value of a series at the cursor: of a step, what it holds there; else its nearest point.
  const indexAt = (u, number_, nearest, at) => {
    const values = u.data[number_], x = u.data[0];
    const there = (index) => values[index] !== null && values[index] !== undefined;
    if (number_ === 0) return nearest;
    if (u.series[number_].style === "step") {
      let index = x[nearest] > at ? nearest - 1 : nearest;
      while (index >= 0 && !there(index)) index--;
      return index < 0 ? null : index;
    }
    for (let away = 0; away < x.length; away++) {
      if (there(nearest - away)) return nearest - away;
      if (there(nearest + away)) return nearest + away;
    }
    return nearest;
  };

  const reset = (u, panel) => u.batch(() => {
    u.setScale("x", { min: panel.x.low, max: panel.x.high });
    u.setScale("y", { min: panel.y.low, max: panel.y.high });
  });

  // Zoom about the middle (or the cursor), in what the axis shows: logarithms where it is logarithmic.
  const zoom = (u, panel, factor) => {
    const { min, max } = u.scales.x;
    const middle = u.cursor.left >= 0 ? u.cursor.left / u.over.clientWidth : 0.5;
    const width = u.over.clientWidth;
    const low = u.posToVal(width * middle * (1 - factor), "x"), high = u.posToVal(width * (middle + (1 - middle) * factor), "x");
    if (high > low && isFinite(low) && isFinite(high)) u.setScale("x", { min: Math.max(low, panel.x.low), max: Math.min(high, panel.x.high) });
    return [min, max];
  };

  const keys = (u, panel, close) => (event) => {
    const width = u.over.clientWidth;
    const left = u.cursor.left >= 0 ? u.cursor.left : width / 2;
    const act = {
      ArrowLeft: () => u.setCursor({ left: Math.max(left - width / 60, 0), top: u.over.clientHeight / 2 }),
      ArrowRight: () => u.setCursor({ left: Math.min(left + width / 60, width), top: u.over.clientHeight / 2 }),
      "+": () => zoom(u, panel, 0.6),
      "=": () => zoom(u, panel, 0.6),
      "-": () => zoom(u, panel, 1 / 0.6),
      0: () => reset(u, panel),
      Escape: close,
    }[event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  };

  const explore = (figure) => {
    const key = figure.dataset.panel, panel = panels[key];
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(`--${name}`).trim();
    const chart = document.createElement("div");
    chart.className = "chart";
    chart.tabIndex = 0;
    chart.setAttribute("role", "group");
    const name = figure.querySelector("svg").getAttribute("aria-label");
    chart.setAttribute("aria-label", `${name}, interactive. Arrow keys move the cursor, plus and minus zoom, 0 resets, Escape closes.`);
    const height = Math.max(300, figure.querySelector(".drawing").clientHeight - 40);
    const { data, series, bands } = curves(panel, colour);
    figure.append(chart);
    figure.classList.add("exploring");
    const u = new uPlot({
      width: chart.clientWidth,
      height,
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      scales: { x: scaleOf(panel.x), y: scaleOf(panel.y) },
      axes: [axisOf(panel.x, colour, "x"), axisOf(panel.y, colour, "y")],
      series, bands,
      cursor: {
        dataIdx: indexAt,
        drag: { x: true, y: true, uni: 24 },
        points: { size: 7 },
        bind: { dblclick: () => () => { reset(u, panel); return null; } },
      },
      legend: { live: true, markers: { width: 2, dash: (u, index) => STYLES[u.series[index].stripe || 0] } },
    }, data, chart);
    const hint = document.createElement("p");
    hint.className = "hint";
    hint.textContent = "Drag to zoom, double-click to reset.";
    chart.append(hint);
    const close = () => { shut(figure); figure.querySelector(".explore").focus(); };
    chart.addEventListener("keydown", keys(u, panel, close));
    const resized = new ResizeObserver(() => chart.clientWidth && u.setSize({ width: chart.clientWidth, height }));
    resized.observe(chart);
    open.set(figure, { u, chart, resized });
    figure.querySelector(".explore").textContent = "Close";
    figure.querySelector(".explore").setAttribute("aria-expanded", "true");
    return chart;
  };

  const shut = (figure) => {
    const { u, chart, resized } = open.get(figure);
    resized.disconnect();
    u.destroy();
    chart.remove();
    open.delete(figure);
    figure.classList.remove("exploring");
    figure.querySelector(".explore").textContent = "Explore";
    figure.querySelector(".explore").setAttribute("aria-expanded", "false");
  };

  for (const figure of document.querySelectorAll("[data-explorable]")) {
    const button = document.createElement("button");
    button.className = "explore";
    button.type = "button";
    button.textContent = "Explore";
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-label", `Explore ${figure.querySelector("svg").getAttribute("aria-label")}`);
    // A key moves the focus into the chart, where further keys act; a pointer needs none.
    const toggle = (event) => {
      if (open.has(figure)) return shut(figure);
      const chart = explore(figure);
      if (event.detail === 0) chart.focus({ preventScroll: true });
    };
    button.addEventListener("click", toggle);
    figure.querySelector(".drawing").addEventListener("click", toggle);
    figure.prepend(button);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const figure of [...open.keys()]) { shut(figure); explore(figure); }
  });

  // --- maps: what a cell holds ----------------------------------------------------------------------------------------

  for (const figure of document.querySelectorAll("[data-panel]")) {
    const map = panels[figure.dataset.panel];
    if (!map || map.kind !== "map" || !map.values) continue;
    const values = unpack(map.values), svg = figure.querySelector("svg");
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    figure.append(tip);
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect(), outer = figure.getBoundingClientRect();
      const [left, top, right, bottom] = map.box;
      const x = ((event.clientX - frame.left) / frame.width - left) / (right - left);
      const y = ((event.clientY - frame.top) / frame.height - top) / (bottom - top);
      const column = Math.floor(x * map.columns.length), row = Math.floor(y * map.rows.length);
      tip.hidden = column < 0 || row < 0 || column >= map.columns.length || row >= map.rows.length;
      if (tip.hidden) return;
      const value = values[row * map.columns.length + column];
      const place = [map.y, map.rows[row], map.x, map.columns[column]].filter(Boolean).join(" ");
      tip.textContent = `${place}: ${value === null ? "no data" : `${number(value)} ${map.unit}`}`;
      const half = tip.offsetWidth / 2;
      tip.style.left = `${Math.min(Math.max(event.clientX - outer.left, half), outer.width - half)}px`;
      tip.style.top = `${event.clientY - outer.top}px`;
    });
  }
})();
