// The configuration as `lmi-vllm explain` tells it: every value with its origin and its effect.

import { getJson, KeyNeeded } from "./api.js";
import { breakable, h, say } from "./dom.js";

const COLUMNS = ["name", "value", "origin", "effect", "target", "note"];

export class SettingsView {
  constructor(section, onKeyNeeded) {
    this.onKeyNeeded = onKeyNeeded;
    this.document = null;
    this.error = h("pre", { class: "error", role: "alert", hidden: true });
    this.warnings = h("div", { class: "warnings" });
    this.search = h("input", { id: "settings-search", type: "search", placeholder: "name, value, origin or note" });
    this.all = h("input", { id: "settings-all", type: "checkbox" });
    this.count = h("p", { class: "dim", "aria-live": "polite" });
    this.body = h("tbody", { id: "settings-rows" });
    this.engine = h("tbody");
    const table = (names, body, kind = "") => h("table", { class: `stack wide ${kind}` },
      h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)))), body);
    section.append(
      h("h2", { class: "unseen" }, "Settings"),
      this.error,
      this.warnings,
      h("div", { class: "card" },
        h("div", { class: "head" }, h("h3", {}, "Options"), this.count),
        h("div", { class: "filter" },
          h("div", { class: "field" }, h("label", { for: "settings-search" }, "Search"), this.search),
          h("label", { class: "check", for: "settings-all" }, this.all, "Defaults too")),
        table(COLUMNS, this.body, "settings")),
      h("div", { class: "card" }, h("h3", {}, "What the engine is given"), table(["argument", "value"], this.engine)),
    );
    this.search.addEventListener("input", () => this.show());
    this.all.addEventListener("change", () => this.show());
  }

  async load() {
    try {
      this.document = await getJson("console/settings");
    } catch (error) {
      if (error instanceof KeyNeeded) return this.onKeyNeeded();
      this.error.hidden = false;
      return say(this.error, error.message);
    }
    this.error.hidden = true;
    return this.show();
  }

  show() {
    if (!this.document) return;
    const { options, engine_args: engine, warnings, errors } = this.document;
    this.warnings.replaceChildren(
      ...errors.map((text) => h("p", { class: "error" }, text)),
      ...warnings.map((text) => h("p", { class: "notice" }, text)));
    const wanted = this.search.value.trim().toLowerCase();
    const rows = options
      .filter((row) => this.all.checked || wanted || row.origin !== "default")
      .filter((row) => !wanted || COLUMNS.some((name) => shown(row[name]).toLowerCase().includes(wanted)));
    say(this.count, `${rows.length} of ${options.length}`);
    this.body.replaceChildren(...rows.map((row) => h("tr", {}, ...COLUMNS.map((name) =>
      h(name === "name" ? "th" : "td", {
        "data-label": name, scope: name === "name" ? "row" : undefined,
        class: ["name", "value", "target"].includes(name) ? "mono" : name === "note" ? "note" : undefined,
      }, ...breakable(shown(row[name])))))));
    this.engine.replaceChildren(...Object.entries(engine).map(([name, value]) => h("tr", {},
      h("th", { scope: "row", "data-label": "argument", class: "mono" }, ...breakable(name)),
      h("td", { "data-label": "value", class: "mono" }, ...breakable(shown(value))))));
  }
}

function shown(value) {
  if (value === null || value === undefined || value === "") return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}
