// The runners, replicas and learners of a run.

import { every, get, runPath } from "./api.js";
import { badge, empty, h, recorded, table } from "./dom.js";
import { ago, number } from "./format.js";

const REFRESH_MS = 3000;

/** The page of a run's workers; it looks again every few seconds. */
export async function showWorkers({ args: [run], signal }) {
  const body = h("div");
  const refresh = async () => body.replaceChildren(...parts(run, await get(runPath(run, "workers"), signal)));
  await refresh();
  every(REFRESH_MS, refresh, signal);
  return [h("h1", {}, "Workers"), body];
}

function parts(run, shown) {
  const address = safe(shown.ray_dashboard);
  const runners = [
    { title: "runner", cell: (runner) => recorded(runner.id.split("/").pop()) },
    { title: "status", cell: (runner) => badge(runner.status) },
    { title: "rollouts now", number: true, cell: (runner) => runner.stats?.rollouts?.length ?? (runner.rollout ? 1 : 0) },
    { title: "one of them", cell: (runner) => (runner.rollout ? h("a", { class: "main", href: runPath(run, "rollouts", runner.rollout) }, recorded(runner.rollout)) : "–") },
    { title: "CPU", number: true, cell: (runner) => (runner.stats?.cpu_percent === undefined ? "–" : `${number(runner.stats.cpu_percent, 3)} %`) },
    { title: "memory", number: true, cell: (runner) => (runner.stats?.memory_bytes ? `${Math.round(runner.stats.memory_bytes / 1e6)} MB` : "–") },
    { title: "last sign", cell: (runner) => ago(runner.last_heartbeat) },
  ];
  const actors = [
    { title: "actor", cell: (actor) => { const link = safe(actor.link), name = recorded(actor.name || actor.class); return link ? h("a", { href: link, target: "_blank", rel: "noopener noreferrer" }, name) : name; } },
    { title: "class", cell: (actor) => recorded(actor.class) },
    { title: "state", cell: (actor) => badge(actor.state.toLowerCase()) },
    { title: "doing now", class: "wide", cell: (actor) => Object.entries(actor.tasks).map(([task, n]) => recorded(n > 1 ? `${task} × ${n}` : task)).flatMap((nodes, i) => (i ? [", ", ...nodes] : nodes)) },
    { title: "node", cell: (actor) => h("code", {}, recorded((actor.node ?? "–").slice(0, 8))) },
    { title: "process", number: true, cell: (actor) => actor.pid ?? "–" },
  ];
  return [
    address ? h("p", {}, h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, "Ray's dashboard")) : null,
    h("h2", {}, "Runners"),
    shown.runners.length ? table("Runners", runners, shown.runners) : empty("No runner has taken a rollout yet."),
    h("h2", {}, "Actors"),
    shown.note ? empty(shown.note) : null,
    shown.actors?.length ? table("Actors of the run", actors, shown.actors) : shown.note ? null : empty("The cluster has no actor of this run."),
  ].filter(Boolean);
}

/** Return an address if it is one of the web; null for others, such as scripts. */
function safe(address) {
  return typeof address === "string" && /^https?:\/\//.test(address) ? address : null;
}
