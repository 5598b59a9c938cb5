"""Whole steps of the cuda backend on any driver, and the torch backend as their judge on the same plans.

The judge is fed what was sampled, so that one near-tie does not part the two for good.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from server.engine.messages import SamplingParams
from server.models.facts import ModelFacts, facts_from_config
from server.models.rope import inverse_frequencies
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Driver, KernelImage, Stream
from server.ops.cuda.operations import CudaOperations
from server.ops.cuda.staging import CudaPendingTokens
from server.ops.cuda.tiles import NO_TABLE, GemmTable
from server.ops.cuda.weights import weight_buffers
from server.ops.interface import BatchLimits
from server.ops.torch.operations import TorchOperations
from server.runner.model_runner import ModelRunner
from server.scheduler.plan import StepPlan, StepResult, TokenChunk
from server.weights.layout import weight_layout
from tests.runner.tiny_engine import EOS_ID, TinyEngine
from tests.tiny_models import Family, tiny_config, tiny_tensors

T = TypeVar("T")

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
MAX_RATIO = 1.2  # of the two errors, which for so few tokens differ by chance


@dataclass(frozen=True)
class TinyWeights:
    """A random model in half precision, laid out by the server's rule."""

    facts: ModelFacts
    weights: dict[str, Tensor]

    def in_fp32(self, device: str) -> "TinyWeights":
        """The same numbers, computed with in fp32."""
        weights = {name: tensor.to(device, torch.float32) for name, tensor in self.weights.items()}
        return TinyWeights(replace(self.facts, dtype="float32"), weights)

    def on(self, device: str) -> "TinyWeights":
        return TinyWeights(self.facts, {name: tensor.to(device) for name, tensor in self.weights.items()})


def tiny_weights(
    family: Family, *, dtype: str = "float16", seed: int = 1, attention_bias: bool = False, **options: int
) -> TinyWeights:
    """`options` are those of tiny_config; `attention_bias` gives q, k, v and the output projection one."""
    config = tiny_config(family, dtype=dtype, **options)  # type: ignore[arg-type]
    if attention_bias:
        config["attention_bias"] = True
    facts = facts_from_config(config)
    stored = tiny_tensors(config, seed=seed)
    weights = {
        spec.name: torch.cat([stored[s.source][s.source_row : s.source_row + s.num_rows] for s in spec.segments])
        for spec in weight_layout(facts).tensors
    }
    return TinyWeights(facts, weights)


class RecordingCudaOperations(CudaOperations):
    """The cuda backend, keeping the logits of every step that sampled, however they were issued."""

    def __init__(
        self,
        model: TinyWeights,
        limits: BatchLimits,
        driver: Driver,
        images: Sequence[KernelImage],
        gemms: GemmTable = NO_TABLE,
    ) -> None:
        self.stream = driver.create_stream()
        self.driver = driver
        self.recorded: list[Tensor] = []
        facts = model.facts
        super().__init__(
            facts,
            upload_weights(driver, self.stream, model),
            limits,
            inverse_frequencies(facts),
            facts.vocab_size,
            driver=driver,
            stream=self.stream,
            images=images,
            gemms=gemms,
        )

    def fetch_tokens(self) -> CudaPendingTokens:
        if self._num_sampled:
            self.recorded.append(self.read(self._largest.logits.rows(0, self._num_sampled)))
        return super().fetch_tokens()

    def read(self, buffer: Buffer) -> Tensor:
        return read_buffer(self.driver, self.stream, buffer)

    def write(self, buffer: Buffer, values: Tensor) -> None:
        write_buffer(self.driver, self.stream, buffer, values)


def upload_weights(driver: Driver, stream: Stream, model: TinyWeights) -> dict[str, Buffer]:
    """Into one allocation, as a loader does."""
    layout = weight_layout(model.facts)
    buffers = weight_buffers(driver.allocate(layout.total_bytes), layout)
    for name, buffer in buffers.items():
        write_buffer(driver, stream, buffer, model.weights[name])
    return buffers


def read_buffer(driver: Driver, stream: Stream, buffer: Buffer) -> Tensor:
    """The buffer's numbers on the host."""
    pinned = driver.allocate_pinned(buffer.num_bytes)
    driver.copy_to_host_async(pinned.address, buffer.address, buffer.num_bytes, stream)
    driver.synchronize(stream)
    values = torch.frombuffer(bytearray(pinned.view), dtype=TORCH_DTYPES[buffer.dtype]).view(buffer.shape)
    driver.free_pinned(pinned)
    return values


def write_buffer(driver: Driver, stream: Stream, buffer: Buffer, values: Tensor) -> None:
    """`values` of the buffer's dtype and size."""
    assert values.dtype == TORCH_DTYPES[buffer.dtype]
    assert values.numel() == buffer.num_elements
    pinned = driver.allocate_pinned(buffer.num_bytes)
    pinned.view.cast("B")[:] = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    driver.copy_to_device_async(buffer.address, pinned.address, buffer.num_bytes, stream)
    driver.synchronize(stream)
    driver.free_pinned(pinned)


@dataclass
class Run:
    """Steps that were run, with results and the logits of those that sampled: a row per result."""

    plans: list[StepPlan]
    results: list[StepResult]
    logits: list[Tensor]


