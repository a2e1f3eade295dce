// The libraries of JavaScript against a server whose model does what it is told: node clients.mjs URL KEY [LIBRARY...]
// Prints a line of JSON for each check: [library, check, what is wrong, or ""].
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool as langchainTool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import {
  Agent, MemorySession, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool as agentTool,
} from "@openai/agents";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { isDeepStrictEqual } from "node:util";
import { z } from "zod";

const [url, key, ...wanted] = process.argv.slice(2);
const [GPT, CLAUDE] = ["gpt-5", "claude-sonnet-5"]; // as which the libraries know what to send
const NUMBERS = z.object({ a: z.number(), b: z.number() });
const add = ({ a, b }) => String(a + b);
const user = (content) => ({ role: "user", content });
setTracingDisabled(true);

// Each library by its name: a function of the key that makes those of what is tried. `heard` is called at each piece.
// A library may have a `thought` of its own, where it drops reasoning, and may lack schemas, which it refuses itself.
const LIBRARIES = {
  "openai chat": (apiKey) => {
    const { completions } = new OpenAI({ baseURL: url, apiKey, maxRetries: 0 }).chat;
    const body = (...messages) => ({ model: GPT, messages });
    return {
      lacks: ["record", "tuple"],
      async whole(text) {
        const { message } = (await completions.create(body(user(text)))).choices[0];
        return [message.content, message.reasoning];
      },
      async stream(text, heard, signal) {
        const stream = completions.stream(body(user(text)), { signal }).on("content", heard);
        return stream.finalContent();
      },
      loop(text) {
        const parameters = z.toJSONSchema(NUMBERS);
        const tools = [{ type: "function", function: { name: "add", parameters, parse: JSON.parse, function: add } }];
        return completions.runTools({ ...body(user(text)), tools }).finalContent();
      },
      async fill(text, schema) {
        const format = zodResponseFormat(schema, "answer");
        return (await completions.parse({ ...body(user(text)), response_format: format })).choices[0].message.parsed;
      },
      async second(first, text) {
        const { message } = (await completions.create(body(user(first)))).choices[0];
        return (await completions.create(body(user(first), message, user(text)))).choices[0].message.content;
      },
    };
  },

  "openai responses": (apiKey) => {
    const { responses } = new OpenAI({ baseURL: url, apiKey, maxRetries: 0 });
    const body = (input) => ({ model: GPT, input, reasoning: { summary: "auto" } });
    return {
      lacks: ["record", "tuple"],
      async whole(text) {
        const { output_text, output } = await responses.create(body(text));
        return [output_text, output[0].summary[0].text];
      },
      async stream(text, heard, signal) {
        const stream = responses.stream(body(text), { signal }).on("response.output_text.delta", heard);
        return (await stream.finalResponse()).output_text;
      },
      async loop(text) {
        const tools = [{ type: "function", name: "add", parameters: z.toJSONSchema(NUMBERS), strict: true }];
        for (let input = [user(text)]; ; ) {
          const { output, output_text } = await responses.create({ ...body(input), tools });
          const calls = output.filter((item) => item.type === "function_call");
          if (!calls.length) return output_text;
          const results = calls.map((call) => ({ call_id: call.call_id, output: add(JSON.parse(call.arguments)) }));
          input = [...input, ...output, ...results.map((result) => ({ type: "function_call_output", ...result }))];
        }
      },
      async fill(text, schema) {
        return (await responses.parse({ ...body(text), text: { format: zodTextFormat(schema, "answer") } })).output_parsed;
      },
      async second(first, text) {
        const { id } = await responses.create(body(first));
        return (await responses.create({ ...body(text), previous_response_id: id })).output_text;
      },
    };
  },

  "@openai/agents": (apiKey) => agents(new OpenAIResponsesModel(new OpenAI({ baseURL: url, apiKey, maxRetries: 0 }), GPT)),
  "@openai/agents chat": (apiKey) =>
    agents(new OpenAIChatCompletionsModel(new OpenAI({ baseURL: url, apiKey, maxRetries: 0 }), GPT)),

  "@anthropic-ai/sdk": (apiKey) => {
    const client = new Anthropic({ baseURL: url.replace("/v1", ""), apiKey, maxRetries: 0 });
    const body = (...messages) => ({ model: CLAUDE, max_tokens: 2000, messages });
    const textOf = (message) => message.content.find((block) => block.type === "text").text;
    return {
      lacks: ["record", "tuple"],
      async whole(text) {
        const message = await client.messages.create({ ...body(user(text)), thinking: { type: "adaptive" } });
        return [textOf(message), message.content[0].thinking];
      },
      async stream(text, heard, signal) {
        return textOf(await client.messages.stream(body(user(text)), { signal }).on("text", heard).finalMessage());
      },
      async loop(text) {
        const tools = [betaZodTool({ name: "add", description: "", inputSchema: NUMBERS, run: add })];
        return textOf(await client.beta.messages.toolRunner({ ...body(user(text)), tools }));
      },
      async fill(text, schema) {
        const format = { output_config: { format: zodOutputFormat(schema) } };
        return (await client.messages.parse({ ...body(user(text)), ...format })).parsed_output;
      },
      async second(first, text) {
        const { content } = await client.messages.create(body(user(first)));
        return textOf(await client.messages.create(body(user(first), { role: "assistant", content }, user(text))));
      },
    };
  },

  "ai openai": (apiKey) => ai(createOpenAI({ baseURL: url, apiKey })(GPT), { openai: { reasoningSummary: "auto" } }),
  "ai openai chat": (apiKey) => ({ ...ai(createOpenAI({ baseURL: url, apiKey }).chat(GPT)), thought: undefined }),
  "ai anthropic": (apiKey) => ai(createAnthropic({ baseURL: url, apiKey })(CLAUDE)),
  "ai compatible": (apiKey) =>
    ai(createOpenAICompatible({ name: "own", baseURL: url, apiKey, supportsStructuredOutputs: true })(GPT)),

  "@langchain/openai": (apiKey) => ({ ...langchain({ apiKey }), thought: undefined }),
  "@langchain/openai responses": (apiKey) => langchain({ apiKey, useResponsesApi: true, reasoning: { summary: "auto" } }),
};

