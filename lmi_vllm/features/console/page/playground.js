// Ask the model in any dialect and see both: the text, and the bytes that carried it.

import { call, KeyNeeded } from "./api.js";
import { curlOf, DIALECTS, errorOf, requestOf, RowReader } from "./dialects.js";
import { announce, bytes, copyButton, h, number, say, seconds } from "./dom.js";

const SHOWN_BYTES = 200_000; // of one answer; the rest is counted

export class Playground {
  constructor(section, onKeyNeeded) {
    this.onKeyNeeded = onKeyNeeded;
    this.model = "";
    this.abort = null;
    this.base = document.baseURI;
    this.hasKey = false;
    this.makeFields();
    this.text = h("div", { class: "answer", id: "answer", tabindex: "0", role: "region", "aria-label": "Answer" });
    this.raw = h("div", { class: "raw", id: "raw", tabindex: "0", role: "region", "aria-label": "Bytes as they came" });
    this.figures = h("p", { class: "figures dim", id: "figures" });
    this.curl = h("pre", { class: "curl", id: "curl", tabindex: "0" });
    this.error = h("pre", { class: "error", id: "play-error", role: "alert", hidden: true });
    this.notice = h("p", { class: "notice", hidden: true });
    section.append(
      h("h2", { class: "unseen" }, "Playground"),
      this.notice,
      h("div", { class: "play" },
        this.form,
        h("div", { class: "results" },
          this.error,
          h("div", { class: "panes" },
            h("div", { class: "card pane" }, h("div", { class: "head" }, h("h3", {}, "Answer"), this.figures), this.text),
            h("div", { class: "card pane" }, h("div", { class: "head" }, h("h3", {}, "Bytes"),
              h("span", { class: "dim" }, "as they came, in milliseconds")), this.raw)),
          h("div", { class: "card" }, h("div", { class: "head" }, h("h3", {}, "The same with curl"),
            copyButton(() => this.curl.textContent)), this.curl))),
    );
    this.refresh();
  }

  makeFields() {
    const field = (label, control, note = "") => h("div", { class: "field" },
      h("label", { for: control.id }, label), control, note);
    this.dialect = h("select", { id: "dialect" }, ...DIALECTS.map((one) => h("option", { value: one.id }, one.name)));
    this.hint = h("p", { class: "note" });
    this.adapter = h("select", { id: "adapter" }, h("option", { value: "" }, "none: the base model"));
    this.system = h("input", { id: "system", placeholder: "optional" });
    this.prompt = h("textarea", { id: "prompt", rows: 5, spellcheck: "false" });
    this.prompt.value = "The capital of France is";
    this.tokens = h("input", { id: "tokens", inputmode: "numeric", value: "60" });
    this.temperature = h("input", { id: "temperature", inputmode: "decimal", placeholder: "default" });
    this.more = h("textarea", { id: "more", rows: 2, spellcheck: "false", placeholder: '{"top_p": 0.9}' });
    this.moreError = h("p", { class: "note wrong", id: "more-error", role: "alert", hidden: true });
    this.more.setAttribute("aria-describedby", "more-error");
    this.send = h("button", { class: "primary", type: "submit", id: "send" }, "Send");
    this.stop = h("button", { type: "button", id: "stop", hidden: true, onclick: () => this.abort?.abort() }, "Stop");
    this.systemField = field("System message", this.system);
    this.form = h("form", { class: "card form", onsubmit: (event) => { event.preventDefault(); this.run(); } },
      field("Dialect", this.dialect, this.hint),
      field("Adapter", this.adapter),
      this.systemField,
      field("Prompt", this.prompt),
      h("div", { class: "pair" }, field("Most tokens", this.tokens), field("Temperature", this.temperature)),
      field("More parameters, as JSON", this.more, this.moreError),
      h("div", { class: "buttons" }, this.send, this.stop, h("span", { class: "dim keys" }, "Ctrl + Enter")));
    this.form.addEventListener("input", () => this.refresh());
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.run(); }
    });
  }

  /** Take a new state: which dialects there are, and under which name the model answers. */
  update(state) {
    this.model = state.served_names[0] ?? state.model;
    this.hasKey = state.has_key;
    this.base = state.inference_url ? `${state.inference_url}/` : document.baseURI;
    for (const option of this.dialect.options) {
      const { needsTgi, name } = DIALECTS.find((one) => one.id === option.value);
      option.disabled = Boolean(needsTgi) && !state.tgi_compat;
      say(option, option.disabled ? `${name} (option.tgi_compat is off)` : name);
    }
    this.notice.hidden = !state.inference_url;
    say(this.notice, state.inference_url
      ? `This is the management address. Requests are answered at ${state.inference_url}, which a page from here may not ask: use the command below.`
      : "");
    this.send.disabled = Boolean(state.inference_url);
    this.refresh();
  }

  setAdapters(names) {
    const [, ...old] = [...this.adapter.options].map((option) => option.value);
    if (old.join("\n") === names.join("\n")) return;
    const chosen = this.adapter.value;
    this.adapter.replaceChildren(this.adapter.options[0], ...names.map((name) => h("option", { value: name }, name)));
    this.adapter.value = names.includes(chosen) ? chosen : "";
  }

  get chosen() {
    return DIALECTS.find((one) => one.id === this.dialect.value);
  }

  /** What is to be sent; null while the extra parameters are no JSON object. */
  request() {
    let more = {};
    try {
      more = this.more.value.trim() ? JSON.parse(this.more.value) : {};
      if (typeof more !== "object" || more === null || Array.isArray(more)) throw new Error("expected {…}");
      this.moreError.hidden = true;
    } catch (error) {
      this.moreError.hidden = false;
      say(this.moreError, `not a JSON object: ${error.message}`);
      return null;
    }
    const limits = { tokens: asNumber(this.tokens.value), temperature: asNumber(this.temperature.value) };
    return requestOf(this.chosen, {
      prompt: this.prompt.value, system: this.system.value, adapter: this.adapter.value, model: this.model, limits, more,
    });
  }

  refresh() {
    const dialect = this.chosen;
    say(this.hint, `POST /${dialect.path}: ${dialect.hint}`);
    this.systemField.hidden = !dialect.takesSystem;
    const request = this.request();
    if (request) say(this.curl, curlOf(request, this.base, this.hasKey));
  }

  async run() {
    const request = this.request();
    if (!request || this.abort || this.send.disabled) return;
    this.abort = new AbortController();
    this.error.hidden = true;
    this.text.replaceChildren();
    this.raw.replaceChildren();
    say(this.figures, "");
    this.stop.hidden = false;
    this.send.disabled = true;
    try {
      await new Answer(this, this.chosen, performance.now()).read(request, this.abort.signal);
    } catch (error) {
      this.fail(error);
    }
    this.abort = null;
    this.stop.hidden = true;
    this.send.disabled = false;
  }

  fail(error) {
    if (error instanceof KeyNeeded) return this.onKeyNeeded();
    if (error.name === "AbortError") return announce("Stopped");
    this.error.hidden = false;
    say(this.error, error.message);
    return undefined;
  }
}

