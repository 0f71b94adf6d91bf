"""A GPT that learns Python's own source text on a CPU.

    python scripts/pretrain.py --config gpt_tiny

Hardware: two CPU cores, one to three minutes.
Expect a validation loss of about 1.95 nats a byte after 600 steps; a bigram model gets 2.45, a trigram model 1.78.
"""

from giantjax.config import CheckpointConfig, DataConfig, LoggingConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig


def config() -> RunConfig:
    return RunConfig(
        name="gpt_tiny",
        model=ModelConfig(num_layers=4, hidden_size=128, num_heads=2, sequence_length=64, vocabulary_size=257, vocabulary_multiple=8),
        training=TrainingConfig(num_steps=600, global_batch_size=16, eval_every=300),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup=50, beta2=0.99),
        data=DataConfig(train=("stdlib",)),
        checkpoint=CheckpointConfig(every=100),
        logging=LoggingConfig(every=100),
    )
