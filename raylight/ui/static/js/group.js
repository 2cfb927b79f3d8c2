// A group of rollouts side by side, and the same task at two steps as a difference.

import { get, runPath, setQuery } from "./api.js";
import { badge, empty, h, recorded, table } from "./dom.js";
import { number, seconds, text } from "./format.js";

/** Words up to which answers are compared word by word; longer ones line by line. */
const MAX_WORDS = 1200;

/** The page of a group. */
export async function showGroup({ args: [run, group], signal }) {
  const shown = await get(runPath(run, "groups", group), signal);
  const rewards = shown.rollouts.map((rollout) => rollout.reward).filter((reward) => reward !== null);
  const best = Math.max(...rewards), worst = Math.min(...rewards);
  const rank = ({ reward }) => (best === worst || reward === null ? "" : reward === best ? "best" : reward === worst ? "worst" : "");
  const cards = shown.rollouts.map((rollout) =>
    h("article", { class: `side ${rank(rollout)}` },
      h("h3", {}, h("a", { class: "main", href: runPath(run, "rollouts", rollout.id) }, recorded(rollout.id.split("-").slice(-1)[0])), " ", badge(rollout.status)),
      h("dl", { class: "facts" },
        fact("reward", number(rollout.reward, 3)), fact("advantage", number(rollout.advantage, 3)),
        fact("tokens", number(rollout.tokens)), fact("calls", rollout.calls), fact("time", seconds(rollout.seconds))),
      Object.keys(rollout.rewards).length > 1 ? h("p", { class: "aside" }, Object.entries(rollout.rewards).map(([name, value]) => `${name} ${number(value, 3)}`).join(", ")) : null,
      rollout.failure ? h("p", { class: "error" }, recorded(rollout.failure.error)) : null,
      h("pre", { class: "answer", tabindex: "0" }, rollout.final === null ? "no answer" : recorded(rollout.final))));
  const others = shown.same_task.filter((other) => other.group !== group);
  return [
    h("h1", {}, `Group ${group}`),
    h("dl", { class: "facts" }, fact("mode", shown.mode ?? "–"), fact("step", shown.step ?? "–"), fact("reward", `${number(shown.reward_mean, 3)} ± ${number(shown.reward_std, 3)}`), fact("rollouts", shown.total)),
    h("h2", {}, "Task"), h("pre", { class: "answer" }, recorded(text(shown.task))),
    h("h2", {}, "Rollouts"), h("div", { class: "sides" }, cards),
    h("h2", {}, "The same task at other steps"),
    others.length ? table("Groups of an equal task", [
      { title: "group", cell: (other) => h("a", { href: runPath(run, "groups", other.group) }, other.group) },
      { title: "step", number: true, cell: (other) => other.step ?? "–" },
      { title: "mode", cell: (other) => other.mode ?? "–" },
      { title: "mean reward", number: true, cell: (other) => number(other.reward_mean, 3) },
      { title: "", head: "difference", cell: (other) => h("a", { href: `${runPath(run, "groups", group)}/diff/${encodeURIComponent(other.group)}` }, "compare") },
    ], others) : empty("This task has no other group in this run."),
  ];
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

/** The page that compares what rollouts of two groups answered; the address has the rollouts. */
export async function showDiff({ args: [run, group, other], query, signal }) {
  const groups = await Promise.all([group, other].map((name) => get(runPath(run, "groups", name), signal)));
  groups.sort((a, b) => (a.step ?? 0) - (b.step ?? 0));
  const chosen = ["first", "second"].map((name, i) => Math.max(groups[i].rollouts.findIndex((rollout) => rollout.id === query.get(name)), 0));
  const result = h("pre", { class: "answer difference", tabindex: "0" });
  const heads = groups.map(() => h("span"));
  const compare = () => {
    const pair = groups.map((one, i) => one.rollouts[chosen[i]]);
    result.replaceChildren(...difference(pair[0].said, pair[1].said));
    pair.forEach((rollout, i) => heads[i].replaceChildren(h("a", { href: runPath(run, "rollouts", rollout.id) }, "open"), ` reward ${number(rollout.reward, 3)}`));
  };
  const choose = (i, index) => {
    chosen[i] = index;
    setQuery({ [["first", "second"][i]]: groups[i].rollouts[index].id });
    compare();
  };
  const choices = groups.map((one, i) =>
    h("label", {}, `step ${one.step ?? "–"}, ${one.group}: rollout `,
      h("select", { onchange: (event) => choose(i, event.target.selectedIndex) },
        one.rollouts.map((rollout, n) => h("option", { selected: n === chosen[i] }, `${n} (reward ${number(rollout.reward, 3)})`))), " ", heads[i]));
  compare();
  return [
    h("h1", {}, `${groups[0].group} and ${groups[1].group}`),
    h("h2", {}, "Task"), h("pre", { class: "answer" }, recorded(text(groups[0].task))),
    h("h2", {}, "Answers"), h("div", { class: "bar" }, choices),
    h("p", { class: "aside" }, h("del", {}, "only in the first"), " ", h("ins", {}, "only in the second")),
    result,
  ];
}

/** Return the difference of two texts as nodes, by words, or by lines if they are long. */
export function difference(before, after) {
  const split = (value) => value.split(/(\s+)/).filter(Boolean);
  let parts = [split(before), split(after)];
  if (Math.max(parts[0].length, parts[1].length) > MAX_WORDS) parts = [before, after].map((value) => value.split(/(?<=\n)/));
  if (Math.max(parts[0].length, parts[1].length) > MAX_WORDS) return [h("del", {}, recorded(before)), "\n", h("ins", {}, recorded(after))];
  return align(...parts).map(([kind, value]) => (kind === "same" ? h("span", {}, recorded(value)) : h(kind, {}, recorded(value))));
}

/** Return runs of [kind, text] by the longest common subsequence of two lists. */
function align(a, b) {
  const width = b.length + 1, lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i * width + j] = a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const runs = [];
  const add = (kind, value) => (runs.at(-1)?.[0] === kind ? (runs.at(-1)[1] += value) : runs.push([kind, value]));
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add("same", a[i]); i++; j++; }
    else if (j >= b.length || (i < a.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) add("del", a[i++]);
    else add("ins", b[j++]);
  }
  return runs;
}
