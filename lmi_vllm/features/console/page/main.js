// Starts the page: tabs, theme, key, and the one poll that everything is drawn from.

import { Adapters } from "./adapters.js";
import { getJson, key, KeyNeeded, setKey } from "./api.js";
import { announce, say } from "./dom.js";
import { Overview } from "./overview.js";
import { Playground } from "./playground.js";
import { SettingsView } from "./settings.js";

const READY_MILLISECONDS = 2000;
const LOADING_MILLISECONDS = 700;
const LONGEST_PAUSE = 10000; // between tries while the server cannot be reached
const STATES = {
  PENDING: ["Starting", "busy"], Healthy: ["Ready", "good"], Unhealthy: ["Stalled", "bad"],
  Asleep: ["Asleep", "busy"], Waking: ["Waking", "busy"], FAILED: ["Failed", "bad"], DRAINING: ["Shutting down", "busy"],
};
const $ = (id) => document.getElementById(id);

const dialog = $("key-dialog");
const overview = new Overview($("overview"));
const playground = new Playground($("playground"), askForKey);
const adapters = new Adapters($("adapters"), {
  onChange: (names) => playground.setAdapters(names), onKeyNeeded: askForKey,
});
const settings = new SettingsView($("settings"), askForKey);

// The poll: one request at a time, none while the page is hidden, slower while the server does not answer.
let timer = 0;
let isAsking = false;
let failures = 0;
let lastState = "";

async function poll() {
  clearTimeout(timer);
  if (document.hidden || dialog.open || isAsking) return;
  isAsking = true;
  let pause = READY_MILLISECONDS;
  try {
    const state = await getJson("console/state");
    failures = 0;
    show(state);
    if (state.state === "PENDING" || state.state === "Waking") pause = LOADING_MILLISECONDS;
  } catch (error) {
    if (error instanceof KeyNeeded) askForKey();
    else pause = showFailure(error);
  }
  isAsking = false;
  timer = setTimeout(poll, pause);
}

function show(state) {
  say($("model"), state.model || "no model");
  say($("version"), `lmi_vllm ${state.version}`);
  $("forget").hidden = !key();
  const [text, tone] = state.model ? STATES[state.state] ?? [state.state, "busy"] : ["Waiting for a model", "busy"];
  pill(text, tone);
  document.title = `${text}: ${state.model || "lmi_vllm"}`;
  overview.update(state);
  playground.update(state);
  const now = `${state.model} ${state.state} ${state.adapters.registered}`;
  if (now !== lastState) refreshLists(state);
  lastState = now;
}

function refreshLists(state) {
  if (state.state === "Healthy" && state.model) adapters.load();
  settings.load();
}

function showFailure(error) {
  failures += 1;
  pill("Not reachable", "bad");
  overview.fail(`The server does not answer: ${error.message}`);
  return Math.min(LONGEST_PAUSE, READY_MILLISECONDS * 2 ** Math.min(failures, 4) / 2);
}

function pill(text, tone) {
  say($("status"), text);
  $("status").className = `pill ${tone}`;
}

document.addEventListener("visibilitychange", poll);

// The key.
function askForKey() {
  if (dialog.open) return;
  pill("Key needed", "busy");
  const wasWrong = Boolean(key());
  setKey("");
  $("key-error").hidden = !wasWrong;
  say($("key-error"), wasWrong ? "The server does not know this key." : "");
  $("key").value = "";
  dialog.showModal();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  dialog.close();
  lastState = "";
  poll();
});
dialog.addEventListener("cancel", (event) => event.preventDefault()); // there is nothing behind it
$("forget").addEventListener("click", () => {
  setKey("");
  location.reload(); // nothing that was shown stays
});

// The theme: as the system, light, dark.
const THEMES = { "": "as the system", light: "light", dark: "dark" };
function labelTheme() {
  $("theme").setAttribute("aria-label", `Theme: ${THEMES[document.documentElement.dataset.theme ?? ""]}`);
  $("theme").title = $("theme").getAttribute("aria-label");
}
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  try {
    localStorage.setItem("lmi-console-theme", next);
  } catch {
    // storage may be forbidden: it lasts as long as the page
  }
  labelTheme();
  announce($("theme").getAttribute("aria-label"));
});
labelTheme();

// Tabs, as the WAI-ARIA pattern has them: one stop for the Tab key, arrows between.
const tabs = [...document.querySelectorAll('[role="tab"]')];
function open(tab, { focus = false } = {}) {
  for (const one of tabs) {
    const isOpen = one === tab;
    one.setAttribute("aria-selected", isOpen);
    one.tabIndex = isOpen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !isOpen;
  }
  if (focus) tab.focus();
  history.replaceState(null, "", `#/${tab.getAttribute("aria-controls")}`); // no id: nothing scrolls
}
for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const target = event.key === "Home" ? 0 : event.key === "End" ? tabs.length - 1
      : step ? (place + step + tabs.length) % tabs.length : null;
    if (target === null) return;
    event.preventDefault();
    open(tabs[target], { focus: true });
  });
}
open(tabs.find((tab) => `#/${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);

poll();
