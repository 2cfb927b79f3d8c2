// The page of a run: its state, advisories, curves, ledger, failures and settings.

import { follow, get, runPath } from "./api.js";
import { Chart, smoothed } from "./chart.js";
import { badge, empty, h, recorded, table } from "./dom.js";
import { change, count, number, percent, seconds, text } from "./format.js";

const INTERVAL = 1.96;
const LEDGER = ["trained", "masked", "auxiliary", "unselected", "dropped", "failed", "open", "unaccounted"];
const FAILURES = ["agent", "reward", "hook", "truncated", "timeout", "unresponsive", "cancelled", "infrastructure"];
/** Charts at the top: title, and metrics with their labels. In an asynchronous run the rollouts take the whole step. */
const CHARTS = [
  ["reward", { "train/reward": "training", "val/reward": "validation" }, { interval: true, height: 260, wide: true }],
  ["seconds of a step", { "time/rollout_s": "rollouts", "async/trainer_idle_s": "waiting for rollouts", "time/teacher_s": "teacher", "time/update_s": "update", "time/sync_s": "publication", "time/val_s": "evaluation" }, { stacked: true, height: 260 }],
  ["loss", { "learner/pg_loss": "policy", "critic/vf_loss": "critic" }],
  ["KL", { "learner/kl": "to the reference", "learner/teacher_kl": "to the teacher", "learner/ppo_kl": "of the update" }],
  ["entropy", { "learner/entropy": "entropy" }],
  ["gradient norm", { "learner/grad_norm": "gradient norm" }],
  ["mismatch of engine and learner", { "mismatch/logprob_abs_mean": "mean |difference|", "mismatch/kl_k3": "KL" }],
  ["staleness", { "async/staleness_mean": "mean", "async/staleness_max": "oldest" }],
  ["tokens of an answer", { "train/response_tokens": "training", "val/response_tokens": "validation" }],
  ["groups without signal", { "train/groups_without_signal": "groups" }],
  ["tokens a second", { "train/tokens_per_s": "sampled" }],
  ["failed rollouts by kind", Object.fromEntries(FAILURES.map((kind) => [`failures/${kind}`, kind])), { stacked: true, onlyAboveZero: true }],
];

/** The page of one run. */
export async function showRun({ args: [run], signal, go }) {
  const [details, { columns }] = await Promise.all([get(runPath(run), signal), get(runPath(run, "metrics"), signal)]);
  const view = new RunView(run, details, columns, go);
  signal.addEventListener("abort", () => view.close());
  follow(run, {
    metrics: ({ columns: added }) => view.add(added),
    run: (card) => view.update(card),
    rollouts: (counts) => view.count(counts),
  }, signal);
  return view.elements();
}

class RunView {
  constructor(run, details, columns, go) {
    Object.assign(this, { run, details, columns, go, charts: [], smoothing: 0, isLog: false });
    this.facts = h("dl", { class: "facts" });
    this.status = h("span");
    this.advisories = h("section", { "aria-label": "Advisories" });
    this.failures = h("section", { class: "part", "aria-label": "Failures" });
    this.counts = null;
  }

  elements() {
    const { details, run } = this;
    const grid = h("div", { class: "charts" }, CHARTS.map(([title, metrics, options = {}]) => this.chart(title, metrics, options)));
    this.show();
    this.update(details);
    this.showAdvisories(details.advisories);
    this.showFailures();
    const hasCurves = this.columns.step.length > 0;
    return [
      h("div", { class: "bar" }, h("h1", {}, run), this.status, h("span", { class: "spacer" }), this.controls()),
      h("p", { class: "aside" }, h("code", {}, details.path)),
      this.facts,
      this.advisories,
      hasCurves || details.status === "running" ? grid : empty("This run has logged no step."),
      this.ledger(),
      this.failures,
      this.allMetrics(),
      h("details", { class: "part" }, h("summary", {}, h("h2", {}, "Settings")),
        table("Settings", [{ title: "setting", cell: ([name]) => h("code", {}, name) }, { title: "value", cell: ([, value]) => recorded(text(value)) }], Object.entries(details.settings))),
    ];
  }

