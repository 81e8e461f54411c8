// /// script
// dependencies = ["ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"]
// ///
// Vercel's ai, with its providers for OpenAI (responses, chats, completions) and for services like OpenAI's: texts,
// streams, objects of a schema, tools, several steps, and conversations.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // generateObject and streamObject are deprecated, and used everywhere
const baseURL = `${process.env.SECATEUR_URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "secateur",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const schema = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal([1, 2, 3]) });
const weather = tool({ description: "Tells the weather of a city.", inputSchema: schema, execute: async () => "sunny" });
const prompt = "What is the weather in Paris?";
const one = { openai: { parallelToolCalls: false }, secateur: { parallel_tool_calls: false } };

function onError({ error }) {
  throw error;
}

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

async function writes(model) {
  const asked = { model, prompt, maxOutputTokens: 16, temperature: 0 };
  const whole = await generateText(asked);
  assert(whole.text && whole.usage.outputTokens <= 16);
  const streamed = streamText({ ...asked, onError });
  assert.equal((await all(streamed.textStream)).join(""), whole.text);
  assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
}

async function makesObjects(model) {
  const output = Output.object({ schema });
  schema.parse((await generateText({ model, prompt, output })).output);
  schema.parse((await generateObject({ model, prompt, schema })).object);
  const streamed = streamText({ model, prompt, output, onError });
  schema.parse((await all(streamed.partialOutputStream)).at(-1));
  const object = streamObject({ model, prompt, schema, onError });
  assert.deepEqual((await all(object.partialObjectStream)).at(-1), schema.parse(await object.object));
}

async function calls(model) {
  const asked = { model, prompt, tools: { weather }, maxOutputTokens: 200, providerOptions: one };
  const called = await generateText({ ...asked, toolChoice: "required" });
  assert.equal(called.finishReason, "tool-calls");
  schema.parse(called.toolCalls[0].input);
  assert.equal(called.toolResults[0].output, "sunny");
  const named = streamText({ ...asked, toolChoice: { type: "tool", toolName: "weather" }, onError });
  await all(named.fullStream);
  schema.parse((await named.toolCalls)[0].input);
  const inSteps = {
    ...asked,
    stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  };
  const answered = await generateText(inSteps);
  assert.deepEqual(
    answered.steps.map((step) => step.toolCalls.length),
    [1, 0],
  );
  const streamed = streamText({ ...inSteps, onError });
  await all(streamed.fullStream);
  assert.equal((await streamed.steps).length, 2);
}

async function goesOn(model) {
  const said = [{ role: "user", content: prompt }];
  const first = await generateText({ model, instructions: "Be short.", messages: said, maxOutputTokens: 16 });
  const more = [...said, ...first.response.messages, { role: "user", content: "Go on." }];
  assert((await generateText({ model, messages: more, maxOutputTokens: 16 })).text);
  assert((await all(streamText({ model, messages: more, maxOutputTokens: 16, onError }).textStream)).length);
}

for (const model of [openai("secateur"), openai.chat("secateur"), compatible("secateur")]) {
  for (const check of [writes, makesObjects, calls, goesOn]) await check(model);
}
for (const model of [openai.completion("secateur"), compatible.completionModel("secateur")]) await writes(model);
