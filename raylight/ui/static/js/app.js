// The shell of all pages: addresses, navigation, theme and keys.

import { append, empty, h } from "./dom.js";
import { runPath } from "./api.js";
import { showCompare, showRuns } from "./runs.js";
import { showRun } from "./run.js";
import { showRollouts } from "./rollouts.js";
import { showDiff, showGroup } from "./group.js";
import { showRollout } from "./rollout.js";
import { showEvaluations } from "./evaluations.js";
import { showWorkers } from "./workers.js";

/** Pages: the pattern of the address, the function that shows it, and the part of the run that it belongs to. */
const PAGES = [
  [/^\/$/, showRuns],
  [/^\/compare$/, showCompare],
  [/^\/runs\/([^/]+)$/, showRun, "overview"],
  [/^\/runs\/([^/]+)\/rollouts$/, showRollouts, "rollouts"],
  [/^\/runs\/([^/]+)\/rollouts\/([^/]+)$/, showRollout, "rollouts"],
  [/^\/runs\/([^/]+)\/groups\/([^/]+)$/, showGroup, "rollouts"],
  [/^\/runs\/([^/]+)\/groups\/([^/]+)\/diff\/([^/]+)$/, showDiff, "rollouts"],
  [/^\/runs\/([^/]+)\/evaluations$/, showEvaluations, "evaluations"],
  [/^\/runs\/([^/]+)\/workers$/, showWorkers, "workers"],
];
/** Parts of a run: its page's name in addresses and its keys, by its title. */
const RUN_PARTS = { overview: ["", "g h"], rollouts: ["rollouts", "g o"], evaluations: ["evaluations", "g e"], workers: ["workers", "g w"] };
/** Keys without an element; the other ones are in the attribute data-keys of the element that they click. */
const KEYS = [
  ["j k", "the next and the previous line or card"],
  ["Enter", "open the line"],
  ["x", "choose the line"],
  ["Esc", "close, or leave a field"],
];

const page = document.getElementById("page");
const help = document.getElementById("help");
let leaving = new AbortController();
let currentRun = null;
let pressedG = 0;

/** Go to an address, without loading the document again. */
export function go(address, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", address);
  return show({ isAgain: replace });
}

/** Show the page of the current address; one that is shown again stays until its new content is there. */
async function show({ isAgain = false } = {}) {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const path = location.pathname;
  const found = PAGES.map(([pattern, render, part]) => [pattern.exec(path), render, part]).find(([match]) => match);
  const args = found ? found[0].slice(1).map(decoded) : [];
  currentRun = path.startsWith("/runs/") ? args[0] : null;
  showTrail(found?.[2]);
  page.setAttribute("aria-busy", "true");
  const waiting = isAgain ? null : setTimeout(() => page.replaceChildren(h("p", { class: "empty" }, "loading …")), 150);
  try {
    if (!found) throw new Error(`there is no page ${path}; the start page lists the runs`);
    const content = await found[1]({ args, query: new URLSearchParams(location.search), signal, go });
    if (signal.aborted) return;
    clearTimeout(waiting);
    page.replaceChildren(...[content].flat(Infinity).filter(Boolean));
    if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  } catch (error) {
    clearTimeout(waiting);
    if (error.name === "AbortError" || signal.aborted) return;
    page.replaceChildren(h("h1", {}, "This page cannot be shown"), empty(error.message));
  } finally {
    if (!signal.aborted) page.removeAttribute("aria-busy");
  }
  document.title = [page.querySelector("h1")?.textContent, "raylight"].filter(Boolean).join(" · ");
}

/** Return a part of an address as text; one that is not encoded well stays as it is, and names nothing. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Show the way to the page: the runs, the run, and the parts of the run with the current one marked. */
function showTrail(part) {
  const trail = document.getElementById("trail");
  trail.replaceChildren(h("a", { href: "/", "data-keys": "g r" }, "runs"));
  if (!currentRun) return;
  const link = ([title, [name, keys]]) =>
    h("a", { href: runPath(currentRun, ...(name ? [name] : [])), "aria-current": title === part ? "page" : null, "data-keys": keys }, title);
  append(trail, [h("a", { href: runPath(currentRun), class: "run" }, currentRun),
    h("span", { class: "parts" }, Object.entries(RUN_PARTS).map(link))]);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || link.target) return;
  if (link.origin !== location.origin || link.getAttribute("href").startsWith("#") || link.pathname.startsWith("/api/")) return;
  event.preventDefault();
  go(link.href).then(() => page.focus({ preventScroll: true }));
  scrollTo(0, 0);
});
addEventListener("popstate", () => show());
addEventListener("refresh", () => show({ isAgain: true }));

// theme

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}
function toggleTheme() {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  show({ isAgain: true });
}
document.getElementById("theme").addEventListener("click", toggleTheme);

// keys

/** List the keys of this page. */
function showHelp() {
  const own = [...document.querySelectorAll("[data-keys]")].map((element) => [element.dataset.keys, element.querySelector("input")?.ariaLabel ?? element.ariaLabel ?? element.textContent]);
  help.replaceChildren(
    h("h2", { id: "help-title" }, "Keys"),
    h("dl", { class: "keys" }, [...own, ...KEYS].map(([keys, text]) => [h("dt", {}, keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, text)])),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "close")),
  );
  help.showModal();
}
document.getElementById("keys").addEventListener("click", showHelp);

/** Move the focus to the main link of the next or previous line or card of the page. */
function moveLine(step) {
  const links = [...page.querySelectorAll("a.main")];
  if (!links.length) return;
  const index = links.indexOf(document.activeElement);
  const next = links[Math.min(Math.max(index < 0 ? 0 : index + step, 0), links.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey) return;
  const field = event.target.closest("input, select, textarea");
  if (event.key === "Escape" && field) field.blur();
  if (field || help.open) return;
  const afterG = Date.now() - pressedG < 1000;
  pressedG = event.key === "g" ? Date.now() : 0;
  const target = document.querySelector(`[data-keys="${CSS.escape(afterG ? `g ${event.key}` : event.key)}"]`);
  if (target) { event.preventDefault(); target.click(); }
  else if (event.key === "j") moveLine(1);
  else if (event.key === "k") moveLine(-1);
  else if (event.key === "x") document.activeElement.closest("tr")?.querySelector("input[type=checkbox]")?.click();
});

show();
