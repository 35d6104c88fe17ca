// A line plot in SVG: history of a few minutes, one path per series, values under the pointer.

import { h, s, say } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 100;
const LEAST_SECONDS = 60; // that the width stands for
const MOST_SECONDS = 300;

export class Plot {
  /** `series` are {name, tone}; `format` writes a value. */
  constructor(title, series, format) {
    this.format = format;
    this.rows = []; // {time, values}
    this.series = series.map(({ name, tone }) => ({
      name,
      line: s("path", { class: `line ${tone}` }),
      area: s("path", { class: `area ${tone}` }),
      value: h("b", {}, "–"),
      tone,
    }));
    this.cursor = s("line", { class: "cursor", y1: 0, y2: HEIGHT, hidden: true });
    this.svg = s(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...[25, 50, 75].map((y) => s("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y })),
      ...this.series.map((one) => one.area),
      ...this.series.map((one) => one.line),
      this.cursor,
    );
    this.top = h("span", { class: "top" });
    this.empty = h("span", { class: "empty" }, "waiting for the first requests");
    this.when = h("span", { class: "when" }, "now");
    this.since = h("span", {}, "");
    this.node = h(
      "figure",
      { class: "card plot" },
      h(
        "figcaption",
        {},
        h("h3", {}, title),
        h("ul", { class: "legend" }, ...this.series.map((one) =>
          h("li", {}, h("i", { class: `swatch ${one.tone}` }), `${one.name} `, one.value))),
      ),
      h("div", { class: "canvas" }, this.svg, this.top, this.empty),
      h("div", { class: "axis", "aria-hidden": "true" }, this.since, this.when),
    );
    this.title = title;
    this.at = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
  }

  /** Add the values of one moment; null is a gap. */
  add(time, values) {
    if (this.rows.length && time < this.rows[this.rows.length - 1].time) this.rows = []; // another server
    this.rows.push({ time, values });
    while (time - this.rows[0].time > MOST_SECONDS) this.rows.shift();
    this.draw();
  }

  get now() {
    return this.rows[this.rows.length - 1]?.time ?? 0;
  }

  get span() {
    return Math.max(LEAST_SECONDS, this.now - (this.rows[0]?.time ?? 0));
  }

  x(time) {
    return WIDTH * (1 - (this.now - time) / this.span);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const time = this.now - this.span * (1 - (event.clientX - box.left) / box.width);
    const distances = this.rows.map((row) => Math.abs(row.time - time));
    const nearest = distances.indexOf(Math.min(...distances));
    this.at = nearest >= 0 && distances[nearest] < this.span / 20 ? nearest : null;
    this.draw();
  }

  draw() {
    const all = this.rows.flatMap((row) => row.values).filter((value) => value !== null);
    const most = niceTop(Math.max(0, ...all));
    this.empty.hidden = all.some((value) => value > 0);
    say(this.top, this.empty.hidden ? this.format(most) : "");
    const shown = this.at ?? this.rows.length - 1;
    this.series.forEach((one, index) => {
      const runs = this.runs(index, most);
      one.line.setAttribute("d", runs.map((run) => `M${run.join("L")}`).join(""));
      one.area.setAttribute("d", runs.map((run) => {
        const [first, last] = [run[0].split(" ")[0], run[run.length - 1].split(" ")[0]];
        return `M${first} ${HEIGHT}L${run.join("L")}L${last} ${HEIGHT}Z`;
      }).join(""));
      const value = this.rows[shown]?.values[index] ?? null;
      say(one.value, value === null ? "–" : this.format(value));
    });
    this.placeCursor(shown);
    this.svg.setAttribute("aria-label", `${this.title}: ${this.series.map((one) =>
      `${one.name} ${one.value.textContent}`).join(", ")}`);
  }

  runs(index, most) {
    const runs = [];
    let run = [];
    this.rows.forEach((row) => {
      const value = row.values[index];
      if (value === null) {
        if (run.length) runs.push(run);
        run = [];
        return;
      }
      run.push(`${this.x(row.time).toFixed(2)} ${(HEIGHT - 2 - (value / most) * (HEIGHT - 8)).toFixed(2)}`);
    });
    if (run.length) runs.push(run);
    return runs;
  }

  placeCursor(shown) {
    say(this.since, `${Math.round(this.span)} s ago`);
    this.cursor.toggleAttribute("hidden", this.at === null);
    if (this.at === null) return say(this.when, "now");
    const x = this.x(this.rows[shown].time);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    return say(this.when, `${Math.round(this.now - this.rows[shown].time)} s ago`);
  }
}

/** The next of 1, 2, 5, 10, 20, ... above a value. */
export function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 1.05) ?? 10 * power;
}
