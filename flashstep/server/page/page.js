// The status page: asks /status once a second, draws the last two minutes, and holds a small chat with /v1/chat/completions.
// What users and models wrote goes into text nodes only; nothing here makes HTML of a string.

const POLL_MS = 1000;
const KEPT = 120; // figures in a graph
const WINDOW_S = 60; // over which percentiles and hit rates are told
const GRAPH = { width: 240, height: 30 };
const SVG = "http://www.w3.org/2000/svg";

const at = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function element(name, attributes = {}, text = "") {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function show(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

// ---- figures ----------------------------------------------------------------------------------------------------------

const polls = []; // answers of /status, oldest first
const graphs = new Map([...document.querySelectorAll("[data-graph]")].map((card) => [card.dataset.graph, graph(card)]));

function graph(card) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "graph");
  svg.setAttribute("viewBox", `0 0 ${GRAPH.width} ${GRAPH.height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true"); // the figure above it says the newest value
  const parts = {};
  for (const kind of ["area", "floor", "line"]) {
    parts[kind] = svg.appendChild(document.createElementNS(SVG, "path"));
    parts[kind].setAttribute("class", kind);
  }
  parts.floor.setAttribute("d", `M0 ${GRAPH.height}H${GRAPH.width}`);
  card.append(svg);
  return { ...parts, values: [] };
}

function draw(name, value, least) {
  const { values, line, area } = graphs.get(name);
  values.push(value ?? 0);
  if (values.length > KEPT) values.shift();
  const top = Math.max(least, ...values) * 1.05;
  const x = (i) => (GRAPH.width * (KEPT - values.length + i)) / (KEPT - 1);
  const y = (v) => GRAPH.height * (1 - v / top);
  const path = values.map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  line.setAttribute("d", path);
  area.setAttribute("d", `${path}L${GRAPH.width} ${GRAPH.height}L${x(0).toFixed(1)} ${GRAPH.height}Z`);
}

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`);

function seconds(s) {
  if (s === null) return "–";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 1) return `${(s * 1000).toPrecision(s < 0.1 ? 2 : 3)} ms`;
  return `${s.toFixed(s < 10 ? 2 : 0)} s`;
}

function span(s) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = Math.min(units.findIndex(([, size]) => s >= size) + 4, 7) % 4;
  return units
    .slice(first, first + 2)
    .map(([unit, size], i) => `${Math.floor(i ? (s % units[first][1]) / size : s / size)} ${unit}`)
    .join(" ");
}

// Of two counts of a cumulative histogram [[edge, count], ...]: the quantile of what came between, or null if nothing did.
function quantile(now, before, q) {
  const counts = now.map(([edge, count], i) => [edge, count - before[i][1]]);
  const all = counts.at(-1)[1];
  if (!all) return null;
  let [low, below] = [0, 0];
  for (const [edge, count] of counts) {
    if (count >= q * all && count > below) {
      return edge === null ? low : low + ((edge - low) * (q * all - below)) / (count - below);
    }
    [low, below] = [edge, count];
  }
  return low;
}

function takeFigures(now) {
  const last = polls.at(-1);
  if (last && now.generation_tokens < last.generation_tokens) polls.length = 0; // the server is another one
  polls.push(now);
  while (polls.length > 2 && polls[1].time_s <= now.time_s - WINDOW_S) polls.shift();
  const before = polls.at(-2) ?? now;
  const passed = now.time_s - before.time_s;
  const rate = (name) => (passed > 0 ? Math.max(now[name] - before[name], 0) / passed : 0);
  showFigures(now, { generated: rate("generation_tokens"), prompted: rate("prompt_tokens") });
  showShares(now, polls[0]);
  showFacts(now);
}

function showFigures(now, rates) {
  show("running", whole.format(now.running));
  show("slots", `of ${whole.format(now.limits.max_num_seqs)}`);
  show("waiting", whole.format(now.waiting));
  show("cache", percent(now.cache_usage));
  show("cache-size", `of ${short.format(now.limits.cache_tokens)} tokens`);
  draw("running", now.running, 1);
  draw("waiting", now.waiting, 1);
  draw("cache", now.cache_usage, 0.01);
  for (const [name, value] of Object.entries(rates)) {
    show(name, value < 10000 ? whole.format(value) : short.format(value));
    draw(name, value, 1);
  }
}