  controls() {
    const smoothing = h("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: "0", oninput: (event) => { this.smoothing = Number(event.target.value); this.show(); } });
    const log = h("input", { type: "checkbox", onchange: (event) => { this.isLog = event.target.checked; for (const { chart } of this.charts) chart.options.log = this.isLog && !chart.options.stacked; this.show(); } });
    return h("span", { class: "controls" }, h("label", {}, "smooth ", smoothing), h("label", {}, log, " log scale"));
  }

  chart(title, metrics, options) {
    const open = (step) => this.go(`${runPath(this.run, "rollouts")}?step=${step}`);
    const chart = new Chart(title, { sync: this.run, open, ...options });
    this.charts.push({ chart, metrics, interval: options.interval });
    return chart.element;
  }

  /** Show all charts with the rows that are known. */
  show() {
    for (const each of this.charts) this.showChart(each);
  }

  showChart({ chart, metrics, interval }) {
    const { columns } = this;
    const rows = columns.step.map((step, i) => [columns["val/step"]?.[i] ?? step, i]);
    const names = Object.keys(metrics).filter((name) => name !== (columns["async/trainer_idle_s"] ? "time/rollout_s" : "async/trainer_idle_s"));
    const used = rows.filter(([, i]) => names.some((name) => columns[name]?.[i] !== null && columns[name]?.[i] !== undefined)).sort((a, b) => a[0] - b[0]);
    const pick = (name) => used.map(([, i]) => columns[name]?.[i] ?? null);
    const curves = names.map((name) => {
      const values = pick(name);
      if (chart.options.onlyAboveZero && !values.some((value) => value > 0)) return { values: [] };
      const curve = { label: metrics[name], values: chart.options.stacked ? values : smoothed(values, this.smoothing), points: name.startsWith("val/") };
      if (!interval || this.smoothing) return curve;
      const errors = name.startsWith("val/") ? pick("val/reward_error") : standardErrors(pick("train/reward_std"), pick("train/rollouts"));
      curve.low = values.map((value, i) => (value === null || errors[i] === null ? null : value - INTERVAL * errors[i]));
      curve.high = values.map((value, i) => (value === null || errors[i] === null ? null : value + INTERVAL * errors[i]));
      return curve;
    });
    requestAnimationFrame(() => chart.show(used.map(([step]) => step), curves));
  }

  /** Take new rows of metrics. */
  add(added) {
    const before = this.columns.step.length, count = added.step.length;
    for (const name of new Set([...Object.keys(this.columns), ...Object.keys(added)])) {
      const known = this.columns[name] ?? Array(before).fill(null);
      this.columns[name] = known.concat(added[name] ?? Array(count).fill(null));
    }
    this.show();
    get(runPath(this.run)).then((details) => this.showAdvisories(details.advisories)).catch(() => {}); // the next row asks again
  }

  update(card) {
    this.card = card;
    this.status.replaceChildren(badge(card.status));
    this.showFacts();
  }

  count(counts) {
    this.counts = counts;
    this.showFacts();
    this.showFailures();
  }

  showFacts() {
    const { card, counts } = this;
    const facts = {
      step: card.step === null ? "–" : `${card.step}${card.total_steps ? ` of ${card.total_steps}` : ""}`,
      "training reward": change(card.train_reward),
      "validation reward": change(card.val_reward),
      best: number(card.best, 3),
      time: seconds(card.seconds),
      rollouts: counts ? (card.status === "running" && counts.lines === counts.known ? `${counts.decided} of ${counts.known} decided` : number(counts.known)) : (card.rollouts ?? "–"),
      failed: card.rollouts_failed ?? "–",
      agent: recorded(card.agent ?? "–"),
      algorithm: card.algorithm ?? "–",
      model: recorded(String(card.model ?? "–").split("/").pop()),
    };
    this.facts.replaceChildren(...Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  showAdvisories(advisories) {
    const card = (item) =>
      h("div", { class: `advisory ${item.level}${item.is_active ? "" : " past"}` },
        h("p", {}, badge(item.is_active ? item.level : "past", item.is_active ? item.level : "past"), " ", recorded(item.text)),
        h("p", {}, recorded(item.remedy)),
        h("p", { class: "aside" }, `steps ${item.first_step} to ${item.last_step}`));
    const active = advisories.filter((item) => item.is_active), past = advisories.filter((item) => !item.is_active);
    this.advisories.replaceChildren(
      ...active.map(card),
      ...(past.length ? [h("details", {}, h("summary", {}, count(past.length, "advisory that no longer holds", "advisories that no longer hold")), past.map(card))] : []));
  }

  /** All metrics by their category; the charts of one are drawn when it is opened. */
  allMetrics() {
    const categories = groupBy(this.details.metric_names);
    const parts = [...categories].map(([category, names]) => {
      const grid = h("div", { class: "charts" });
      return h("details", { ontoggle: (event) => {
        if (!event.target.open || grid.childElementCount) return;
        for (const name of names) {
          grid.append(this.chart(name, { [name]: name }, { height: 140 }));
          this.showChart(this.charts.at(-1));
        }
      } }, h("summary", {}, `${category} (${names.length})`), grid);
    });
    return parts.length ? h("section", { class: "part" }, h("h2", {}, "All metrics"), parts) : null;
  }

  ledger() {
    const tokens = this.details.tokens;
    const kinds = LEDGER.filter((kind) => tokens[kind]);
    if (!kinds.length) return null;
    const bar = h("div", { class: "ledger", role: "img", "aria-label": kinds.map((kind) => `${kind} ${percent(tokens[kind], tokens.generated)}`).join(", ") });
    for (const kind of kinds) {
      const part = h("span", { class: kind, title: `${kind}: ${tokens[kind]}` });
      part.style.flexGrow = tokens[kind];
      bar.append(part);
    }
    const list = kinds.map((kind) => h("li", {}, h("span", { class: `swatch ${kind}` }), `${kind}: ${number(tokens[kind])} (${percent(tokens[kind], tokens.generated)})`));
    return h("section", { class: "part" }, h("h2", {}, `Tokens: ${number(tokens.generated)} sampled`), bar, h("ul", { class: "legend" }, list));
  }

  /** Show the errors of the rollouts by kind, each with the rollout that had it last. */
  async showFailures() {
    const { items } = await get(runPath(this.run, "failures")).catch(() => ({ items: [] })); // a run without a store has none
    if (!items.length) return;
    const list = runPath(this.run, "rollouts");
    this.failures.replaceChildren(h("h2", {}, "Failures"), table("Failures", [
      { title: "kind", cell: (item) => h("a", { href: `${list}?failure=${item.kind}` }, item.kind) },
      { title: "error", class: "wide", cell: (item) => recorded(item.error) },
      { title: "rollouts", number: true, cell: (item) => number(item.rollouts) },
      { title: "last one", cell: (item) => h("a", { href: runPath(this.run, "rollouts", item.last) }, recorded(item.last)) },
    ], items));
  }

  close() {
    for (const { chart } of this.charts) chart.close();
  }
}

const standardErrors = (spreads, counts) =>
  spreads.map((spread, i) => (spread === null || !counts[i] ? null : spread / Math.sqrt(counts[i])));

function groupBy(names) {
  const groups = new Map();
  for (const name of names) {
    const category = name.split("/")[0];
    groups.set(category, [...(groups.get(category) ?? []), name]);
  }
  return groups;
}
