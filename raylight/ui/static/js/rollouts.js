// The rollouts of a run: filters, order, search, and plots of the reward.

import { follow, get, runPath } from "./api.js";
import { scatter } from "./chart.js";
import { badge, empty, h, marked, recorded, table } from "./dom.js";
import { count, number, seconds } from "./format.js";

const PAGE = 100;
/** Time after which a list that is not complete is read again. */
const AGAIN_MS = 1500;
const STATUSES = ["succeeded", "failed", "cancelled", "running", "queuing", "preparing", "requeuing"];
const SORTED = { position: "number", step: "step", reward: "reward", tokens: "tokens", calls: "calls", age: "age", seconds: "time" };

/** The page of a run's rollouts. */
export async function showRollouts({ args: [run], query, signal, go }) {
  const filters = Object.fromEntries(["mode", "status", "step", "group", "failure", "min_reward", "max_reward", "q"].map((name) => [name, query.get(name) ?? ""]));
  const sort = query.get("sort") ?? "position", order = query.get("order") ?? "desc";
  const offset = Number(query.get("offset") ?? 0);
  const address = (changes) => {
    const values = Object.entries({ ...filters, sort, order, ...changes }).filter(([, value]) => value !== "" && value !== null);
    return `${runPath(run, "rollouts")}?${new URLSearchParams(values)}`;
  };
  const title = h("h1", {}, "Rollouts");
  const form = filterForm(filters, (values) => go(address({ ...values, offset: null })));
  let found;
  try {
    found = await get(runPath(run, "rollouts"), signal, { ...filters, sort, order, limit: PAGE, offset });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return [title, form, empty(error.message)];
  }
  const part = found.items.length ? `${offset + 1} to ${offset + found.items.length} of ${number(found.total)}` : "none";
  const state = found.indexed < found.decided ? `; ${number(found.indexed)} of ${number(found.decided)} can be searched so far` : "";
  const lines = found.lines < found.known ? `; ${number(found.lines)} of ${number(found.known)} are listed so far` : "";
  const isFollowed = offset === 0 && (state || lines);
  if (isFollowed) {
    const again = setTimeout(() => { if (!document.activeElement?.closest("form")) go(address({}), { replace: true }); }, AGAIN_MS);
    signal.addEventListener("abort", () => clearTimeout(again));
  }
  const more = h("button", { type: "button", hidden: true, onclick: () => go(address({}), { replace: true }) });
  follow(run, { rollouts: ({ known }) => {
    more.hidden = isFollowed || known <= found.known;
    more.textContent = `${count(known - found.known, "new rollout")}: show`;
  } }, signal);
  const pages = h("nav", { class: "bar", "aria-label": "Parts of the list" },
    h("span", {}, part + state + lines), more,
    h("span", { class: "spacer" }),
    offset ? h("a", { href: address({ offset: Math.max(offset - PAGE, 0) }), "data-keys": "[" }, "← before") : null,
    offset + PAGE < found.total ? h("a", { href: address({ offset: offset + PAGE }), "data-keys": "]" }, "after →") : null);
  return [title, form, found.items.length ? [plots(run, filters, signal, go), pages, rolloutTable(run, found.items, { sort, order, address })] : found.total ? [pages, empty("The list ends before this part.")] : empty(`No rollout matches${state + lines}.`)];
}

/** Return the plots of the reward over length and age, which are filled when their points are known. */
function plots(run, filters, signal, go) {
  const grid = h("div", { class: "charts pair" });
  get(runPath(run, "points"), signal, { ...filters, limit: 5000 }).then(({ columns }) => {
    const isGood = columns.status.map((status) => status === "succeeded"), isRing = columns.mode.map((mode) => mode === "val");
    const open = (i) => go(runPath(run, "rollouts", columns.id[i]));
    const describe = (i) => `${columns.id[i]} (${columns.mode[i]}): reward ${number(columns.reward[i], 3)}, ${number(columns.tokens[i])} tokens, age ${columns.age[i] ?? "–"}, step ${columns.step[i] ?? "–"}`;
    const add = (title, x) => grid.append(scatter(title, { x, y: columns.reward, isGood, isRing }, describe, open));
    add("reward over sampled tokens", columns.tokens);
    add("reward over the age of its tokens", columns.age);
  }).catch(() => {}); // the list is shown without them
  return grid;
}