function agents(model) {
  const add_ = agentTool({ name: "add", description: "", parameters: NUMBERS, execute: add });
  const agent = new Agent({ name: "a", model, tools: [add_], modelSettings: { reasoning: { summary: "auto" } } });
  return {
    async whole(text) {
      const { finalOutput, newItems } = await run(agent, text);
      return [finalOutput, (newItems[0].rawItem.rawContent ?? newItems[0].rawItem.content)[0].text];
    },
    async stream(text, heard, signal) {
      const result = await run(agent, text, { stream: true, signal });
      for await (const piece of result.toTextStream()) heard(piece);
      return (await result.completed, result.finalOutput);
    },
    loop: async (text) => (await run(agent, text)).finalOutput,
    fill: async (text, schema) => (await run(new Agent({ name: "a", model, outputType: schema }), text)).finalOutput,
    async second(first, text) {
      const session = new MemorySession();
      await run(agent, first, { session });
      return (await run(agent, text, { session })).finalOutput;
    },
  };
}

function ai(model, providerOptions) {
  const options = { model, providerOptions, maxRetries: 0 };
  const tools = { add: tool({ inputSchema: NUMBERS, execute: add }) };
  return {
    async whole(prompt) {
      const { text, reasoningText } = await generateText({ ...options, prompt });
      return [text, reasoningText];
    },
    async stream(prompt, heard, abortSignal) {
      const fail = ({ error }) => (failure = error);
      let failure;
      const result = streamText({ ...options, prompt, abortSignal, onError: fail });
      for await (const piece of result.textStream) heard(piece);
      if (failure) throw failure;
      return result.text;
    },
    loop: async (prompt) => (await generateText({ ...options, prompt, tools, stopWhen: isStepCount(9) })).text,
    fill: async (prompt, schema) => (await generateText({ ...options, prompt, output: Output.object({ schema }) })).output,
    async second(first, text) {
      const { response } = await generateText({ ...options, prompt: first });
      return (await generateText({ ...options, messages: [user(first), ...response.messages, user(text)] })).text;
    },
  };
}

function langchain(fields) {
  const model = new ChatOpenAI({ model: GPT, maxRetries: 0, configuration: { baseURL: url }, ...fields });
  const add_ = langchainTool(add, { name: "add", schema: NUMBERS });
  return {
    lacks: ["recursive"], // which its conversion follows without end
    async whole(text) {
      const { text: said, additional_kwargs } = await model.invoke(text);
      return [said, additional_kwargs.reasoning?.summary[0].text];
    },
    async stream(text, heard, signal) {
      let said = "";
      for await (const piece of await model.stream(text, { signal })) {
        said += piece.text;
        if (piece.text) heard(piece.text);
      }
      return said;
    },
    async loop(text) {
      for (const messages = [new HumanMessage(text)]; ; ) {
        const answer = await model.bindTools([add_]).invoke(messages);
        if (!answer.tool_calls.length) return answer.text;
        const results = answer.tool_calls.map(({ id, args }) => new ToolMessage({ tool_call_id: id, content: add(args) }));
        messages.push(answer, ...results);
      }
    },
    fill: (text, schema) => model.withStructuredOutput(schema, { name: "answer" }).invoke(text),
    async second(first, text) {
      const answer = await model.invoke(first);
      return (await model.invoke([new HumanMessage(first), answer, new HumanMessage(text)])).text;
    },
  };
}

