# ruff: noqa: T201
"""How far our bf16 logits are from an fp32 run, beside transformers in bf16, teacher-forced in every batch shape.

    PYTHONPATH=. python tests/gpu/accuracy.py CHECKPOINT_FOLDER [--backend cuda]

Needs no network and no tokenizer: prompts are random ids. The cuda backend replays decode steps from graphs. Fails
(exit 1) if, in any shape, our error exceeds 1.1 times that of transformers, or more than 0.5 % of the greedy ids differ
from the fp32 run where its two best logits are further apart than twice the largest error of transformers.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from server.engine.messages import SamplingParams
from server.kernels.manifest import built_folder, read_manifest
from server.models.decoder import Decoder
from server.models.facts import ModelFacts
from server.models.rope import inverse_frequencies
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.nvidia import NvidiaDriver
from server.ops.cuda.operations import CudaOperations
from server.ops.interface import Activations, BatchLimits, StepGraph, StepShape
from server.ops.torch.operations import TorchOperations
from server.ops.torch.weights import weight_tensors
from server.runner.input_batch import InputBatch, slot_sampling
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk
from tests.loaded_weights import load_on_host, open_folder

MAX_RATIO = 1.1
MAX_UNEXPLAINED = 0.005
TOKEN_BUDGET = 2048
BLOCK_SIZE = 16
LOGITS_ROWS = 256
CHUNK_TOKENS = 37  # of prompts beside decodes: no multiple of anything


@dataclass(frozen=True)
class Part:
    """Tokens `start` .. `start + length - 1` of a prompt, computed in one step."""

    prompt: int
    start: int
    length: int


Steps = list[list[Part]]


def alone(num_prompts: int, num_tokens: int) -> Steps:
    """Each prompt in a step of its own."""
    return [[Part(prompt, 0, num_tokens)] for prompt in range(num_prompts)]


def together(num_prompts: int, num_tokens: int, budget: int) -> Steps:
    """Prompts one behind the other, cut wherever a step is full."""
    steps: Steps = [[]]
    for prompt in range(num_prompts):
        start = 0
        while start < num_tokens:
            left = budget - sum(part.length for part in steps[-1])
            length = min(left, num_tokens - start)
            if length:
                steps[-1].append(Part(prompt, start, length))
                start += length
            else:
                steps.append([])
    return steps


def decodes(num_prompts: int, num_tokens: int) -> Steps:
    """The last quarter of each prompt token by token, all prompts at once."""
    first = num_tokens - num_tokens // 4
    steps = alone(num_prompts, first)
    return steps + [[Part(prompt, p, 1) for prompt in range(num_prompts)] for p in range(first, num_tokens)]


def mixed(num_prompts: int, num_tokens: int) -> Steps:
    """Half of the prompts decode while the others come in chunks."""
    chunks = [
        Part(prompt, start, min(CHUNK_TOKENS, num_tokens - start))
        for prompt in range(1, num_prompts, 2)
        for start in range(0, num_tokens, CHUNK_TOKENS)
    ]
    num_decodes = min(len(chunks), num_tokens - 1)
    first = num_tokens - num_decodes
    steps: Steps = [[Part(prompt, 0, first)] for prompt in range(0, num_prompts, 2)]
    for index, chunk in enumerate(chunks):
        decoding = range(0, num_prompts, 2) if index < num_decodes else ()
        steps.append([*(Part(prompt, first + index, 1) for prompt in decoding), chunk])
    return steps


@dataclass
class Comparison:
    """Running totals of logits against the fp32 run; `explained_gap`: two best logits closer than this may swap."""

    explained_gap: float = math.inf
    sum_squares: float = 0.0
    num_logits: int = 0
    num_positions: int = 0
    max_error: float = 0.0
    num_differing: int = 0
    num_unexplained: int = 0
    seconds: float = field(default_factory=time.perf_counter)

    def add(self, logits: Tensor, reference: Tensor) -> None:
        """Both [positions, vocab] fp32."""
        error = logits - reference
        assert torch.isfinite(error).all(), "logits are not finite"
        best = reference.topk(2, dim=-1).values
        differs = logits.argmax(-1) != reference.argmax(-1)
        self.sum_squares += float(error.double().square().sum())
        self.num_logits += error.numel()
        self.num_positions += error.shape[0]
        self.max_error = max(self.max_error, float(error.abs().max()))
        self.num_differing += int(differs.sum())
        self.num_unexplained += int((differs & (best[:, 0] - best[:, 1] > self.explained_gap)).sum())

    @property
    def rms_error(self) -> float:
        return math.sqrt(self.sum_squares / self.num_logits)


class TorchRig:
    """The torch backend, whose hidden states are turned into logits at every position."""

    def __init__(self, facts: ModelFacts, weights: dict[str, Tensor], limits: BatchLimits) -> None:
        self.ops = TorchOperations(facts, weights, limits, inverse_frequencies(facts), facts.vocab_size)
        self._decoder = Decoder(facts, self.ops)
        self._head = self.ops.weights["embed.weight" if facts.tied_head else "head.weight"]
        self._vocab_size = facts.vocab_size

    def poison_pool(self) -> None:
        self.ops.kv_pool.fill_(float("nan"))

    def run(self, act: Activations[Tensor], shape: StepShape) -> None:
        self._decoder.forward(act)

    def logits(self, act: Activations[Tensor], first: int, count: int) -> Tensor:
        """[count, vocab] of token rows `first` .. of the step that ran last."""
        logits = torch.empty(count, self._vocab_size, device=act.normed.device)
        with self.ops.execution_context():
            self.ops.logits(act.normed[first : first + count], self._head, logits)
        return logits


class CudaRig:
    """The cuda backend in a process that has torch too: tensors and buffers are views of the same memory."""

    def __init__(self, facts: ModelFacts, weights: dict[str, Tensor], limits: BatchLimits) -> None:
        self._driver = NvidiaDriver.open()
        self._stream = self._driver.create_stream()
        manifest = read_manifest(built_folder())
        assert manifest is not None, "no kernels are built: run scripts/build-kernels"
        torch.cuda.synchronize()
        self.ops = CudaOperations(
            facts,
            {name: _as_buffer(tensor) for name, tensor in weights.items()},
            limits,
            inverse_frequencies(facts),
            facts.vocab_size,
            driver=self._driver,
            stream=self._stream,
            images=manifest.images(self._driver.facts.arch),
        )
        self._decoder = Decoder(facts, self.ops)
        self._head = self.ops.weights["embed.weight" if facts.tied_head else "head.weight"]
        self._logits = torch.empty(LOGITS_ROWS, facts.vocab_size, device="cuda")
        self._graphs: dict[int, StepGraph] = {}

    def poison_pool(self) -> None:
        pool = self.ops.kv_pool
        self._driver.fill_async(pool.address, 0xFF, pool.num_bytes, self._stream)  # NaN in both half precisions

    def run(self, act: Activations[Buffer], shape: StepShape) -> None:
        """Decodes alone run once, are recorded, and replayed from then on."""
        if shape.num_chunks in self._graphs and shape.num_decodes == shape.num_chunks:
            self.ops.replay(self._graphs[shape.num_chunks], shape)
            return
        self._run(act)
        if shape.num_decodes == shape.num_chunks:
            self._graphs[shape.num_chunks] = self.ops.capture(shape, self._run)

    def logits(self, act: Activations[Buffer], first: int, count: int) -> Tensor:
        """[count, vocab] of token rows `first` .. of the step that ran last."""
        pieces = []
        for begin in range(first, first + count, LOGITS_ROWS):
            end = min(begin + LOGITS_ROWS, first + count)
            out = self._logits[: end - begin]
            self.ops.logits(act.normed.rows(begin, end), self._head, _as_buffer(out))
            self._driver.synchronize(self._stream)
            pieces.append(out.clone())
            torch.cuda.synchronize()
        return torch.cat(pieces)

    def _run(self, act: Activations[Buffer]) -> None:
        self._decoder.forward(act)
        self.ops.sample(act.logits)


def _as_buffer(tensor: Tensor) -> Buffer:
    assert tensor.is_contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), dtype, tensor)  # type: ignore[arg-type]


RIGS = {"torch": TorchRig, "cuda": CudaRig}


class TeacherForcing:
    """Runs prompts through decoder and backend in given steps, and yields the logits of every position."""

    def __init__(
        self, facts: ModelFacts, weights: dict[str, Tensor], prompts: list[list[int]], backend: str = "torch"
    ) -> None:
        num_prompts, num_tokens = len(prompts), len(prompts[0])
        blocks_per_prompt = -(-num_tokens // BLOCK_SIZE)
        limits = BatchLimits(TOKEN_BUDGET, num_prompts, num_tokens, 1 + num_prompts * blocks_per_prompt, BLOCK_SIZE)
        self._prompts = prompts
        self._rig = RIGS[backend](facts, weights, limits)
        self._batch = InputBatch(limits)
        block_ids = list(range(1, limits.num_blocks))
        Random(0).shuffle(block_ids)
        self._tables = [
            tuple(block_ids[first : first + blocks_per_prompt]) for first in range(0, len(block_ids), blocks_per_prompt)
        ]
        for slot in range(num_prompts):
            reset = SlotReset(slot, slot, (), 0, SamplingParams(max_tokens=1))
            self._batch.reset_slot(slot, slot_sampling(reset, (), facts.vocab_size))

    def run(self, steps: Steps) -> Iterator[tuple[Part, Tensor]]:
        """In the order of the steps: each part with its logits [length, vocab]."""
        self._rig.poison_pool()
        for step in steps:
            chunks = tuple(
                TokenChunk(
                    part.prompt,
                    part.prompt,
                    part.start,
                    part.length,
                    tuple(self._prompts[part.prompt][part.start : part.start + part.length]),
                    self._tables[part.prompt],
                    samples=True,
                )
                for part in step
            )
            yield from self._run_step(step, StepPlan(1, (), chunks))

    def _run_step(self, step: list[Part], plan: StepPlan) -> Iterator[tuple[Part, Tensor]]:
        rig = self._rig
        with rig.ops.execution_context():
            shape = self._batch.fill(plan, rig.ops.next_staging())
            act: Any = rig.ops.begin_step(shape)
            rig.run(act, shape)
        row = 0
        for part in step:
            yield part, rig.logits(act, row, part.length)
            row += part.length


def shapes(num_prompts: int, num_tokens: int) -> dict[str, Steps]:
    """Name -> steps of every batch shape."""
    return {
        "one by one": alone(num_prompts, num_tokens),
        f"together, {TOKEN_BUDGET} a step": together(num_prompts, num_tokens, TOKEN_BUDGET),
        "together, 200 a step": together(num_prompts, num_tokens, 200),
        f"{num_prompts} decodes": decodes(num_prompts, num_tokens),
        "decodes beside chunks": mixed(num_prompts, num_tokens),
    }


def load_reference(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """transformers' model with the checkpoint's weights in `dtype`, without accelerate or the host's memory."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()
    parameters = dict(model.named_parameters())
    missing = set(parameters)
    with torch.no_grad():
        for path in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(path, device=device).items():
                if name in parameters:  # a tied head may be stored all the same
                    parameters[name].copy_(tensor)
                    missing.discard(name)
    assert not missing, f"the checkpoint lacks {sorted(missing)}"
    return model


