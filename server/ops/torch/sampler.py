"""Choosing tokens for a whole batch on the device, as ops/sampling defines it. Nothing here waits for the device.

SlotTable is the memory of the slots; `choose` is a function of logits and of the rows' parameters.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from server.ops.sampling import MAX_LOGIT, SamplingUse, SlotSampling
from server.ops.torch.philox import philox4x32

SEEN, STOP = 1, 2  # bits of SlotTable.token_flags
_PARAMS_FORMAT = "<4i4f"
_PARAMS_WORDS = struct.calcsize(_PARAMS_FORMAT) // 4
MAX_TILE_ENTRIES = 1 << 22  # logits drawn from at a time: bounds the temporaries of sort and Philox
_NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class RowParams:
    """Parameters of a batch's rows, each [rows]; seed words are int64 within 0 .. 2^32 - 1."""

    top_k: Tensor
    min_position: Tensor
    seed_low: Tensor
    seed_high: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor

    def select(self, rows: Tensor) -> "RowParams":
        """The parameters of some rows, by index."""
        return RowParams(*(getattr(self, name).index_select(0, rows) for name in self.__dataclass_fields__))


class SlotTable:
    """Per slot: the last sampled token, the sampling parameters, and flags per token id (seen, stop)."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.token_flags = torch.zeros(num_slots, vocab_size, dtype=torch.uint8, device=device)
        self._params = torch.zeros(num_slots, _PARAMS_WORDS, dtype=torch.int32, device=device)
        self._device = device

    def reset(self, slot: int, sampling: SlotSampling) -> None:
        """Forget the slot's former request. One upload: parameters, then seen ids, then stop ids."""
        num_seen, num_stop = len(sampling.seen_ids), len(sampling.stop_ids)
        packed = bytearray(_pack_params(sampling))
        packed += struct.pack(f"<{num_seen + num_stop}i", *sampling.seen_ids, *sampling.stop_ids)
        words = torch.frombuffer(packed, dtype=torch.int32)
        if self._device.type == "cuda":
            words = words.pin_memory().to(self._device, non_blocking=True)
        self._params[slot].copy_(words[:_PARAMS_WORDS])
        flags = self.token_flags[slot].zero_()
        ids = words[_PARAMS_WORDS:].long()
        flags.index_fill_(0, ids[:num_seen], SEEN)
        if num_stop:
            flags.index_copy_(0, ids[num_seen:], flags.index_select(0, ids[num_seen:]) | STOP)

    def params(self, slots: Tensor) -> RowParams:
        """The parameters of the rows' slots."""
        rows = self._params.index_select(0, slots)
        top_k, min_position, seed_low, seed_high = rows[:, :4].long().unbind(1)
        temperature, top_p, min_p, penalty = rows[:, 4:].view(torch.float32).unbind(1)
        return RowParams(
            top_k, min_position, seed_low & 0xFFFFFFFF, seed_high & 0xFFFFFFFF, temperature, top_p, min_p, penalty
        )

    def record(self, slots: Tensor, token_ids: Tensor, *, mark_seen: bool) -> None:
        """The rows' new tokens; `mark_seen` may be false if no row has a penalty."""
        self.last_tokens.index_copy_(0, slots, token_ids.int())
        if mark_seen:
            vocab_size = self.token_flags.shape[1]
            entries = slots * vocab_size + token_ids
            flags = self.token_flags.view(-1)
            flags.index_copy_(0, entries, flags.index_select(0, entries) | SEEN)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """token_ids int64, logprobs fp32 (NaN unless wanted), is_finite bool, each [rows], on the device."""

    token_ids: Tensor
    logprobs: Tensor
    is_finite: Tensor


