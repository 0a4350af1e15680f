// The playground's page: it draws what the server tells over /events, and sends commands to /commands.
// All text comes in by textContent, so that no data can become markup.

const WINDOW_MS = 30_000;
const LEDGER_ROWS = 100;
const MOST_DOTS = 160;
// A vote takes less than a millisecond: its dot is shown slower than it was.
const DOT_MS = 300;
// The requests of one round begin within this time.
const ROUND_MS = 60;
// Without news for this long the clocks of the page stand still, as they would be guesses.
const STALE_MS = 500;
// A round is shown for this long, unless another one replaces it.
const ROUND_SHOWN_MS = 2_000;

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

const REASONS = [
  { counter: "contended", name: "Busy", words: "another caller holds the lock" },
  { counter: "unavailable", name: "No quorum", words: "too few nodes answer" },
  { counter: "quarantined", name: "Quarantined", words: "restarted nodes may not vote yet" },
  { counter: "expired", name: "Expired", words: "the lock ran out before the response" },
  { counter: "lost", name: "Lost", words: "a majority no longer knows the lock" },
  { counter: "refused_writes", name: "Stale token", words: "the storage has seen a newer one" },
];

const CODES = {
  "lock-contended": "Busy: another caller holds the lock",
  "request-in-progress": "In progress: the first request with this key still runs",
  "lock-unavailable": "No quorum: too few nodes answer",
  "lock-quarantined": "Quarantined: restarted nodes may not vote yet",
  "lock-expired": "Expired: the lock ran out before the response",
  "lock-lost": "Lost: a majority no longer knows the lock",
  "lock-overloaded": "Overloaded: too many requests wait for this lock",
  "stale-token": "Stale token: the storage has seen a newer one",
  replayed: "replayed: the recorded response",
  ok: "served",
};

const INVARIANTS = ["two_holders", "token_regressions", "lost_updates"];

const byId = (id) => document.getElementById(id);

// What is shown. All times are the server's, in milliseconds since the playground began.
const view = {
  state: null,
  instance: null,
  offset: null,
  early: [],
  holds: new Map(),
  writes: [],
  rounds: new Map(),
  announced: new Map(),
  tourSteps: [],
};

// ---------------------------------------------------------------- helpers

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Writes only what changes, so that nothing is laid out or read out again without need.
function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function setAttribute(target, name, value) {
  if (value === null) target.removeAttribute(name);
  else if (target.getAttribute(name) !== String(value)) target.setAttribute(name, value);
}

function setHidden(target, hidden) {
  if (target.hidden !== hidden) target.hidden = hidden;
}

const seconds = (ms) => `${(Math.max(0, ms) / 1000).toFixed(1)} s`;

// Tokens have 16 digits. The difference to the first one shows that they increase.
function difference(token) {
  const first = view.state?.first_token ?? null;
  if (token === null || first === null) return "–";
  const value = BigInt(token) - BigInt(first);
  return `${value < 0n ? "−" : "+"}${(value < 0n ? -value : value).toLocaleString("en")}`;
}

function setToken(target, token) {
  setText(target, difference(token));
  setAttribute(target, "title", token);
  setAttribute(target, "data-token", token ?? "");
}

// Now by the server's clock. Messages can come late but never early, so the largest offset is the best one.
function now() {
  const guess = view.offset + performance.now();
  return Math.min(guess, view.state.at + STALE_MS);
}

function keepTime(at) {
  const offset = at - performance.now();
  const isNews = view.offset === null || offset > view.offset || view.offset - offset > 1000;
  view.offset = isNews ? offset : view.offset - 0.2;
}

// ---------------------------------------------------------------- commands

async function command(what) {
  try {
    const answer = await fetch("/commands", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(what),
    });
    if (!answer.ok) notify((await answer.text()) || `The playground answered ${answer.status}.`);
  } catch {
    notify("The playground does not answer.");
  }
}

let noticeTimer = 0;
function notify(text) {
  const notice = byId("notice");
  setText(notice, text);
  setHidden(notice, false);
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => setHidden(notice, true), 6000);
}

const NODE_COMMANDS = {
  kill: (node) => ({ do: "kill", node }),
  restart: (node) => ({ do: "restart", node }),
  hang: (node) => ({ do: "hang", node }),
  resume: (node) => ({ do: "resume", node }),
  wipe: (node) => ({ do: "wipe", node }),
  delay: (node, button) => ({ do: "delay", node, ms: isPressed(button) ? 0 : 100 }),
  cut: (node, button) => ({ do: "cut", node, server: button.dataset.server, on: !isPressed(button) }),
};

const isPressed = (button) => button.getAttribute("aria-pressed") === "true";

