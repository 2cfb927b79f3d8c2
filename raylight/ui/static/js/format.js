// Numbers, times and values as text.

/** Return a number with about four digits; "–" for none. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return Math.abs(value) < 1e5 ? String(value) : value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

/** Return the first and the last value of a metric as "0.5 → 0.9"; "–" for none. */
export const change = (values) => (values ? `${number(values[0], 3)} → ${number(values[1], 3)}` : "–");

/** Return seconds as "12.3 s", "4 min 10 s" or "3 h 12 min". */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 100) return `${number(value, 3)} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

/** Return a time of the day, with the date if it is not today. */
export function time(value) {
  if (!value) return "–";
  const date = new Date(value * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  const clock = date.toLocaleTimeString("en-GB");
  return isToday ? clock : `${date.toLocaleDateString("sv")} ${clock}`;
}

/** Return how long ago a time was. */
export const ago = (value) => (value ? `${seconds(Math.max(Math.round(Date.now() / 1000 - value), 0))} ago` : "–");

export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole / 100 ? 1 : 0)} %` : "–");

/** Return a number of things: "1 tool", "2 tools". */
export const count = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

/** Return any value as text: strings as they are, others as JSON, in one line if it is short. */
export function text(value) {
  if (typeof value === "string") return value;
  const lines = String(JSON.stringify(value, null, 2)), line = lines.replace(/\n\s*/g, " ");
  return line.length <= 100 ? line : lines;
}
