// What the server is doing: its start, what it answers, and what that takes.

import { bytes, h, number, say, seconds } from "./dom.js";
import { quantile, rate } from "./numbers.js";
import { Plot } from "./plot.js";

const PHASES = {
  "settings": "Read settings",
  "download": "Fetch model",
  "engine": "Start engine",
  "adapters": "Load adapters",
  "warm-up": "First token",
};
const WINDOW_SECONDS = 30; // over which latencies are taken

export class Overview {
  constructor(section) {
    this.states = [];
    this.failure = h("p", { class: "error", role: "alert", hidden: true });
    this.start = new StartCard();
    this.tiles = Object.fromEntries([
      ["generated", "Generated", "tokens/s"], ["prompt", "Prompt", "tokens/s"],
      ["in_flight", "In flight", ""], ["first", "First token", "median, 30 s"],
    ].map(([id, name, unit]) => [id, new Tile(name, unit)]));
    this.throughput = new Plot("Throughput", [
      { name: "generated", tone: "one" }, { name: "prompt", tone: "two" },
    ], (value) => `${number(value)}/s`);
    this.first = new Plot("Time to first token", [
      { name: "median", tone: "one" }, { name: "p95", tone: "two" },
    ], seconds);
    this.between = new Plot("Between tokens", [
      { name: "median", tone: "one" }, { name: "p95", tone: "two" },
    ], seconds);
    this.queue = new Plot("Requests", [
      { name: "running", tone: "one" }, { name: "waiting", tone: "two" },
    ], number);
    this.memory = h("div", { class: "meters" });
    this.facts = h("dl", { class: "facts" });
    section.append(
      h("h2", { class: "unseen" }, "Overview"),
      this.failure,
      this.start.node,
      h("div", { class: "tiles" }, ...Object.values(this.tiles).map((tile) => tile.node)),
      h("div", { class: "grid" }, this.throughput.node, this.first.node, this.between.node, this.queue.node),
      h("div", { class: "grid" },
        h("div", { class: "card" }, h("h3", {}, "Memory"), this.memory),
        h("div", { class: "card" }, h("h3", {}, "Since the start"), this.facts)),
    );
  }

  /** Take a new state. */
  update(state) {
    this.failure.hidden = true; const before = this.states[this.states.length - 1]; const old =
    this.states.find((one) => state.time - one.time <= WINDOW_SECONDS) ?? before;
    this.states.push(state); this.states = this.states.filter((one) => state.time - one.time <= 2 *
    WINDOW_SECONDS); this.start.update(state); const generated = rate(state, before,
    "generated_tokens"); const prompt = rate(state, before, "prompt_tokens"); const first = old ?
    quantile(state, old, "first_token", 0.5) : null; this.tiles.generated.set(number(generated));
    this.tiles.prompt.set(number(prompt)); this.tiles.in_flight.set(number(state.queue.in_flight),
    `of ${number(state.queue.limit)} slots`); this.tiles.first.set(seconds(first));
    this.throughput.add(state.time, [generated, prompt]); this.first.add(state.time, [first, old ?
    quantile(state, old, "first_token", 0.95) : null]); this.between.add(state.time, [0.5,
    0.95].map((share) =>
      old ? quantile(state, old, "between_tokens", share) : null));
    const running = state.queue.running ?? state.queue.in_flight;
    this.queue.add(state.time, [running, state.queue.waiting ?? 0]);
    this.memory.replaceChildren(...meters(state));
    this.facts.replaceChildren(...facts(state));
  }

  /** Say that the server cannot be asked. */
  fail(text) {
    this.failure.hidden = false;
    say(this.failure, text);
  }
}

class Tile {
  constructor(name, unit) {
    this.value = h("b", {}, "–");
    this.unit = h("span", {}, unit);
    this.node = h("div", { class: "tile card" }, h("h3", {}, name), h("p", {}, this.value, " ", this.unit));
  }

  set(value, unit) {
    say(this.value, value);
    if (unit !== undefined) say(this.unit, unit);
  }
}

/** The phases of a start, and how far a download is. */
class StartCard {
  constructor() {
    this.title = h("h3", {}, "Start-up");
    this.total = h("span", { class: "dim" });
    this.steps = new Map(Object.keys(PHASES).map((name) => [name, this.step(name)]));
    this.node = h("div", { class: "card start", id: "start" },
      h("div", { class: "head" }, this.title, this.total),
      h("ol", { class: "steps" }, ...[...this.steps.values()].map((step) => step.node)));
  }

  step(name) {
    const time = h("span", { class: "time" });
    const detail = h("p", { class: "detail", hidden: true });
    const fill = h("div", { class: "fill" });
    const bar = h("div", { class: "progress", role: "progressbar", "aria-label": PHASES[name], hidden: true }, fill);
    const node = h("li", { "data-phase": name },
      h("div", { class: "head" }, h("span", { class: "name" }, PHASES[name]), time), bar, detail);
    return { node, time, detail, bar, fill };
  }

