// Elements from data. Texts become text nodes only, so that nothing recorded is read as HTML.

/** Characters that change the direction of text or are invisible, other than space, tab and line break. */
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

/**
 * Return an element.
 * @param {string} tag
 * @param {object} attributes `on...` are listeners, `class` and others attributes; null and false are left out.
 * @param {...any} children elements, texts, or lists of them.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

/** Append children to an element, texts as text nodes. */
export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** Return a recorded text as nodes, with hidden characters shown as marked escapes. */
export function recorded(text) {
  const nodes = [];
  let start = 0;
  for (const match of String(text).matchAll(HIDDEN)) {
    nodes.push(document.createTextNode(text.slice(start, match.index)));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(h("span", { class: "hidden-character", title: "an invisible character" }, `U+${code}`));
    start = match.index + match[0].length;
  }
  nodes.push(document.createTextNode(String(text).slice(start)));
  return nodes;
}

/** Return a search snippet as nodes; its matches are between U+E000 and U+E001. */
export function marked(snippet) {
  return snippet.split("\ue000").flatMap((part, index) => {
    if (index === 0) return recorded(part);
    const [match, rest = ""] = part.split("\ue001");
    return [h("mark", {}, recorded(match)), ...recorded(rest)];
  });
}

/** Return a table with headers. `columns` are {title, cell(row), head?, number?, class?, order?}. */
export function table(caption, columns, rows, attributes = {}) {
  const cells = (row) =>
    columns.map((column) => h("td", { class: column.number ? "number" : column.class }, column.cell(row)));
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      attributes,
      h("caption", {}, h("span", { class: "unseen" }, caption)),
      h(
        "thead",
        {},
        h("tr", {}, columns.map((c) => h("th", { scope: "col", class: c.number ? "number" : c.class, "aria-sort": c.order }, c.head ?? c.title))),
      ),
      h("tbody", {}, rows.map((row) => h("tr", {}, cells(row)))),
    ),
  );
}

/** Copy a text, also from a page of another machine without TLS, which lacks the clipboard's own interface. */
async function copy(value) {
  if (navigator.clipboard) return navigator.clipboard.writeText(value);
  const field = h("textarea", { class: "unseen" });
  field.value = value;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (!isCopied) throw new Error("the browser refused");
}

/** Return a button that copies what `read` returns (or a promise of it). */
export function copyButton(title, read) {
  const button = h("button", {
    type: "button",
    onclick: async () => {
      try {
        await copy(await read());
        button.textContent = "copied";
      } catch (error) {
        button.textContent = `not copied: ${error.message}`;
      }
      setTimeout(() => (button.textContent = title), 1500);
    },
  }, title);
  return button;
}

/** Return a line about an empty page or part. */
export const empty = (...text) => h("p", { class: "empty" }, ...text);

/** Return a short text in a coloured box. */
export const badge = (text, kind = text) => h("span", { class: `badge ${String(kind).replace(/[^a-z-]/g, "")}` }, text);
