// The list of chats. The browser's IndexedDB keeps them, and has room for images. A chat is {id, title, changed, turns}.

import { $, add, addButton } from "./dom.js";
import { textOf } from "./answer.js";

const database = new Promise((resolve, reject) => {
  const request = indexedDB.open("mlx_mtp", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
database.catch(() => {});  // each call below reports it

async function run(mode, act) {
  const store = (await database).transaction("chats", mode).objectStore("chats");
  return new Promise((resolve, reject) => {
    const request = act(store);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export const loadChats = () => run("readonly", (store) => store.getAll());
export const saveChat = (chat) => run("readwrite", (store) => store.put(chat));
export const deleteChat = (chat) => run("readwrite", (store) => store.delete(chat.id));

export function newChat() {
  return { id: `${Date.now()}-${Math.random()}`, title: "", changed: Date.now(), turns: [] };
}

const titleOf = (chat) => chat.title || chat.turns[0]?.text.trim().slice(0, 60) || "New chat";

// Show the chats, the latest first. What the buttons do is in actions: {open, rename, remove}.
export function showChats(chats, current, actions) {
  const list = $("chats"), hadFocus = list.contains(document.activeElement);
  list.replaceChildren();
  for (const chat of chats.toSorted((a, b) => b.changed - a.changed)) {
    const item = add(list, "li"), title = titleOf(chat);
    const button = addButton(item, title, () => actions.open(chat));
    if (chat !== current) continue;
    button.setAttribute("aria-current", "true");
    const bar = add(item, "div", "bar");
    addButton(bar, "Rename", () => {
      const name = prompt("Name of the chat", title);
      if (name !== null) actions.rename(chat, name.trim());
    });
    addButton(bar, "Export", () => download(`${title.replace(/[^\w-]+/g, "-")}.md`, markdownOf(chat)));
    addButton(bar, "Delete", () => { if (confirm(`Delete the chat "${title}"?`)) actions.remove(chat); });
  }
  if (hadFocus) list.querySelector("[aria-current]")?.focus();
}

// A chat as a Markdown file.
export function markdownOf(chat) {
  const turns = chat.turns.map(({ text, images, answer }) => {
    const note = images.length ? `(${images.length === 1 ? "1 image" : `${images.length} images`})\n\n` : "";
    const said = answer ? answer.error ? `Error: ${answer.error}` : textOf(answer.text) : "";
    return `## Question\n\n${note}${text}\n\n## Answer\n\n${said}\n`;
  });
  return [`# ${titleOf(chat)}\n`, ...turns].join("\n");
}

function download(name, text) {
  const link = document.createElement("a"), url = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  Object.assign(link, { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}
