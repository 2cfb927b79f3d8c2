// An agent that learns while it is in use: it adds two numbers with the official client of OpenAI. Each question
// is a session of `raylight serve --learn`, and the reward tells whether the answer was right.

import OpenAI from "openai";

const server = process.env.RAYLIGHT_URL ?? "http://127.0.0.1:8000";
const headers = { authorization: `Bearer ${process.env.RAYLIGHT_API_KEY}`, "content-type": "application/json" };
const [total, parallel] = [Number(process.argv[2] ?? 1000), Number(process.argv[3] ?? 16)];

type Session = { session_id: string; base_url: string; api_key: string; model: string };

async function post(path: string, body: object): Promise<Response> {
  return fetch(`${server}/v1/sessions${path}`, { method: "POST", headers, body: JSON.stringify(body) });
}

async function json<T>(response: Response): Promise<T> {
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return (await response.json()) as T;
}

/** Begin a session. While the run has no place for one, wait as long as it says. */
async function begin(task: object): Promise<Session> {
  for (;;) {
    const response = await post("", { task });
    if (response.status !== 429) return json<Session>(response);
    const seconds = Number(response.headers.get("retry-after") ?? 1);
    await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
  }
}

/** Answer one question in a session of its own, and return the reward. */
async function play(): Promise<number> {
  const [a, b] = [0, 0].map(() => 10 + Math.floor(Math.random() * 90));
  const session = await begin({ a, b });
  try {
    const client = new OpenAI({ baseURL: session.base_url, apiKey: session.api_key });
    const reply = await client.chat.completions.create({
      model: session.model,
      messages: [{ role: "user", content: `${a}+${b}=` }],
      max_tokens: 8,
    });
    const reward = reply.choices[0].message.content?.trim() === String(a + b) ? 1 : 0;
    await json(await post(`/${session.session_id}/reward`, { reward }));
    return reward;
  } catch (error) {
    await post(`/${session.session_id}/reward`, { failed: String(error) });
    throw error;
  }
}

const rewards: number[] = [];
let begun = 0;
await Promise.all(
  Array.from({ length: parallel }, async () => {
    while (begun++ < total) {
      rewards.push(await play());
      if (rewards.length % 100 === 0) {
        const mean = rewards.slice(-100).reduce((sum, reward) => sum + reward, 0) / 100;
        console.log(`${rewards.length} sessions, mean reward of the last 100: ${mean.toFixed(2)}`);
      }
    }
  }),
);
console.log(`done: ${rewards.length} sessions`);
