// Charts: curves with intervals, stacked areas and scatter plots.

import { h } from "./dom.js";
import { number } from "./format.js";

const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const HEIGHT = 200;
const STEP_INCREMENTS = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const seriesColor = (index) => color(COLORS[index % COLORS.length]);

/** Return values smoothed by an exponential mean; nulls stay. */
export function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

/** Return the limits of an axis; a constant is drawn in the middle, near its value. */
function rangeOf(_, low, high) {
  if (low === null) return [null, null];
  const margin = Math.abs(low) / 10 || 1;
  return low === high ? [low - margin, high + margin] : uPlot.rangeNum(low, high, 0.1, true);
}

/**
 * A chart of curves over steps.
 * @param {string} title
 * @param {{label: string, values: number[], low?: number[], high?: number[], points?: boolean}[]} curves
 * @param {{sync?: string, log?: boolean, stacked?: boolean, height?: number}} options
 */
export class Chart {
  constructor(title, options = {}) {
    this.title = title;
    this.options = options;
    this.plot = null;
    this.box = h("div", { class: "plot" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, title), this.box);
    this.resize = new ResizeObserver(() => {
      const width = this.box.clientWidth;
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
    });
    this.resize.observe(this.box);
  }

  get height() { return this.options.height ?? HEIGHT; }

  /** Show curves over x. The plot is kept while the curves have the same names. */
  show(x, curves) {
    const shown = curves.filter((curve) => curve.values.some((value) => value !== null && value !== undefined));
    this.element.hidden = !shown.length || !x.length;
    if (this.element.hidden) return;
    const { data, series, bands } = this.options.stacked ? stack(x, shown) : lay(x, shown, this.options.log);
    const names = JSON.stringify([series.map((one) => one.label), this.options.log, document.documentElement.dataset.theme]);
    this.summary(shown);
    if (this.plot && this.names === names) { this.plot.setData(data); return; }
    this.plot?.destroy();
    this.plot = null;
    this.names = names;
    cancelAnimationFrame(this.frame); // only the latest curves are drawn
    this.frame = requestAnimationFrame(() => this.draw(data, series, bands));
  }

  draw(data, series, bands) {
    if (!this.box.isConnected) return;
    const axis = { stroke: color("--text-soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, font: "11px system-ui" };
    this.plot = new uPlot({
      width: this.box.clientWidth || 320,
      height: this.height,
      padding: [8, 8, 0, 0],
      scales: { x: { time: false }, y: this.options.log ? { distr: 3 } : { range: rangeOf } },
      axes: [{ ...axis, size: 30, incrs: STEP_INCREMENTS }, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3))) }],
      series,
      bands,
      legend: { live: true },
      cursor: { sync: this.options.sync ? { key: this.options.sync } : undefined, drag: { x: true, y: false } },
    }, data, this.box);
  }

  /** Describe the curves in words, for those who cannot see them. */
  summary(curves) {
    const parts = curves.map((curve) => {
      const known = curve.values.filter((value) => value !== null && value !== undefined);
      return `${curve.label} from ${number(known[0])} to ${number(known[known.length - 1])}`;
    });
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", `${this.title}: ${parts.join(", ")}`);
  }

  close() {
    this.resize.disconnect();
    this.plot?.destroy();
  }
}

/** Return uPlot's data and series of curves, each with its interval. */
function lay(x, curves, isLog) {
  const data = [x], series = [{ label: "step" }], bands = [];
  const positive = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
  curves.forEach((curve, index) => {
    const stroke = curve.color ?? seriesColor(index);
    data.push(positive(curve.values));
    series.push({ label: curve.label, stroke, width: 2, spanGaps: true, points: { show: curve.points || undefined, size: 5 }, value: (_, value) => number(value) });
    if (!curve.low) return;
    const at = data.length;
    data.push(positive(curve.high), positive(curve.low));
    const hidden = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false }, class: "interval", value: (_, value) => number(value) };
    series.push({ ...hidden, label: `${curve.label} high` }, { ...hidden, label: `${curve.label} low` });
    bands.push({ series: [at, at + 1], fill: `color-mix(in srgb, ${stroke} 18%, transparent)` });
  });
  return { data, series, bands };
}

