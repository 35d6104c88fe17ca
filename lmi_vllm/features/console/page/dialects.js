// The dialects of the playground: what is sent for a prompt, and where the text is in what comes.


function lmi(id, name, accept, isStreaming) {
  return {
    id, name, path: "invocations", accept, rows: accept === "text/event-stream" ? "sse" : "lines",
    hint: isStreaming ? "one row for each token" : "one answer at the end",
    body: ({ prompt, adapter, limits, more }) => ({
      inputs: prompt,
      parameters: { ...named(limits, "max_new_tokens"), ...more },
      ...(isStreaming ? { stream: true } : {}),
      ...(adapter ? { adapters: adapter } : {}),
    }),
    text: (row) => row.token?.text ?? (isStreaming ? "" : row.generated_text ?? ""),
  };
}

function named(limits, tokens) {
  const found = {};
  if (limits.tokens !== null) found[tokens] = limits.tokens;
  if (limits.temperature !== null) found.temperature = limits.temperature;
  return found;
}

export const DIALECTS = [
  lmi("sse", "LMI, server-sent events", "text/event-stream", true),
  lmi("jsonlines", "LMI, JSON lines", "application/jsonlines", true),
  lmi("json", "LMI, JSON", "application/json", false),
  {
    id: "chat", name: "OpenAI, chat", path: "v1/chat/completions", accept: "text/event-stream", rows: "sse",
    hint: "vLLM's own bytes", takesSystem: true,
    body: ({ prompt, system, adapter, model, limits, more }) => ({
      model: adapter || model,
      messages: [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: prompt }],
      ...named(limits, "max_tokens"),
      stream: true,
      ...more,
    }),
    text: (row) => row.choices?.[0]?.delta?.content ?? row.choices?.[0]?.delta?.reasoning ?? "",
  },
  {
    id: "completions", name: "OpenAI, completions", path: "v1/completions", accept: "text/event-stream", rows: "sse",
    hint: "vLLM's own bytes",
    body: ({ prompt, adapter, model, limits, more }) => ({
      model: adapter || model, prompt, ...named(limits, "max_tokens"), stream: true, ...more,
    }),
    text: (row) => row.choices?.[0]?.text ?? "",
  },
  {
    id: "tgi", name: "TGI, generate_stream", path: "generate_stream", accept: "text/event-stream", rows: "sse",
    hint: "as text-generation-inference 3", needsTgi: true,
    body: ({ prompt, adapter, limits, more }) => ({
      inputs: prompt,
      parameters: { ...named(limits, "max_new_tokens"), ...(adapter ? { adapter_id: adapter } : {}), ...more },
    }),
    text: (row) => (row.token?.special ? "" : row.token?.text ?? ""),
  },
];

/** What is sent: path, headers and body of one request. */
export function requestOf(dialect, given) {
  return {
    path: dialect.path,
    headers: { "Accept": dialect.accept },
    body: JSON.stringify(dialect.body(given)),
  };
}

/** A command that sends the same; the key is named, never shown. */
export function curlOf(request, base, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl -sN ${quoted(new URL(request.path, base).href)}`];
  if (hasKey) lines.push('-H "Authorization: Bearer $LMI_API_KEY"');
  lines.push("-H 'Content-Type: application/json'");
  for (const [name, value] of Object.entries(request.headers)) lines.push(`-H ${quoted(`${name}: ${value}`)}`);
  lines.push(`-d ${quoted(request.body)}`);
  return lines.join(" \\\n  ");
}

/** Takes pieces of a stream and returns the rows that are complete; rows may be cut anywhere. */
export class RowReader {
  constructor(kind) {
    this.kind = kind;
    this.rest = "";
  }

  read(piece, isLast = false) {
    this.rest += piece;
    const lines = this.rest.split("\n");
    this.rest = isLast ? "" : lines.pop();
    return lines.flatMap((line) => this.row(line));
  }

  row(line) {
    let text = line.trim();
    if (this.kind === "sse" && text.startsWith("data:")) text = text.slice("data:".length).trim();
    if (!text || text === "[DONE]") return [];
    try {
      return [JSON.parse(text)];
    } catch {
      return [];
    }
  }
}

/** What a row says went wrong; null when nothing did. */
export function errorOf(row) {
  const error = row?.error;
  if (error === undefined || error === null) return null;
  return typeof error === "string" ? error : error.message ?? JSON.stringify(error);
}

