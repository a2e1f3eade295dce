// The fields of a request. The browser keeps them, without the key.

import { $, notify } from "./dom.js";

const FIELDS = ["system", "temperature", "top-p", "max-tokens", "thinking"];
const NAME = "mlx_mtp.settings";

export function loadSettings() {
  const saved = Object(keep(() => JSON.parse(localStorage.getItem(NAME))));  // an object, whatever was kept
  for (const id of FIELDS.filter((id) => id in saved)) setValue($(id), saved[id]);
  const view = document.querySelector(`input[name=view][value="${saved.view === "text" ? "text" : "tokens"}"]`);
  view.checked = true;
}

export function saveSettings() {
  const values = Object.fromEntries(FIELDS.map((id) => [id, valueOf($(id))]));
  keep(() => localStorage.setItem(NAME, JSON.stringify({ ...values, view: viewOf() })));
}

// A browser may forbid storage.
function keep(act) {
  try {
    return act();
  } catch (error) {
    notify(`The browser could not save the settings: ${error.message}`);
  }
}

const valueOf = (field) => (field.type === "checkbox" ? field.checked : field.value);
const setValue = (field, value) => { field[field.type === "checkbox" ? "checked" : "value"] = value; };

export const keyOf = () => $("key").value;
export const systemOf = () => $("system").value.trim();
export const isThinking = () => $("thinking").checked;
export const viewOf = () => document.querySelector("input[name=view]:checked").value;

// The fields that requests for chats and for texts have; an empty one is left out.
export function fieldsOf() {
  const body = { model: $("model").value || "default_model" };
  for (const [id, name] of [["temperature", "temperature"], ["top-p", "top_p"], ["max-tokens", "max_tokens"]])
    if ($(id).value) body[name] = $(id).valueAsNumber;
  return body;
}

export function showSettings(isShown = true) {
  $("settings").hidden = !isShown;
  $("show-settings").setAttribute("aria-expanded", isShown);
}

// Whether all fields are valid. If not, the browser says what is wrong with the first that is not.
export function checkSettings() {
  if ($("settings").checkValidity()) return true;
  showSettings();
  $("settings").reportValidity();
  return false;
}
