// An answer as the page keeps it, its figures, and the messages of a request.

// The sources of drafts by name, as the server tells them: [how their tokens are called, color]. The first word is short.
export const sources = {};

const wordOf = (source) => sources[source]?.[0].split(" ")[0] ?? source;
export const classOf = (source) => (source === "model" ? source : `source ${sources[source]?.[1] ?? "cyan"}`);

// The sources that an answer has tokens of, or drafts.
export const sourcesOf = ({ counts, usage }) =>
  Object.keys({ model: 0, ...sources, ...counts }).filter((source) => counts[source] || draftsOf(usage, source)[1]);

// The pieces of its text and of its thoughts are [source, text].
export function newAnswer(model) {
  return {
    model, text: [], thoughts: [], finish: null, error: null, read: null,
    counts: {},  // tokens by source
    nLast: 0,  // tokens of the last request; an answer that was continued has several
    seconds: 0, nTimed: 0,  // without the first event of each request: it took the prompt's time
    usage: { prompt: 0, cached: 0, drafts: {} },  // drafts by source: [accepted ones, all]
  };
}

export const textOf = (pieces) => pieces.map(([, text]) => text).join("");
export const countOf = (answer) => Object.values(answer.counts).reduce((sum, n) => sum + n, 0);

// Only an answer with a text that did not fail is part of the conversation.
export const isUsable = (answer) => Boolean(answer && !answer.error && textOf(answer.text));

// Take an event of api.js into an answer. The times of events are in seconds; the first event of a request has no time before it.
export function takeEvent(answer, event, now, before) {
  if (event.usage) return takeUsage(answer.usage, event.usage);
  if (!event.choice) {
    answer.read = event;
    return;
  }
  const { delta = {}, text = delta.content, sources = [], finish_reason: finish } = event.choice;
  answer.read = null;
  for (const source of sources) answer.counts[source] = (answer.counts[source] ?? 0) + 1;
  answer.nLast += sources.length;
  if (before !== null) {
    answer.seconds += now - before;
    answer.nTimed += sources.length;
  }
  // A piece of text may take several tokens; it has the colour of the last one.
  const source = sources.at(-1) ?? answer.text.at(-1)?.[0] ?? answer.thoughts.at(-1)?.[0] ?? "model";
  addPiece(answer.thoughts, source, delta.reasoning);
  addPiece(answer.text, source, text);
  answer.finish = finish ?? answer.finish;
}

function addPiece(pieces, source, text) {
  if (!text) return;
  if (pieces.at(-1)?.[0] === source) pieces.at(-1)[1] += text;
  else pieces.push([source, text]);
}

function takeUsage(usage, { prompt_tokens: prompt, prompt_tokens_details: read, completion_tokens_details: details = {} }) {
  Object.assign(usage, { prompt, cached: read?.cached_tokens ?? 0 });
  for (const source of Object.keys(sources)) {
    const name = `${wordOf(source)}_tokens`, [accepted, all] = draftsOf(usage, source);
    usage.drafts = { ...usage.drafts, [source]: [accepted + (details[`accepted_${name}`] ?? 0), all + (details[name] ?? 0)] };
  }
}

// A chat that was stored by an earlier version has no drafts by source.
const draftsOf = (usage, source) => usage.drafts?.[source] ?? [0, 0];

// The figures of an answer in words.
export function figuresOf(answer) {
  const { counts, usage, seconds, nTimed } = answer;
  const n = countOf(answer);
  const figures = [`${n} tokens`];
  if (nTimed > 0 && seconds > 0) figures.push(`${(nTimed / seconds).toFixed(1)} tokens/s`);
  const shares = sourcesOf(answer).map((source) => {
    const [accepted, all] = draftsOf(usage, source), share = `${wordOf(source)} ${percent(counts[source] ?? 0, n)}`;
    return all ? `${share} (${accepted} of ${all} drafts)` : share;
  });
  if (n) figures.push(shares.join(", "));
  if (usage.prompt) figures.push(`prompt ${usage.prompt} tokens (${usage.cached} cached)`);
  return figures.join(" · ");
}

const percent = (n, all) => `${Math.round((100 * n) / all)}%`;

// The messages of a request for the answer to a turn, or for more of it. Failed turns before it are left out.
export function messagesFor(turns, turn, system, isContinued) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const t of turns.slice(0, turns.indexOf(turn)).filter((t) => isUsable(t.answer)))
    messages.push(questionOf(t), { role: "assistant", content: textOf(t.answer.text) });
  messages.push(questionOf(turn));
  if (isContinued) {
    const { text, thoughts } = turn.answer;
    messages.push({ role: "assistant", content: textOf(text), ...(thoughts.length && { reasoning: textOf(thoughts) }) });
  }
  return messages;
}

// The prompt of a request to a model without a chat template, which continues a text.
export function promptFor(turn, isContinued) {
  return turn.text + (isContinued ? textOf(turn.answer.text) : "");
}

function questionOf({ text, images }) {
  if (!images.length) return { role: "user", content: text };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}
