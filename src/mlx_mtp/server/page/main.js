// The page: its chats, the running answer, and what its buttons do.

import { complete, listModels, listPrompts, listSources } from "./api.js";
import { classOf, countOf, messagesFor, newAnswer, promptFor, sources, takeEvent } from "./answer.js";
import { deleteChat, loadChats, newChat, saveChat, showChats } from "./chats.js";
import { fill, readQuestion, setRunning, setUpComposer } from "./composer.js";
import { $, add, addProgress, announce, notify } from "./dom.js";
import { checkSettings, fieldsOf, isThinking, keyOf, loadSettings, saveSettings, showSettings, systemOf } from "./settings.js";
import { TurnView } from "./turns.js";

let chats = [], models = [];
let views = [];  // of the chat's turns, in order
let chat = newChat();
let running = null;  // the AbortController of the running request

const turnActions = {
  edit: (turn) => fill(turn),
  regenerate: (turn) => {
    if (running || !checkSettings()) return;
    dropFrom(chat.turns.indexOf(turn) + 1);
    run(turn, false);
    $("stop").focus();  // the button that was pressed is gone
  },
  goOn: (turn) => {
    run(turn, true);
    $("stop").focus();
  },
};
const chatActions = {
  open,
  rename: (c, title) => { c.title = title; save(c); },
  remove: async (c) => {
    chats = chats.filter((other) => other !== c);
    await report(deleteChat(c));
    open(newChat());
  },
};

// Chats.

function open(c) {
  running?.abort();
  chat = c;
  fill();
  showHistory(false);
  showTurns();
  showChats(chats, chat, chatActions);
}

function showTurns() {
  $("turns").replaceChildren();
  views = chat.turns.map((turn) => new TurnView(turn, turnActions));
  for (const view of views) view.show();
  $("turns").scrollTop = $("turns").scrollHeight;
}

// Remove the turns from number i on.
function dropFrom(i) {
  if (i >= chat.turns.length) return;
  chat.turns.length = i;
  showTurns();
}

async function save(c) {
  c.changed = Date.now();
  if (!chats.includes(c)) chats.push(c);
  showChats(chats, chat, chatActions);
  await report(saveChat(c));
}

const report = (saving) => saving.catch((error) => notify(`The browser could not save the chats: ${error.message}`));

// Answers.

function send() {
  const { text, images, edited } = readQuestion();
  if (running || !(text.trim() || images.length) || !checkSettings()) return;
  if (images.length && !takesImages()) {
    notify("This model takes no images: remove them from the question.");
    return;
  }
  if (edited) dropFrom(chat.turns.indexOf(edited));
  const turn = { text, images, answer: null };
  chat.turns.push(turn);
  views.push(new TurnView(turn, turnActions));
  fill();
  run(turn, false);
}

// Ask for the answer to a turn, or for more of it.
async function run(turn, isContinued) {
  if (running || !checkSettings()) return;
  const own = chat, view = views[chat.turns.indexOf(turn)], controller = new AbortController();
  const body = bodyFor(turn, isContinued);
  if (!isContinued) turn.answer = newAnswer(body.model);
  const { answer } = turn;
  const { finish } = answer;
  Object.assign(answer, { finish: "stopped", notice: null, nLast: 0 });  // as it is if the page is closed now
  running = controller;
  setRunning(true);
  view.isRunning = true;
  view.show();
  $("turns").scrollTop = $("turns").scrollHeight;
  announce("Processing the prompt");
  save(own);
  try {
    await receive(complete(body, keyOf(), controller.signal), answer, view);
    announce(`The answer is complete: ${countOf(answer)} tokens`);
  } catch (error) {
    if (error.name === "AbortError") announce("Stopped");
    else takeError(error, answer, finish, isContinued);
  }
  running = null;
  setRunning(false);
  view.isRunning = false;
  answer.read = null;
  view.show();
  if (chats.includes(own)) save(own);  // it may have been deleted meanwhile
}

function bodyFor(turn, isContinued) {
  if (!canChat()) return { ...fieldsOf(), prompt: promptFor(turn, isContinued) };
  const messages = messagesFor(chat.turns, turn, systemOf(), isContinued);
  return { ...fieldsOf(), messages, enable_thinking: isThinking() };
}

