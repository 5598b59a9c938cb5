"""The server that people write first: transformers, one request at a time. A baseline for `model-server bench startup`.

Usage: plain_transformers.py MODEL PORT. POST anything: one greedy token for "The sea was".
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, port: int) -> None:
    """Load, then listen."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"status": "ready"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            inputs = tokenizer("The sea was", return_tensors="pt").to(device)
            output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
            self._answer({"generated_text": tokenizer.decode(output[0])})

        def _answer(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
