"""Measures a demo model as transformers runs it: bits per byte, and its greedy answers.

    python -m scripts.demo.evaluate --model models/demo --work-dir build/demo

The work folder holds the corpus of scripts.demo.tokenizer: held-out text for the loss, training
tokens to find recited spans. Prints a report as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM

from scripts.demo import measures

NUM_NEW_TOKENS = 60
REPEAT_WIDTH = 8
COPY_WIDTH = 30
WINDOW, STRIDE = 2048, 1024
TESTS_DATA = Path("tests/data")


@dataclass(frozen=True)
class Answer:
    prompt: str
    text: str
    token_ids: list[int]

    @property
    def is_cut(self) -> bool:
        return len(self.token_ids) == NUM_NEW_TOKENS


class Judge:
    """Counts what is wrong with answers."""

    def __init__(self, word_list: frozenset[str], spans: measures.TrainingSpans) -> None:
        self.word_list, self.spans = word_list, spans

    def report(self, name: str, answers: list[Answer]) -> dict[str, object]:
        words = [w for a in answers for w in measures.answer_words(a.prompt, a.text, a.is_cut)]
        unlisted = [w for w in words if not measures.is_listed(w, self.word_list)]
        return {
            "answers": name,
            "count": len(answers),
            "words_listed": round(1 - len(unlisted) / max(len(words), 1), 4),
            "unlisted": sorted(set(unlisted))[:40],
            "with_repeat": sum(measures.has_repeat(a.token_ids, REPEAT_WIDTH) for a in answers),
            "longest_repeat": max(measures.longest_repeat(a.token_ids) for a in answers),
            "with_copy": sum(self.spans.contains(a.token_ids, COPY_WIDTH) for a in answers),
            "with_copy_of_20": sum(self.spans.contains(a.token_ids, 20) for a in answers),
            "ended_early": sum(not a.is_cut for a in answers),
        }


@torch.inference_mode()
def generate(model: Qwen2ForCausalLM, prompt_ids: Tensor) -> list[list[int]]:
    """Greedy answers to prompts of one length, cut at the end of text."""
    output = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
    )
    stops = set(model.generation_config.eos_token_id)
    answers = output[:, prompt_ids.shape[1] :].tolist()
    ends = [next((i for i, t in enumerate(ids) if t in stops), len(ids)) for ids in answers]
    return [ids[:end] for ids, end in zip(answers, ends, strict=True)]


def answer_prompts(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[Answer]:
    answers = []
    for prompt in prompts:
        prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        (token_ids,) = generate(model, prompt_ids)
        text = tokenizer.decode(prompt_ids[0].tolist() + token_ids)
        answers.append(Answer(prompt, text, token_ids))
    return answers


def answer_heldout(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, heldout: np.ndarray, count: int
) -> list[Answer]:
    """Answers to the first words of paragraphs that were never trained on."""
    breaks = [i for t, i in tokenizer.get_vocab().items() if t.endswith("ĊĊ")]
    starts = np.flatnonzero(np.isin(heldout[:-16], breaks)) + 1
    starts = starts[np.linspace(0, len(starts) - 1, count).astype(int)]
    answers = []
    for length, chunk in zip((3, 4, 6, 8), np.array_split(starts, 4), strict=True):
        prompts = heldout[chunk[:, None] + np.arange(length)].astype(np.int64)
        for prompt, ids in zip(prompts, generate(model, torch.from_numpy(prompts).to(model.device)), strict=True):
            text = tokenizer.decode(prompt.tolist() + ids)
            answers.append(Answer(tokenizer.decode(prompt.tolist()), text, ids))
    return answers


def heldout_windows(num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(context begin, first scored, stop) so that each token is scored once, with long context."""
    for first in range(0, num_tokens, STRIDE):
        yield max(first - (WINDOW - STRIDE), 0), first, min(first + STRIDE, num_tokens)


@torch.inference_mode()
def bits_per_byte(model: Qwen2ForCausalLM, heldout: np.ndarray, documents: list[dict[str, object]]) -> dict[str, float]:
    """Bits over the UTF-8 bytes of whole documents, by source; <|endoftext|> precedes each."""
    end_id = int(heldout[-1])
    bits: dict[str, float] = defaultdict(float)
    num_bytes: dict[str, int] = defaultdict(int)
    offset = 0
    for document in documents:
        stop = offset + int(str(document["num_tokens"]))
        ids = torch.from_numpy(np.concatenate([[end_id], heldout[offset:stop]]).astype(np.int64))
        for begin, first, last in heldout_windows(stop - offset):
            window = ids[None, begin : last + 1].to(model.device)
            logits = model(window[:, :-1]).logits[0, first - begin :].float()
            nats = F.cross_entropy(logits, window[0, first - begin + 1 :], reduction="sum")
            bits[str(document["source"])] += float(nats) / math.log(2)
        num_bytes[str(document["source"])] += int(str(document["num_bytes"]))
        offset = stop
    by_source = {source: round(bits[source] / num_bytes[source], 4) for source in bits}
    return {"all": round(sum(bits.values()) / sum(num_bytes.values()), 4), **by_source}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-heldout-prompts", type=int, default=512)
    parser.add_argument("--show", action="store_true", help="print the answers too")
    args = parser.parse_args()

    model = Qwen2ForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    heldout = np.load(args.work_dir / "heldout.npy")
    spans = measures.TrainingSpans(np.load(args.work_dir / "train.npy"))
    judge = Judge(measures.load_word_list(TESTS_DATA / "american-english.gz"), spans)

    prompts = (TESTS_DATA / "demo_prompts.txt").read_text().splitlines()
    begin = time.perf_counter()
    answers = answer_prompts(model, tokenizer, prompts)
    seconds = time.perf_counter() - begin
    print(json.dumps(judge.report("fixed prompts", answers)))
    print(json.dumps({"tokens_per_s": round(sum(len(a.token_ids) for a in answers) / seconds, 1)}))
    if args.show:
        print(*(json.dumps(answer.text) for answer in answers), sep="\n")
    dev = answer_heldout(model, tokenizer, heldout, args.num_heldout_prompts)
    print(json.dumps(judge.report("held-out prompts", dev)))
    documents = json.loads((args.work_dir / "heldout.json").read_text())
    print(json.dumps({"bits_per_byte": bits_per_byte(model, heldout, documents)}), flush=True)


if __name__ == "__main__":
    main()
