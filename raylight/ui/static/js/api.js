// The server's JSON and events.

/** Return the JSON of an address below /api; raise an error with the server's message. */
export async function get(path, signal, query = {}) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const suffix = search.size ? `?${search}` : "";
  let answer;
  try {
    answer = await fetch(`/api${path}${suffix}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer; start `raylight ui` again, then reload this page");
  }
  const body = await answer.json().catch(() => ({ error: `the server answered ${answer.status} without JSON` }));
  if (!answer.ok) throw new Error(body.error);
  return body;
}

/** Return the address of a run's API, or of a part of it. */
export const runPath = (run, ...parts) => ["/runs", run, ...parts].map((part, i) => (i ? encodeURIComponent(part) : part)).join("/");

/** Call a function every few milliseconds while the page is seen, until the signal aborts; errors wait for the next time. */
export function every(milliseconds, refresh, signal) {
  const timer = setInterval(() => { if (!document.hidden) refresh().catch(() => {}); }, milliseconds);
  signal.addEventListener("abort", () => clearInterval(timer));
}

/** Set a value of the current address, without a new entry in the history, so that the address can be shared. */
export function setQuery(values) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, value);
  }
  history.replaceState(null, "", location.pathname + (query.size ? `?${query}` : "") + location.hash);
}

/**
 * Follow a run until it ends or the signal aborts. A hidden page is not connected, because browsers open only
 * six connections to a server; it is refreshed when it is seen again, and after a failed connection.
 * @param {Object<string, function(any)>} handlers by the kind of event.
 */
export function follow(run, handlers, signal) {
  const live = document.getElementById("live");
  const refresh = () => dispatchEvent(new Event("refresh"));
  let source = null, isOver = false, missed = false;
  const connect = () => {
    source = new EventSource(`/api${runPath(run, "events")}`);
    source.onopen = () => { live.textContent = "live"; if (missed) refresh(); };
    source.onerror = () => { missed = true; live.hidden = false; live.textContent = "not connected"; };
    source.addEventListener("run", (event) => { live.hidden = JSON.parse(event.data).status !== "running"; });
    source.addEventListener("end", () => { isOver = true; source.close(); });
    for (const [kind, handle] of Object.entries(handlers)) {
      source.addEventListener(kind, (event) => handle(JSON.parse(event.data)));
    }
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) source?.close();
    else if (!isOver) refresh();
  }, { signal });
  if (!document.hidden) connect();
  signal.addEventListener("abort", () => { source?.close(); live.hidden = true; });
}
