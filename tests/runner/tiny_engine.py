"""A tiny model of each family beside transformers' own, and a scheduler that drives a runner until nothing is left."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from server.engine.messages import SamplingParams, Submit
from server.kv.block_tables import BlockTables
from server.models.facts import ModelFacts, facts_from_config
from server.models.rope import inverse_frequencies
from server.ops.interface import BatchLimits
from server.ops.torch.operations import TorchOperations
from server.runner.model_runner import ModelRunner
from server.scheduler.budget import SchedulerLimits
from server.scheduler.plan import StepPlan, StepResult
from server.scheduler.scheduler import Scheduler
from server.weights.layout import weight_layout
from tests.tiny_models import Family, tiny_tensors, write_tiny_model

EOS_ID = 3
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)


@dataclass(frozen=True)
class TinyModel:
    """One checkpoint, as the server lays it out and as transformers reads it."""

    facts: ModelFacts
    weights: dict[str, Tensor]
    reference: PreTrainedModel

    def reference_logits(self, token_ids: Sequence[int]) -> Tensor:
        """fp32 logits of transformers after each token: [tokens, vocab]."""
        device = self.reference.device
        with torch.inference_mode():
            return self.reference(torch.tensor([list(token_ids)], device=device)).logits[0].float()


def make_tiny_model(
    folder: Path, family: Family, *, dtype: str = "float32", seed: int = 1, device: str = "cpu"
) -> TinyModel:
    """Written by the test builder, laid out by the server's rule (its loader has tests of its own)."""
    write_tiny_model(folder, family, dtype=dtype, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    facts = facts_from_config(config)
    stored = tiny_tensors(config, seed=seed)
    weights = {
        spec.name: torch.cat([stored[s.source][s.source_row : s.source_row + s.num_rows] for s in spec.segments])
        for spec in weight_layout(facts).tensors
    }
    reference = AutoModelForCausalLM.from_pretrained(folder).eval().to(device)
    return TinyModel(facts, {name: tensor.to(device) for name, tensor in weights.items()}, reference)


class RecordingOperations(TorchOperations):
    """The torch backend, keeping the logits of every sampled row."""

    def __init__(self, facts: ModelFacts, weights: dict[str, Tensor], limits: BatchLimits) -> None:
        super().__init__(facts, weights, limits, inverse_frequencies(facts), facts.vocab_size)
        self.recorded: list[Tensor] = []

    def sample(self, logits: Tensor) -> None:
        self.recorded.append(logits.clone())
        super().sample(logits)


def batch_limits(
    *, max_batched_tokens: int = 64, max_num_requests: int = 8, num_blocks: int = 129, block_size: int = 8
) -> BatchLimits:
    return BatchLimits(max_batched_tokens, max_num_requests, 256, num_blocks, block_size)


class TinyEngine:
    """Scheduler, runner and backend; `num_in_flight` steps are submitted before the oldest is read."""

    def __init__(
        self,
        model: TinyModel,
        limits: BatchLimits,
        *,
        num_in_flight: int = 1,
        prefix_cache: bool = True,
        ops: Any = None,
    ) -> None:
        """`ops`: of another backend, which keeps logits in `recorded` too."""
        self.ops = ops or RecordingOperations(model.facts, model.weights, limits)
        self.runner = ModelRunner(model.facts, self.ops, (EOS_ID,))
        tables = BlockTables(limits.num_blocks, limits.block_size, prefix_cache)
        scheduler_limits = SchedulerLimits(
            limits.max_model_len, limits.max_num_requests, limits.max_batched_tokens, 1000, 1 << 20
        )
        self.scheduler = Scheduler(tables, scheduler_limits, (EOS_ID,))
        self._num_in_flight = num_in_flight
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.outputs: dict[int, list[int]] = {}
        self.logits: dict[int, list[Tensor]] = {}
        self.logprobs: dict[int, list[float]] = {}

    def add(self, request_id: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> None:
        assert self.scheduler.add(Submit(request_id, list(prompt), len(prompt), sampling)) is None
        self.outputs[request_id], self.logits[request_id], self.logprobs[request_id] = [], [], []

    def run(self) -> None:
        """Until nothing is left to do."""
        in_flight = []
        while True:
            plan = self.scheduler.schedule()
            if plan is not None:
                self.plans.append(plan)
                in_flight.append(self.runner.submit(plan))
                if any(chunk.samples for chunk in plan.chunks):
                    self._assign_logits(plan)
            if not in_flight:
                return
            if plan is None or len(in_flight) >= self._num_in_flight:
                self.results.append(in_flight.pop(0).wait())
                for output in self.scheduler.update(self.results[-1]):
                    self.outputs[output.request_id].append(output.token_id)
                    self.logprobs[output.request_id].append(output.logprob)

    def _assign_logits(self, plan: StepPlan) -> None:
        sampled = [chunk for chunk in plan.chunks if chunk.samples]
        for chunk, row in zip(sampled, self.ops.recorded[-1][: len(sampled)], strict=True):  # padding rows come last
            self.logits[chunk.request_id].append(row)


def assert_as_reference(
    model: TinyModel, prompt: Sequence[int], outputs: Sequence[int], logits: Sequence[Tensor]
) -> None:
    """Each output is the reference's greedy choice, and each row of logits within 1e-4 of its, relative to the row."""
    expected = model.reference_logits([*prompt, *outputs])[len(prompt) - 1 : -1]
    assert outputs == expected.argmax(-1).tolist()
    scale = expected.abs().amax(-1, keepdim=True)
    assert ((torch.stack(list(logits)) - expected) / scale).abs().max() < 1e-4
