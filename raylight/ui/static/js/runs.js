// The list of runs, and the comparison of several.

import { get, runPath } from "./api.js";
import { Chart, spark } from "./chart.js";
import { badge, empty, h, recorded, table } from "./dom.js";
import { count, number, seconds, text, time } from "./format.js";

/** The page of all runs. */
export async function showRuns({ signal, go }) {
  const { runs } = await get("/runs", signal);
  const title = h("h1", {}, "Runs");
  if (!runs.length) return [title, empty("There is no run here yet. Start one with `raylight quickstart`, then reload this page.")];
  const chosen = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => go(`/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`) }, "compare");
  const choose = (run) =>
    h("input", {
      type: "checkbox",
      "aria-label": `compare ${run.id}`,
      onchange: (event) => {
        event.target.checked ? chosen.add(run.id) : chosen.delete(run.id);
        compare.disabled = chosen.size < 2;
        compare.textContent = chosen.size ? `compare ${chosen.size}` : "compare";
      },
    });
  const columns = [
    { title: "", head: h("span", { class: "aside-only" }, "choose"), cell: choose },
    { title: "run", cell: (run) => h("a", { class: "main", href: runPath(run.id) }, run.id) },
    { title: "status", cell: (run) => [badge(run.status), run.advisories ? badge(count(run.advisories, "advisory", "advisories"), "warning") : null] },
    { title: "agent", cell: (run) => recorded(run.agent ?? "–") },
    { title: "algorithm", cell: (run) => run.algorithm ?? run.kind },
    { title: "step", number: true, cell: (run) => (run.step === null ? "–" : `${run.step}${run.total_steps ? `/${run.total_steps}` : ""}`) },
    { title: "reward", number: true, cell: (run) => (run.reward_before === null ? "–" : `${number(run.reward_before, 3)} → ${number(run.reward_after, 3)}`) },
    { title: "training reward", cell: (run) => spark(run.spark) },
    { title: "time", number: true, cell: (run) => seconds(run.seconds) },
    { title: "began", cell: (run) => time(run.started) },
  ];
  return [h("div", { class: "bar" }, title, compare), table("All runs", columns, runs)];
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
  const charts = [];
  const grid = h("div", { class: "charts" });
  const add = (metric) => {
    const chart = new Chart(metric, { sync: "compare" });
    charts.push(chart);
    grid.append(chart.element);
    requestAnimationFrame(() => showTogether(chart, metric, runs));
  };
  COMPARED.filter((metric) => metrics.includes(metric)).forEach(add);
  const more = h("select", { "aria-label": "add a metric", onchange: (event) => { add(event.target.value); event.target.selectedIndex = 0; } },
    h("option", { value: "" }, "add a metric …"), metrics.map((metric) => h("option", {}, metric)));
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.close()));
  return [h("div", { class: "bar" }, h("h1", {}, "Compare"), more), grid, h("h2", {}, "Settings"), settingsTable(runs)];
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
    ...runs.map((run, i) => ({ title: run.name, cell: (row) => (row.values[i] === undefined ? "–" : row.differs ? h("mark", {}, recorded(text(row.values[i]))) : recorded(text(row.values[i]))) })),
  ];
  const differing = rows.filter((row) => row.differs), equal = rows.filter((row) => !row.differs);
  return [
    differing.length ? table("Settings that differ", columns, differing) : empty("All settings are equal."),
    h("details", {}, h("summary", {}, `${equal.length} equal settings`), table("Settings that are equal", columns, equal)),
  ];
}
