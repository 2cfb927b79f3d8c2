// Charts: curves with intervals, stacked areas and scatter plots.

import { h } from "./dom.js";
import { number, percent } from "./format.js";

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
 * @param {{sync?: string, log?: boolean, stacked?: boolean, height?: number, wide?: boolean,
 *   open?: function(number)}} options `open` is called with the step of a click.
 */
export class Chart {
  constructor(title, options = {}) {
    this.title = title;
    this.options = options;
    this.plot = null;
    this.box = h("div", { class: "plot" });
    this.element = h("figure", { class: options.wide ? "chart wide" : "chart" }, h("figcaption", {}, title), this.box);
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
    const { open } = this.options;
    if (open) this.listenForClicks(open);
  }

  /** Call `open` with the step under the pointer at a click that is not the end of a drag. */
  listenForClicks(open) {
    const { over } = this.plot;
    let pressed = 0;
    over.classList.add("clickable");
    over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    over.addEventListener("click", (event) => {
      const { idx } = this.plot.cursor;
      if (Math.abs(event.clientX - pressed) < 4 && idx !== null && idx !== undefined) open(this.plot.data[0][idx]);
    });
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
  const data = [x], series = [stepSeries(x)], bands = [];
  const positive = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
  curves.forEach((curve, index) => {
    const stroke = curve.color ?? seriesColor(index);
    data.push(positive(curve.values));
    series.push({ label: curve.label, stroke, width: 2, spanGaps: true, points: { show: curve.points || undefined, size: 5 }, value: shownValue(curve.values) });
    if (!curve.low) return;
    const at = data.length;
    data.push(positive(curve.high), positive(curve.low));
    const hidden = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false }, class: "interval" };
    series.push({ ...hidden, label: `${curve.label} high` }, { ...hidden, label: `${curve.label} low` });
    bands.push({ series: [at, at + 1], fill: `color-mix(in srgb, ${stroke} 18%, transparent)` });
  });
  return { data, series, bands };
}

/** Return the legend's text of a curve: its value at the pointer, or the last one. */
function shownValue(values) {
  return (_, __, ___, i) => number(i === null || i === undefined ? values.findLast((value) => value !== null && value !== undefined) : values[i]);
}

const stepSeries = (x) => ({ label: "step", value: (_, value) => number(value ?? x.at(-1)) });

