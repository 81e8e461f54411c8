"""An HTTP server that answers as vLLM and llama.cpp do. Token i of an answer is the prompt's first token plus i.

A prompt that begins with 13 is refused, one that begins with 66 ends the process.
"""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="peer"}} {drafts}.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="peer"}} {drafts}0.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="peer"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="peer",position="0"}} 7.0
"""


class Handler(BaseHTTPRequestHandler):
    answered = 0

    def do_GET(self):
        text = "ok" if self.path == "/health" else METRICS.format(drafts=2 * self.answered, accepted=3 * self.answered)
        self._send(200, text)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        first = asked["prompt"][0]
        assert asked["ignore_eos"] and asked["stream"]
        if first == 13:
            return self._send(400, json.dumps({"error": {"message": "an unlucky prompt"}}))
        if first == 66:
            print("out of memory, says the fake", flush=True)
            os._exit(9)
        Handler.answered += 1
        if self.path == "/v1/completions":
            assert asked["return_token_ids"]
            tokens = range(first, first + asked["max_tokens"])
            lines = [{"choices": [{"index": 0, "text": "", "token_ids": [token]}]} for token in tokens]
            return self._send(200, "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n")
        assert self.path == "/completion" and asked["return_tokens"]
        lines = [{"tokens": [token]} for token in range(first, first + asked["n_predict"])] + [{"tokens": []}]
        return self._send(200, "".join(f"data: {json.dumps(line)}\n\n" for line in lines))

    def log_message(self, *_):
        pass

    def _send(self, code, text):
        self.send_response(code)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def serve(port=0):
    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