def run_requests(
    model: TinyWeights,
    ops: RecordingCudaOperations,
    waves: Sequence[Sequence[tuple[Sequence[int], SamplingParams]]],
    **options: Any,
) -> Run:
    """Each wave of (prompt, sampling) through scheduler and runner until nothing is left; options of TinyEngine."""
    engine = TinyEngine(model, ops.limits, ops=ops, **options)  # type: ignore[arg-type]
    request_ids = count()
    for wave in waves:
        for prompt, sampling in wave:
            engine.add(next(request_ids), prompt, sampling)
        engine.run()
    counts = [sum(chunk.samples for chunk in plan.chunks) for plan in engine.plans]
    rows = [logits[:number] for number, logits in zip(filter(None, counts), ops.recorded, strict=True)]
    return Run(engine.plans, engine.results, rows)


class Judge(TorchOperations):
    """The torch backend, which samples from logits that it is given and keeps its own."""

    def __init__(self, model: TinyWeights, limits: BatchLimits, given: list[Tensor]) -> None:
        facts = model.facts
        super().__init__(facts, model.weights, limits, inverse_frequencies(facts), facts.vocab_size)
        self.recorded: list[Tensor] = []
        self._given = iter(given)

    def sample(self, logits: Tensor) -> None:
        self.recorded.append(logits.cpu().clone())
        super().sample(next(self._given).to(logits.device))


def judge(model: TinyWeights, limits: BatchLimits, run: Run) -> Run:
    """The same plans on the torch backend, with the run's tokens as inputs and its logits to sample from."""
    ops = Judge(model, limits, run.logits)
    runner = ModelRunner(model.facts, ops, (EOS_ID,))
    results = []
    last_tokens: dict[int, int] = {}
    for plan, result in zip(run.plans, run.results, strict=True):
        results.append(runner.submit(_with_known_tokens(plan, last_tokens)).wait())
        slots = [chunk.slot for chunk in plan.chunks if chunk.samples]
        last_tokens |= dict(zip(slots, result.token_ids, strict=True))
    return Run(run.plans, results, ops.recorded)


def _with_known_tokens(plan: StepPlan, last_tokens: dict[int, int]) -> StepPlan:
    def known(chunk: TokenChunk) -> TokenChunk:
        if not chunk.input_on_device:
            return chunk
        token_ids = (last_tokens[chunk.slot],)
        return TokenChunk(
            chunk.slot, chunk.request_id, chunk.start, 1, token_ids, chunk.block_ids, samples=chunk.samples
        )

    return StepPlan(plan.step, plan.resets, tuple(known(chunk) for chunk in plan.chunks))


@dataclass(frozen=True)
class Verdict:
    """A run against fp32, beside the torch backend in the run's own precision."""

    num_tokens: int
    num_other_ids: int
    max_logprob_error: float
    rms_error: float
    rms_error_of_torch: float
    max_error: float
    max_error_of_torch: float
    num_unexplained: int

    def assert_good(self) -> None:
        """The error of half precision, no more; ids as the sampler's definition says for the same logits."""
        assert self.num_tokens > 0
        assert self.num_other_ids <= 1 + self.num_tokens // 1000, self  # a tie within rounding
        assert self.max_logprob_error < 1e-4, self
        assert self.rms_error <= MAX_RATIO * self.rms_error_of_torch, self
        assert self.max_error <= 2 * self.max_error_of_torch, self
        assert self.num_unexplained <= self.num_tokens * 0.005, self


def _pairs(rows: Iterable[Sequence[T]], others: Iterable[Sequence[T]]) -> list[tuple[T, T]]:
    return [pair for row, other in zip(rows, others, strict=True) for pair in zip(row, other, strict=True)]


def compare(model: TinyWeights, limits: BatchLimits, run: Run, device: str = "cpu") -> Verdict:
    """Logits against the torch backend in fp32; tokens against its sampler on the same logits."""
    reference = judge(model.in_fp32(device), limits, run)
    same_precision = judge(model.on(device), limits, run)
    expected = torch.cat(reference.logits)
    ours, theirs = torch.cat(run.logits) - expected, torch.cat(same_precision.logits) - expected
    assert torch.isfinite(ours).all()
    ids = _pairs([result.token_ids for result in run.results], [result.token_ids for result in reference.results])
    logprobs = _pairs([result.logprobs for result in run.results], [result.logprobs for result in reference.results])
    logprob_errors = [abs(own - other) for own, other in logprobs if not math.isnan(other)]
    assert all(math.isnan(own) for own, other in logprobs if math.isnan(other))
    best = expected.topk(2, dim=-1).values
    differs = torch.cat(run.logits).argmax(-1) != expected.argmax(-1)
    max_error_of_torch = float(theirs.abs().max())
    return Verdict(
        num_tokens=len(ids),
        num_other_ids=sum(own != other for own, other in ids),
        max_logprob_error=max(logprob_errors, default=0.0),
        rms_error=float(ours.double().square().mean().sqrt()),
        rms_error_of_torch=float(theirs.double().square().mean().sqrt()),
        max_error=float(ours.abs().max()),
        max_error_of_torch=max_error_of_torch,
        num_unexplained=int((differs & (best[:, 0] - best[:, 1] > 2 * max_error_of_torch)).sum()),
    )
