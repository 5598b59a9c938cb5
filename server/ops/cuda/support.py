"""Which models the cuda backend can serve: asked where a backend is chosen, and again where it is made.

Knows a model's facts; imports nothing of the backend, because the master asks.
"""

from server.models.facts import ModelFacts

HEAD_DIMS = (64, 128)  # constants of the kernels
MAX_GROUP_SIZE = 8  # query heads of a KV head that fit in attention's tiles
WIDTH_MULTIPLE = 8  # elements: rows of 16 bytes, which vector loads and tensor cores ask for


def why_unsupported(facts: ModelFacts) -> str | None:
    """What the cuda backend cannot serve about a model: found, then expected. None if it can."""
    if facts.dtype == "float32":
        return "the weights are float32; the cuda backend serves bfloat16 and float16 (model-server convert)"
    if facts.head_dim not in HEAD_DIMS:
        return f"head_dim is {facts.head_dim}; the cuda backend has kernels for {HEAD_DIMS[0]} and {HEAD_DIMS[1]}"
    if facts.group_size > MAX_GROUP_SIZE:
        return f"{facts.group_size} query heads share a KV head; the cuda backend serves up to {MAX_GROUP_SIZE}"
    widths = {
        "hidden_size": facts.hidden_size,
        "intermediate_size per block": facts.intermediate_size // facts.num_mlp_blocks,
        "vocab_size": facts.vocab_size,
    }
    for name, width in widths.items():
        if width % WIDTH_MULTIPLE:
            return f"{name} is {width}; the cuda backend needs a multiple of {WIDTH_MULTIPLE}"
    return None