const PAGE_COMMANDS = {
  load: (button) => ({ do: "load", on: !isPressed(button) }),
  reset: () => ({ do: "reset" }),
  "fewer-callers": () => ({ do: "callers", count: view.state.callers.length - 1 }),
  "more-callers": () => ({ do: "callers", count: view.state.callers.length + 1 }),
  pause: (button) => ({ do: "pause", caller: button.dataset.caller }),
  disconnect: (button) => ({ do: "disconnect", caller: button.dataset.caller }),
  tour: (button) => ({ do: "tour", step: Number(button.dataset.step) }),
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (!button || !view.state || button.getAttribute("aria-disabled") === "true") return;
  const { action, node } = button.dataset;
  if (action === "explain") {
    const step = button.closest("li");
    openStep(step.dataset.open === "true" ? null : Number(step.dataset.step));
  } else if (node !== undefined) {
    command(NODE_COMMANDS[action](Number(node), button));
  } else {
    command(PAGE_COMMANDS[action](button));
  }
});

// ---------------------------------------------------------------- nodes

function actionButton(action, text, label, attributes = {}) {
  return element("button", { type: "button", "data-action": action, "aria-label": label, ...attributes }, text);
}

function makeNode(index) {
  const name = `node ${index + 1}`;
  const own = { "data-node": index };
  const parts = {
    name: element("b", { class: "node-name" }, name),
    state: element("span", { class: "node-state" }),
    holder: element("dd", { "data-fact": "holder" }),
    fence: element("dd", { "data-fact": "fence", class: "token" }),
    life: actionButton("kill", "Kill", `Kill ${name}`, own),
    pause: actionButton("hang", "Pause", `Pause ${name}`, own),
    wipe: actionButton("wipe", "Wipe", `Wipe ${name}`, own),
    delay: actionButton("delay", "+100 ms", `+100 ms delay at ${name}`, { ...own, "aria-pressed": "false" }),
    cuts: ["A", "B"].map((server) =>
      actionButton("cut", `Cut ${server}`, `Cut ${server} off from ${name}`, {
        ...own,
        "data-server": server,
        "aria-pressed": "false",
      }),
    ),
  };
  const item = element(
    "li",
    { class: "node", "data-node": index, "data-state": "up" },
    element("div", { class: "node-head" }, element("i", { class: "lamp", "aria-hidden": "true" }), parts.name, parts.state),
    element(
      "dl",
      { class: "facts" },
      element("div", {}, element("dt", {}, "held by"), parts.holder),
      element("div", {}, element("dt", {}, "fence"), parts.fence),
    ),
    element(
      "div",
      { class: "node-buttons", role: "group", "aria-label": name },
      parts.life,
      parts.pause,
      parts.wipe,
      parts.delay,
      ...parts.cuts,
    ),
  );
  return { item, parts };
}

const NODE_STATES = { up: "up", hung: "paused", down: "down", quarantined: "quarantined" };

function showNode({ item, parts }, node, elapsed) {
  setAttribute(item, "data-state", node.state);
  setAttribute(item, "data-delay", node.delay_ms);
  setAttribute(item, "data-holder", node.holder?.server ?? "");
  setText(parts.name, node.name);
  const left = node.left_ms === null ? "" : ` ${seconds(node.left_ms - elapsed)}`;
  setText(parts.state, `${NODE_STATES[node.state] ?? node.state}${left}`);
  setText(parts.holder, node.holder ? `${node.holder.server}, ${seconds(node.holder.left_ms - elapsed)}` : "–");
  setToken(parts.fence, node.fence);
  const isDown = node.state === "down";
  showChoice(parts.life, isDown ? "restart" : "kill", isDown ? "Restart" : "Kill", node.name);
  const isHung = node.state === "hung";
  showChoice(parts.pause, isHung ? "resume" : "hang", isHung ? "Resume" : "Pause", node.name);
  setAttribute(parts.pause, "aria-disabled", isDown ? "true" : null);
  setAttribute(parts.wipe, "aria-disabled", isDown || isHung ? "true" : null);
  setAttribute(parts.delay, "aria-pressed", node.delay_ms > 0);
  for (const button of parts.cuts) setAttribute(button, "aria-pressed", node.cut_off.includes(button.dataset.server));
}

function showChoice(button, action, text, name) {
  setAttribute(button, "data-action", action);
  setAttribute(button, "aria-label", `${text} ${name}`);
  setText(button, text);
}

// ---------------------------------------------------------------- servers and callers

function makeServer(name) {
  const parts = {
    state: element("span", { class: "server-state" }),
    votes: element("span", { class: "votes", "aria-hidden": "true" }),
    count: element("span", { class: "vote-count" }),
    callers: element("ul", { class: "callers", "aria-label": `Callers of server ${name}` }),
  };
  const head = element(
    "div",
    { class: "server-head" },
    element("b", {}, `Server ${name}`),
    parts.state,
    element("span", { class: "round" }, parts.votes, parts.count),
  );
  const item = element("li", { class: "server", "data-server": name, "data-state": "running" }, head, parts.callers);
  return { item, parts };
}