def choose(
    logits: Tensor, flags: Tensor, params: RowParams, positions: Tensor, random_rows: Tensor, use: SamplingUse
) -> SampledRows:
    """logits fp32 [rows, vocab]; flags uint8 [rows, vocab], read if penalties or min_tokens are in use; positions,
    random_rows int64: position of each new token, and which rows draw."""
    is_finite = logits.amax(-1).isfinite()
    scores = logits
    if use.penalty:
        scores = _penalise(scores, flags, params.penalty)
    if use.min_tokens:
        is_early = (positions < params.min_position).unsqueeze(1)
        scores = scores.masked_fill((flags & STOP).bool() & is_early, _NEGATIVE_INFINITY)
    token_ids = scores.argmax(-1)
    if random_rows.shape[0]:
        for rows in random_rows.split(max(1, MAX_TILE_ENTRIES // logits.shape[1])):
            drawn = _draw(scores.index_select(0, rows), params.select(rows), positions.index_select(0, rows), use)
            token_ids.index_copy_(0, rows, drawn)
    token_ids = torch.where(is_finite, token_ids, 0)
    return SampledRows(token_ids, _logprobs(logits, token_ids, use), is_finite)


def gumbel_noise(params: RowParams, positions: Tensor, vocab_size: int) -> Tensor:
    """Step 6's noise, fp32 [rows, vocab_size]."""
    ids = torch.arange(vocab_size, device=positions.device)
    zero = torch.zeros_like(ids)
    key = (params.seed_low.unsqueeze(1), params.seed_high.unsqueeze(1))
    word = philox4x32((positions.unsqueeze(1), ids, zero, zero), key)[0]
    uniform = ((word.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _pack_params(sampling: SlotSampling) -> bytes:
    seed_low, seed_high = struct.unpack("<2i", struct.pack("<Q", sampling.seed))
    return struct.pack(
        _PARAMS_FORMAT,
        min(sampling.top_k, 2**31 - 1),
        min(sampling.min_position, 2**31 - 1),
        seed_low,
        seed_high,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
    )


def _penalise(logits: Tensor, flags: Tensor, penalty: Tensor) -> Tensor:
    penalty = penalty.unsqueeze(1)
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty).clamp_(-MAX_LOGIT, MAX_LOGIT)
    # A row without a penalty keeps its logits untouched, even where they exceed the clamp.
    return torch.where((flags & SEEN).bool() & (penalty != 1), penalised, logits)


def _draw(scores: Tensor, params: RowParams, positions: Tensor, use: SamplingUse) -> Tensor:
    z = (scores - scores.amax(-1, keepdim=True)) / params.temperature.unsqueeze(1)
    if use.top_k_or_top_p:
        z = z.masked_fill(z < _top_threshold(z, params).unsqueeze(1), _NEGATIVE_INFINITY)
    if use.min_p:
        z = z.masked_fill(z < params.min_p.log().unsqueeze(1), _NEGATIVE_INFINITY)  # the largest z is 0
    return (z + gumbel_noise(params, positions, z.shape[1])).argmax(-1)


def _top_threshold(z: Tensor, params: RowParams) -> Tensor:
    """The smallest z that top_k and top_p keep, per row; -inf where both are off."""
    vocab_size = z.shape[1]
    descending = z.sort(-1, descending=True).values
    kth = descending.gather(1, params.top_k.clamp(1, vocab_size).unsqueeze(1) - 1)
    kth = torch.where(params.top_k.unsqueeze(1) > 0, kth, _NEGATIVE_INFINITY)
    probabilities = descending.masked_fill(descending < kth, _NEGATIVE_INFINITY).softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    top_p = params.top_p.unsqueeze(1)
    num_kept = (mass_before < top_p).sum(-1, keepdim=True).clamp_(min=1)
    last_kept = torch.where(top_p < 1, descending.gather(1, num_kept - 1), _NEGATIVE_INFINITY)
    return torch.maximum(kth, last_kept).squeeze(1)


def _logprobs(logits: Tensor, token_ids: Tensor, use: SamplingUse) -> Tensor:
    if not use.logprobs:
        return logits.new_full(token_ids.shape, float("nan"))
    return logits.gather(1, token_ids.unsqueeze(1)).squeeze(1) - logits.logsumexp(-1)
