// The first and the last reward of a run.

import { get, runPath } from "./api.js";
import { h } from "./dom.js";

/** The toy page of a run. */
export async function showToy({ args: [run], signal }) {
  const { first, last } = await get(runPath(run, "toy"), signal);
  return [h("h1", {}, "Toy"), h("p", {}, `from ${first} to ${last}`)];
}
