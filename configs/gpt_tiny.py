"""A GPT that learns Python's own source text on a CPU.

python scripts/pretrain.py --config gpt_tiny
"""

from giantjax.config import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig


def config() -> RunConfig:
    return RunConfig(
        name="gpt_tiny",
        model=ModelConfig(num_layers=4, hidden_size=128, num_heads=4, sequence_length=128, vocabulary_size=257, vocabulary_multiple=8),
        training=TrainingConfig(num_steps=800, global_batch_size=16, eval_every=200, eval_samples=512),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup=50, beta2=0.99),
        data=DataConfig(train=("stdlib",)),
        checkpoint=CheckpointConfig(every=200),
    )