/** A table of rollout cards, whose headers are links that change the order. */
function rolloutTable(run, items, sorting) {
  const rewards = items.map((item) => item.reward).filter((reward) => reward !== null);
  const low = Math.min(...rewards, 0), high = Math.max(...rewards, 0);
  const head = (name) => {
    const isSorted = sorting.sort === name, next = isSorted && sorting.order === "desc" ? "asc" : "desc";
    const arrow = isSorted ? (sorting.order === "desc" ? " ↓" : " ↑") : "";
    return h("a", { href: sorting.address({ sort: name, order: next, offset: null }) }, SORTED[name] + arrow);
  };
  const order = (name) => (sorting.sort === name ? (sorting.order === "desc" ? "descending" : "ascending") : null);
  const column = (name, cell) => ({ title: SORTED[name], head: head(name), order: order(name), number: true, cell });
  const columns = [
    { title: "rollout", class: "line", cell: (item) => h("a", { class: "main", href: runPath(run, "rollouts", item.id) }, recorded(item.id)) },
    { title: "mode", cell: (item) => (item.mode ? badge(item.mode) : "–") },
    column("reward", (item) => [meter(item.reward, low, high), number(item.reward, 3)]),
    { title: "status", cell: (item) => badge(item.status) },
    column("step", (item) => item.step ?? "–"),
    { title: "group", cell: (item) => (item.group ? h("a", { href: runPath(run, "groups", item.group) }, recorded(item.group)) : "–") },
    column("tokens", (item) => number(item.tokens)),
    column("calls", (item) => item.calls),
    column("age", (item) => item.age ?? "–"),
    column("seconds", (item) => seconds(item.seconds)),
    { title: "task", class: "wide", cell: (item) => [item.snippet ? marked(item.snippet) : recorded(item.task), item.failure ? h("div", { class: "error" }, recorded(item.failure.error)) : null] },
  ];
  return table("Rollouts", columns, items);
}

/** Return a bar for a reward, scaled to the rewards of the list. */
function meter(reward, low, high) {
  if (reward === null || low === high) return null;
  const bar = h("span", { class: "meter" }, h("span", {}));
  bar.firstChild.style.width = `${(100 * (reward - low)) / (high - low)}%`;
  return bar;
}

function filterForm(filters, apply) {
  const select = (name, label, options) =>
    h("label", {}, label, h("select", { name, onchange: submit }, h("option", { value: "" }, "any"), options.map((value) => h("option", { value, selected: filters[name] === value }, value))));
  const input = (name, label, type = "text", size = 6) => h("label", {}, label, h("input", { name, type, size, value: filters[name], step: "any" }));
  const form = h("form", { class: "filters", role: "search", onsubmit: (event) => { event.preventDefault(); submit(); } },
    h("label", { class: "search", "data-keys": "/" }, "search", h("input", { type: "search", name: "q", value: filters.q, placeholder: 'words, "exact words", error: timeout' })),
    select("mode", "mode", ["train", "val"]),
    select("status", "status", STATUSES),
    select("failure", "failure", ["agent", "reward", "hook", "truncated", "timeout", "unresponsive", "infrastructure", "cancelled"]),
    input("step", "step", "number"), input("group", "group", "text", 10),
    input("min_reward", "reward from", "number"), input("max_reward", "to", "number"),
    h("button", {}, "show"));
  function submit() {
    apply(Object.fromEntries(new FormData(form)));
  }
  return form;
}