  update(state) {
    const isLoading = state.state === "PENDING" || state.state === "Waking";
    const names = [...this.steps.keys()];
    const current = isLoading ? names.indexOf(state.phase) : names.length;
    this.node.classList.toggle("done", !isLoading);
    say(this.total, isLoading ? `${seconds(state.elapsed_seconds)} so far` : this.sum(state));
    for (const { name, seconds: spent } of state.phases) {
      const step = this.steps.get(name);
      if (!step) continue;
      const place = names.indexOf(name);
      const isCurrent = place === current;
      step.node.className = isCurrent ? "current" : place < current ? "past" : "future";
      step.node.toggleAttribute("aria-current", isCurrent);
      if (isCurrent) step.node.setAttribute("aria-current", "step");
      say(step.time, spent === null || spent === undefined ? "" : seconds(spent));
      step.bar.hidden = !isCurrent;
      this.progress(step, isCurrent && name === "download" ? state.download : {});
      if (name === "engine" && state.engine_steps.length) {
        step.detail.hidden = false;
        say(step.detail, state.engine_steps.join(", "));
      }
    }
  }

  sum(state) {
    const spent = state.phases.reduce((sum, phase) => sum + (phase.seconds ?? 0), 0);
    return spent ? `${seconds(spent)}` : "";
  }

  progress(step, download) {
    const isKnown = download.bytes_total > 0;
    step.bar.classList.toggle("unknown", !isKnown);
    step.detail.hidden = !isKnown;
    if (!isKnown) return step.bar.removeAttribute("aria-valuenow");
    const percent = Math.min(100, (100 * download.bytes) / download.bytes_total);
    step.fill.style.width = `${percent.toFixed(1)}%`;
    step.bar.setAttribute("aria-valuenow", Math.round(percent));
    const left = download.seconds_left === null ? "" : `, ${seconds(download.seconds_left)} left`;
    return say(step.detail,
      `${bytes(download.bytes)} of ${bytes(download.bytes_total)}, ${download.files} of ` +
      `${download.files_total} files, ${bytes(download.bytes_per_second)}/s${left}`);
  }
}

function meter(name, used, total, text, parts = []) {
  const share = total > 0 ? Math.min(1, used / total) : 0;
  const track = h("div", {
    class: "track", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100,
    "aria-valuenow": Math.round(100 * share), "aria-valuetext": text,
  });
  for (const [tone, amount] of parts.length ? parts : [["one", used]]) {
    const part = h("div", { class: `part ${tone}` });
    part.style.width = `${total > 0 ? Math.min(100, (100 * amount) / total) : 0}%`;
    track.append(part);
  }
  return h("div", { class: "meter" }, h("div", { class: "head" }, h("span", {}, name), h("span", { class: "dim" }, text)), track);
}

function meters(state) {
  const found = [];
  const cache = state.kv_cache;
  if (cache.usage !== null) {
    const room = cache.tokens ? ` of ${number(cache.tokens)} tokens` : "";
    const size = cache.bytes ? `, ${bytes(cache.bytes)}` : "";
    found.push(meter("KV cache", cache.usage, 1, `${number(100 * cache.usage)} %${room}${size}`));
  }
  for (const gpu of state.memory.gpus ?? []) {
    const load = gpu.load === null ? "" : `, ${gpu.load} % busy`;
    found.push(meter(`GPU ${gpu.index}, ${gpu.name}`, gpu.used, gpu.total,
      `${bytes(gpu.used)} of ${bytes(gpu.total)}${load}`));
  }
  const { server, engine, total, available } = state.memory;
  if (total) {
    const others = Math.max(0, total - available - server - engine);
    found.push(meter("Main memory", server + engine, total, `${bytes(total - available)} of ${bytes(total)}`,
      [["one", engine], ["two", server], ["rest", others]]));
    found.push(h("ul", { class: "legend" },
      ...[["one", "engine", engine], ["two", "server", server], ["rest", "everything else", others]].map(
        ([tone, name, amount]) => h("li", {}, h("i", { class: `swatch ${tone}` }), `${name} `, h("b", {}, bytes(amount))))));
  }
  return found.length ? found : [h("p", { class: "dim" }, "not known on this system")];
}

function facts(state) {
  const { counters, answers } = state;
  const count = (test) => Object.entries(answers).reduce((sum, [status, many]) => sum + (test(status) ? many : 0), 0);
  const hits = counters.prefix_queries ? `${number((100 * counters.prefix_hits) / counters.prefix_queries)} %` : "–";
  const rows = [
    ["Answered", number(count((status) => status.startsWith("2")))],
    ["Refused", number(count((status) => status.startsWith("4") && status !== "499"))],
    ["Failed", number(count((status) => status.startsWith("5")))],
    ["Clients gone", number(counters.disconnects ?? 0)],
    ["Tokens generated", number(counters.generated_tokens ?? 0)],
    ["Prompt tokens", number(counters.prompt_tokens ?? 0)],
    ["Prefix cache hits", hits],
    ["Preemptions", number(counters.preemptions ?? 0)],
    ["Adapters loaded", `${state.adapters.loaded} of ${state.adapters.registered}`],
    ["Engine restarts", number(counters.engine_restarts ?? 0)],
  ];
  return rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}
