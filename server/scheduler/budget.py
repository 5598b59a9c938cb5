"""How many tokens of prompts a step computes beside its decodes, and what else bounds a scheduler.

Knows counts of tokens. Does not know requests. The figures behind the choice: docs/decisions/007-token-budget.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_model_len: prompt and output tokens of one request; the others bound a step or the queue.

    max_batched_tokens     of a step that decodes
    max_prefill_tokens     of a step that decodes nothing; 0: as many as of one that does
    usual_batched_tokens   of a step that decodes, while prompts are not far behind; 0: max_batched_tokens
    max_steps_behind       prompts are far behind when they would take more steps than this of the usual size
    """

    max_model_len: int
    max_num_requests: int
    max_batched_tokens: int
    max_waiting_requests: int
    max_waiting_tokens: int
    max_prefill_tokens: int = 0
    usual_batched_tokens: int = 0
    max_steps_behind: int = 0


class TokenBudget:
    """Streams want short steps, prompts want long ones; which of them waits depends on how far behind prompts are."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._with_decodes = limits.max_batched_tokens
        self._alone = limits.max_prefill_tokens or limits.max_batched_tokens
        self._usual = limits.usual_batched_tokens or limits.max_batched_tokens
        self._max_steps_behind = limits.max_steps_behind

    def for_prefills(self, num_decodes: int, num_behind: int) -> int:
        """Tokens for chunks of prompts in a step of `num_decodes`, when `num_behind` prompt tokens want to be computed.

        A short step is shared by its decodes and prompts in the proportion in which the GEMMs are cheap. Where
        decodes leave prompts so little of it that the queue grows, only longer steps bring more requests to decoding.
        """
        if not num_decodes:
            return self._alone
        room = max(0, self._usual - num_decodes)
        if num_behind > room * self._max_steps_behind:
            return max(0, self._with_decodes - num_decodes)
        return room
