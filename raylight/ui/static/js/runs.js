// The list of runs, and the comparison of several.

import { every, get, runPath } from "./api.js";
import { Chart, spark } from "./chart.js";
import { badge, empty, h, recorded, table } from "./dom.js";
import { count, number, seconds, text, time } from "./format.js";

const REFRESH_MS = 3000;

/** The page of all runs; it looks again every few seconds. */
export async function showRuns({ signal, go }) {
  let { runs } = await get("/runs", signal);
  const title = h("h1", {}, "Runs");
  const chosen = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => go(`/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`) }, "compare");
  const choose = (run) =>
    h("input", {
      type: "checkbox",
      "aria-label": `compare ${run.id}`,
      checked: chosen.has(run.id),
      onchange: (event) => {
        event.target.checked ? chosen.add(run.id) : chosen.delete(run.id);
        compare.disabled = chosen.size < 2;
        compare.textContent = chosen.size ? `compare ${chosen.size}` : "compare";
      },
    });
  const columns = [
    { title: "", head: h("span", { class: "unseen" }, "choose"), cell: choose },
    { title: "run", cell: (run) => h("a", { class: "main", href: runPath(run.id), "data-run": run.id }, run.id) },
    { title: "status", cell: (run) => [badge(run.status), run.advisories ? badge(count(run.advisories, "advisory", "advisories"), "warning") : null] },
    { title: "agent", cell: (run) => recorded(run.agent ?? "–") },
    { title: "algorithm", cell: (run) => run.algorithm ?? run.kind },
    { title: "step", number: true, cell: (run) => (run.step === null ? "–" : `${run.step}${run.total_steps ? `/${run.total_steps}` : ""}`) },
    { title: "reward", number: true, cell: (run) => (run.reward_before === null ? "–" : `${number(run.reward_before, 3)} → ${number(run.reward_after, 3)}`) },
    { title: "training reward", cell: (run) => spark(run.spark) },
    { title: "rollouts failed", number: true, cell: (run) => number(run.rollouts_failed) },
    { title: "time", number: true, cell: (run) => seconds(run.seconds) },
    { title: "began", cell: (run) => time(run.started) },
  ];
  const search = h("input", { type: "search", placeholder: "name, agent, algorithm, model", "aria-label": "Search runs", oninput: () => show() });
  const list = h("div");
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/);
    const found = runs.filter((run) => words.every((word) => `${run.id} ${run.agent} ${run.algorithm} ${run.model} ${run.status}`.toLowerCase().includes(word)));
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.run : null;
    list.replaceChildren(found.length ? table("All runs", columns, found)
      : empty(runs.length ? "No run matches." : "There is no run here yet. Start one with `raylight quickstart`; it appears here by itself."));
    if (focused) list.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
  };
  show();
  every(REFRESH_MS, async () => {
    const before = JSON.stringify(runs);
    ({ runs } = await get("/runs", signal));
    if (JSON.stringify(runs) !== before) show();
  }, signal);
  return [h("div", { class: "bar" }, title, search, h("span", { class: "spacer" }), compare), list];
}

const COMPARED = ["train/reward", "val/reward", "learner/kl", "learner/entropy", "train/response_tokens", "learner/grad_norm", "time/rollout_s", "time/update_s"];

/** The page that compares runs. */
export async function showCompare({ query, signal }) {
  const names = (query.get("runs") ?? "").split(",").filter(Boolean);
  if (names.length < 2) return [h("h1", {}, "Compare"), empty("Choose two or more runs on the start page.")];
  const runs = await Promise.all(names.map(async (name) => ({
    name,
    details: await get(runPath(name), signal),
    columns: (await get(runPath(name, "metrics"), signal)).columns,
  })));
  const metrics = [...new Set(runs.flatMap((run) => run.details.metric_names))].sort();
  const charts = [], shown = [];
  const grid = h("div", { class: "charts" });
  const add = (metric) => {
    const chart = new Chart(metric, { sync: "compare" });
    charts.push(chart);
    shown.push(metric);
    grid.append(chart.element);
    requestAnimationFrame(() => showTogether(chart, metric, runs));
  };
  COMPARED.filter((metric) => metrics.includes(metric)).forEach(add);
  const more = h("select", { "aria-label": "add a metric", onchange: (event) => { add(event.target.value); event.target.selectedIndex = 0; } },
    h("option", { value: "" }, "add a metric …"), metrics.map((metric) => h("option", {}, metric)));
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.close()));
  every(REFRESH_MS, async () => {
    for (const run of runs.filter((one) => one.details.status === "running")) {
      [run.details, run.columns] = [await get(runPath(run.name), signal), (await get(runPath(run.name, "metrics"), signal)).columns];
      charts.forEach((chart, i) => showTogether(chart, shown[i], runs));
    }
  }, signal);
  return [h("div", { class: "bar" }, h("h1", {}, "Compare"), h("span", { class: "spacer" }), more), grid, h("h2", {}, "Settings"), settingsTable(runs)];
}

/** Show a metric of several runs over the steps of all. */
function showTogether(chart, metric, runs) {
  const at = (columns, i) => columns["val/step"]?.[i] ?? columns.step[i];
  const steps = [...new Set(runs.flatMap((run) => run.columns.step.map((_, i) => at(run.columns, i))))].sort((a, b) => a - b);
  const curves = runs.map((run) => {
    const values = new Map();
    (run.columns[metric] ?? []).forEach((value, i) => { if (value !== null) values.set(at(run.columns, i), value); });
    return { label: run.name, values: steps.map((step) => values.get(step) ?? null) };
  });
  chart.show(steps, curves);
}

function settingsTable(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.details.settings)))];
  const rows = names.map((name) => {
    const values = runs.map((run) => run.details.settings[name]);
    return { name, values, differs: new Set(values.map((value) => JSON.stringify(value))).size > 1 };
  });
  const columns = [
    { title: "setting", cell: (row) => h("code", {}, row.name) },
    ...runs.map((run, i) => ({ title: run.name, head: h("a", { href: runPath(run.name) }, run.name), class: "wide", cell: (row) => (row.values[i] === undefined ? "–" : row.differs ? h("mark", {}, recorded(text(row.values[i]))) : recorded(text(row.values[i]))) })),
  ];
  const differing = rows.filter((row) => row.differs), equal = rows.filter((row) => !row.differs);
  return [
    differing.length ? table("Settings that differ", columns, differing) : empty("All settings are equal."),
    h("details", {}, h("summary", {}, `${equal.length} equal settings`), table("Settings that are equal", columns, equal)),
  ];
}
