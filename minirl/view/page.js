// The page of `python -m minirl.view`. What it shows stands in the address (#step=10&split=train&
// index=3), so that it can be reloaded and passed on. Texts of a run are never read as HTML.

const byId = (id) => document.getElementById(id);
const state = { step: null, split: null, index: null, metric: null, colours: null };
const REWARD = "critic/score/mean";
let steps = [], rows = [], sortedBy = null;

// ---- parts -------------------------------------------------------------------------------------

/** An element with attributes and children; functions are listeners, strings are text. */
function make(tag, attributes = {}, ...children) {
  const inSvg = ["svg", "g", "rect", "path", "line", "text", "title"].includes(tag);
  const element = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const isNumber = (value) => value !== null && value !== undefined && value !== "";
/** JSON has no nan and no infinity: they come as their names. */
const show = (value, digits = 4) =>
  !isNumber(value) ? "" : Number.isInteger(Number(value)) ? String(value)
    : Number(value).toPrecision(digits);
const isChosen = (row) => String(row.index) === state.index;
const timed = (part) => isNumber(part.start_s) && isNumber(part.end_s);
const at = (seconds) => (isNumber(seconds) ? seconds.toFixed(3) : "");
const ms = (seconds) => (isNumber(seconds) ? (1000 * seconds).toFixed(1) : "");
const span = (part) => (timed(part) ? part.end_s - part.start_s : null);

const word = (value) => (isNaN(value) ? String(value) : show(value, 3));

function table(headings, lines) {
  return make("table", {},
    make("tr", {}, ...headings.map((text) => make("th", {}, text))),
    ...lines.map((cells) => make("tr", {}, ...cells.map((cell) =>
      make("td", isNaN(cell) ? { class: "text" } : {}, String(cell))))));
}

async function ask(path, options = {}) {
  const response = await fetch(`api/${path}?${new URLSearchParams(options)}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function fill(select, values, chosen) {
  select.replaceChildren(...values.map((value) => make("option", { value }, String(value))));
  select.value = chosen;
}

// ---- what is shown -----------------------------------------------------------------------------

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(state)) state[name] = given.get(name);
}

function go(changes) {
  const known = Object.entries({ ...state, ...changes }).filter(([, value]) => isNumber(value));
  location.hash = new URLSearchParams(known);
}

async function update() {
  byId("message").textContent = "";
  try {
    readAddress();
    const run = await ask("run");
    steps = run.steps;
    document.title = byId("name").textContent = run.name;
    state.metric ??= run.metrics.includes(REWARD) ? REWARD : run.metrics[0];
    fill(byId("metrics"), run.metrics, state.metric);
    state.step = Number(state.step ?? steps.at(-1));
    fill(byId("steps"), steps, state.step);
    await showCurve();
    if (!steps.length) throw new Error("No trajectories: rollout.trace says how many are kept.");
    await showStep();
  } catch (error) {
    byId("message").textContent = error.message;
  }
}

async function showCurve() {
  const points = isNumber(state.metric) ? await ask("metric", { name: state.metric }) : [];
  const found = points.map(([step, value]) => [step, Number(value)]).filter(([, v]) => isFinite(v));
  if (!found.length) return byId("curve").replaceChildren();
  const [width, height, left, low] = [1200, 120, 60, 18];
  const values = found.map(([, value]) => value);
  const [first, last] = [found[0][0], found.at(-1)[0]];
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const x = (step) => left + ((step - first) / (last - first || 1)) * (width - left - 10);
  const y = (value) => 8 + (1 - (value - least) / (most - least || 1)) * (height - low - 12);
  const line = found.map(([step, value], i) => `${i ? "L" : "M"}${x(step)} ${y(value)}`).join("");
  const here = found.find(([step]) => step === state.step);
  const chart = make("svg", {
    viewBox: `0 0 ${width} ${height}`,
    click: (event) => {
      const box = chart.getBoundingClientRect();
      const step = first + (((event.clientX - box.left) / box.width * width - left)
        / (width - left - 10)) * (last - first);
      const near = (s) => Math.abs(s - step);
      go({ step: steps.reduce((best, s) => (near(s) < near(best) ? s : best)), index: null });
    },
  },
    make("line", { class: "axis", x1: left, x2: width, y1: height - low, y2: height - low }),
    make("line", { class: "here", x1: x(state.step), x2: x(state.step), y1: 0, y2: height - low }),
    make("path", { class: "curve", d: line }),
    make("text", { x: 0, y: y(most) + 4 }, show(most)),
    make("text", { x: 0, y: y(least) }, least === most ? "" : show(least)),
    make("text", { x: left, y: height - 4 }, `step ${first}`),
    make("text", { x: width, y: height - 4, "text-anchor": "end" }, `step ${last}`),
    make("text", { x: x(state.step) + 4, y: 12 }, here ? `${state.step}: ${show(here[1])}` : ""));
  byId("curve").replaceChildren(chart);
}

async function showStep() {
  const all = (await ask("step", { step: state.step })).map((row, index) => ({ ...row, index }));
  const splits = [...new Set(all.map((row) => row.split))].sort();
  if (!splits.includes(state.split)) state.split = splits.includes("train") ? "train" : splits[0];
  fill(byId("splits"), splits, state.split);
  rows = all.filter((row) => row.split === state.split);
  const known = rows.some((row) => String(row.index) === state.index);
  if (!known) state.index = rows.length ? String(rows[0].index) : null;
  showTimeline();
  showList();
  if (state.index !== null) await showTrajectory();
}

// ---- a step ------------------------------------------------------------------------------------

function showTimeline() {
  const measured = rows.filter(timed).sort((a, b) => a.start_s - b.start_s);
  if (!measured.length) return byId("timeline").replaceChildren();
  const [width, left, each] = [1200, 90, measured.length > 60 ? 5 : 12];
  const ends = measured.flatMap((row) => [row, ...row.rewards].filter(timed).map((r) => r.end_s));
  const [from, to] = [measured[0].start_s, Math.max(...ends)];
  const x = (s) => left + ((s - from) / (to - from || 1)) * (width - left - 10);
  const bar = (kind, part, top, height, text) => make("rect", {
    class: kind, x: x(part.start_s), y: top, height,
    width: Math.max(x(part.end_s) - x(part.start_s), 0.75),
  }, make("title", {}, `${text}, ${part.start_s.toFixed(3)} to ${part.end_s.toFixed(3)} s`));
  const turns = measured.flatMap((row) => row.turns.filter(timed));
  const engines = Map.groupBy(turns, (turn) => turn.server ?? 0);
  const shapes = [];
  let top = 4;
  for (const [server, its] of [...engines].sort(([a], [b]) => a - b)) {
    shapes.push(make("text", { x: 0, y: top + 28 }, `engine ${server}`), load(its, x, top, 36));
    top += 44;
  }
  for (const row of measured) {
    const name = `${row.uid} / ${row.sample_index}`;
    const parts = [
      ["waiting", row, name],
      ...row.turns.filter(timed).map((turn) => ["generating", turn, `${name} generates`]),
      ...row.tool_calls.filter(timed).map((call) => ["tool", call, `${name}: ${call.name}`]),
      ...row.rewards.filter(timed).map((part) => ["scoring", part, `${name}: ${part.name}`]),
    ];
    shapes.push(make("g", {
      class: isChosen(row) ? "chosen" : "", click: () => go({ index: row.index }),
    }, ...parts.map(([kind, part, text]) => bar(kind, part, top, each - 1, text))));
    top += each;
  }
  shapes.push(make("text", { x: left, y: top + 12 }, `${from.toFixed(2)} s`),
    make("text", { x: width, y: top + 12, "text-anchor": "end" }, `${to.toFixed(2)} s`));
  byId("timeline").replaceChildren(make("svg", { viewBox: `0 0 ${width} ${top + 16}` }, ...shapes));
}

/** How many of these turns an engine had at once, as an area. */
function load(turns, x, top, height) {
  const changes = turns.flatMap((turn) => [[turn.start_s, 1], [turn.end_s, -1]]);
  changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let now = 0;
  const numbers = changes.map(([, by]) => (now += by));
  const most = Math.max(...numbers);
  const y = (number) => top + height * (1 - number / most);
  const line = changes.map(([when], i) => `H${x(when)}V${y(numbers[i])}`).join("");
  return make("path", { class: "generating", d: `M${x(changes[0][0])} ${top + height}${line}Z` },
    make("title", {}, `up to ${most} at once, of those that were kept`));
}

const COLUMNS = [
  ["prompt", (row) => row.uid],
  ["sample", (row) => row.sample_index],
  ["reward", (row) => row.reward],
  ["advantage", (row) => row.advantage],
  ["turns", (row) => row.turns.length],
  ["tokens", (row) => row.num_tokens],
  ["tools", (row) => row.tool_calls.length],
  ["seconds", span],
  ["ended", (row) => (row.failed ? "error" : row.termination)],
];

function showList() {
  const value = sortedBy && COLUMNS.find(([name]) => name === sortedBy.name)[1];
  const order = !value ? rows : [...rows].sort((a, b) => {
    const [one, two] = [value(a), value(b)];
    const less = typeof one === "number" && typeof two === "number" ? one - two
      : String(one).localeCompare(String(two));
    return sortedBy.down ? -less : less;
  });
  const sort = (name) => {
    sortedBy = { name, down: sortedBy?.name === name && !sortedBy.down };
    showList();
  };
  byId("rows").replaceChildren(
    make("tr", {}, ...COLUMNS.map(([name]) => make("th", { click: () => sort(name) }, name))),
    ...order.map((row) => make("tr", {
      class: isChosen(row) ? "chosen" : "", tabindex: 0,
      click: () => go({ index: row.index }),
      keydown: (event) => { if (event.key === "Enter") go({ index: row.index }); },
    }, ...COLUMNS.map(([, get]) => make("td", {}, word(get(row)))))));
  const list = byId("list"), box = list.getBoundingClientRect();
  const place = list.querySelector(".chosen")?.getBoundingClientRect();
  if (place && (place.top < box.top + 50 || place.bottom > box.bottom)) {
    list.scrollTop += place.top - box.top - 80;
  }
}

// ---- a trajectory ------------------------------------------------------------------------------

/** By what tokens are coloured: name, the value of token i, and whether it has two signs. */
const COLOURINGS = [
  ["who wrote it", null],
  ["log-probability, engine", (t, i) => t.response_logprobs?.[i]],
  ["log-probability, trainer", (t, i) => t.old_logprobs?.[i]],
  ["engine - trainer",
    (t, i) => t.old_logprobs && t.response_logprobs[i] - t.old_logprobs[i], true],
  ["advantage", (t, i) => t.advantages?.[i], true],
  ["reward", (t, i) => t.token_rewards?.[i], true],
  ["return", (t, i) => t.returns?.[i], true],
  ["value", (t, i) => t.values?.[i], true],
  ["log-probability, reference", (t, i) => t.ref_logprobs?.[i]],
];

async function showTrajectory() {
  const t = await ask("trajectory", { step: state.step, index: state.index });
  const about = make("div", { id: "about" });
  const response = make("div", { class: "tokens" });
  const possible = COLOURINGS.filter(([, value]) => !value || isNumber(value(t, 0)));
  const choice = make("select", { change: () => go({ colours: choice.value }) });
  const chosen = possible.find(([name]) => name === state.colours) ?? possible[0];
  fill(choice, possible.map(([name]) => name), chosen[0]);
  colour(t, response, about, chosen);
  const facts = {
    "ended": t.termination,
    "reward": show(t.reward),
    "parts": JSON.stringify(t.reward_breakdown),
    "ground truth": JSON.stringify(t.ground_truth),
    "answer": t.answer ?? "",
    "weights": [...new Set(t.weight_versions)].join(", "),
    "data source": t.data_source,
    "tokens": `${t.prompt_ids.length} prompt, ${t.response_ids.length} response, `
      + `${t.response_mask.reduce((a, b) => a + b, 0)} of them sampled`,
  };
  const turns = table(["", "engine", "weights", "cached", "preempted", "at, s", "ms", "ended"],
    t.turns.map((turn, i) => [i, turn.server ?? "", t.weight_versions[i], turn.num_cached_tokens,
      turn.num_preempted, at(turn.start_s), ms(span(turn)), turn.finish_reason]));
  const calls = table(
    ["turn", "tool", "arguments", "result", "status", "reward", "at, s", "ms"],
    t.tool_calls.map((call) => [call.turn, call.name, call.arguments, call.result, call.status,
      show(call.reward), at(call.start_s), ms(call.seconds)]));
  const rewards = table(["part", "value", "at, s", "ms"], t.rewards.map(
    (part) => [part.name, show(part.value) || "failed", at(part.start_s), ms(span(part))]));
  byId("trajectory").replaceChildren(
    make("h2", {}, `${t.uid} / ${t.sample_index}`),
    make("dl", {}, ...Object.entries(facts).filter(([, text]) => text)
      .flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])),
    ...(t.error ? [make("h2", {}, "Error"), make("pre", {}, t.error)] : []),
    make("details", {}, make("summary", {}, "Prompt"), make("div", { class: "tokens" }, t.prompt)),
    make("h2", {}, "Response"),
    make("label", {}, "colours ", choice),
    make("p", { class: "key" }, make("span", { class: "policy" }), "the policy",
      make("span", { class: "other" }), "a tool, the user or the template"),
    about, response,
    make("h2", {}, "Turns"), make("div", { class: "wide" }, turns),
    ...(t.tool_calls.length ? [make("h2", {}, "Tool calls")] : []),
    ...(t.tool_calls.length ? [make("div", { class: "wide" }, calls)] : []),
    ...(t.rewards.length ? [make("h2", {}, "Rewards"), rewards] : []));
}

/** Fill `target` with the response, one span per token, or per stretch where texts of single tokens
 * are not known. */
function colour(t, target, about, [, value, signed]) {
  if (!t.pieces) {
    about.textContent = `Texts of single tokens are not known: ${t.pieces_error}`;
    return target.replaceChildren(...t.turns.flatMap((turn) => [
      make("span", { class: "policy" }, turn.text),
      make("span", { class: "other" }, turn.observation)]));
  }
  const isColoured = (i) => value && t.response_mask[i];
  const values = t.pieces.map((_, i) => (isColoured(i) ? Number(value(t, i)) : 0));
  const largest = Math.max(...values.filter(isFinite).map(Math.abs), 1e-12);
  const scale = signed ? `; blue is above 0, orange below` : ` below 0`;
  about.textContent = "Point at a token."
    + (value ? ` The strongest colour is ${show(largest)}${scale}.` : "");
  const spans = t.pieces.map((text, i) => {
    const token = make("span", {
      class: t.response_mask[i] ? "policy" : "other",
      mouseenter: () => { about.textContent = describe(t, i); },
    }, text || "·");
    if (!text) token.classList.add("mark");
    if (isColoured(i)) {
      const hue = signed && values[i] >= 0 ? 205 : 20;
      const strength = isFinite(values[i]) ? Math.abs(values[i]) / largest : 1;
      token.style.background = `hsl(${hue} 90% ${100 - 38 * strength}%)`;
    }
    return token;
  });
  target.replaceChildren(...spans);
}

function describe(t, i) {
  const parts = [`token ${i}: id ${t.response_ids[i]} ${JSON.stringify(t.pieces[i])}`];
  if (!t.response_mask[i]) return `${parts[0]}, not sampled`;
  for (const [name, value] of COLOURINGS) {
    if (value && isNumber(value(t, i))) parts.push(`${name} ${show(value(t, i))}`);
  }
  return parts.join(" | ");
}

// ---- begin -------------------------------------------------------------------------------------

const move = (by) => {
  const place = steps.indexOf(state.step) + by;
  if (steps[place] !== undefined) go({ step: steps[place], index: null });
};
byId("earlier").addEventListener("click", () => move(-1));
byId("later").addEventListener("click", () => move(1));
byId("steps").addEventListener("change", (event) => go({ step: event.target.value, index: null }));
byId("splits").addEventListener("change", (event) => {
  go({ split: event.target.value, index: null });
});
byId("metrics").addEventListener("change", (event) => go({ metric: event.target.value }));
let updates = update();
addEventListener("hashchange", () => { updates = updates.then(update); });  // one after another