function showShares(now, then) {
  const asked = now.prefix_queries - then.prefix_queries;
  const found = asked ? (now.prefix_hits - then.prefix_hits) / asked : null;
  const since = now.prefix_queries ? now.prefix_hits / now.prefix_queries : null;
  show("hits", percent(found ?? since));
  show("hits-span", found === null && since !== null ? "since the start" : "of prompt tokens");
  draw("hits", found, 1);
  for (const [id, name] of [["first", "time_to_first_token_s"], ["between", "inter_token_s"]]) {
    const median = quantile(now[name], then[name], 0.5);
    const tail = quantile(now[name], then[name], 0.95);
    show(id, seconds(median));
    show(`${id}-tail`, tail === null ? "median" : `median · ${seconds(tail)} p95`);
    draw(id, median, 0.0001);
  }
  at("acceptance-card").hidden = !now.acceptance;
  if (now.acceptance) showAcceptance(now.acceptance, then.acceptance);
}

function showAcceptance(now, then) {
  const fresh = then && now.steps > then.steps;
  const steps = fresh ? now.steps - then.steps : now.steps;
  const stood = now.per_position.map((count, i) => (steps ? (count - (fresh ? then.per_position[i] : 0)) / steps : 0));
  show("acceptance-title", now.synthetic ? "Drafts that stand (synthetic: by lot)" : "Drafts that stand");
  show("acceptance", steps ? (1 + stood.reduce((sum, share) => sum + share, 0)).toFixed(2) : "–");
  show("acceptance-span", fresh ? "tokens a step" : "tokens a step, since the start");
  const bars = at("positions");
  while (bars.children.length < stood.length) {
    const item = bars.appendChild(element("li"));
    item.append(element("meter", { min: 0, max: 1, "aria-label": `Position ${bars.children.length}` }), element("span"));
  }
  stood.forEach((share, i) => {
    const [meter, label] = bars.children[i].children;
    meter.value = share;
    label.textContent = `${i + 1}: ${percent(share)}`;
  });
}

function showFacts(now) {
  show("finished", whole.format(now.finished.stop + now.finished.length));
  show("aborted", whole.format(now.finished.abort));
  show("failed", whole.format(now.finished.error));
  show("rejected", whole.format(now.rejected));
  show("preempted", whole.format(now.preemptions));
  show("generated-all", short.format(now.generation_tokens));
  show("context", `${whole.format(now.limits.max_model_len)} tokens`);
  show("policy", now.limits.hit_policy);
  show("model", now.model);
  show("uptime", `up ${span(now.uptime_s)}`);
  show("version", `flashstep ${now.version}`);
  document.title = `${now.model} · flashstep`;
}

function showHealth(state, text) {
  show("health", text);
  at("health").dataset.state = state;
}

