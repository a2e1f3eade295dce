// The list of chats.

import { $, add, addButton } from "./dom.js";
import { textOf } from "./answer.js";

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
