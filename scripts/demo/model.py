"""The Qwen2 architecture in plain PyTorch, with Hugging Face's parameter names.

Training needs a module that compiles and that can roll out greedily in large batches; the exported
weights are read by transformers, which is also what the evaluation runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Architecture:
    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6


# Keys and values of one layer, each [batch, kv heads, capacity, head_dim].
Cache = tuple[Tensor, Tensor]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; x is [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.q_proj = nn.Linear(arch.hidden_size, q_size)
        self.k_proj = nn.Linear(arch.hidden_size, kv_size)
        self.v_proj = nn.Linear(arch.hidden_size, kv_size)
        self.o_proj = nn.Linear(q_size, arch.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, start: int) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.arch.head_dim)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin).to(v.dtype)
        if cache is not None:
            for kept, new in zip(cache, (k, v), strict=True):
                kept[:, :, start : start + length] = new
            k, v = (kept[:, :, : start + length] for kept in cache)
        group = self.arch.num_heads // self.arch.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = Attention(arch)
        self.post_attention_layernorm = nn.RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = MLP(arch)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, start: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocab]; the embedding is tied."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(Layer(arch) for _ in range(arch.num_layers))
        self.norm = nn.RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        halves = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
        angles = torch.outer(torch.arange(arch.max_positions), arch.rope_theta**-halves)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, token_ids: Tensor, caches: list[Cache] | None = None, start: int = 0) -> Tensor:
        stop = start + token_ids.shape[1]
        x = self.embed_tokens(token_ids)
        cos, sin = (table[start:stop].to(x.dtype) for table in (self.cos, self.sin))
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, caches[index] if caches else None, start)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def new_caches(self, batch: int, capacity: int, dtype: torch.dtype) -> list[Cache]:
        shape = (batch, self.arch.num_kv_heads, capacity, self.arch.head_dim)
        device = self.embed_tokens.weight.device
        return [
            (
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for _ in self.layers
        ]

    def hf_state_dict(self) -> dict[str, Tensor]:
        """Weights under the names of transformers' Qwen2ForCausalLM, in float32 on the CPU."""
        return {f"model.{k}": v.detach().float().cpu() for k, v in self.state_dict().items()}