async function poll() {
  try {
    const response = await fetch("status", { cache: "no-store" });
    if (!response.ok) throw new Error(`status ${response.status}`);
    const now = await response.json();
    takeFigures(now);
    now.healthy ? showHealth("good", "Healthy") : showHealth("bad", "The engine is gone");
  } catch {
    showHealth("bad", "Not reachable");
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
}

// ---- chat -------------------------------------------------------------------------------------------------------------

const talk = at("talk");
let messages = []; // what the model is told next time
let running = null; // the AbortController of the answer that comes in

function follow(change) {
  const close = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  change();
  if (close) talk.scrollTop = talk.scrollHeight;
}

// The answer's place in the page: reasoning apart, then text; gives functions that add to it.
function answerTurn() {
  const turn = talk.appendChild(element("div", { class: "turn answer", "aria-busy": "true" }));
  const began = performance.now();
  const parts = {};
  const part = (name, make) => (parts[name] ??= make());
  const reasoning = () => {
    const box = turn.appendChild(element("details", { open: "" }));
    parts.summary = box.appendChild(element("summary", {}, "Thinking"));
    return box.appendChild(element("div", { class: "text" })).appendChild(new Text());
  };
  const content = () => {
    if (parts.summary) closeThought();
    return turn.appendChild(element("div", { class: "text content" })).appendChild(new Text());
  };
  const closeThought = () => {
    if (parts.summary.textContent !== "Thinking") return;
    parts.summary.textContent = `Thought for ${seconds((performance.now() - began) / 1000)}`;
  };
  return {
    think: (text) => follow(() => part("reasoning", reasoning).appendData(text)),
    say: (text) => follow(() => part("content", content).appendData(text)),
    fail: (text) => follow(() => turn.append(element("p", { class: "failed", role: "alert" }, text))),
    end: (told) =>
      follow(() => {
        if (parts.summary) closeThought();
        turn.setAttribute("aria-busy", "false");
        if (told) turn.append(element("p", { class: "told" }, told));
      }),
    text: () => parts.content?.data ?? "",
  };
}

// The data of server-sent events, one after the other.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

async function ask(signal) {
  const headers = { "Content-Type": "application/json" };
  if (at("key").value) headers.Authorization = `Bearer ${at("key").value}`;
  const thinking = { type: at("thinking").checked ? "enabled" : "disabled" };
  const body = JSON.stringify({ messages, thinking, stream: true, stream_options: { include_usage: true } });
  const response = await fetch("v1/chat/completions", { method: "POST", headers, body, signal });
  if (response.ok) {
    at("key-row").hidden = true;
    return response.body;
  }
  if (response.status === 401) {
    at("key-row").hidden = false;
    at("key").focus();
    throw new Error("This server wants an API key: enter it below and send again.");
  }
  const told = await response.json().catch(() => null);
  throw new Error(told?.error?.message ?? `The server answered ${response.status}.`);
}

async function hear(turn, signal) {
  const began = performance.now();
  let [reason, usage, first] = [null, null, null];
  for await (const data of events(await ask(signal))) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    reason = choice.finish_reason ?? reason;
    const { content, reasoning, reasoning_content: thought = reasoning } = choice.delta; // by --reasoning-field
    if (thought || content) first ??= performance.now();
    if (thought) turn.think(thought);
    if (content) turn.say(content);
  }
  if (!usage) return null;
  const count = usage.completion_tokens;
  const decode = (performance.now() - first) / 1000;
  const pace = count > 1 && first && decode > 0 ? ` · ${whole.format((count - 1) / decode)} tokens/s` : "";
  const wait = first ? ` · first after ${seconds((first - began) / 1000)}` : "";
  return `${whole.format(count)} tokens${pace}${wait} · ${reason}`;
}

async function send(text) {
  at("empty").hidden = true;
  for (const old of talk.querySelectorAll(".answer:has(> .failed:only-child)")) old.remove();
  const asked = element("div", { class: "turn user" });
  asked.append(element("div", { class: "text" }, text));
  talk.append(asked);
  messages.push({ role: "user", content: text });
  const heard = messages;
  const turn = answerTurn();
  talk.scrollTop = talk.scrollHeight;
  running = new AbortController();
  busy(true);
  try {
    turn.end(await hear(turn, running.signal));
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!stopped) turn.fail(error instanceof TypeError ? "The server cannot be reached." : error.message);
    turn.end(stopped ? "stopped" : null);
    if (!stopped && !turn.text()) takeBack(heard, asked, text);
  }
  if (turn.text()) heard.push({ role: "assistant", content: turn.text() });
  running = null;
  busy(false);
}

// A message that was not answered goes back to where it was written.
function takeBack(heard, asked, text) {
  heard.pop();
  asked.remove();
  if (!at("message").value) at("message").value = text;
}

function busy(yes) {
  at("send").hidden = yes;
  at("stop").hidden = !yes;
}

function fit() {
  const box = at("message");
  box.style.height = "auto"; // where CSS has no field-sizing
  box.style.height = `${Math.min(box.scrollHeight + 2, 180)}px`;
}

at("ask").addEventListener("submit", (happened) => {
  happened.preventDefault();
  const text = at("message").value.trim();
  if (!text || running) return;
  at("message").value = "";
  fit();
  send(text);
});
at("message").addEventListener("keydown", (pressed) => {
  if (pressed.key !== "Enter" || pressed.shiftKey || pressed.isComposing) return;
  pressed.preventDefault();
  at("ask").requestSubmit();
});
at("message").addEventListener("input", fit);
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  for (const turn of talk.querySelectorAll(".turn")) turn.remove();
  at("empty").hidden = false;
  at("message").focus();
});

watch();
