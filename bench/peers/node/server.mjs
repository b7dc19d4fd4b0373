// The AI SDK's reference: streamText, answered as a UI message stream over node:http.
import { createServer } from "node:http";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { convertToModelMessages, streamText } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false;

const provider = createOpenAICompatible({
  name: "bench",
  baseURL: process.env.BENCH_PROVIDER_URL,
  apiKey: "key-of-the-bench",
  includeUsage: true,
});
const model = provider(process.env.BENCH_MODEL);

async function bodyOf(request) {
  const pieces = [];
  for await (const piece of request) pieces.push(piece);
  return JSON.parse(Buffer.concat(pieces).toString());
}

async function answer(request, response) {
  const { messages } = await bodyOf(request);
  const gone = new AbortController();
  response.on("close", () => response.writableFinished || gone.abort());
  const result = streamText({ model, messages: await convertToModelMessages(messages), abortSignal: gone.signal });
  const { status, headers, body } = result.toUIMessageStreamResponse();
  response.writeHead(status, Object.fromEntries(headers));
  // As the package's own writer for node:http does it: one write a piece, waiting when the socket is full.
  const reader = body.getReader();
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    if (!response.write(piece.value)) await new Promise((drained) => response.once("drain", drained));
  }
  response.end();
}

const server = createServer((request, response) => {
  answer(request, response).catch((error) => {
    console.error(error);
    response.destroy();
  });
});
server.listen(Number(process.env.BENCH_PORT), "127.0.0.1");
