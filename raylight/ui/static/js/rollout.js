// The page of a rollout: its facts, and its conversation, tokens, spans and record.

import { get, runPath } from "./api.js";
import { conversation } from "./conversation.js";
import { badge, copyButton, h, recorded, table } from "./dom.js";
import { number, seconds, text, time } from "./format.js";
import { waterfall } from "./spans.js";
import { tokenView } from "./tokens.js";

const TABS = { conversation: "Conversation", tokens: "Tokens", spans: "Spans", raw: "Record" };

/** The page of one rollout. */
export async function showRollout({ args: [run, id], query, signal }) {
  const rollout = await get(runPath(run, "rollouts", id), signal);
  const chosen = query.get("tab") in TABS ? query.get("tab") : "conversation";
  const address = runPath(run, "rollouts", id);
  const tabs = Object.entries(TABS).map(([name, title], i) =>
    h("a", { "data-keys": i + 1, href: name === "conversation" ? address : `${address}?tab=${name}`, "aria-current": name === chosen ? "page" : null }, title));
  const content = { conversation: () => conversation(run, rollout), tokens: () => tokenView(run, rollout, query, signal), spans: () => waterfall(rollout), raw: () => record(run, rollout, signal) };
  return [
    h("div", { class: "bar" }, h("h1", {}, recorded(id)), badge(rollout.status), h("span", { class: "spacer" }),
      neighbour(run, rollout.previous, "prev", chosen, "← before"), neighbour(run, rollout.next, "next", chosen, "after →")),
    facts(run, rollout),
    failure(rollout),
    h("nav", { class: "tabs", "aria-label": "Views of the rollout" }, tabs),
    h("section", { "aria-label": TABS[chosen] }, await content[chosen]()),
  ];
}

const neighbour = (run, id, rel, tab, title) =>
  (id ? h("a", { class: "button", href: runPath(run, "rollouts", id) + (tab === "conversation" ? "" : `?tab=${tab}`), rel, "data-keys": rel === "prev" ? "[" : "]" }, title) : null);

function facts(run, rollout) {
  const rewards = Object.entries(rollout.rewards);
  const values = {
    reward: rewards.length > 1 ? rewards.map(([name, value]) => `${name} ${number(value, 3)}`).join(", ") : number(rollout.reward, 3),
    advantage: number(rollout.advantage, 3),
    step: rollout.step ?? "–",
    mode: rollout.mode ?? "–",
    group: rollout.group ? h("a", { href: runPath(run, "groups", rollout.group) }, recorded(rollout.group)) : "–",
    calls: rollout.calls.length,
    tokens: number(rollout.tokens),
    age: rollout.age ?? "–",
    time: seconds(rollout.seconds),
    began: time(rollout.started),
    runner: recorded(rollout.attempts.at(-1)?.worker_id?.split("/").pop() ?? "–"),
    trained: rollout.mode === "val" ? "no, validation" : rollout.trained ? "yes" : "no record",
  };
  return [
    h("dl", { class: "facts" }, Object.entries(values).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("details", { class: "part", open: text(rollout.task).length < 400 }, h("summary", {}, "Task"), h("pre", { class: "answer" }, recorded(text(rollout.task)))),
  ];
}

function failure(rollout) {
  const attempts = rollout.attempts.filter((attempt) => attempt.failure);
  if (!attempts.length) return null;
  return h("section", { class: "part", "aria-label": "Failures" }, attempts.map((attempt) =>
    h("details", { open: attempt === rollout.attempts.at(-1) },
      h("summary", { class: "error" }, `attempt ${attempt.sequence_id}: ${attempt.failure.kind}: `, recorded(attempt.failure.error)),
      attempt.failure.trace ? [copyButton("copy traceback", () => attempt.failure.trace), h("pre", { class: "answer", tabindex: "0" }, recorded(attempt.failure.trace))] : null)));
}

async function record(run, rollout, signal) {
  const raw = await get(runPath(run, "rollouts", rollout.id, "raw"), signal);
  const json = JSON.stringify(raw, null, 2), shown = json.length > 300_000 ? `${json.slice(0, 300_000)}\n… ${json.length} characters; "copy" copies all` : json;
  const attempts = table("Attempts", [
    { title: "attempt", cell: (attempt) => recorded(attempt.attempt_id) },
    { title: "status", cell: (attempt) => badge(attempt.status) },
    { title: "runner", cell: (attempt) => recorded(attempt.worker_id ?? "–") },
    { title: "began", cell: (attempt) => time(attempt.started) },
    { title: "time", number: true, cell: (attempt) => seconds(attempt.ended && attempt.ended - attempt.started) },
  ], rollout.attempts);
  return [attempts, h("div", { class: "bar" }, copyButton("copy", () => json)), h("pre", { class: "answer", tabindex: "0" }, recorded(shown))];
}