def reference_logits(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """fp32 [prompts, tokens, vocab] for ids [prompts, tokens]."""
    with torch.inference_mode():
        return model(batch, use_cache=False).logits.float()


def load_ours(folder: Path, device: str) -> tuple[ModelFacts, dict[str, Tensor]]:
    """Through the server's own loader."""
    checkpoint, layout = open_folder(folder)
    return checkpoint.facts, weight_tensors(load_on_host(checkpoint, layout), layout, torch.device(device))


def compare_reference(model: PreTrainedModel, prompts: Tensor, expected: Tensor, batch_size: int) -> Comparison:
    """transformers' logits, `batch_size` prompts at a time."""
    comparison = Comparison()
    for first in range(0, prompts.shape[0], batch_size):
        logits = reference_logits(model, prompts[first : first + batch_size])
        for index in range(logits.shape[0]):
            comparison.add(logits[index], expected[first + index])
    return comparison


def compare_ours(forcing: TeacherForcing, steps: Steps, expected: Tensor, explained_gap: float) -> Comparison:
    """Our logits in one batch shape."""
    comparison = Comparison(explained_gap)
    for part, logits in forcing.run(steps):
        comparison.add(logits, expected[part.prompt, part.start : part.start + part.length])
    return comparison


def measure(folder: Path, num_prompts: int, num_tokens: int, device: str, backend: str = "torch") -> bool:
    """Print the table; whether all shapes pass."""
    facts = open_folder(folder)[0].facts
    random = Random(0)
    prompts = [[random.randrange(facts.vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]
    ids = torch.tensor(prompts, device=device)

    model = load_reference(folder, torch.float32, device)
    expected = torch.cat([reference_logits(model, ids[index : index + 1]) for index in range(num_prompts)])
    del model
    free_memory()
    model = load_reference(folder, torch.bfloat16, device)
    theirs = {
        "transformers, one by one": compare_reference(model, ids, expected, 1),
        "transformers, 8 at a time": compare_reference(model, ids, expected, 8),
    }
    del model
    free_memory()
    scale = f"logits {float(expected.std()):.3f} rms"
    print(f"{num_prompts} prompts x {num_tokens} tokens, {scale}, {facts.dtype}, {device}, {backend} backend")
    for name, comparison in theirs.items():
        report(name, comparison, 1.0)
    limit = min(comparison.rms_error for comparison in theirs.values())
    explained_gap = 2 * max(comparison.max_error for comparison in theirs.values())
    forcing = TeacherForcing(*load_ours(folder, device), prompts, backend)
    passed = True
    for name, steps in shapes(num_prompts, num_tokens).items():
        ours = compare_ours(forcing, steps, expected, explained_gap)
        passed &= report(f"ours, {name}", ours, ours.rms_error / limit)
    return passed


def free_memory() -> None:
    """Give a dropped model's memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report(name: str, comparison: Comparison, ratio: float) -> bool:
    """One line of the table; whether it is within the limits."""
    unexplained = comparison.num_unexplained / comparison.num_positions
    passed = ratio <= MAX_RATIO and unexplained <= MAX_UNEXPLAINED
    print(
        f"{name:36} rms {comparison.rms_error:.6f}  max {comparison.max_error:.4f}  ratio {ratio:.3f}  "
        f"ids differ {comparison.num_differing}/{comparison.num_positions}, {comparison.num_unexplained} unexplained  "
        f"{time.perf_counter() - comparison.seconds:.1f} s  {'ok' if passed else 'FAILED'}",
        flush=True,
    )
    return passed


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", choices=RIGS, default="torch")
    options = parser.parse_args(None if arguments is None else list(arguments))
    return 0 if measure(options.folder, options.prompts, options.tokens, options.device, options.backend) else 1


if __name__ == "__main__":
    sys.exit(main())
