// The evaluations of a run, and the scores of a run that only evaluates.

import { get, runPath } from "./api.js";
import { Chart } from "./chart.js";
import { empty, h, recorded, table } from "./dom.js";
import { number } from "./format.js";

/** The page of a run's evaluations. */
export async function showEvaluations({ args: [run], signal }) {
  const { items, scores } = await get(runPath(run, "evaluations"), signal);
  const title = h("h1", {}, "Evaluations");
  if (scores) return [title, scoresTable(scores)];
  if (!items.length) return [title, empty("This run has no evaluation yet. Give the Trainer a val_dataset.")];
  const chart = new Chart("validation reward, with its 95% interval", { height: 260 });
  signal.addEventListener("abort", () => chart.close());
  const bound = (side) => items.map((item) => (item.error === null ? null : item.reward + side * 1.96 * item.error));
  requestAnimationFrame(() => chart.show(items.map((item) => item.step), [{ label: "validation", values: items.map((item) => item.reward), low: bound(-1), high: bound(1), points: true }]));
  const names = [...new Set(items.flatMap((item) => Object.keys(item.metrics)))].filter((name) => !["val/step", "val/reward", "val/reward_error", "val/rollouts"].includes(name));
  const columns = [
    { title: "step", number: true, cell: (item) => h("a", { class: "main", href: `${runPath(run, "rollouts")}?mode=val&step=${item.step}` }, item.step) },
    { title: "reward", number: true, cell: (item) => `${number(item.reward, 4)} ± ${number(item.error, 2)}` },
    { title: "rollouts", number: true, cell: (item) => number(item.rollouts) },
    ...names.map((name) => ({ title: name.replace("val/", ""), number: true, cell: (item) => number(item.metrics[name]) })),
  ];
  return [title, chart.element, table("Evaluations", columns, items)];
}

function scoresTable(scores) {
  const rows = Object.entries(scores.rewards ?? {});
  return [
    h("p", {}, recorded(`${scores.agent} with ${scores.model}: ${scores.tasks} tasks, ${scores.rollouts} rollouts, ${scores.failed} failed`)),
    table("Scores", [
      { title: "reward", cell: ([name]) => recorded(name) },
      { title: "mean", number: true, cell: ([, one]) => number(one.mean) },
      { title: "standard deviation", number: true, cell: ([, one]) => number(one.std) },
      { title: "95% interval", number: true, cell: ([, one]) => (one.interval_95 ? one.interval_95.map((value) => number(value)).join(" to ") : "–") },
      { title: "rollouts", number: true, cell: ([, one]) => number(one.rollouts) },
    ], rows),
  ];
}
