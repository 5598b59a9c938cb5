"""The dense decoder of the Llama family (Qwen2, Qwen2.5, Qwen3, Llama 3), written once for all backends.

Knows which operation follows which on which weights. Does not know devices, requests or how anything is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from server.models.facts import ModelFacts
from server.ops.interface import Activations, BufferT, Linear, Operations


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[BufferT]):
    """One layer, by the names of weights/layout."""

    input_norm: BufferT
    qkv: Linear[BufferT]
    q_norm: BufferT | None
    k_norm: BufferT | None
    out: Linear[BufferT]
    mlp_norm: BufferT
    gate_up: Linear[BufferT]
    down: Linear[BufferT]

    @classmethod
    def named(cls, weights: Mapping[str, BufferT], layer: int) -> "LayerWeights[BufferT]":
        """Pick the tensors of `layer`; biases and q/k norms are there if the model has them."""
        prefix = f"layers.{layer}."

        def linear(name: str) -> Linear[BufferT]:
            return Linear(weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

        return cls(
            input_norm=weights[prefix + "input_norm.weight"],
            qkv=linear("qkv"),
            q_norm=weights.get(prefix + "q_norm.weight"),
            k_norm=weights.get(prefix + "k_norm.weight"),
            out=linear("out"),
            mlp_norm=weights[prefix + "mlp_norm.weight"],
            gate_up=linear("gate_up"),
            down=linear("down"),
        )


class Decoder(Generic[BufferT]):
    """A model on a backend. Shapes: T tokens of the step, S rows that are sampled, see ops/interface.Activations."""

    def __init__(self, facts: ModelFacts, ops: Operations[BufferT]) -> None:
        weights = ops.weights
        self._ops = ops
        self._embedding = weights["embed.weight"]
        self._layers = [LayerWeights.named(weights, layer) for layer in range(facts.num_layers)]
        self._final_norm = weights["final_norm.weight"]
        self._head = weights["embed.weight" if facts.tied_head else "head.weight"]
        # The norm that closes layer i opens layer i + 1: each add is fused with the norm behind it.
        self._next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]

    def forward(self, act: Activations[BufferT]) -> None:
        """From the token ids of the step begun last to act.logits; act.normed keeps the final hidden states [T]."""
        ops = self._ops
        ops.embed(self._embedding, act.residual)
        ops.rms_norm(act.residual, self._layers[0].input_norm, act.normed)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            ops.linear(act.normed, layer.qkv, act.qkv)
            ops.rotate_and_store(index, act.qkv, layer.q_norm, layer.k_norm)
            ops.attend(index, act.qkv, act.attended)
            ops.linear_add_norm(act.attended, layer.out, act.delta, act.residual, layer.mlp_norm, act.normed)
            ops.gated_linear(act.normed, layer.gate_up, act.gate_up, act.gated)
            ops.linear_add_norm(act.gated, layer.down, act.delta, act.residual, next_norm, act.normed)
        ops.gather_samples(act.normed, act.sampled)
        ops.logits(act.sampled, self._head, act.logits)
