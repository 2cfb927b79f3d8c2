// The conversation of a rollout: its calls with their messages, thoughts and tools.

import { get, runPath } from "./api.js";
import { badge, copyButton, empty, h, recorded } from "./dom.js";
import { count, number, seconds, text } from "./format.js";

/** Characters after which a message is folded. */
const LONG = 4000;
/** Roles with their own colour. */
const ROLES = ["system", "developer", "user", "tool", "assistant"];

/** Return the calls of a rollout. */
export function conversation(run, rollout) {
  if (!rollout.calls.length) return empty(rollout.status === "queuing" ? "This rollout waits for a runner." : "The agent has not called a model.");
  return rollout.calls.map((call) => callCard(run, rollout, call));
}

function callCard(run, rollout, call) {
  const request = () => get(runPath(run, "rollouts", rollout.id, "calls", call.id, "request"));
  const versions = call.versions ? (call.versions[0] === call.versions[1] ? `weights ${call.versions[0]}` : `weights ${call.versions.join(" to ")}`) : null;
  const facts = [call.model, call.dialect, `${number(call.prompt_tokens)} + ${number(call.output_tokens)} tokens`, seconds(call.ended - call.started), call.finish_reason, versions,
    call.temperature !== null && call.temperature !== undefined ? `temperature ${number(call.temperature)}` : null].filter(Boolean);
  return h("article", { class: "call-card", id: `call-${call.number}` },
    h("div", { class: "bar" },
      h("h3", {}, h("a", { href: `#call-${call.number}` }, `Call ${call.number}`), call.agent ? [" of ", recorded(call.agent)] : null),
      badge(call.relation.replaceAll("_", " "), call.relation.startsWith("drift") ? "warning" : "relation"),
      call.trained || rollout.mode !== "train" || call.relation === "not_trained" ? null : badge("not trained", "warning"),
      h("span", { class: "spacer" }),
      call.output_tokens ? h("a", { class: "button", href: `${runPath(run, "rollouts", rollout.id)}?tab=tokens&call=${call.number}` }, "tokens") : null,
      copyButton("copy as curl", async () => (await request()).curl),
      copyButton("copy as OpenAI messages", async () => JSON.stringify((await request()).messages, null, 2))),
    h("p", { class: "aside" }, recorded(facts.join(" · "))),
    call.relation_reason ? h("p", { class: "aside" }, recorded(call.relation_reason)) : null,
    call.tools?.length ? h("details", {}, h("summary", {}, count(call.tools.length, "tool")), h("pre", { class: "answer" }, recorded(text(call.tools)))) : null,
    call.shared_messages ? h("p", { class: "earlier" }, `${count(call.shared_messages, "message")} as before`) : null,
    call.messages.map((message) => messageCard(run, message, false)),
    call.answers.map((message) => messageCard(run, message, true)));
}

function messageCard(run, message, isAnswer) {
  const role = isAnswer ? "answer" : String(message.role ?? "?");
  const reasoning = message.reasoning_content || message.reasoning || message.thinking;
  const parts = Array.isArray(message.content) ? message.content : message.content === null || message.content === undefined ? [] : [message.content];
  return h("div", { class: `message ${isAnswer ? "answered" : ROLES.includes(role) ? role : ""}` },
    h("div", { class: "role" }, recorded(role), message.name ? [" ", recorded(message.name)] : null, message.tool_call_id ? h("span", { class: "aside" }, " for ", recorded(message.tool_call_id)) : null),
    reasoning ? h("details", { class: "thought" }, h("summary", {}, "thinking"), body(String(reasoning))) : null,
    parts.map((part) => (typeof part === "string" ? thoughts(part) : digestOf(part) ? thumbnail(run, digestOf(part)) : part?.type === "text" || part?.text ? thoughts(String(part.text)) : part?.thinking ? thoughts(`<think>${part.thinking}</think>`) : h("pre", {}, recorded(text(part))))),
    (message.tool_calls ?? []).map((call) => h("div", { class: "tool-call" }, h("b", {}, recorded(call.function?.name ?? "?")), " ", h("span", { class: "aside" }, recorded(call.id ?? "")), h("pre", {}, recorded(pretty(call.function?.arguments))))));
}

/** Return the digest of a recorded image; null for another part. */
function digestOf(part) {
  const match = /^raylight-image:([0-9a-f]{64})$/.exec(part?.image_url?.url ?? "");
  return match ? match[1] : null;
}

function thumbnail(run, digest) {
  const address = `/api${runPath(run, "images", digest)}`;
  return h("a", { class: "thumbnail", href: address, target: "_blank", rel: "noopener" }, h("img", { src: address, alt: `image ${digest.slice(0, 12)}`, loading: "lazy" }));
}

/** Return a text with its thoughts, which some models write between tags, folded. */
function thoughts(value) {
  const match = /^\s*<think>([\s\S]*?)<\/think>\s*([\s\S]*)$/.exec(value);
  if (!match) return body(value);
  return [h("details", { class: "thought" }, h("summary", {}, "thinking"), body(match[1])), body(match[2])];
}

function body(value) {
  if (value.length <= LONG) return h("div", { class: "text" }, recorded(value));
  const cut = /[\uD800-\uDBFF]/.test(value[LONG - 1]) ? LONG + 1 : LONG; // not within a character
  const rest = h("details", {}, h("summary", {}, count(value.length - cut, "more character")));
  rest.addEventListener("toggle", () => { if (rest.childElementCount === 1) rest.append(h("div", { class: "text" }, recorded(value.slice(cut)))); }, { once: true });
  return [h("div", { class: "text" }, recorded(value.slice(0, cut))), rest];
}

function pretty(value) {
  try {
    return JSON.stringify(JSON.parse(value), null, 2);
  } catch {
    return String(value ?? "");
  }
}
