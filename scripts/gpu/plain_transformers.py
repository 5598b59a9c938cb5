"""The server that people write first: transformers, one request at a time. A baseline for `model-server bench`.

Usage: plain_transformers.py MODEL PORT. POST /v1/completions with token ids (a list of them is one batch) generates
greedily, always to the last token; POST anything else: one greedy token for "The sea was". Never streamed.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class PlainModel:
    """What a tutorial would write around `generate`."""

    def __init__(self, folder: str) -> None:
        self.device = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        # Straight to the GPU, which needs accelerate. A CPU computes bfloat16 slowly.
        options = (
            {"dtype": torch.bfloat16, "device_map": self.device} if torch.cuda.is_available() else {"dtype": "auto"}
        )
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options)

    def say_something(self) -> dict[str, Any]:
        """One token."""
        inputs = self.tokenizer("The sea was", return_tensors="pt").to(self.device)
        output = self.model.generate(**inputs, max_new_tokens=1, do_sample=False)
        return {"generated_text": self.tokenizer.decode(output[0])}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """`max_tokens` for each prompt; prompts of one batch have the same length."""
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        inputs = torch.tensor(prompts, device=self.device)
        num_tokens = body["max_tokens"]
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        generated = output[:, inputs.shape[1] :]
        choices = [{"index": index, "text": text} for index, text in enumerate(self.tokenizer.batch_decode(generated))]
        return {"choices": choices, "usage": {"completion_tokens": generated.numel()}}


def main(folder: str, port: int) -> None:
    """Load, then listen."""
    plain = PlainModel(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"status": "ready"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self._answer(plain.complete(json.loads(body)) if self.path == "/v1/completions" else plain.say_something())

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
