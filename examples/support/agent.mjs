// A support desk that learns while it is in use. The Vercel AI SDK asks the model which team solves a ticket. Each
// ticket is a session of `raylight serve --learn`, whose reward, the customer's answer, comes long after the call.
//
//   node agent.mjs PARALLEL DELAY     tickets at a time, and mean seconds until a customer answers

import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, RetryError } from "ai";

const { system, teams } = JSON.parse(readFileSync(new URL("tickets.json", import.meta.url), "utf8"));
const { RAYLIGHT_URL, RAYLIGHT_API_KEY } = process.env;
const headers = { authorization: `Bearer ${RAYLIGHT_API_KEY}`, "content-type": "application/json" };
const [parallel, delay] = [Number(process.argv[2] ?? 16), Number(process.argv[3] ?? 5)];

const choose = (list) => list[Math.floor(Math.random() * list.length)];

let started = false; // the server, which may take long to load its model

/** Send a request; while the server starts or has no place for a session, send it again. */
async function post(path, body) {
  for (let failures = 0; failures < 120; ) {
    const request = { method: "POST", headers, body: JSON.stringify(body) };
    const response = await fetch(`${RAYLIGHT_URL}/v1/sessions${path}`, request).catch(() => null);
    started ||= response !== null;
    if (response?.ok) return response.json();
    if (response && response.status < 500 && ![404, 429].includes(response.status)) {
      throw new Error(`${response.status}: ${await response.text()}`);
    }
    failures = response || !started ? 0 : failures + 1;
    await sleep(1000 * Number(response?.headers.get("retry-after") ?? 1));
  }
  throw new Error(`${RAYLIGHT_URL} does not answer any more`);
}

/** Route a ticket; return the team that the model names, and the session. */
async function route(ticket) {
  const session = await post("", { task: ticket });
  const provider = createOpenAICompatible({
    name: "raylight",
    baseURL: session.base_url,
    apiKey: session.api_key,
  });
  const { text } = await generateText({
    model: provider(session.model),
    system,
    prompt: `Order ${ticket.order}: ${ticket.problem}`,
    maxOutputTokens: 64,
  });
  return { team: text.trim().toLowerCase(), session };
}

/** Wait until the customer answers, and send the reward: 1 if the right team had the ticket. */
async function reward(session, team, ticket) {
  await sleep(-1000 * delay * Math.log(1 - Math.random()));
  await post(`/${session.session_id}/reward`, { reward: teams[team]?.includes(ticket.problem) ? 1 : 0 });
}

const stop = (error) => {
  console.error(String(error));
  process.exit(1);
};
for (let worker = 0; worker < parallel; worker++) {
  (async () => {
    for (;;) {
      const ticket = {
        order: 1000 + Math.floor(Math.random() * 9000),
        problem: choose(teams[choose(Object.keys(teams))]),
      };
      try {
        const { team, session } = await route(ticket);
        reward(session, team, ticket).catch(stop); // the next ticket does not wait for it
      } catch (error) {
        if (!RetryError.isInstance(error)) throw error; // the server is gone or busy: `post` waits for it
      }
    }
  })().catch(stop);
}
