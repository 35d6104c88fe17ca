// Calls to this server, with the key where there is one. The key lives in sessionStorage: it ends
// with the tab, and no other origin can read it.

const NAME = "lmi-console-key";
let remembered = "";

export class KeyNeeded extends Error {}

export function key() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return remembered;
  }
}

export function setKey(value) {
  remembered = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // storage may be forbidden: then it lasts as long as the page
  }
}

/** Send a request; `path` is below the folder the console is in. A body goes as JSON. */
export async function call(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key()) sent["Authorization"] = `Bearer ${key()}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method, signal, headers: sent, body, cache: "no-store", credentials: "omit", redirect: "error",
  });
  if (response.status === 401) throw new KeyNeeded(await response.text());
  return response;
}

export async function getJson(path) {
  const response = await call(path);
  if (!response.ok) throw new Error(await failureText(response));
  return response.json();
}

/** The server's own words for a refusal, as they came. */
export async function failureText(response) {
  return `${response.status} ${response.statusText}\n${(await response.text()).trim()}`;
}