/** Return uPlot's data and series of areas on top of one another. */
function stack(x, curves) {
  const sums = x.map(() => 0);
  const layers = curves.map((curve) => x.map((_, i) => (sums[i] += curve.values[i] ?? 0)));
  const series = [stepSeries(x)], bands = [];
  curves.forEach((curve, index) => {
    const stroke = seriesColor(index);
    series.push({ label: curve.label, stroke, width: 1, fill: index ? undefined : `color-mix(in srgb, ${stroke} 45%, transparent)`, points: { show: false }, value: shownValue(curve.values) });
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

const PLACE = { left: 44, right: 44, top: 8, bottom: 24 };
/** Distance in pixels from which a point is chosen. */
const NEAR = 14;
/** Values up to which the points of an equal value are spread over most of the way to the next value, and their share is shown. */
const FEW = 12;
const MAX_TICKS = 4;

/**
 * Return a scatter plot.
 * @param {string} title
 * @param {{x: number[], y: number[], isGood: boolean[], isRing: boolean[]}} points
 * @param {function(number): string} describe returns the text of a point at the pointer.
 * @param {function(number)} open is called with the point of a click.
 */
export function scatter(title, points, describe, open) {
  const canvas = h("canvas", { role: "img", "aria-label": `${title}, ${points.x.length} rollouts` });
  const tip = h("div", { class: "tip", hidden: true });
  let shown = [];
  const draw = () => { shown = drawPoints(canvas, points); };
  const nearest = (event) => shown.reduce((best, point) => {
    const distance = Math.hypot(point.x - event.offsetX, point.y - event.offsetY);
    return distance < best.distance ? { distance, point } : best;
  }, { distance: NEAR, point: null }).point;
  canvas.addEventListener("mousemove", (event) => {
    const point = nearest(event);
    tip.hidden = !point;
    canvas.classList.toggle("clickable", Boolean(point));
    if (!point) return;
    tip.textContent = describe(point.i);
    tip.style.left = `${Math.min(point.x, canvas.clientWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${point.y + canvas.offsetTop + 10}px`;
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (event) => { const point = nearest(event); if (point) open(point.i); });
  new ResizeObserver(draw).observe(canvas);
  const key = h("span", { class: "legend" }, h("span", {}, h("span", { class: "swatch good" }), "succeeded"), h("span", {}, h("span", { class: "swatch bad" }), "others"), points.isRing.some((isRing, i) => isRing && points.x[i] !== null) ? h("span", {}, h("span", { class: "swatch ring" }), "validation") : null);
  return h("figure", { class: "chart scatter" }, h("figcaption", { class: "bar" }, title, h("span", { class: "spacer" }), key), canvas, tip);
}

/** Draw points and axes; return the places of the points. */
function drawPoints(canvas, { x, y, isGood, isRing }) {
  const width = canvas.clientWidth, height = canvas.clientHeight, ratio = devicePixelRatio || 1;
  if (!width) return [];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui";
  pen.fillStyle = color("--text-soft");
  const known = x.map((_, i) => i).filter((i) => x[i] !== null && y[i] !== null);
  if (!known.length) {
    pen.fillText("no rollout has both", PLACE.left, 30);
    return [];
  }
  const rangeX = spread(known.map((i) => x[i])), rangeY = spread(known.map((i) => y[i]));
  const toX = (value) => PLACE.left + rangeX.part(value) * (width - PLACE.left - PLACE.right);
  const toY = (value) => height - PLACE.bottom - rangeY.part(value) * (height - PLACE.top - PLACE.bottom);
  pen.strokeStyle = color("--line");
  pen.textAlign = "center";
  for (const tick of rangeX.ticks) pen.fillText(number(tick, 3), toX(tick), height - 8);
  pen.textAlign = "right";
  for (const tick of rangeY.ticks) {
    pen.fillText(number(tick, 3), PLACE.left - 6, toY(tick) + 4);
    pen.beginPath(); pen.moveTo(PLACE.left, toY(tick)); pen.lineTo(width - PLACE.right, toY(tick)); pen.stroke();
  }
  pen.textAlign = "left";
  for (const [value, n] of rangeY.counts) pen.fillText(percent(n, known.length), width - PLACE.right + 6, toY(value) + 4);
  const isMany = known.length > 1000, radius = isMany ? 2 : 3;
  pen.globalAlpha = isMany ? 0.4 : 0.7;
  const good = seriesColor(0), bad = color("--alarm");
  const spreadX = rangeX.reach * (width - PLACE.left - PLACE.right), spreadY = rangeY.reach * (height - PLACE.top - PLACE.bottom);
  return known.map((i) => {
    const place = { i, x: toX(x[i]) + spreadX * offset(i, 0.7549), y: toY(y[i]) + spreadY * offset(i, 0.5698) };
    pen.fillStyle = pen.strokeStyle = isGood[i] ? good : bad;
    pen.beginPath(); pen.arc(place.x, place.y, radius, 0, 7);
    isRing[i] ? pen.stroke() : pen.fill();
    return place;
  });
}

/** Return a number from -1 to 1 that differs between neighbours and is always the same for an index. */
const offset = (i, factor) => 2 * ((i * factor) % 1) - 1;

/**
 * Return the ticks of an axis with some values, and the function from a value to its place between 0 and 1. Of few
 * values also how many points each has, and the part of the axis over which its points may be spread to each side.
 */
function spread(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  const sorted = [...counts.keys()].sort((a, b) => a - b), low = sorted[0], high = sorted.at(-1);
  const isFew = sorted.length <= FEW, gap = isFew ? Math.min(...sorted.slice(1).map((value, i) => value - sorted[i])) : 0;
  const margin = low === high ? 1 : Math.max(gap / 2, (high - low) / 12), span = high - low + 2 * margin;
  const part = (value) => (value - low + margin) / span;
  return { part, ticks: sorted.length <= MAX_TICKS ? sorted : [low, (low + high) / 2, high], counts: isFew ? counts : new Map(), reach: isFew ? Math.min(0.4 * gap / span, 0.4) : 0 };
}
