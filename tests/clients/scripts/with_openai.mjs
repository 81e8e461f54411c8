// /// script
// dependencies = ["openai@7.57.0", "zod@4.6.7"]
// ///
// openai for Node: models, chats, streams, parsed answers, tools, completions and responses.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.SECATEUR_URL}/v1`, apiKey: "none" });
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal([1, 2, 3]) });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const tool = zodFunction({ name: "weather", parameters: Weather });

const listed = [];
for await (const each of client.models.list()) listed.push(each.id);
const [model] = listed;
assert.equal((await client.models.retrieve(model)).id, model);

const asked = { model, messages, max_completion_tokens: 16, seed: 1 };
const answer = await client.chat.completions.create(asked);
assert(answer.usage.completion_tokens <= 16 && answer.choices[0].message.role === "assistant");
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0].delta.content ?? "";
}
assert.equal(text, answer.choices[0].message.content);
const stream = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
assert.equal(await stream.finalContent(), text);
assert.equal((await stream.totalUsage()).completion_tokens, answer.usage.completion_tokens);
await assert.rejects(
  client.chat.completions.create({ ...asked, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);

const parsed = await client.chat.completions.parse({
  model,
  messages,
  response_format: zodResponseFormat(Weather, "weather"),
});
Weather.parse(parsed.choices[0].message.parsed);

const demand = { model, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false, seed: 3 };
const called = (await client.chat.completions.parse(demand)).choices[0];
assert.equal(called.finish_reason, "tool_calls");
const [call] = called.message.tool_calls;
Weather.parse(call.function.parsed_arguments);
const streamed = (await client.chat.completions.stream(demand).finalChatCompletion()).choices[0];
assert.equal(streamed.message.tool_calls[0].function.arguments, call.function.arguments);
const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
const after = await client.chat.completions.create({ ...asked, messages: [...messages, called.message, result] });
assert.equal(after.choices[0].message.role, "assistant");
const runnable = zodFunction({ name: "weather", parameters: Weather, function: () => "sunny" });
const runner = client.chat.completions.runTools({ ...demand, tools: [runnable] }, { maxChatCompletions: 2 });
await runner.done();
assert.deepEqual(
  runner.messages.map((message) => message.role),
  ["user", "assistant", "tool", "assistant", "tool"],
);
assert.equal(runner.messages[2].content, "sunny");

const completed = { model, prompt: "def f(", max_tokens: 8, seed: 1 };
const scored = (await client.completions.create({ ...completed, logprobs: 2, echo: true })).choices[0];
assert(scored.text.startsWith("def f(") && scored.logprobs.token_logprobs[0] === null);
text = "";
for await (const chunk of await client.completions.create({ ...completed, stream: true })) text += chunk.choices[0].text;
assert.equal(`def f(${text}`, scored.text);

const first = await client.responses.create({
  model,
  input: "Hello",
  instructions: "Be short.",
  max_output_tokens: 16,
});
assert(first.output_text);
const second = await client.responses.create({
  model,
  input: "Go on.",
  previous_response_id: first.id,
  max_output_tokens: 16,
});
assert.equal(second.previous_response_id, first.id);
assert.deepEqual((await client.responses.retrieve(first.id)).output, first.output);
const items = [];
for await (const item of client.responses.inputItems.list(second.id)) items.push(item);
assert.deepEqual([items.length, items[0].type, items[0].content[0].text], [1, "message", "Go on."]);
const referring = await client.responses.create({
  model,
  input: [
    { type: "item_reference", id: first.output[0].id },
    { role: "user", content: "Go on." },
  ],
  max_output_tokens: 16,
});
assert(referring.output_text);
const bound = await client.responses.parse({
  model,
  input: "What is the weather?",
  text: { format: zodTextFormat(Weather, "weather") },
});
Weather.parse(bound.output_parsed);
const demanded = await client.responses.parse({
  model,
  input: "What is the weather?",
  tools: [zodResponsesFunction({ name: "weather", parameters: Weather })],
  tool_choice: "required",
  parallel_tool_calls: false,
});
const [item] = demanded.output;
assert.equal(item.type, "function_call");
Weather.parse(item.parsed_arguments);
const told = client.responses.stream({ model, input: "Hello", max_output_tokens: 16 });
text = "";
for await (const event of told) if (event.type === "response.output_text.delta") text += event.delta;
assert(text);
assert.equal((await told.finalResponse()).output_text, text);
await client.responses.delete(first.id);