/** Return uPlot's data and series of areas on top of one another. */
function stack(x, curves) {
  const sums = x.map(() => 0);
  const layers = curves.map((curve) => x.map((_, i) => (sums[i] += curve.values[i] ?? 0)));
  const series = [{ label: "step" }], bands = [];
  curves.forEach((curve, index) => {
    const stroke = seriesColor(index);
    const own = (plot, _, __, i) => (i === null || i === undefined ? "–" : number(curve.values[i]));
    series.push({ label: curve.label, stroke, width: 1, fill: index ? undefined : `color-mix(in srgb, ${stroke} 45%, transparent)`, points: { show: false }, value: own });
    if (index) bands.push({ series: [index + 1, index], fill: `color-mix(in srgb, ${stroke} 45%, transparent)` });
  });
  return { data: [x, ...layers], series, bands };
}

/** Return a small curve without axes, as SVG. */
export function spark(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return h("span", { class: "aside" }, "–");
  const low = Math.min(...known), high = Math.max(...known), span = high - low || 1;
  const points = known.map((value, i) => `${(100 * i) / (known.length - 1)},${22 - (20 * (value - low)) / span}`).join(" ");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("class", "spark");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `reward from ${number(known[0])} to ${number(known[known.length - 1])}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points);
  svg.append(line);
  return svg;
}

/** Return a scatter plot whose points call `open` with their index at a click. */
export function scatter(title, x, y, kinds, open) {
  const canvas = h("canvas", { role: "img", "aria-label": `${title}, ${x.length} rollouts` });
  const place = { left: 44, right: 8, top: 8, bottom: 24 };
  let shown = [];
  const draw = () => {
    const width = canvas.clientWidth, height = canvas.clientHeight, ratio = devicePixelRatio || 1;
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const known = x.map((_, i) => i).filter((i) => x[i] !== null && y[i] !== null);
    const range = (values) => [Math.min(...values), Math.max(...values)].map((v, i, all) => (all[0] === all[1] ? v + (i ? 1 : -1) : v));
    if (!known.length) { pen.fillStyle = color("--text-soft"); pen.fillText("no rollout has both", 50, 30); return; }
    const [lowX, highX] = range(known.map((i) => x[i])), [lowY, highY] = range(known.map((i) => y[i]));
    const toX = (value) => place.left + ((value - lowX) / (highX - lowX)) * (width - place.left - place.right);
    const toY = (value) => height - place.bottom - ((value - lowY) / (highY - lowY)) * (height - place.top - place.bottom);
    pen.font = "11px system-ui";
    pen.fillStyle = color("--text-soft");
    pen.strokeStyle = color("--line");
    for (const part of [0, 0.5, 1]) {
      const tickX = lowX + part * (highX - lowX), tickY = lowY + part * (highY - lowY);
      pen.textAlign = part === 1 ? "right" : part ? "center" : "left";
      pen.fillText(number(tickX, 3), toX(tickX), height - 8);
      pen.textAlign = "right";
      pen.fillText(number(tickY, 3), place.left - 6, toY(tickY) + 4);
      pen.beginPath(); pen.moveTo(place.left, toY(tickY)); pen.lineTo(width - place.right, toY(tickY)); pen.stroke();
    }
    pen.globalAlpha = known.length > 1000 ? 0.35 : 0.7;
    shown = known.map((i) => ({ i, x: toX(x[i]), y: toY(y[i]) }));
    for (const point of shown) {
      pen.fillStyle = kinds[point.i] === "succeeded" ? seriesColor(0) : color("--alarm");
      pen.beginPath(); pen.arc(point.x, point.y, 3, 0, 7); pen.fill();
    }
  };
  canvas.addEventListener("click", (event) => {
    const near = shown.reduce((best, point) => {
      const distance = Math.hypot(point.x - event.offsetX, point.y - event.offsetY);
      return distance < best.distance ? { distance, i: point.i } : best;
    }, { distance: 14, i: null });
    if (near.i !== null) open(near.i);
  });
  new ResizeObserver(draw).observe(canvas);
  return h("figure", { class: "chart scatter" }, h("figcaption", {}, title), canvas);
}
