"""The sampler's definition (server/ops/sampling) once more, row by row in plain Python and float64."""

import math
from collections.abc import Sequence

from server.ops.sampling import MAX_LOGIT, SlotSampling

_WORD = 0xFFFFFFFF


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    c, k = list(counter), list(key)
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [product1 >> 32 ^ c[1] ^ k[0], product1 & _WORD, product0 >> 32 ^ c[3] ^ k[1], product0 & _WORD]
        k = [k[0] + 0x9E3779B9 & _WORD, k[1] + 0xBB67AE85 & _WORD]
    return tuple(c)


def gumbel(seed: int, position: int, token_id: int) -> float:
    word = philox4x32_10((position, token_id, 0, 0), (seed & _WORD, seed >> 32))[0]
    return -math.log(-math.log1p(-min((word + 0.5) / 2**32, 1 - 2.0**-24)))


def candidate_scores(logits: Sequence[float], sampling: SlotSampling, position: int) -> dict[int, float]:
    """Token id -> what step 6 (or greedy) takes the largest of; ids that were filtered out are missing."""
    scores = {token_id: _penalised(logit, token_id, sampling) for token_id, logit in enumerate(logits)}
    if position < sampling.min_position:
        scores = {token_id: score for token_id, score in scores.items() if token_id not in sampling.stop_ids}
    if not sampling.is_random:
        return scores
    largest = max(scores.values())
    z = {token_id: (score - largest) / sampling.temperature for token_id, score in scores.items()}
    z = _top_p(_top_k(z, sampling.top_k), sampling.top_p)
    if sampling.min_p > 0:
        z = {token_id: value for token_id, value in z.items() if value >= math.log(sampling.min_p)}
    return {token_id: value + gumbel(sampling.seed, position, token_id) for token_id, value in z.items()}


def choose_row(logits: Sequence[float], sampling: SlotSampling, position: int) -> tuple[int, float]:
    """The token's id, and by how much it wins."""
    scores = candidate_scores(logits, sampling, position)
    ranked = sorted(scores, key=lambda token_id: (-scores[token_id], token_id))
    margin = scores[ranked[0]] - scores[ranked[1]] if len(ranked) > 1 else math.inf
    return ranked[0], margin


def log_softmax(logits: Sequence[float], token_id: int) -> float:
    largest = max(logits)
    return logits[token_id] - largest - math.log(sum(math.exp(logit - largest) for logit in logits))


def _penalised(logit: float, token_id: int, sampling: SlotSampling) -> float:
    if token_id not in sampling.seen_ids or sampling.repetition_penalty == 1:
        return logit
    score = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
    return min(max(score, -MAX_LOGIT), MAX_LOGIT)


def _top_k(z: dict[int, float], top_k: int) -> dict[int, float]:
    if top_k <= 0 or top_k >= len(z):
        return z
    threshold = sorted(z.values(), reverse=True)[top_k - 1]
    return {token_id: value for token_id, value in z.items() if value >= threshold}


def _top_p(z: dict[int, float], top_p: float) -> dict[int, float]:
    if top_p >= 1:
        return z
    total = sum(math.exp(value) for value in z.values())
    mass, threshold = 0.0, math.inf
    for value in sorted(z.values(), reverse=True):
        if threshold < math.inf and mass >= top_p * total:
            break
        mass, threshold = mass + math.exp(value), value
    return {token_id: value for token_id, value in z.items() if value >= threshold}
