"""Load for people who use locust: POST /generate, /v1/completions and streams of it, 128 tokens in and 128 out.

    pip install locust          # in an environment of its own: the project does not need it
    locust -f scripts/locustfile.py --host http://127.0.0.1:8000 --headless -u 32 -r 32 -t 1m
    locust -f scripts/locustfile.py --host http://127.0.0.1:8000 Completions   # one kind of user, and locust's page

The first token of a stream is reported as a request of its own. An event costs locust about four times the processor
time that it costs `model-server bench load`: with thousands of events a second, give it several processes.
"""

import json
import os
import random
import time

from locust import HttpUser, constant, task

INPUT_TOKENS = int(os.environ.get("INPUT_TOKENS", "128"))
OUTPUT_TOKENS = int(os.environ.get("OUTPUT_TOKENS", "128"))
# Ids of prompts: in the usual vocabularies bytes and control tokens lie below or far above.
FIRST_TOKEN_ID, LAST_TOKEN_ID = (int(part) for part in os.environ.get("TOKEN_IDS", "300:3999").split(":"))
TEXT = "the sea was grey and the men stood at the rail and looked at the long shore while nobody said a word"


class _User(HttpUser):
    """Sends the next request as soon as the last one is answered."""

    abstract = True
    wait_time = constant(0)

    def prompt_ids(self) -> list[int]:
        """A prompt of exactly so many tokens, unlike all others: no prefix is found again."""
        return [random.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(INPUT_TOKENS)]

    def prompt_text(self) -> str:
        """A text of about so many tokens."""
        words = TEXT.split()
        return " ".join(random.choice(words) for _ in range(INPUT_TOKENS))


class Generate(_User):
    """POST /generate: may end before the last token, where the model ends its text."""

    @task
    def generate(self) -> None:
        body = {"inputs": self.prompt_text(), "parameters": {"max_new_tokens": OUTPUT_TOKENS}}
        with self.client.post("/generate", json=body, catch_response=True) as response:
            if response.status_code == 200 and not response.json().get("generated_text"):
                response.failure("an empty text")


class Completions(_User):
    """POST /v1/completions, whole."""

    @task
    def complete(self) -> None:
        with self.client.post("/v1/completions", json=completion(self.prompt_ids()), catch_response=True) as response:
            if response.status_code == 200:
                num_tokens = response.json()["usage"]["completion_tokens"]
                if num_tokens != OUTPUT_TOKENS:
                    response.failure(f"{num_tokens} tokens instead of {OUTPUT_TOKENS}")


class StreamedCompletions(_User):
    """POST /v1/completions, streamed."""

    @task
    def stream(self) -> None:
        body = completion(self.prompt_ids()) | {"stream": True, "stream_options": {"include_usage": True}}
        begin = time.perf_counter()
        first_s, num_tokens, is_done = 0.0, 0, False
        name = "/v1/completions (stream)"
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True, name=name) as response:
            if response.status_code != 200:
                return  # counted as failed by locust
            for line in response.iter_lines():
                if not line.startswith(b"data: "):
                    continue
                first_s = first_s or time.perf_counter() - begin
                if line == b"data: [DONE]":
                    is_done = True
                elif b'"completion_tokens"' in line:
                    num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            response.request_meta["response_time"] = (time.perf_counter() - begin) * 1e3  # else only up to the headers
            if not is_done or num_tokens != OUTPUT_TOKENS:
                response.failure(f"{num_tokens} tokens instead of {OUTPUT_TOKENS}, or no [DONE]")
        self.environment.events.request.fire(
            request_type="POST",
            name="/v1/completions (first token)",
            response_time=first_s * 1e3,
            response_length=0,
            exception=None,
            context={},
        )


def completion(prompt: list[int]) -> dict[str, object]:
    """Exactly OUTPUT_TOKENS, greedy."""
    return {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
