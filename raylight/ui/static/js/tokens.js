// The tokens of a rollout, coloured by what is known of each. Only the blocks in view are in the document.

import { get, runPath, setQuery } from "./api.js";
import { color } from "./chart.js";
import { empty, h, recorded } from "./dom.js";
import { count, number } from "./format.js";

const BLOCK = 512;
const PAGE = 4096;
const BINS = 512;
const KEPT_PAGES = 16;
const NAMES = { logprob: "log-prob of the engine", learner_logprob: "log-prob of the learner", difference: "difference of both", version: "weight version", advantage: "advantage", trained: "trained" };
const KINDS = ["prompt", "sampled", "observation"];

/** Return the token view of a rollout, at the row, colour and token that the address names. */
export async function tokenView(run, rollout, query, signal) {
  if (!rollout.rows.length) return empty("No call of this rollout has tokens.");
  const view = new TokenView(run, rollout, signal);
  const call = rollout.rows.findIndex(({ calls }) => query.get("call") in calls);
  if (query.get("by") in NAMES) view.by = query.get("by");
  await view.choose(call >= 0 ? call : Math.min(Math.max(Number(query.get("row")) || 0, 0), rollout.rows.length - 1));
  const token = call >= 0 ? rollout.rows[call].calls[query.get("call")] : query.get("token");
  if (token !== null) requestAnimationFrame(() => view.goTo(Number(token) || 0));
  return view.elements();
}

