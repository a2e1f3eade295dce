// Questions and their answers.

import { $, add, addButton, addProgress, copy } from "./dom.js";
import { classOf, figuresOf, isUsable, sourcesOf, textOf } from "./answer.js";
import { render } from "./markdown.js";
import { viewOf } from "./settings.js";

// Shows a turn. What its buttons do is in actions: {edit, regenerate, goOn}.
export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.isRunning = false;
    this.pause = 0;  // milliseconds between two updates: those of a long answer take longer
    this.question = add($("turns"), "article", "question");
    this.question.setAttribute("aria-label", "Question");
    this.showQuestion();
    this.element = add($("turns"), "article", "answer");
    this.element.setAttribute("aria-label", "Answer");
    this.thoughts = add(this.element, "details");
    this.summary = add(this.thoughts, "summary");
    this.thought = add(this.thoughts, "div", "text");
    this.text = add(this.element, "div", "text");
    this.reading = add(this.element, "p", "reading");
    this.error = add(this.element, "p", "error");
    this.error.setAttribute("role", "alert");
    this.shares = add(this.element, "div", "shares");
    this.figures = add(this.element, "footer");
    this.buttons = add(this.element, "div", "buttons");
  }

  showQuestion() {
    const { text, images } = this.turn;
    const bubble = add(this.question, "div", "bubble");
    add(bubble, "div", "text", text);
    images.forEach((url, i) => Object.assign(add(bubble, "img"), { src: url, alt: `Image ${i + 1}` }));
    addButton(add(this.question, "div", "buttons"), "Edit", () => this.actions.edit(this.turn), "Edit the question");
  }

  // Show the answer soon; many calls become one.
  update() {
    this.timer ??= setTimeout(() => this.show(), this.pause);
  }

  show() {
    clearTimeout(this.timer);
    this.timer = null;
    const log = $("turns"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    const begun = performance.now(), { answer } = this.turn;
    this.element.setAttribute("aria-busy", this.isRunning);  // screen readers wait for the end
    this.showTexts(answer);
    this.showReading(answer);
    this.error.textContent = answer.error ?? answer.notice ?? "";
    this.figures.textContent = answer.text.length || answer.thoughts.length ? figuresOf(answer) : "";
    this.showShares(answer);
    this.buttons.replaceChildren();
    if (!this.isRunning) this.showButtons(answer);
    this.pause = Math.max(50, 5 * (performance.now() - begun));
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  showTexts({ text, thoughts }) {
    this.thoughts.hidden = thoughts.length === 0;
    this.summary.textContent = this.isRunning && text.length === 0 ? "Thinking …" : "Thoughts";
    fillText(this.thought, thoughts);
    fillText(this.text, text);
  }

  showReading({ read, text, thoughts }) {
    this.reading.replaceChildren();
    this.reading.hidden = !this.isRunning || (text.length + thoughts.length > 0 && read === null);
    if (this.reading.hidden) return;
    if (read?.all) addProgress(this.reading, read.read, read.all);
    else this.reading.textContent = "Processing the prompt …";
  }

  showShares(answer) {
    this.shares.replaceChildren();
    for (const source of sourcesOf(answer)) add(this.shares, "span", classOf(source)).style.flexGrow = answer.counts[source] ?? 0;
  }

  showButtons(answer) {
    if (answer.finish === "length") {
      const isCut = `Stopped at the limit of ${answer.nLast} tokens`;
      add(this.buttons, "span", "", isUsable(answer) ? `${isCut}:` : `${isCut} before the answer: raise the maximum.`);
      if (isUsable(answer)) addButton(this.buttons, "Continue", () => this.actions.goOn(this.turn)).className = "main";
    }
    if (answer.finish === "stopped") add(this.buttons, "span", "", "Stopped.");
    if (textOf(answer.text)) {
      const button = addButton(this.buttons, "Copy", () => copy(textOf(answer.text), button), "Copy the answer");
    }
    const again = answer.error ? "Try again" : "Regenerate";
    addButton(this.buttons, again, () => this.actions.regenerate(this.turn));
  }
}

// Coloured tokens, or rendered text.
function fillText(parent, pieces) {
  const isText = viewOf() === "text";
  parent.classList.toggle("rendered", isText);
  parent.classList.toggle("tokens", !isText);
  parent.replaceChildren();
  if (isText) parent.append(render(textOf(pieces)));
  else for (const [source, text] of pieces) add(parent, "span", classOf(source), text);
}