function showServer(server, { item, parts }, elapsed) {
  setAttribute(item, "data-state", server.state);
  const left = server.left_ms === null ? "" : ` for ${seconds(server.left_ms - elapsed)}`;
  setText(parts.state, server.state === "paused" ? `garbage collection${left}` : "running");
  setAttribute(parts.state, "title", server.url);
}

const RANKS = ["granted", "held", "quarantined", "failed", "silent"];

// The votes of a server's latest round, granted ones first: they make a lock once they pass the line.
function showRound(server, { parts }) {
  const { nodes, quorum } = view.state;
  if (parts.votes.childElementCount !== nodes.length) {
    parts.votes.replaceChildren(...nodes.map((_, at) => element("i", at === quorum ? { class: "past-quorum" } : {})));
  }
  const round = view.rounds.get(server.name);
  // Without any node in reach, there are no answers that would replace the last ones.
  const answers = round && now() - round.began < ROUND_SHOWN_MS ? [...round.answers.values()] : [];
  const granted = answers.filter((answer) => answer === "granted").length;
  answers.sort((one, other) => RANKS.indexOf(one) - RANKS.indexOf(other));
  [...parts.votes.children].forEach((slot, at) => setAttribute(slot, "data-answer", answers[at] ?? ""));
  setText(parts.count, `${granted} of ${nodes.length}, quorum ${quorum}`);
  setAttribute(parts.count, "data-quorum", granted >= quorum ? "reached" : "missed");
}

function makeCaller(name, server) {
  const own = { "data-caller": name };
  const parts = {
    state: element("span", { class: "badge" }),
    token: element("span", { class: "token" }),
    bar: element("i"),
    left: element("span", { class: "left" }),
    last: element("span", { class: "last" }),
  };
  const pause = actionButton("pause", `Pause server ${server}`, `Pause server ${server} with all its callers, by ${name}`, own);
  const disconnect = actionButton("disconnect", "Disconnect", `Disconnect ${name}`, own);
  const item = element(
    "li",
    { class: "caller", "data-caller": name, "data-state": "idle" },
    element("div", { class: "caller-line" }, element("b", {}, name), parts.state, parts.token, parts.left),
    element("div", { class: "validity", "aria-hidden": "true" }, parts.bar),
    parts.last,
    element("div", { class: "caller-buttons", role: "group", "aria-label": name }, pause, disconnect),
  );
  return { item, parts };
}

function showCaller(caller, { item, parts }, elapsed) {
  setAttribute(item, "data-state", caller.state);
  setText(parts.state, caller.state);
  setToken(parts.token, caller.token);
  const { status, code, holder } = caller.last ?? {};
  const busy = holder ? `Busy: ${holder.note} on ${holder.label} holds it` : null;
  const words = `Last answer: ${status} · ${busy ?? CODES[code ?? "ok"] ?? code}`;
  setText(parts.last, caller.last ? words : "No answer yet");
  setAttribute(parts.last, "data-code", code ?? "");
  setAttribute(parts.last, "data-kind", !caller.last ? "none" : status < 400 ? "served" : "refused");
  showValidity(caller, parts, elapsed);
}

function showValidity(caller, parts, elapsed) {
  const left = caller.valid_ms === null ? 0 : Math.max(0, caller.valid_ms - elapsed);
  parts.bar.style.transform = `scaleX(${Math.min(1, left / view.state.ttl_ms).toFixed(4)})`;
  setText(parts.left, caller.valid_ms === null ? "" : left > 0 ? seconds(left) : "expired");
  setAttribute(parts.bar, "data-low", left < view.state.ttl_ms / 4 ? "true" : "false");
}

const shown = { nodes: [], servers: new Map(), callers: new Map() };

function showScene() {
  const { state } = view;
  while (shown.nodes.length < state.nodes.length) {
    const made = makeNode(shown.nodes.length);
    shown.nodes.push(made);
    byId("nodes").append(made.item);
  }
  state.nodes.forEach((node, index) => showNode(shown.nodes[index], node, 0));
  for (const server of state.servers) {
    if (!shown.servers.has(server.name)) {
      shown.servers.set(server.name, makeServer(server.name));
      byId("servers").append(shown.servers.get(server.name).item);
    }
    showServer(server, shown.servers.get(server.name), 0);
    showRound(server, shown.servers.get(server.name));
  }
  const present = new Set(state.callers.map((caller) => caller.name));
  for (const [name, { item }] of shown.callers) {
    if (!present.has(name)) {
      item.remove();
      shown.callers.delete(name);
    }
  }
  for (const caller of state.callers) {
    if (!shown.callers.has(caller.name)) shown.callers.set(caller.name, makeCaller(caller.name, caller.server));
    const made = shown.callers.get(caller.name);
    const list = shown.servers.get(caller.server)?.parts.callers;
    if (list && made.item.parentElement !== list) list.append(made.item);
    showCaller(caller, made, 0);
  }
}

