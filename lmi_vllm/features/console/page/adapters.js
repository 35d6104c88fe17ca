// Adapters, through the public routes: what those refuse is shown as they say it.

import { call, failureText, KeyNeeded } from "./api.js";
import { announce, breakable, h, say } from "./dom.js";

const PAGES = 20; // of 100 adapters each: more are counted, not shown

export class Adapters {
  constructor(section, { onChange, onKeyNeeded }) {
    this.onChange = onChange;
    this.onKeyNeeded = onKeyNeeded;
    this.error = h("pre", { class: "error", id: "adapter-error", role: "alert", hidden: true });
    this.body = h("tbody");
    this.empty = h("p", { class: "dim" }, "No adapter is registered.");
    this.table = h("table", { class: "stack" },
      h("thead", {}, h("tr", {}, ...["Name", "Source", "Loaded at once", "Pinned", ""].map((name) => h("th", { scope: "col" }, name || h("span", { class: "unseen" }, "Actions"))))),
      this.body);
    this.name = h("input", { id: "adapter-name", required: true, autocomplete: "off", spellcheck: "false" });
    this.src = h("input", { id: "adapter-src", required: true, autocomplete: "off", spellcheck: "false", placeholder: "/path, s3://bucket/prefix/ or .tar.gz" });
    this.pin = h("input", { id: "adapter-pin", type: "checkbox" });
    this.submit = h("button", { class: "primary", type: "submit" }, "Register");
    section.append(
      h("h2", { class: "unseen" }, "Adapters"),
      this.error,
      h("div", { class: "card" }, h("h3", {}, "Registered"), this.empty, this.table),
      h("form", { class: "card form register", onsubmit: (event) => { event.preventDefault(); this.register(); } },
        h("h3", {}, "Register an adapter"),
        h("div", { class: "field" }, h("label", { for: "adapter-name" }, "Name"), this.name),
        h("div", { class: "field" }, h("label", { for: "adapter-src" }, "Source"), this.src),
        h("label", { class: "check", for: "adapter-pin" }, this.pin, "Pin: never make room by unloading it"),
        h("div", { class: "buttons" }, this.submit)),
    );
  }

  /** Ask for the list again. */
  async load() {
    try {
      const found = [];
      let token = "";
      for (let page = 0; page < PAGES; page += 1) {
        const response = await call(`adapters?limit=100${token ? `&next_page_token=${encodeURIComponent(token)}` : ""}`);
        if (!response.ok) throw new Error(await failureText(response));
        const answer = await response.json();
        found.push(...answer.adapters);
        token = answer.nextPageToken;
        if (!token) break;
      }
      this.show(found);
    } catch (error) {
      this.show([]);
      this.fail(error);
    }
  }

  show(adapters) {
    this.empty.hidden = adapters.length > 0;
    this.table.hidden = adapters.length === 0;
    this.body.replaceChildren(...adapters.map((adapter) => h("tr", {},
      h("th", { scope: "row", "data-label": "Name" }, adapter.name),
      h("td", { "data-label": "Source", class: "mono" }, ...breakable(adapter.src)),
      h("td", { "data-label": "Loaded at once" }, adapter.preload ? "yes" : "no"),
      h("td", { "data-label": "Pinned" }, adapter.pin ? "yes" : "no"),
      h("td", { class: "action" }, this.removeButton(adapter.name)))));
    this.onChange(adapters.map((adapter) => adapter.name));
  }

  /** Asks once more before it removes. */
  removeButton(name) {
    const button = h("button", { type: "button", class: "small", "aria-label": `Remove ${name}` }, "Remove");
    button.addEventListener("click", () => {
      if (button.classList.contains("danger")) return this.remove(name, button);
      button.classList.add("danger");
      button.textContent = "Really remove?";
      button.setAttribute("aria-label", `Really remove ${name}?`);
      return undefined;
    });
    button.addEventListener("blur", () => {
      if (button.disabled) return;
      button.classList.remove("danger");
      button.textContent = "Remove";
      button.setAttribute("aria-label", `Remove ${name}`);
    });
    return button;
  }

  async register() {
    this.error.hidden = true;
    const fields = { name: this.name.value, src: this.src.value, pin: this.pin.checked };
    this.submit.disabled = true;
    const isDone = await this.change("adapters", { method: "POST", body: JSON.stringify(fields) });
    this.submit.disabled = false;
    if (isDone) {
      announce(`Adapter ${fields.name} registered`);
      this.name.value = "";
      this.src.value = "";
      this.pin.checked = false;
    }
  }

  async remove(name, button) {
    this.error.hidden = true;
    button.disabled = true;
    say(button, "Removing");
    // A JSON type, so that a browser would have to ask before another site could send it.
    const headers = { "Content-Type": "application/json" };
    if (await this.change(`adapters/${encodeURIComponent(name)}`, { method: "DELETE", headers })) {
      announce(`Adapter ${name} removed`);
      return;
    }
    button.disabled = false;
    say(button, "Remove");
  }

  async change(path, request) {
    try {
      const response = await call(path, request);
      if (!response.ok) throw new Error(await failureText(response));
    } catch (error) {
      this.fail(error);
      return false;
    }
    await this.load();
    return true;
  }

  fail(error) {
    if (error instanceof KeyNeeded) return this.onKeyNeeded();
    this.error.hidden = false;
    say(this.error, error.message);
    this.error.scrollIntoView({ block: "nearest" });
    return undefined;
  }
}