/** One answer while it arrives. */
class Answer {
  constructor(view, dialect, began) {
    Object.assign(this, { view, dialect, began, first: null, pieces: 0, tokens: 0, received: 0, shown: 0 });
    this.rows = new RowReader(dialect.rows);
    this.encoder = new TextEncoder();
  }

  async read(request, signal) {
    const response = await call(request.path, { method: "POST", body: request.body, headers: request.headers, signal });
    this.status = response.status;
    this.head(response);
    if (!response.ok) {
      const text = await response.text();
      this.piece(text);
      const { view } = this;
      view.error.hidden = false;
      say(view.error, `${response.status} ${response.statusText}\n${text.trim()}`);
      return;
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        this.take(this.rows.read(value ?? "", done));
        if (done) break;
        this.piece(value);
      }
    } finally {
      this.end();
    }
  }

  head(response) {
    this.line("meta", `HTTP ${response.status} ${response.headers.get("content-type") ?? ""}`);
  }

  piece(text) {
    this.received += this.encoder.encode(text).length;
    if (this.shown < SHOWN_BYTES) this.line("", text.slice(0, SHOWN_BYTES - this.shown));
    this.shown += text.length;
  }

  line(kind, text) {
    const { raw } = this.view;
    const isAtEnd = raw.scrollHeight - raw.scrollTop - raw.clientHeight < 40;
    raw.append(h("div", { class: `chunk ${kind}` },
      h("span", { class: "at" }, String(Math.round(performance.now() - this.began))),
      h("span", { class: "data" }, ...marked(text))));
    if (isAtEnd) raw.scrollTop = raw.scrollHeight;
  }

  take(rows) {
    for (const row of rows) {
      const wrong = errorOf(row);
      if (wrong !== null) {
        this.view.error.hidden = false;
        say(this.view.error, wrong);
      }
      const text = this.dialect.text(row);
      if (!text) continue;
      this.first ??= performance.now();
      this.tokens += 1;
      this.view.text.append(h("span", { class: this.tokens % 2 ? "odd" : "even" }, text));
    }
    this.say();
  }

  say() {
    const spent = (performance.now() - this.began) / 1000;
    const parts = [];
    if (this.first !== null) parts.push(`first token ${seconds((this.first - this.began) / 1000)}`);
    const after = (performance.now() - this.first) / 1000;
    if (this.tokens > 1 && after > 0) parts.push(`${number((this.tokens - 1) / after)} tokens/s`);
    say(this.view.figures, [...parts, bytes(this.received), seconds(spent)].join(" · "));
  }

  end() {
    this.say();
    if (this.shown > SHOWN_BYTES) this.line("meta", `… ${bytes(this.received - SHOWN_BYTES)} more are not shown`);
    announce(`Answer complete: ${this.view.text.textContent.slice(0, 300)}`);
  }
}

/** The text with its line ends made visible; the marks are not copied with it. */
function marked(text) {
  return text.split("\n").flatMap((line, index) => (index ? [h("i", { class: "newline" }), "\n", line] : [line]));
}

/** A number as it was typed, a text where it is none (the server says what is wrong), null if empty. */
function asNumber(text) {
  const trimmed = text.trim();
  if (!trimmed) return null;
  const value = Number(trimmed);
  return Number.isNaN(value) ? trimmed : value;
}