const cat = z.object({ kind: z.literal("cat"), lives: z.int() });
const dog = z.object({ kind: z.literal("dog"), name: z.string() });
const node = z.object({ value: z.number(), get children() { return z.array(node); } });
const SCHEMAS = {
  plain: [z.object({ name: z.string(), age: z.int().min(0).max(150), alive: z.boolean() }), { name: "Ann", age: 3, alive: true }],
  nested: [z.object({ a: z.object({ b: z.array(z.string()).max(3) }) }), { a: { b: ["x", "y"] } }],
  listed: [z.object({ color: z.enum(["red", "green"]), size: z.literal("s") }), { color: "green", size: "s" }],
  record: [z.object({ r: z.record(z.enum(["a", "b"]), z.number()) }), { r: { a: 1, b: 2 } }],
  tuple: [z.object({ t: z.tuple([z.number(), z.string()]) }), { t: [1, "a"] }],
  nullable: [z.object({ note: z.string().nullable(), n: z.number().nullable() }), { note: null, n: 1.5 }],
  discriminated: [z.object({ pet: z.discriminatedUnion("kind", [cat, dog]) }), { pet: { kind: "dog", name: "Rex" } }],
  union: [z.object({ value: z.union([z.string(), z.number(), z.boolean()]) }), { value: 5 }],
  recursive: [z.object({ root: node }), { root: { value: 1, children: [{ value: 2, children: [] }] } }],
  described: [z.object({ a: z.string().describe("A.").meta({ deprecated: true, examples: ["b"] }) }), { a: "b" }],
  constrained: [z.object({ n: z.number().multipleOf(0.5).gt(1), list: z.array(z.int()).min(2) }), { n: 1.5, list: [1, 2] }],
  formats: [z.object({ code: z.string().regex(/^[A-Z]{3}-\d+$/), mail: z.email(), at: z.iso.date() }),
    { code: "ABC-1", mail: "a@example.com", at: "2026-01-31" }],
};

const LONG = "word ".repeat(1000), TOO_LONG = "word ".repeat(5000);
const statusOf = (e) => (e ? e.status ?? e.statusCode ?? statusOf(e.cause ?? e.lastError) : String(e));
const failed = (promise) => promise.then((answer) => `an answer: ${JSON.stringify(answer).slice(0, 100)}`, statusOf);

async function check(library, name, found, expected) {
  let wrong = "";
  try {
    const got = await found();
    if (!isDeepStrictEqual(got, expected)) wrong = `${JSON.stringify(got)?.slice(0, 300)}, not ${JSON.stringify(expected)}`;
  } catch (e) {
    wrong = `${e?.constructor?.name}: ${String(e?.message ?? e).slice(0, 500)}`;
  }
  console.log(JSON.stringify([library, name, wrong]));
}

async function heardBefore(abort, stream) {
  let n = 0;
  const controller = new AbortController();
  const heard = () => ++n === 3 && abort && controller.abort();
  const text = await stream(heard, controller.signal).catch((e) => (abort ? "" : Promise.reject(e)));
  return [abort ? text === LONG : text, n > 2 && (!abort || n < 900)];
}

for (const name of Object.keys(LIBRARIES).filter((name) => !wanted.length || wanted.includes(name))) {
  const library = LIBRARIES[name](key), stranger = LIBRARIES[name]("wrong");
  const { thought, lacks } = { thought: "Hm.", lacks: [], ...library };
  await check(name, "whole", () => library.whole("SAY Yes, I do."), ["Yes, I do.", thought]);
  await check(name, "stream", () => heardBefore(false, (...of) => library.stream("SAY Yes, I do.", ...of)), ["Yes, I do.", true]);
  await check(name, "tools", () => library.loop("ADD"), "The sum is 4.");
  for (const [kind, [schema, value]] of Object.entries(SCHEMAS).filter(([kind]) => !lacks.includes(kind))) {
    await check(name, `schema ${kind}`, () => library.fill(`FILL ${JSON.stringify(value)}`, schema), value);
  }
  await check(name, "abort", () => heardBefore(true, (...of) => library.stream(`SAY ${LONG}`, ...of)), [false, true]);
  await check(name, "too long", () => failed(library.whole(`SAY ${TOO_LONG}`)), 400);
  await check(name, "wrong key", () => failed(stranger.whole("SAY Yes.")), 401);
  await check(name, "second turn", () => library.second("SAY I am here.", "REPEAT"), "I am here.");
}
process.exit(0); // some libraries keep connections
