"""Question and answer pairs made of the training text, so that the chat template means something.

Knows the chat format. Does not know token ids.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STORY_SOURCES = ("austen", "novels", "moby-dick")


def dialogue(question: str, answer: str) -> str:
    """One exchange, as CHAT_TEMPLATE renders it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def dialogues(source: str, text: str, rng: random.Random) -> Iterator[str]:
    """A few exchanges about one training document: definitions, or a story told."""
    paragraphs = text.split("\n\n")
    if source == "wordnet":
        for entry in rng.sample(paragraphs, min(4, len(paragraphs))):
            word, _, gloss = entry.partition(": ")
            question = rng.choice(("What does {} mean?", "What is the meaning of {}?", "Define {}."))
            yield dialogue(question.format(f'"{word.lower()}"'), f"It means {gloss}")
    elif source in STORY_SOURCES:
        told = [p for p in paragraphs if 300 < len(p) < 1200 and p[0].isupper()]
        for paragraph in rng.sample(told, min(4, len(told))):
            first = re.split(r"(?<=[.?!]) ", paragraph)[0]
            question = rng.choice(("Tell me a story.", "Go on with this: " + first, "Write a page."))
            yield dialogue(question, paragraph)