// Between two states: what runs down, by the time since the last one.
function runDown() {
  const { state } = view;
  const elapsed = now() - state.at;
  state.nodes.forEach((node, index) => {
    if (node.left_ms !== null || node.holder) showNode(shown.nodes[index], node, elapsed);
  });
  for (const server of state.servers) {
    if (server.left_ms !== null) showServer(server, shown.servers.get(server.name), elapsed);
  }
  for (const caller of state.callers) {
    if (caller.valid_ms !== null) showValidity(caller, shown.callers.get(caller.name).parts, elapsed);
  }
}

// ---------------------------------------------------------------- wires and votes

// From a server to a node: the way as a path, and the point at a part of the way from 0 to 1.
const wires = new Map();
const dots = new Set();

const wireKey = (server, node) => `${server} ${node}`;

function layWires() {
  const svg = byId("wires");
  const stage = byId("stage").getBoundingClientRect();
  const isStacked = getComputedStyle(byId("stage")).getPropertyValue("--stacked").trim() === "1";
  setAttribute(svg, "viewBox", `0 0 ${stage.width} ${stage.height}`);
  for (const [at, server] of view.state.servers.entries()) {
    const from = shown.servers.get(server.name).item.getBoundingClientRect();
    for (const [index, { item }] of shown.nodes.entries()) {
      const to = item.getBoundingClientRect();
      const way = isStacked ? stackedWay(from, to, at, stage) : curvedWay(from, to, at, index, stage);
      const key = wireKey(server.name, index);
      const wire = wires.get(key) ?? { path: shape("path", { class: "wire", "data-server": server.name, "data-node": index }) };
      if (!wires.has(key)) svg.prepend(wire.path);
      wires.set(key, Object.assign(wire, way));
      setAttribute(wire.path, "d", way.d);
    }
  }
}

