// The list of runs, and the comparison of several.

import { every, get, runPath } from "./api.js";
import { Chart, seriesColor, spark } from "./chart.js";
import { badge, empty, h, recorded, table } from "./dom.js";
import { change, count, number, seconds, text, time } from "./format.js";

const REFRESH_MS = 3000;

/** The page of all runs; it looks again every few seconds. */
export async function showRuns({ signal, go }) {
  let { runs } = await get("/runs", signal);
  const title = h("h1", {}, "Runs");
  const chosen = new Set();
  const compare = h("button", { type: "button", "data-keys": "c", disabled: true, onclick: () => go(`/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`) }, "compare");
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
    { title: "run", class: "line", cell: (run) => h("a", { class: "main", href: runPath(run.id), "data-run": run.id }, run.id) },
    { title: "training reward", number: true, cell: (run) => [change(run.train_reward), spark(run.spark)] },
    { title: "validation reward", number: true, cell: (run) => change(run.val_reward) },
    { title: "status", cell: (run) => [badge(run.status), run.advisories ? badge(count(run.advisories, "advisory", "advisories"), "warning") : null] },
    { title: "step", number: true, cell: (run) => (run.step === null ? "–" : `${run.step}${run.total_steps ? `/${run.total_steps}` : ""}`) },
    { title: "agent", cell: (run) => recorded(run.agent ?? "–") },
    { title: "algorithm", cell: (run) => run.algorithm ?? run.kind },
    { title: "failed", number: true, cell: (run) => number(run.rollouts_failed) },
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
  return [h("div", { class: "bar" }, title, h("label", { "data-keys": "/" }, search), h("span", { class: "spacer" }), compare), list];
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
  const settings = settingsOf(runs), labels = labelsOf(runs, settings);
  runs.forEach((run, i) => { run.label = labels[i]; });
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
  const heading = h("div", { class: "bar" }, h("h1", {}, "Compare"), h("span", { class: "spacer" }), more);
  return [heading, differencesTable(runs, settings), grid, equalSettings(settings)];
}

/** Show a metric of several runs over the steps of all. */
function showTogether(chart, metric, runs) {
  const at = (columns, i) => columns["val/step"]?.[i] ?? columns.step[i];
  const steps = [...new Set(runs.flatMap((run) => run.columns.step.map((_, i) => at(run.columns, i))))].sort((a, b) => a - b);
  const curves = runs.map((run, index) => {
    const values = new Map();
    (run.columns[metric] ?? []).forEach((value, i) => { if (value !== null) values.set(at(run.columns, i), value); });
    return { label: run.label, color: seriesColor(index), values: steps.map((step) => values.get(step) ?? null) };
  });
  chart.show(steps, curves);
}

/** Return the settings of the runs, with the value of each run. */
function settingsOf(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.details.settings)))];
  return names.map((name) => {
    const values = runs.map((run) => run.details.settings[name]).map((value) => (value === undefined ? "–" : text(value)));
    return { name, values, differs: new Set(values).size > 1 };
  });
}

/** Return a setting's name, which may be broken after a dot. */
const settingName = (name) => h("code", {}, name.split(/(?<=\.)/).flatMap((part) => [part, h("wbr")]));

/** Settings that differ between runs by themselves. */
const OWN = /^(run\..*|output_dir)$/;
/** Settings in the label of a run, at most. */
const LABEL_SETTINGS = 2;

/** Return a label for each run: its settings that others do not have, or its name if they are many or the same. */
function labelsOf(runs, settings) {
  const short = settings.filter(({ name }) => !OWN.test(name)).map(({ name, values }) => ({ name: name.split(".").pop(), values: values.map((value) => value.split("/").pop()) }));
  const told = short.filter(({ values }) => new Set(values).size > 1);
  const labels = runs.map((_, i) => told.map(({ name, values }) => `${name} ${values[i]}`).join(", "));
  return told.length <= LABEL_SETTINGS && new Set(labels).size === runs.length ? labels : runs.map((run) => run.name);
}

/** Return the table of results and of the settings that differ; those unlike the first run's are marked. */
function differencesTable(runs, settings) {
  const result = (name, cell) => ({ name, values: runs.map((run) => cell(run.details)), isResult: true });
  const rows = [
    result("training reward", (details) => change(details.train_reward)),
    result("validation reward", (details) => change(details.val_reward)),
    result("steps", (details) => number(details.step)),
    result("time", (details) => seconds(details.seconds)),
    ...settings.filter((row) => row.differs).sort((a, b) => OWN.test(a.name) - OWN.test(b.name)),
  ];
  const swatch = (i) => {
    const element = h("span", { class: "swatch" });
    element.style.background = seriesColor(i);
    return element;
  };
  const value = (row, i) => (row.isResult || row.values[i] === row.values[0] ? recorded(row.values[i]) : h("mark", {}, recorded(row.values[i])));
  return table("Results and settings that differ", [
    { title: "", class: "line", head: h("span", { class: "unseen" }, "result or setting"), cell: (row) => (row.isResult ? row.name : settingName(row.name)) },
    ...runs.map((run, i) => ({ title: run.name, head: [swatch(i), h("a", { href: runPath(run.name) }, run.name)], class: "wide", cell: (row) => value(row, i) })),
  ], rows);
}

function equalSettings(settings) {
  const equal = settings.filter((row) => !row.differs);
  return h("details", { class: "part" }, h("summary", {}, `${equal.length} equal settings`),
    table("Settings that are equal", [{ title: "setting", cell: (row) => settingName(row.name) }, { title: "value", class: "wide", cell: (row) => recorded(row.values[0]) }], equal));
}
