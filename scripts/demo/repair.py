"""More of the trained demo model's cure against loops: many updates on fresh rollouts, each rollout one CUDA graph.

    python -m scripts.demo.repair --weights build/demo/final.safetensors --work-dir build/demo --out-dir build/demo

The objective is that of scripts.demo.train's second phase. Saves NUM_SAVED stages of the way, so that the first one
whose answers to held-out text rarely repeat can be taken: longer than needed costs legibility.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.demo.model import Architecture, Qwen2
from scripts.demo.repetition import COPIED_SPAN, repeats, rolling_hashes, rollout, unlikelihood_loss
from scripts.demo.train import Corpus, new_optimizer, next_token_loss, step

PREFIX_LENGTHS = (3, 4, 5, 6, 8, 12)
NUM_NEW_TOKENS = 96
NUM_ANSWER_TOKENS = 60
NUM_SAVED = 4


def load_model(weights: Path) -> Qwen2:
    """The model of a safetensors file under transformers' names."""
    model = Qwen2(Architecture())
    tensors = load_file(weights).items()
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors})
    return model


class GreedyRollouts:
    """`rollout` for one shape, on a GPU as one captured graph: launches bound it, and weights change in place."""

    def __init__(self, model: Qwen2, batch: int, prefix_length: int, num_new: int) -> None:
        self._model = model
        self._num_new = num_new
        self._graph: torch.cuda.CUDAGraph | None = None
        device = model.embed_tokens.weight.device
        if device.type == "cuda":
            self._prefix = torch.zeros((batch, prefix_length), dtype=torch.long, device=device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run(self._prefix, 2)  # libraries and workspaces come into being outside the capture
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._token_ids = self._run(self._prefix, num_new)
            self._graph = graph

    def __call__(self, prefix: Tensor) -> Tensor:
        """Greedy continuations: [batch, prefix_length] to [batch, prefix_length + num_new]."""
        if self._graph is None:
            return self._run(prefix, self._num_new)
        self._prefix.copy_(prefix)
        self._graph.replay()
        return self._token_ids.clone()

    def _run(self, prefix: Tensor, num_new: int) -> Tensor:
        return rollout(self._model, prefix, num_new)


class Check:
    """Share of greedy answers to held-out text that repeat an 8-gram."""

    def __init__(self, model: Qwen2, corpus: Corpus, batch: int) -> None:
        self._rollouts = GreedyRollouts(model, batch, 8, NUM_ANSWER_TOKENS)
        device = corpus.heldout.device
        starts = torch.linspace(0, len(corpus.heldout) - 9, batch, device=device).long()
        self._prefix = corpus.heldout[starts[:, None] + torch.arange(8, device=device)]

    def share_repeating(self) -> float:
        """With the model's weights of now."""
        answers = self._rollouts(self._prefix)[:, -NUM_ANSWER_TOKENS:]
        return float(repeats(answers, 8).any(1).float().mean())


def repair(model: Qwen2, corpus: Corpus, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Unlikelihood and language loss, linear decay to zero over `args.steps`; yields the curve."""
    optimizer = new_optimizer(model, args.peak_lr)
    known = rolling_hashes(corpus.train, COPIED_SPAN).sort().values
    rollouts = {length: GreedyRollouts(model, args.rollouts, length, NUM_NEW_TOKENS) for length in PREFIX_LENGTHS}
    check = Check(model, corpus, args.rollouts)
    rng, begin = random.Random(0), time.monotonic()
    for num_steps in range(1, args.steps + 1):
        prefix_length = rng.choice(PREFIX_LENGTHS)
        text = corpus.paragraphs(args.rollouts, prefix_length + NUM_NEW_TOKENS)
        token_ids = rollouts[prefix_length](text[:, :prefix_length])
        with torch.autocast(token_ids.device.type, torch.bfloat16):
            unlikelihood = unlikelihood_loss(model, token_ids, prefix_length, known)
        language = next_token_loss(model, corpus.windows(args.batch, args.length + 1))
        lr = args.peak_lr * min(1.0, num_steps / 10) * (1 - (num_steps - 1) / args.steps)
        step(model, optimizer, unlikelihood + language + next_token_loss(model, text), lr)
        if num_steps % (args.steps // (2 * NUM_SAVED)) == 0:
            yield {
                "step": num_steps,
                "seconds": round(time.monotonic() - begin, 1),
                "unlikelihood_loss": round(float(unlikelihood.detach()), 4),
                "train_nats_per_token": round(float(language.detach()), 4),
                "share_of_greedy_answers_repeating": round(check.share_repeating(), 4),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--peak-lr", type=float, default=2e-4)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    model = load_model(args.weights).to(args.device)
    curve = []
    for record in repair(model, Corpus(args.work_dir, args.device), args):
        print(json.dumps(record), flush=True)
        curve.append(record)
        if len(curve) % 2 == 0:
            weights = {name: tensor.half() for name, tensor in model.hf_state_dict().items()}
            save_file(weights, args.out_dir / f"repaired-{record['step']}.safetensors", {"format": "pt"})
    (args.out_dir / "repair_curve.json").write_text(json.dumps(curve, indent=1) + "\n")


if __name__ == "__main__":
    main()