async function receive(events, answer, view) {
  let before = null;
  for await (const event of events) {
    const now = performance.now() / 1000;
    takeEvent(answer, event, now, before);
    if (event.choice) before = now;
    view.update();
  }
}

// An answer that cannot be continued stays as it was.
function takeError(error, answer, finish, isContinued) {
  answer.finish = finish;
  if (isContinued) answer.notice = `The answer was not continued: ${error.message}`;
  else answer.error = error.message;
  if (error.status === 401) askForKey();
}

// Models.

async function showModels() {
  try {
    models = await listModels(keyOf());
  } catch (error) {
    if (error.status === 401) askForKey();
    else notify(error.message);
    return;
  }
  $("model").replaceChildren(...models.map(({ id }) => new Option(nameOf(id), id)));
  showDescription();
}

// A folder's path is long: its last part is enough.
const nameOf = (id) => (id.startsWith("/") ? id.split("/").findLast(Boolean) : id);

const modelOf = () => models.find(({ id }) => id === $("model").value);
// A model without a chat template continues each text by itself.
const canChat = () => modelOf()?.has_chat_template ?? true;
const takesImages = () => canChat() && (modelOf()?.takes_images ?? true);

function showDescription() {
  const description = modelOf()?.description ?? "";
  $("description").textContent = description;
  $("description").hidden = !description;
  for (const id of ["system", "thinking"]) $(id).closest("label").hidden = !canChat();
  $("files").closest("label").hidden = !takesImages();
  const action = canChat() ? "Ask a question" : "Start a text for the model to continue";
  $("question").placeholder = action;
  $("invitation").textContent = `${action}.`;
  $("example").textContent = canChat() ? "Write a binary search in Python." : 'class Stack:\n    """A stack of items."""\n';
  document.body.classList.toggle("continues", !canChat());
}

async function showSources() {
  Object.assign(sources, await listSources().catch((error) => notify(error.message)));
  for (const [name, [label, color]] of Object.entries(sources)) {
    $("legend").append(", ");
    add($("legend"), "span", classOf(name), `${color}: ${label}`);
  }
}

// A coding agent's first prompt takes minutes.
async function showPrompts() {
  const prompts = document.hidden || running ? [] : await listPrompts().catch(() => []);
  $("others").hidden = prompts.length === 0;
  $("others").replaceChildren();
  for (const { processed, total } of prompts) addProgress(add($("others"), "p", "reading"), processed, total);
}

function askForKey() {
  notify("This server requires an API key: enter it in the settings.");
  showSettings();
  $("key").focus();
}

// The rest of the page.

// On a narrow page the chats cover it.
const isHistoryShown = () => document.body.classList.contains("with-history");

function showHistory(isShown) {
  document.body.classList.toggle("with-history", isShown);
  if (isShown) $("new-chat").focus();
  $("show-history").setAttribute("aria-expanded", isShown);
}

function setUp() {
  setUpComposer();
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("settings").addEventListener("submit", (event) => { event.preventDefault(); checkSettings(); });
  $("settings").addEventListener("change", saveSettings);
  $("key").addEventListener("change", () => { notify(""); showModels(); });
  $("model").addEventListener("change", showDescription);
  $("example").addEventListener("click", () => { $("question").value = $("example").textContent; send(); });
  $("stop").addEventListener("click", () => running?.abort());
  $("new-chat").addEventListener("click", () => open(newChat()));
  $("show-settings").addEventListener("click", () => showSettings($("settings").hidden));
  $("show-history").addEventListener("click", () => showHistory(!isHistoryShown()));
  document.addEventListener("click", ({ target }) => {
    if (isHistoryShown() && !target.closest("#history, #show-history")) closeHistory();
  });
  for (const radio of document.querySelectorAll("input[name=view]"))
    radio.addEventListener("change", () => {
      saveSettings();
      for (const view of views) view.show();
    });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (isHistoryShown()) closeHistory();
    else if (running) running.abort();
    else if (!$("editing").hidden) fill();
  });
}

function closeHistory() {
  showHistory(false);
  $("show-history").focus();
}

async function start() {
  loadSettings();
  setUp();
  await showSources();
  await showModels();
  chats = (await report(loadChats())) ?? [];
  showChats(chats, chat, chatActions);
  setInterval(showPrompts, 2000);
}

start();
