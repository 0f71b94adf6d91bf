"""GPT-2 small (Radford et al., 2019): 124M parameters.

    python scripts/prepare_data.py TEXT... --output data/train
    python scripts/prepare_data.py HELD_OUT_TEXT... --output data/validation
    python scripts/pretrain.py --config gpt2_124m --data.train data/train --data.validation data/validation

Hardware: one GPU of 16 GB or more, or several with --mesh.data.
Expect a loss of about 3.3 nats a token after 10 billion tokens of web text with GPT-2's own tokenizer.
"""

from giantjax.config import CheckpointConfig, ModelConfig, OptimizerConfig, PipelineConfig, RunConfig, TrainingConfig


def config() -> RunConfig:
    return RunConfig(
        name="gpt2_124m",
        model=ModelConfig(num_layers=12, hidden_size=768, num_heads=12, sequence_length=1024, vocabulary_size=50257),
        training=TrainingConfig(num_steps=19_073, global_batch_size=512, eval_every=500),
        optimizer=OptimizerConfig(learning_rate=6e-4, min_learning_rate=6e-5, warmup=700),
        pipeline=PipelineConfig(microbatch_size=4),
        checkpoint=CheckpointConfig(every=500, keep_every=5000),
    )