function curvedWay(from, to, at, index, stage) {
  const port = (index + 1) / (shown.nodes.length + 1);
  const x0 = from.left - stage.left + from.width * port;
  const y0 = from.top - stage.top;
  const x3 = to.left - stage.left + to.width * (at === 0 ? 0.38 : 0.62);
  const y3 = to.bottom - stage.top;
  const middle = (y0 + y3) / 2;
  const bend = (t, a, b, c, d) => (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t ** 2 * c + t ** 3 * d;
  return {
    d: `M${x0} ${y0}C${x0} ${middle} ${x3} ${middle} ${x3} ${y3}`,
    point: (t) => [bend(t, x0, x0, x3, x3), bend(t, y0, middle, middle, y3)],
  };
}

// Nodes and servers one below the other, and the wires in a gutter beside them.
function stackedWay(from, to, at, stage) {
  const gutter = 8 + at * 10;
  const y0 = from.top - stage.top + 22;
  const y1 = to.top - stage.top + 18 + at * 8;
  const corners = [[from.left - stage.left, y0], [gutter, y0], [gutter, y1], [to.left - stage.left, y1]];
  const lengths = corners.slice(1).map(([x, y], i) => Math.abs(x - corners[i][0]) + Math.abs(y - corners[i][1]));
  const total = lengths.reduce((sum, length) => sum + length, 0);
  return {
    d: `M${corners.map((corner) => corner.join(" ")).join("L")}`,
    point: (t) => {
      let way = t * total;
      let leg = 0;
      while (leg < lengths.length - 1 && way > lengths[leg]) way -= lengths[leg++];
      const part = lengths[leg] === 0 ? 0 : Math.min(1, way / lengths[leg]);
      return [0, 1].map((axis) => corners[leg][axis] + part * (corners[leg + 1][axis] - corners[leg][axis]));
    },
  };
}

function showWires() {
  for (const [index, node] of view.state.nodes.entries()) {
    for (const { name } of view.state.servers) {
      const wire = wires.get(wireKey(name, index));
      const condition = node.cut_off.includes(name) ? "cut" : node.state;
      if (wire) setAttribute(wire.path, "data-state", condition);
    }
  }
}

const ANSWERS = { granted: "granted", stored: "granted", held: "held", released: "released" };

function showVote(vote) {
  const answer = ANSWERS[vote.answer] ?? "failed";
  countVote(vote);
  const wire = wires.get(wireKey(vote.server, vote.node));
  if (!wire || document.hidden) return;
  if (reducedMotion.matches) {
    setAttribute(wire.path, "data-answer", answer);
    clearTimeout(wire.timer);
    wire.timer = setTimeout(() => setAttribute(wire.path, "data-answer", null), DOT_MS);
    return;
  }
  if (dots.size >= MOST_DOTS) return;
  const circle = shape("circle", { class: "vote", r: vote.kind === "acquire" ? 4.5 : 3, "data-kind": vote.kind });
  byId("wires").append(circle);
  // A slow answer is seen to be slow, but not for seconds.
  const back = DOT_MS + Math.min(600, vote.ms);
  dots.add({ wire, circle, answer, back, began: performance.now() });
}

// A server asks each node once in a round, and all of them together.
function countVote(vote) {
  if (vote.kind !== "acquire") return;
  const began = vote.at - vote.ms;
  let round = view.rounds.get(vote.server);
  if (!round || round.answers.has(vote.node) || began > round.began + ROUND_MS) {
    // Late answers of an older round do not open another one.
    if (round && began < round.began - ROUND_MS) return;
    round = { began, answers: new Map() };
    view.rounds.set(vote.server, round);
  }
  round.answers.set(vote.node, vote.answer);
}

function moveDots() {
  const time = performance.now();
  for (const dot of dots) {
    const age = time - dot.began;
    const isOut = age < DOT_MS;
    const isLost = dot.answer === "failed";
    const t = isOut ? age / DOT_MS : isLost ? 1 : 1 - (age - DOT_MS) / dot.back;
    if (t <= 0 || age > DOT_MS + dot.back || reducedMotion.matches) {
      dot.circle.remove();
      dots.delete(dot);
      continue;
    }
    const [x, y] = dot.wire.point(ease(Math.max(0, Math.min(1, t))));
    setAttribute(dot.circle, "data-answer", isOut ? "asked" : dot.answer);
    dot.circle.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    if (isLost && !isOut) dot.circle.style.opacity = (1 - (age - DOT_MS) / dot.back).toFixed(2);
  }
}

const ease = (t) => t * t * (3 - 2 * t);

function removeDots() {
  for (const { circle } of dots) circle.remove();
  dots.clear();
}

// ---------------------------------------------------------------- timeline

const ROW = 24;
const LABEL = 46;
const AXIS = 22;
const timeline = { width: 0, names: "", moving: null, rows: new Map(), bars: new Map(), marks: [], bands: [], base: 0, drawn: 0 };

function layTimeline() {
  const chart = byId("timeline-chart");
  const names = view.state.callers.map((caller) => caller.name);
  const width = Math.round(chart.getBoundingClientRect().width);
  if (width === 0 || (timeline.width === width && timeline.names === names.join())) return;
  const height = names.length * ROW + AXIS;
  timeline.width = width;
  timeline.names = names.join();
  timeline.base = view.state.at;
  timeline.rows = new Map(names.map((name, at) => [name, at]));
  setAttribute(chart, "viewBox", `0 0 ${width} ${height}`);
  setAttribute(chart, "height", height);
  const clip = shape("clipPath", { id: "timeline-clip" });
  clip.append(shape("rect", { x: LABEL, y: 0, width: width - LABEL, height }));
  const still = shape("g");
  const ticks = width < 480 ? 10 : 5;
  for (let ago = 30; ago >= 0; ago -= ticks) {
    const x = width - (ago / 30) * (width - LABEL);
    still.append(shape("line", { class: "tick", x1: x, x2: x, y1: 0, y2: height - AXIS + 4 }));
    const text = shape("text", { class: "axis", x, y: height - 4, "text-anchor": ago === 0 ? "end" : ago === 30 ? "start" : "middle" });
    text.textContent = ago === 0 ? "now" : `−${ago} s`;
    still.append(text);
  }
  names.forEach((name, at) => {
    const text = shape("text", { class: "row-name", x: 0, y: at * ROW + ROW / 2 + 4 });
    text.textContent = name;
    still.append(text, shape("line", { class: "row", x1: LABEL, x2: width, y1: (at + 1) * ROW, y2: (at + 1) * ROW }));
  });
  const clipped = shape("g", { "clip-path": "url(#timeline-clip)" });
  timeline.moving = shape("g");
  clipped.append(timeline.moving);
  chart.replaceChildren(clip, still, clipped);
  timeline.bars.clear();
  timeline.marks = [];
  timeline.bands = [];
  for (const hold of view.holds.values()) showHold(hold);
  for (const write of view.writes) markWrite(write);
}

const scale = () => (timeline.width - LABEL) / WINDOW_MS;
const place = (at) => (at - timeline.base) * scale();

function showHold(hold) {
  if (!timeline.moving || !timeline.rows.has(hold.caller)) return;
  let bar = timeline.bars.get(hold.id);
  if (!bar) {
    bar = shape("rect", { class: "hold", rx: 3, height: ROW - 10, "data-hold": hold.id });
    bar.append(shape("title"));
    timeline.bars.set(hold.id, bar);
    timeline.moving.append(bar);
  }
  setAttribute(bar, "y", timeline.rows.get(hold.caller) * ROW + 5);
  setAttribute(bar, "x", place(hold.from).toFixed(1));
  setAttribute(bar, "data-end", hold.end ?? "open");
  setAttribute(bar, "data-server", hold.server);
  const end = hold.to ?? (view.state ? now() : hold.from);
  setAttribute(bar, "width", Math.max(2, place(end) - place(hold.from)).toFixed(1));
  setText(bar.firstChild, `${hold.caller} by server ${hold.server}, token ${hold.token ?? "none"}, ${hold.end ?? "held"}`);
}

// Writes that the storage should not have got, or did not take, stand where they happened.
function markWrite(write) {
  if (!timeline.moving || !timeline.rows.has(write.caller) || (write.accepted && !write.lost_update)) return;
  const mark = shape("path", {
    class: "mark",
    d: "M-4-4L4 4M4-4L-4 4",
    "data-mark": write.accepted ? "lost-update" : "refused",
    transform: `translate(${place(write.at).toFixed(1)} ${timeline.rows.get(write.caller) * ROW + ROW / 2})`,
  });
  const title = shape("title");
  title.textContent = write.accepted ? "lost update" : "write refused";
  mark.append(title);
  timeline.marks.push({ at: write.at, mark });
  timeline.moving.append(mark);
}

// Where two callers held the lock at a time, if the server counted that.
function markOverlaps() {
  for (const band of timeline.bands) band.remove();
  timeline.bands = [];
  if (view.state.counters.two_holders === 0 || !timeline.moving) return;
  const holds = [...view.holds.values()].sort((one, other) => one.from - other.from);
  let last = null;
  for (const hold of holds) {
    const until = (one) => one.to ?? view.state.at;
    if (last && hold.caller !== last.caller && until(last) - hold.from > 20) {
      const end = Math.min(until(last), until(hold));
      const band = shape("rect", { class: "overlap", x: place(hold.from), y: 0, width: Math.max(2, place(end) - place(hold.from)), height: timeline.rows.size * ROW });
      timeline.moving.prepend(band);
      timeline.bands.push(band);
    }
    if (!last || until(hold) > until(last)) last = hold;
  }
}

function moveTimeline() {
  if (!timeline.moving) return;
  const time = now();
  if (reducedMotion.matches && Math.abs(time - timeline.drawn) < 1000) return;
  timeline.drawn = time;
  timeline.moving.setAttribute("transform", `translate(${(timeline.width - place(time)).toFixed(2)} 0)`);
  for (const hold of view.holds.values()) if (hold.to === null) showHold(hold);
}

function forgetOld() {
  const oldest = view.state.at - WINDOW_MS - 1000;
  for (const [id, hold] of view.holds) {
    if ((hold.to ?? Infinity) < oldest) {
      view.holds.delete(id);
      timeline.bars.get(id)?.remove();
      timeline.bars.delete(id);
    }
  }
  for (const { mark } of timeline.marks.filter(({ at }) => at < oldest)) mark.remove();
  timeline.marks = timeline.marks.filter(({ at }) => at >= oldest);
}

// ---------------------------------------------------------------- ledger and counters

function showWrite(write) {
  if (view.writes.some(({ serial }) => serial === write.serial)) return;
  view.writes.push(write);
  if (view.writes.length > LEDGER_ROWS) view.writes.shift();
  markWrite(write);
  const kind = !write.accepted ? "refused" : write.lost_update ? "lost-update" : "accepted";
  const result = { refused: "refused: stale token", "lost-update": "accepted: lost update", accepted: "accepted" }[kind];
  const token = element("td", { class: "token" });
  setToken(token, write.token);
  const sign = write.amount > 0 ? "+" : "";
  const row = element(
    "tr",
    { "data-write": kind, "data-caller": write.caller, "data-token": write.token ?? "" },
    element("td", {}, seconds(write.at)),
    element("td", {}, write.caller),
    token,
    element("td", { class: "number" }, `${sign}${write.amount}`),
    element("td", { class: "number" }, String(write.balance)),
    element("td", {}, element("span", { class: "result" }, result)),
  );
  const body = byId("ledger-body");
  body.prepend(row);
  while (body.childElementCount > LEDGER_ROWS) body.lastElementChild.remove();
  setHidden(byId("ledger-empty"), true);
}

function makeReasons() {
  for (const { counter, name, words } of REASONS) {
    const reason = element("th", { scope: "row" }, element("b", {}, name), " ", element("span", {}, words));
    byId("reasons").append(element("tr", { "data-reason": counter }, reason, element("td", { class: "number", "data-counter": counter }, "–")));
  }
}

function showCounters() {
  const { counters, weak, account } = view.state;
  for (const target of document.querySelectorAll("[data-counter]")) {
    const value = counters[target.dataset.counter];
    const isTime = target.dataset.counter.endsWith("_ms");
    setText(target, value === null || value === undefined ? "–" : isTime ? value.toFixed(1) : String(value));
  }
  for (const row of byId("reasons").children) setAttribute(row, "data-zero", counters[row.dataset.reason] === 0);
  for (const name of INVARIANTS) {
    const tile = document.querySelector(`[data-invariant=${name}]`);
    const verdict = counters[name] === 0 ? "kept" : weak ? "expected" : "broken";
    setAttribute(tile, "data-verdict", verdict);
    setText(tile.querySelector(".verdict"), { kept: "invariant holds", expected: `expected here: ${weak}`, broken: "invariant broken" }[verdict]);
  }
  const missing = account.expected - account.balance;
  const text = `Balance ${account.balance}, expected ${account.expected}`;
  setText(byId("account"), missing === 0 ? text : `${text}: ${Math.abs(missing)} ${missing > 0 ? "missing" : "too much"}`);
  setAttribute(byId("account"), "data-missing", missing);
}

// ---------------------------------------------------------------- tour

async function loadTour() {
  if (view.tourSteps.length > 0) return;
  try {
    const answer = await fetch("/tour");
    const steps = await answer.json();
    if (view.tourSteps.length > 0) return;
    view.tourSteps = steps;
    byId("tour").replaceChildren(...view.tourSteps.map(makeStep));
    openStep(1);
    if (view.state) showTour();
  } catch {
    setTimeout(loadTour, 1000);
  }
}

function makeStep({ step, title, text, weak }) {
  const head = element(
    "div",
    { class: "step-head" },
    element("span", { class: "step-number", "aria-hidden": "true" }, String(step)),
    element("h3", {}, title),
    actionButton("explain", "?", `What step ${step} shows`, { class: "explain", "aria-expanded": "false", "aria-controls": `step-${step}-text` }),
    actionButton("tour", "Run", `Run step ${step}: ${title}`, { class: "run", "data-step": step }),
  );
  const item = element("li", { class: "step", "data-step": step, "data-state": "idle", "data-open": "false" }, head);
  const body = element("div", { class: "step-text", id: `step-${step}-text` }, element("p", {}, text));
  if (weak) body.append(element("p", { class: "separate" }, `In a separate instance: ${weak}.`));
  item.append(body, element("p", { class: "step-result", hidden: "" }));
  return item;
}

// On small screens only one step shows its text.
function openStep(number) {
  for (const item of byId("tour").children) {
    const isOpen = Number(item.dataset.step) === number;
    setAttribute(item, "data-open", isOpen);
    setAttribute(item.querySelector(".explain"), "aria-expanded", isOpen);
  }
}

function showTour() {
  const { tour } = view.state;
  setAttribute(document.body, "data-running", tour.running);
  if (tour.step === null) setHidden(byId("step-line"), true);
  const results = new Map(tour.results.map((result) => [result.step, result]));
  for (const item of byId("tour").children) {
    const number = Number(item.dataset.step);
    const result = results.get(number);
    const isRunning = tour.running && tour.step === number;
    const wasRunning = item.dataset.state === "running";
    const title = item.querySelector("h3").textContent;
    // A step in a weak instance shows a failure, as it promises to.
    const isWeak = view.tourSteps[number - 1].weak !== null;
    const end = !result?.ok ? "failed" : isWeak ? "expected" : "done";
    const told = result && `${SIGNS[end]} ${result.text}`;
    setAttribute(item, "data-state", isRunning ? "running" : !result ? "idle" : end);
    setAttribute(item, "aria-current", isRunning ? "step" : null);
    if (isRunning && !wasRunning) {
      openStep(number);
      keepInView(item);
      showSceneOf(item);
      announce(`Step ${number}, ${title}, runs.`);
    }
    const run = item.querySelector(".run");
    setText(run, isRunning ? "Running…" : result ? "Run again" : "Run");
    setAttribute(run, "aria-label", `${run.textContent}, step ${number}: ${title}`);
    setAttribute(run, "aria-disabled", tour.running ? "true" : null);
    const line = item.querySelector(".step-result");
    const showsResult = result !== undefined && !isRunning;
    setHidden(line, !showsResult);
    setText(line, showsResult ? told : "");
    if (tour.step === number) {
      setText(byId("step-line"), showsResult ? told : `Step ${number}, ${title}, runs…`);
      setHidden(byId("step-line"), !isRunning && !showsResult);
    }
    if (showsResult && wasRunning) {
      keepInView(item);
      announce(`Step ${number}, ${title}: ${result.text}`);
    }
  }
}

const SIGNS = { done: "✓", expected: "⚠", failed: "✕" };

// Where the tour stands above the scene, the page moves on to the scene.
function showSceneOf(item) {
  const isAbove = getComputedStyle(item.closest(".tour")).position === "static";
  if (!isAbove) return;
  const head = document.querySelector(".watch").getBoundingClientRect().height;
  const top = byId("scene").getBoundingClientRect().top + scrollY - head;
  scrollTo({ top, behavior: reducedMotion.matches ? "instant" : "smooth" });
}

// Scrolls the tour's own box, and never the page.
function keepInView(item) {
  const box = item.closest(".tour");
  if (box.scrollHeight <= box.clientHeight) return;
  const [inner, outer] = [item.getBoundingClientRect(), box.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - 60;
}

const announce = (text) => setText(byId("announcement"), text);

// ---------------------------------------------------------------- events

function forgetInstance() {
  view.holds.clear();
  view.writes = [];
  view.rounds.clear();
  for (const { mark } of timeline.marks) mark.remove();
  for (const bar of timeline.bars.values()) bar.remove();
  timeline.marks = [];
  timeline.bars.clear();
  removeDots();
  byId("ledger-body").replaceChildren();
  setHidden(byId("ledger-empty"), false);
}

function showState(state) {
  const isOther = view.instance !== state.instance;
  const isFirst = view.state?.first_token !== state.first_token;
  view.state = state;
  keepTime(state.at);
  if (isOther) forgetInstance();
  view.instance = state.instance;
  showScene();
  showHead();
  layTimeline();
  showWires();
  showCounters();
  // A write can overtake the first token.
  if (isFirst) for (const token of document.querySelectorAll("#ledger-body .token")) setToken(token, token.dataset.token || null);
  showTour();
  forgetOld();
  markOverlaps();
  if (isOther) {
    const early = view.early.filter((event) => event.instance === state.instance);
    view.early = [];
    early.forEach(showEvent);
  }
}

function showHead() {
  const { mode, nodes, quorum, ttl_ms, weak, load, callers } = view.state;
  const what = mode === "redis" ? "redis-server processes" : "embedded nodes";
  setText(byId("subtitle"), `${nodes.length} ${what} · quorum ${quorum} · locks of ${ttl_ms / 1000} s`);
  setHidden(byId("banner"), weak === null);
  setText(byId("banner-title"), weak === null ? "" : `Separate instance: ${weak}`);
  setAttribute(document.body, "data-weak", weak ?? "");
  setAttribute(document.body, "data-instance", view.state.instance);
  setAttribute(document.body, "data-mode", mode);
  setAttribute(byId("load"), "aria-pressed", load);
  setText(byId("load"), load ? "Load on" : "Load off");
  setText(byId("caller-count"), `${callers.length} callers`);
  setAttribute(byId("caller-count"), "data-callers", callers.length);
  setAttribute(document.querySelector("[data-action=fewer-callers]"), "aria-disabled", callers.length <= 3 ? "true" : null);
  setAttribute(document.querySelector("[data-action=more-callers]"), "aria-disabled", callers.length >= 8 ? "true" : null);
}

function showEvent(event) {
  // An event can overtake the first state of its instance.
  if (event.instance !== view.instance) {
    if (view.early.length < 1000) view.early.push(event);
    return;
  }
  if (event.type === "vote") showVote(event);
  else if (event.type === "write") showWrite(event);
  else if (event.type === "hold") {
    // The past of an instance can come after its news.
    if ((view.holds.get(event.id)?.serial ?? 0) > event.serial) return;
    view.holds.set(event.id, event);
    showHold(event);
  }
}

function connect() {
  const events = new EventSource("/events");
  events.addEventListener("open", () => {
    // The server sends the last 30 s again.
    view.instance = null;
    view.early = [];
    view.offset = null;
    showConnection("live", "Live");
    loadTour();
  });
  events.addEventListener("message", ({ data }) => {
    const event = JSON.parse(data);
    if (event.type === "state") showState(event);
    else showEvent(event);
  });
  events.addEventListener("error", () => {
    showConnection("lost", "Connection lost, reconnecting…");
    // The browser tries again by itself after most errors, but not after all.
    if (events.readyState === EventSource.CLOSED) setTimeout(connect, 1000);
  });
}

function showConnection(state, text) {
  setAttribute(document.body, "data-connection", state);
  setText(byId("connection-text"), text);
}

function frame() {
  if (view.state && !document.hidden) {
    if (!reducedMotion.matches) runDown();
    moveTimeline();
    moveDots();
  }
  requestAnimationFrame(frame);
}

makeReasons();
loadTour();
connect();
new ResizeObserver(() => {
  if (view.state) {
    layWires();
    showWires();
    layTimeline();
  }
}).observe(byId("stage"));
requestAnimationFrame(frame);
