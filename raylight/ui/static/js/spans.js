// The spans of a rollout as a waterfall.

import { badge, empty, h, recorded } from "./dom.js";
import { seconds, text } from "./format.js";

/** Return the spans of a rollout in order, each below its parent. */
export function waterfall(rollout) {
  const { spans } = rollout;
  if (!spans.length) return empty("This rollout has no spans.");
  const times = spans.flatMap((span) => [span.started, span.ended]).filter((value) => value !== null);
  const first = Math.min(...times), length = Math.max(Math.max(...times) - first, 1e-6);
  return h("ol", { class: "waterfall" }, inOrder(spans).map(([span, depth]) => line(span, depth, first, length)));
}

/** Return [span, depth] of all spans, children after their parents. */
function inOrder(spans) {
  const ids = new Set(spans.map((span) => span.id)), children = new Map(), ordered = [], seen = new Set();
  for (const span of spans) {
    const parent = span.parent && span.parent !== span.id && ids.has(span.parent) ? span.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), span]);
  }
  const visit = (span, depth) => {
    if (seen.has(span)) return;
    seen.add(span);
    ordered.push([span, depth]);
    for (const child of children.get(span.id) ?? []) visit(child, depth + 1);
  };
  for (const span of children.get(null) ?? []) visit(span, 0);
  for (const span of spans) visit(span, 0); // circles have no root
  return ordered;
}

function line(span, depth, first, length) {
  const bar = h("span", { class: `span-bar ${span.kind}` });
  const known = span.started !== null && span.ended !== null;
  if (known) {
    bar.style.left = `${(100 * (span.started - first)) / length}%`;
    bar.style.width = `max(${(100 * (span.ended - span.started)) / length}%, 2px)`;
  }
  const name = h("span", { class: "span-name" }, recorded(span.name));
  name.style.paddingLeft = `${Math.min(depth, 12) * 1.1}em`;
  const attributes = h("dl", { class: "attributes" });
  const details = h("details", { ontoggle: () => {
    if (attributes.childElementCount) return;
    for (const [key, value] of Object.entries(span.attributes)) {
      attributes.append(h("dt", {}, recorded(key)), h("dd", {}, h("pre", {}, recorded(text(value)))));
    }
  } },
  h("summary", {}, name, h("span", { class: "span-track" }, known ? bar : null), badge(span.kind, span.kind === "error" || span.status === "ERROR" ? "failed" : span.kind),
    h("span", { class: "number" }, known ? seconds(span.ended - span.started) : "–")), attributes);
  return h("li", {}, details);
}
