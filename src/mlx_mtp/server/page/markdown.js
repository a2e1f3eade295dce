// Markdown of the model as elements. The model's text is never trusted: markdown-it shows its HTML as text, and DOMPurify lets
// only the elements below through. The page's Content-Security-Policy loads nothing that they name.

/* global markdownit, hljs, DOMPurify */
import { add, addButton, copy } from "./dom.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s", "span", "strong",
    "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["class", "href", "start"],
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  ALLOW_ARIA_ATTR: false, ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const markdown = markdownit({ html: false, linkify: true, breaks: true, highlight }).disable("image");

// Code as HTML; an empty text leaves it to markdown-it.
function highlight(code, language) {
  return hljs.getLanguage(language) ? hljs.highlight(code, { language, ignoreIllegals: true }).value : "";
}

export function render(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const block of fragment.querySelectorAll("pre")) addCopyButton(block);
  return fragment;
}

function addCopyButton(block) {
  const box = document.createElement("div"), bar = add(box, "div", "bar");
  const code = block.textContent;
  box.className = "code";
  add(bar, "span", "", /language-(\S+)/.exec(block.firstElementChild?.className)?.[1] ?? "");
  const button = addButton(bar, "Copy", () => copy(code, button), "Copy the code");
  block.replaceWith(box);
  block.tabIndex = 0;  // so that a keyboard can scroll it
  box.append(block);
}
