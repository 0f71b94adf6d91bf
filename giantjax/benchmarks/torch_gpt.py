"""The same GPT in eager PyTorch, as a peer to measure against: torch.nn modules, fused attention, AdamW."""

import torch
from torch import nn
from torch.nn import functional

from giantjax.config import ModelConfig, OptimizerConfig


class Block(nn.Module):
    """A pre-LayerNorm transformer block."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, epsilon = config.hidden_size, config.layer_norm_epsilon
        self.num_heads = config.num_heads
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.inner_size), nn.Linear(config.inner_size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] to [B, S, H]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.output(context.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.feedforward_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """The decoder that `config` describes, without dropout, its head tied."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.token = nn.Embedding(config.padded_vocabulary(), config.hidden_size)
        self.position = nn.Embedding(config.sequence_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=config.init_std)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats of int64 [B, S] tokens and targets."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.token.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model: GPT, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, config.learning_rate, (config.beta1, config.beta2), config.epsilon)