class TokenView {
  constructor(run, rollout, signal) {
    Object.assign(this, { run, rollout, signal, row: 0, total: 0, by: rollout.advantage === null ? "logprob" : "advantage" });
    this.pages = new Map();
    this.body = h("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
    this.details = h("dl", { class: "facts token-facts", "aria-live": "polite" });
    this.strip = h("canvas", { class: "strip", role: "img", "aria-label": "overview of all tokens; a click goes to a place" });
    this.legend = h("span", { class: "aside" });
    this.watch = new IntersectionObserver((entries) => entries.forEach((entry) => (entry.isIntersecting ? this.fill(entry.target) : this.clear(entry.target))), { rootMargin: "600px" });
    this.resize = new ResizeObserver(() => this.drawStrip());
    this.resize.observe(this.strip);
    this.body.addEventListener("mouseover", (event) => this.point(event.target));
    this.body.addEventListener("focusin", (event) => this.point(event.target));
    this.body.addEventListener("keydown", (event) => this.move(event));
    this.strip.addEventListener("click", (event) => this.goTo(Math.floor((event.offsetX / this.strip.clientWidth) * this.total)));
    signal.addEventListener("abort", () => { this.watch.disconnect(); this.resize.disconnect(); });
  }

  elements() {
    const rows = h("label", {}, "row ", h("select", { onchange: (event) => { this.choose(event.target.selectedIndex); setQuery({ row: this.row, call: null, token: null }); } },
      this.rollout.rows.map((row) => h("option", { selected: row.row === this.row }, rowTitle(row)))));
    const by = h("label", {}, "colour ", h("select", { onchange: (event) => { this.by = event.target.value; setQuery({ by: this.by }); this.recolor(); } },
      Object.entries(NAMES).map(([name, title]) => h("option", { value: name, selected: name === this.by }, title))));
    const place = h("input", { type: "number", min: "0", placeholder: "0", onchange: (event) => this.goTo(Number(event.target.value)) });
    return [h("div", { class: "bar controls" }, rows, by, h("label", {}, "go to token ", place), this.legend), this.strip, this.details, this.body];
  }

  path(...parts) { return runPath(this.run, "rollouts", this.rollout.id, ...parts); }

  /** Show a row. */
  async choose(row) {
    this.row = row;
    this.pages.clear();
    const { total, columns } = await get(this.path("token_summary"), this.signal, { row, bins: BINS });
    this.total = total;
    this.summary = columns;
    this.limits = Object.fromEntries(Object.keys(NAMES).map((name) => [name, largest(columns[name] ?? [])]));
    this.watch.disconnect();
    const blocks = Array.from({ length: Math.ceil(total / BLOCK) }, (_, i) => h("div", { class: "block", "data-block": String(i) }));
    this.body.replaceChildren(...blocks);
    this.details.replaceChildren(h("div", {}, h("dt", {}, "token"), h("dd", {}, "point at one, or move with the arrow keys")));
    blocks.forEach((block) => { block.style.minHeight = "12em"; this.watch.observe(block); });
    this.recolor();
  }

  /** Return the columns of the page with a token. */
  page(offset) {
    const start = Math.floor(offset / PAGE) * PAGE;
    if (!this.pages.has(start)) {
      if (this.pages.size >= KEPT_PAGES) this.pages.delete(this.pages.keys().next().value);
      const page = get(this.path("tokens"), this.signal, { row: this.row, offset: start, limit: PAGE });
      this.pages.set(start, page);
      page.catch(() => this.pages.delete(start)); // the next look asks again
    }
    return this.pages.get(start);
  }

  async fill(block) {
    if (block.childElementCount) return;
    const first = Number(block.dataset.block) * BLOCK, row = this.row;
    block.dataset.wanted = "yes";
    let page;
    try {
      page = await this.page(first);
    } catch (error) {
      if (error.name !== "AbortError") block.replaceChildren(empty(error.message));
      return;
    }
    if (row !== this.row || block.dataset.wanted !== "yes" || block.childElementCount) return;
    const at = first - page.offset, end = Math.min(at + BLOCK, page.columns.id.length);
    const spans = [];
    for (let i = at; i < end; i++) spans.push(this.token(page.columns, i, page.offset + i));
    spans[0]?.setAttribute("tabindex", "0");
    block.replaceChildren(...spans);
    block.style.minHeight = "";
  }

  /** Empty a block that is far from view, and keep its height. */
  clear(block) {
    block.dataset.wanted = "";
    if (!block.childElementCount) return;
    block.style.minHeight = `${block.offsetHeight}px`;
    block.replaceChildren();
  }

  token(columns, i, position) {
    const value = columns.text[i];
    const shown = value === null ? `${columns.id[i]} ` : value === "" ? "∅" : value.replaceAll("\n", "↵\n");
    const span = h("span", { class: `token ${KINDS[columns.kind[i]]}${columns.trained[i] ? " trained" : ""}`, tabindex: "-1", "data-position": String(position) }, recorded(shown));
    span.facts = {
      position, id: columns.id[i], text: value === null ? "–" : JSON.stringify(value), kind: KINDS[columns.kind[i]], call: columns.call[i] ?? "–",
      logprob: columns.logprob[i], learner_logprob: columns.learner_logprob[i], version: columns.version[i], advantage: columns.advantage[i], trained: columns.trained[i],
      difference: columns.logprob[i] === null || columns.learner_logprob[i] === null ? null : columns.learner_logprob[i] - columns.logprob[i],
    };
    this.paint(span);
    return span;
  }

  paint(span) {
    span.style.backgroundColor = shade(this.by, span.facts[this.by], this.limits[this.by]) ?? "";
  }

  recolor() {
    for (const span of this.body.querySelectorAll(".token")) this.paint(span);
    const limit = this.limits[this.by];
    const has = (this.summary[this.by] ?? []).some((value) => value !== null);
    this.legend.replaceChildren(...(has ? scale(this.by, limit) : ["not recorded for this rollout"]));
    this.drawStrip();
  }

  point(target) {
    const span = target.closest?.(".token");
    if (!span) return;
    const { facts } = span;
    const rows = { position: facts.position, token: `${facts.text} (${facts.id})`, kind: facts.kind, call: facts.call, ...Object.fromEntries(Object.entries(NAMES).map(([name, title]) => [title, name === "trained" ? (facts.trained ? "yes" : "no") : number(facts[name])])) };
    this.details.replaceChildren(...Object.entries(rows).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, recorded(String(value))))));
  }

  /** Move the focus with the arrow keys. */
  move(event) {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const next = step && event.target[step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  async goTo(position) {
    const place = Math.min(Math.max(position, 0), this.total - 1);
    const block = this.body.children[Math.floor(place / BLOCK)];
    block.scrollIntoView({ block: "center" });
    await this.fill(block);
    const token = block.querySelector(`[data-position="${place}"]`);
    token?.scrollIntoView({ block: "center" });
    token?.focus({ preventScroll: true });
    setQuery({ token: place, row: this.row, call: null });
  }

  drawStrip() {
    const { strip, summary } = this;
    const width = strip.clientWidth, height = strip.clientHeight;
    if (!width || !summary) return;
    strip.width = width;
    strip.height = height;
    const pen = strip.getContext("2d"), bins = summary.kind.length;
    for (let i = 0; i < bins; i++) {
      const left = (i * width) / bins, wide = Math.max(width / bins, 1);
      pen.fillStyle = summary.kind[i] > 0 ? color("--sampled") : color("--line");
      pen.fillRect(left, height - 5, wide, 5);
      const value = summary[this.by]?.[i] ?? null;
      const fill = shade(this.by, value, this.limits[this.by]);
      if (!fill) continue;
      pen.fillStyle = fill;
      pen.fillRect(left, 0, wide, height - 7);
    }
  }
}

const rowTitle = ({ row, tokens, trained, calls }) =>
  `${row}: ${number(tokens)} tokens, ${trained ? `${number(trained)} trained` : "not trained"}, ${count(Object.keys(calls).length, "call")}`;

/** Return the legend of a colour. */
function scale(by, limit) {
  if (by === "version") return ["a colour for each version"];
  if (by === "trained") return [swatch(by, 1, 1), "trained"];
  const marks = by === "logprob" || by === "learner_logprob" ? [0, -limit / 2, -limit] : [-limit, -limit / 2, 0, limit / 2, limit];
  return marks.map((value) => [swatch(by, value, limit), number(value, 3), " "]).flat();
}

function swatch(by, value, limit) {
  const box = h("span", { class: "swatch colour" });
  box.style.backgroundColor = shade(by, value, limit) ?? "";
  return box;
}

/** Return the largest size of some values, which the strongest colour stands for. */
const largest = (values) => values.reduce((most, value) => (value === null ? most : Math.max(most, Math.abs(value))), 0) || 1;

/** Return the colour of a value; null for none. */
function shade(by, value, limit) {
  if (value === null || value === undefined) return null;
  if (by === "version") return `hsl(${(value * 67) % 360} 70% 55% / 0.35)`;
  if (by === "trained") return value ? "hsl(150 65% 45% / 0.35)" : null;
  const strength = Math.min(Math.abs(value) / limit, 1) * 0.75;
  if (strength < 0.01) return null;
  if (by === "logprob" || by === "learner_logprob") return `hsl(28 95% 52% / ${strength})`;
  return value > 0 ? `hsl(150 65% 42% / ${strength})` : `hsl(352 80% 56% / ${strength})`;
}
