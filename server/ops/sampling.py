"""How a token is chosen: the one definition that every backend implements, and its parameters per slot.

In fp32, on logits[0 : vocab_limit] of a row (ids that the tokenizer cannot name are not there), in this order:

1. is_finite = the largest logit is finite (no NaN, no +inf, not all -inf). Otherwise the row's id is 0, and flagged.
2. Repetition penalty r, ids of prompt and output: logit / r if logit > 0, else logit * r, kept within +-MAX_LOGIT.
3. While the new token's position < min_position: -inf for the stop ids.
4. Temperature 0: the largest, the lowest id on a tie. Else z = (logit - largest) / temperature.
5. top_k: z below the k-th largest out. top_p: of the softmax of what is left, sorted, the shortest head whose mass
   reaches top_p, at least one token. min_p: probability below min_p times the largest out. All three are thresholds:
   whatever ties with the last one kept stays.
6. id = argmax(z + g), the lowest on a tie; g is Gumbel noise: with x = word 0 of Philox4x32-10(key = (low, high word of
   seed), counter = (position, id, 0, 0)), v = min((float(x) + 0.5) * 2^-32, 1 - 2^-24), g = -log(-log1p(-v)).

The logprob is of the model's own distribution: log-softmax of the logits before step 2, as vLLM reports by default.
So an id depends on the row's logits, the request's parameters, seed and position, and on nothing else.
"""

from dataclasses import dataclass

MAX_LOGIT = 1e30
GREEDY_BELOW = 1e-3  # e^(0.02 / 1e-3) = 5e8: colder than this, drawing only differs from greedy between near-ties
MAX_TEMPERATURE = 1e30
PENALTY_LIMIT = 1e20  # penalties are held within 1/limit .. limit, so that a penalised logit is finite in fp32


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """A slot's request: parameters within the bounds above, and the tokens it starts with.

    seen_ids and stop_ids hold ids of the vocabulary only: whoever makes it drops the others.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    min_position: int
    seen_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    logprobs: bool

    @property
    def is_random(self) -> bool:
        """Whether step 6 applies."""
        return self.temperature > 0


@dataclass(frozen=True, slots=True)
class SamplingUse:
    """Which steps any row of a batch needs. A hint: parameters that are off change nothing."""

    penalty: bool
    min_tokens: bool
    top_k_or_top_p: bool
    min_p: bool
    logprobs: bool


def bounded_temperature(temperature: float) -> float:
    """0 for greedy, else within what fp32 divides by."""
    return 0.0 if temperature < GREEDY_BELOW else min(temperature, MAX_TEMPERATURE)


def bounded_penalty(penalty: float) -> float:
    """A repetition penalty whose quotients and products stay finite."""
    return min(max(penalty, 1 / PENALTY_LIMIT), PENALTY_LIMIT)
