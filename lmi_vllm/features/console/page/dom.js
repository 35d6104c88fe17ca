// Elements and texts. Whatever comes from the server or the model enters the page as text only:
// nothing here, or anywhere in the console, turns a string into markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

/** An element; children are nodes or strings, which become text. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Set a text only when it differs, so that screen readers and selections are left alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Tell a screen reader what happened. */
export function announce(text) {
  document.getElementById("announce").textContent = text;
}

/** A long name or path as pieces between which a line may end. */
export function breakable(text) {
  return text.split(/(?<=[_/.,:])(?=[^_/.,:])/).flatMap((piece, index) => (index ? [h("wbr"), piece] : [piece]));
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.1) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 10 && !Number.isInteger(value)) return value.toFixed(1);
  return Math.round(value).toLocaleString("en");
}

/** Copy a text, and say on the button that it was done. */
export function copyButton(text) {
  const button = h("button", { type: "button", class: "quiet small" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
