// Elements of the page.

export const $ = (id) => document.getElementById(id);

// Add an element with a text to a parent.
export function add(parent, tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  return parent.appendChild(element);
}

export function addButton(parent, text, act, label = text) {
  const button = add(parent, "button", "", text);
  button.type = "button";
  if (label !== text) button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

// Copy a text, and say so on the button.
export async function copy(text, button) {
  const was = button.textContent;
  button.textContent = (await writeClipboard(text)) ? "Copied" : "Copying failed";
  setTimeout(() => { button.textContent = was; }, 1500);
}

// The clipboard exists at https and at localhost only. Elsewhere the older command serves.
async function writeClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = add(document.body, "textarea", "hidden");
  area.value = text;
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  return isDone;
}

// Show how much of a prompt is processed.
export function addProgress(parent, read, all) {
  const bar = add(parent, "progress");
  Object.assign(bar, { max: all, value: read });
  bar.setAttribute("aria-label", "Processing the prompt");
  parent.append(` Processing the prompt: ${read.toLocaleString("en")} of ${all.toLocaleString("en")} tokens`);
}

// A message for screen readers.
export function announce(text) {
  $("status").textContent = text;
}

// A message above the conversation; an empty one removes it.
export function notify(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}
