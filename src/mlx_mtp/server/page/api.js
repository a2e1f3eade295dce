// Requests to the server.

const WAITING = /^: keepalive (\d+)\/(\d+)/;  // in a text: the tokens of the prompt that are read, and all

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The models that the server offers.
export async function listModels(key) {
  return (await (await ask("v1/models", key)).json()).data;
}

// The sources of drafts by name: [how their tokens are called, color].
export async function listSources() {
  return (await ask("page/sources.json")).json();
}

// The prompts that the server processes, of all clients: {processed, total} tokens each.
export async function listPrompts() {
  return (await (await ask("health")).json()).prompts ?? [];
}

// The events of an answer: {read, all} tokens of the prompt, {choice}, {usage}.
export async function* complete(body, key, signal) {
  const options = { stream: true, stream_options: { include_usage: true, include_sources: true } };
  const path = body.messages ? "v1/chat/completions" : "v1/completions";
  const response = await ask(path, key, {
    method: "POST", signal, body: JSON.stringify({ ...body, ...options }),
  });
  let isComplete = false;
  for await (const part of parts(response)) {
    const waiting = WAITING.exec(part);
    if (waiting) yield { read: Number(waiting[1]), all: Number(waiting[2]) };
    if (part === "data: [DONE]") isComplete = true;
    else if (part.startsWith("data: ")) yield eventOf(JSON.parse(part.slice(6)));
  }
  if (!isComplete) throw new ServerError("The server closed the connection before the end of the answer.");
}

function eventOf(chunk) {
  if (chunk.error) throw new ServerError(chunk.error.message);
  if (chunk.prompt_progress) return { read: chunk.prompt_progress.processed, all: chunk.prompt_progress.total };
  return chunk.usage ? { usage: chunk.usage } : { choice: chunk.choices[0] };
}

async function ask(path, key, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer: check that it is running.");
  }
  if (response.ok) return response;
  const content = await response.json().catch(() => null);
  throw new ServerError(content?.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

// Parts of a stream that blank lines separate: events and comments.
async function* parts(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const found = (rest + value).split("\n\n");
    rest = found.pop();
    yield* found;
  }
}
