"""Broken configurations and inputs: exit code 2, one sentence that names the field or file, and nothing written.

Most cases run a whole script inside this process, where starting JAX is an error unless the case says so; a dozen
run it as a user does.
"""

import dataclasses
import operator
import os
import runpy
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np
import pytest

from giantjax import cluster, command_line, runtime
from giantjax.cluster import InstalledGPU
from giantjax.data.indexed import TokenizerRecord
from giantjax.data.indexed_writer import write_indexed
from giantjax.data.tokenizer import load_tokenizer, record_of
from giantjax.fields import leaves
from giantjax.training.run_directory import write_record

SCRIPTS = Path(__file__).parents[1] / "scripts"
GIB = 2**30
# Where the other tests keep compiled programs.
COMPILED = jax.config.values["jax_compilation_cache_dir"]
# What looks for GPUs; tests put something else in its place.
QUERY_GPUS = cluster._query_gpus
TINY = """\
from giantjax.config import CheckpointConfig, DataConfig, LoggingConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig


def config():
    return RunConfig(
        name="tiny",
        model=ModelConfig(num_layers=1, hidden_size=8, num_heads=2, sequence_length=8, vocabulary_size=257, vocabulary_multiple=8),
        training=TrainingConfig(num_steps=2, global_batch_size=4),
        data=DataConfig(train=("corpus",)),
        logging=LoggingConfig(tensorboard=False),
    )
"""
RECORD = TokenizerRecord("bytes", 257, 256)


class Case(NamedTuple):
    """A command line of a script, and what its refusal says."""

    name: str
    command: str
    says: tuple[str, ...]


def case(name: str, command: str, *says: str) -> Case:
    return Case(name, command, says)


def tiny(name: str, options: str, *says: str) -> Case:
    """A case of pretrain.py with the configuration above and options that break it."""
    return Case(name, f"pretrain --config tiny.py {options}", says)


COMMAND_LINE = (
    tiny("unknown-field", "--training.num-step 3", "there is no field --training.num-step; did you mean --training.num-steps?"),
    tiny("field-of-another-group", "--training.num-layers 3", "no field --training.num-layers; did you mean --model.num-layers?"),
    tiny("field-without-group", "--learning-rate 3", "no field --learning-rate; did you mean --optimizer.learning-rate?"),
    tiny("field-of-two-groups", "--every 3", "no field --every; did you mean --checkpoint.every or --logging.every?"),
    tiny("unknown-group", "--trainig.seed 3", "no field --trainig.seed; did you mean --seed?"),
    tiny("unlike-any-field", "--zzz 3", "there is no field --zzz"),
    tiny("shortened-config", "--conf 3", "there is no field --conf; did you mean --config?"),
    tiny("left-over-word", "extra", "extra cannot be understood"),
    tiny("short-option", "-x 3", "-x, 3 cannot be understood"),
    tiny("two-values-for-one", "--training.num-steps 1 2", "2 cannot be understood"),
    tiny("value-of-a-switch", "--logging.tensorboard maybe", "maybe cannot be understood"),
    tiny("value-missing-at-the-end", "--training.num-steps", "--training.num-steps is missing its value"),
    tiny("value-missing-before-an-option", "--seed --mesh.data 1", "--seed is missing its value"),
    tiny("underscores", "--training.num_steps x", "--training.num-steps is 'x'; it must be a whole number"),
    tiny("underscores-and-equals", "--training.num_steps=x", "--training.num-steps is 'x'; it must be a whole number"),
    tiny("the-last-of-two-counts", "--training.num-steps 5 --training.num-steps 0", "training.num_steps is 0; it must be at least 1"),
    case("no-config", "pretrain", "--config NAME is missing", "gpt_tiny"),
    case("config-without-value", "pretrain --config", "--config is missing its value"),
    case("config-before-an-option", "pretrain --config --seed 3", "--config is missing its value"),
    case("config-twice", "pretrain --config tiny.py --config gpt_tiny", "--config is given twice"),
    case("config-twice-with-equals", "pretrain --config=tiny.py --config=gpt_tiny", "--config is given twice"),
    case("config-empty", "pretrain --config ''", "there is no config '' (shipped: ", "gpt_tiny"),
    case("config-near-miss", "pretrain --config gpt_tny", "there is no config gpt_tny; did you mean gpt_tiny?"),
    case("config-path-missing", "pretrain --config ./nope.py", "there is no config ./nope.py"),
    case("config-is-a-folder", "pretrain --config folder.py", "there is no config folder.py"),
    case("config-of-a-long-name", f"pretrain --config {'a' * 300}", "there is no config aaa"),
)

TYPES = (
    tiny("word-for-int", "--training.num-steps x", "--training.num-steps is 'x'; it must be a whole number"),
    tiny("float-for-int", "--seed 1.5", "--seed is '1.5'; it must be a whole number"),
    tiny("exponent-for-int", "--training.num-steps 1e3", "--training.num-steps is '1e3'; it must be a whole number"),
    tiny("nothing-for-int", "--seed ''", "--seed is ''; it must be a whole number"),
    tiny("none-for-int", "--seed None", "--seed is 'None'; it must be a whole number"),
    tiny("5000-digits", f"--seed {'9' * 5000}", "--seed cannot be read"),
    tiny("word-for-float", "--optimizer.learning-rate abc", "--optimizer.learning-rate is 'abc'; it must be a number"),
    tiny("word-for-int-or-none", "--pipeline.microbatch-size x", "--pipeline.microbatch-size is 'x'; it must be a whole number or None"),
    tiny("word-for-float-or-none", "--optimizer.clip-norm none", "--optimizer.clip-norm is 'none'; it must be a number or None"),
    tiny("no-such-choice", "--training.precision fp64", "--training.precision is 'fp64'; it must be one of 'auto', 'fp32', 'bf16', 'fp16'"),
    tiny("choice-in-unicode", "--model.head 'ünï[bold]'", "--model.head is 'ünï[bold]'; it must be one of 'tied', 'untied'"),
    tiny("no-such-recompute", "--training.recompute some", "training.recompute is 'some'", "none, selective, full and full:K"),
    tiny("recompute-every-0-layers", "--training.recompute full:0", "training.recompute is 'full:0'"),
    tiny("recompute-no-number", "--training.recompute full:x", "training.recompute is 'full:x'"),
    tiny("no-such-schedule", "--pipeline.schedule 1f1", "pipeline.schedule is '1f1'", "did you mean 1f1b?"),
    tiny("empty-text", "--run-dir ''", "run_dir is ''; it must not be empty"),
    tiny("empty-name", "--name ''", "name is ''; it must not be empty"),
    tiny("name-with-a-slash", "--name a/b", "name is 'a/b'", "slash"),
    tiny("name-above", "--name ..", "name is '..'; it names a directory of its own"),
    tiny("empty-cache", "--runtime.compilation-cache ''", "runtime.compilation_cache is ''; it must not be empty"),
    tiny(
        "no-such-accept-change", "--checkpoint.accept-change optimizer.warmpu", "accept_change names optimizer.warmpu", "optimizer.warmup?"
    ),
)

NUMBERS = (
    *(
        tiny(f"zero-{field}", f"--{field} 0", f"{field.replace('-', '_')} is 0; it must be at least 1")
        for field in (
            *("training.num-steps", "training.global-batch-size", "model.num-layers", "model.num-heads", "model.sequence-length"),
            *("model.vocabulary-multiple", "model.feedforward-size", "pipeline.num-microbatches", "pipeline.microbatch-size", "mesh.data"),
            *("checkpoint.keep", "data.prefetch", "logging.every", "runtime.num-cpu-devices"),
        )
    ),
    tiny("negative-seed", "--seed -1", "seed is -1; it must be from 0 to 4294967295"),
    tiny("negative-seed-with-equals", "--seed=-1", "seed is -1; it must be from 0 to 4294967295"),
    tiny("seed-of-33-bits", "--seed 4294967296", "seed is 4294967296; it must be from 0 to 4294967295"),
    tiny("negative-warmup", "--optimizer.warmup -5", "optimizer.warmup is -5; it must be at least 0"),
    tiny("negative-decay", "--optimizer.weight-decay -0.1", "optimizer.weight_decay is -0.1; it must be at least 0"),
    tiny("nan", "--optimizer.learning-rate nan", "optimizer.learning_rate is nan; it must be a finite number"),
    tiny("infinite", "--optimizer.weight-decay inf", "optimizer.weight_decay is inf; it must be a finite number"),
    tiny("minus-infinite", "--optimizer.clip-norm=-inf", "optimizer.clip_norm is -inf; it must be a finite number"),
    tiny("too-large-a-float", "--optimizer.learning-rate 1e999", "optimizer.learning_rate is inf; it must be a finite number"),
    tiny("no-learning-rate", "--optimizer.learning-rate 0", "optimizer.learning_rate is 0.0; it must be above 0"),
    tiny("rate-that-rises", "--optimizer.min-learning-rate 1", "optimizer.min_learning_rate is 1.0", "optimizer.learning_rate, 0.0003"),
    tiny("beta-of-1", "--optimizer.beta1 1", "optimizer.beta1 is 1.0"),
    tiny("dropout-of-1", "--model.hidden-dropout 1", "model.hidden_dropout is 1.0"),
    tiny("memory-fraction-above-1", "--runtime.memory-fraction 1.5", "runtime.memory_fraction is 1.5"),
)

DIVISORS = (
    tiny("heads", "--model.num-heads 3", "model.hidden_size is 8", "hidden sizes: 6 or 9", "head counts: 2 or 4"),
    tiny("heads-of-a-large-prime", "--model.hidden-size 1000000007", "model.hidden_size is 1000000007", "head counts: 1 or 1000000007"),
    tiny("batch-by-data", "--mesh.data 3", "training.global_batch_size is 4", "mesh.data 3", "nearest: 3 or 6"),
    tiny("batch-by-microbatches", "--pipeline.num-microbatches 3", "pipeline.num_microbatches is 3", "4 samples", "nearest: 2 or 4"),
    tiny("batch-by-microbatch-size", "--pipeline.microbatch-size 8", "pipeline.microbatch_size is 8", "4 samples", "nearest: 4"),
    tiny(
        "both-microbatch-fields",
        "--pipeline.microbatch-size 2 --pipeline.num-microbatches 4",
        *("pipeline.microbatch_size 2 x pipeline.num_microbatches 4", "= 8, but training.global_batch_size is 4", "to 2"),
    ),
    tiny("heads-by-tensor", "--mesh.tensor 8", "model.num_heads is", "which mesh.tensor 8 does not divide", "nearest mesh.tensor: "),
    tiny("more-stages-than-layers", "--mesh.pipe 64", "mesh.pipe is 64, but model.num_layers is"),
    tiny("no-such-axis", "--mesh.inside tensr", "mesh.inside names 'tensr'", "did you mean tensor?"),
    tiny("more-cpu-devices-than-mesh", "--runtime.num-cpu-devices 4", "num_cpu_devices is 4", "= 1; set mesh.data to 4"),
    tiny("fewer-cpu-devices-than-mesh", "--runtime.num-cpu-devices 1 --mesh.data 2", "num_cpu_devices is 1", "num_cpu_devices to 2"),
)

LOSS_SCALE = (
    tiny("scale-outside", "--loss-scale.initial 0.5", "loss_scale.initial is 0.5", "between loss_scale.floor 1.0 and loss_scale.ceiling"),
    tiny("scale-that-shrinks", "--loss-scale.growth 0.5", "loss_scale.growth is 0.5; it must be above 1"),
    tiny("scale-that-never-falls", "--loss-scale.backoff 1", "loss_scale.backoff is 1.0; it must be above 0 and below 1"),
    tiny("static-zero", "--loss-scale.static 0", "loss_scale.static is 0.0; it must be above 0"),
    tiny("no-patience", "--loss-scale.hysteresis 0", "loss_scale.hysteresis is 0; it must be at least 1"),
    tiny("no-skips", "--loss-scale.skip-limit 0", "loss_scale.skip_limit is 0; it must be at least 1"),
)

NOT_YET = tuple(
    tiny(f"not-yet-{option.split('.')[1].replace(' ', '-')}", f"--{option}", f"{option.partition(' ')[0].replace('-', '_')} is ")
    for option in ("training.zero-stage 7",)
)

FOUR = "--model.num-layers 4 --mesh.pipe 2 --runtime.num-cpu-devices 2"
PIPELINE = (
    tiny("partition-word", "--pipeline.partition unifrom", "pipeline.partition is 'unifrom'", "manual:COUNT", "did you mean uniform?"),
    tiny("partition-bare-list", "--pipeline.partition 1,1", "pipeline.partition is '1,1'", "did you mean manual:1,1?"),
    tiny("partition-regex", "--pipeline.partition 'type:['", "'[' is no regular expression"),
    tiny("partition-without-match", f"{FOUR} --pipeline.partition type:conv", "matches no block of the model", "TransformerLayer"),
    tiny("partition-sum", f"{FOUR} --pipeline.partition manual:2,1", "3 layers in all, but the model has 4; such as manual:2,2"),
    tiny("partition-parts", f"{FOUR} --pipeline.partition manual:2,1,1", "3 counts, but mesh.pipe x", "is 2; such as manual:2,2"),
    tiny("partition-empty-stage", f"{FOUR} --pipeline.partition manual:4:0,4,4", "leaves part 1 without a block", "manual:4:0,2,4"),
    tiny("partition-entries", f"{FOUR} --pipeline.partition manual:5:0,2,5", "4 blocks, which are 10 pipeline entries", "manual:4:0,2,4"),
    tiny("chunks-of-1f1b", f"{FOUR} --pipeline.num-chunks 2", "pipeline.num_chunks is 2, but pipeline.schedule 1f1b has 1 chunk"),
    tiny(
        "chunks-above-layers",
        f"{FOUR} --pipeline.num-chunks 3 --pipeline.schedule interleaved",
        "mesh.pipe 2 x pipeline.num_chunks 3 = 6, but model.num_layers is 4",
        "pipeline.num_chunks is at most 2",
    ),
    tiny(
        "head-not-divided",
        "--model.num-layers 5 --mesh.pipe 5 --runtime.num-cpu-devices 5 --pipeline.head shared",
        *("pipeline.head is shared, but mesh.pipe 5 does not divide the 264 rows", "nearest mesh.pipe: 4 or 6", "multiple: 5 or 10"),
    ),
    tiny("no-such-schedule-file", "--pipeline.schedule nope.csv", "nope.csv", "No such file"),
    tiny("no-such-head", "--pipeline.head first", "--pipeline.head is 'first'; it must be one of 'everywhere', 'last', 'shared'"),
)

PROCESSES_AND_DEGREES = (
    tiny("coordinator-alone", "--runtime.coordinator host:1234", "the coordinator is host:1234, but nothing says how many processes"),
    tiny("coordinator-without-port", "--runtime.coordinator host", "runtime.coordinator is host; it must be HOST:PORT with a port"),
    tiny("no-process", "--runtime.num-processes 0", "runtime.num_processes is 0; it must be at least 1"),
    tiny("number-alone", "--runtime.num-processes 2", "runtime.num_processes is 2, but nothing says which of them", "--runtime.process-id"),
    tiny("process-alone", "--runtime.process-id 1", "runtime.process_id is 1, but nothing says how many processes there are"),
    tiny("no-address", "--runtime.num-processes 2 --runtime.process-id 1", "but nothing says where process 0 is"),
    tiny("no-time", "--runtime.start-timeout 0", "runtime.start_timeout is 0.0; it must be above 0"),
    tiny("degree-word", "--mesh.data all", "--mesh.data is 'all'; it must be a whole number or None"),
    tiny(
        "degree-of-no-rest",
        "--mesh.data None --mesh.tensor 2 --runtime.num-cpu-devices 3",
        "= 2 does not divide the devices that mesh.data",
    ),
    tiny(
        "degree-inferred",
        "--mesh.data None --runtime.num-cpu-devices 3",
        *("training.global_batch_size is 4", "mesh.data 3 x mesh.replica 1 = 3", "nearest: 3 or 6 (mesh.data 3 inferred from 3 devices)"),
    ),
    tiny(
        "degree-of-stages", "--mesh.pipe None --runtime.num-cpu-devices 2", "mesh.pipe is 2, but model.num_layers is 1", "(mesh.pipe 2 inf"
    ),
)

DATA = (
    tiny("no-such-corpus", "--data.train corpsu", "data.train is corpsu, but there is no corpsu.idx; did you mean corpus?"),
    tiny("no-such-folder", "--data.train no/corpus", "data.train is no/corpus, but there is no folder no"),
    tiny("folder-for-prefix", "--data.train sub", "data.train is sub, a folder; name a pair in it, such as sub/inner"),
    tiny("folder-without-pairs", "--data.train folder.py", "data.train is folder.py, a folder; it holds no indexed pair"),
    tiny("text-for-prefix", "--data.train a.txt", "data.train is a.txt", "prepare_data.py a.txt --output PREFIX"),
    tiny("prefix-in-unicode", "--data.train '[red]ö\n'", "data.train is [red]ö"),
    tiny("no-index", "--data.train noindex", "beside noindex.bin there is no noindex.idx"),
    tiny("no-tokens", "--data.train notokens", "beside notokens.idx there is no notokens.bin"),
    tiny("one-weight-of-two", "--data.train corpus:0.5 sub/inner", "data.train gives weights to some corpora, but none to sub/inner"),
    tiny("weight-of-0", "--data.train corpus:0 sub/inner:1", "data.train is 'corpus:0'; a weight is a plain decimal above 0, such as 0.7"),
    tiny("weight-by-powers", "--data.train corpus:1e3 sub/inner:1", "data.train is 'corpus:1e3'; a weight is a plain decimal"),
    tiny("corpus-twice", "--data.train corpus:1 corpus:2", "data.train names corpus twice; give it once, with a weight"),
    tiny("synthetic-in-a-blend", "--data.train corpus synthetic", "data.train blends synthetic with other corpora"),
    tiny(
        "another-tokenizer",
        "--data.train corpus words",
        "words and corpus were prepared with different tokenizers (huggingface of 17 ids and",
    ),
    tiny("validated-by-another", "--data.validation words", "words and corpus were prepared with different tokenizers"),
    tiny("lost-tokenizer", "--data.train lost", "cannot read lost.tokenizer.json: No such file"),
    tiny("exchanged-tokenizer", "--data.train exchanged", "exchanged.tokenizer.json is not the tokenizer that was recorded"),
    tiny("unknown-tokenizer", "--data.train unknown", "unknown.tokenizer is of the tokenizer 'runes', which this version does not have"),
    tiny("split-into-four", "--data.split 1,1,1,1", "data.split is '1,1,1,1'; it must be up to three numbers with commas"),
    tiny("split-in-words", "--data.split most,some", "data.split is 'most,some'; it must be up to three numbers"),
    tiny("split-without-training", "--data.split 0,1", "data.split is '0,1'; it must be", "the first above 0"),
    tiny(
        "split-and-validation", "--data.split 9,1 --data.validation sub/inner", "data.split is 9,1 and data.validation is sub/inner; either"
    ),
    tiny("split-of-one-document", "--data.split 9,1", "data.split is 9,1, which leaves none of the 1 documents of corpus for validation"),
    tiny("split-of-synthetic", "--data.train synthetic --data.split 9,1", "data.split is 9,1, but synthetic tokens are of no documents"),
    tiny("split-too-small", "--data.train halves --data.split 1,2", "that part of halves holds 1 tokens, too few for one sample"),
    tiny(
        "split-without-validation", "--data.split 1 --training.eval-every 5", "training.eval_every is 5, but data.validation names nothing"
    ),
    tiny("warmup-without-steps", "--data.length-warmup 4", "data.length_warmup holds '4'; it must be LENGTH:STEPS"),
    tiny("warmup-that-falls", "--data.length-warmup 4:1 2:1", "data.length_warmup goes from 4 to 2 tokens; its lengths must ascend"),
    tiny(
        "warmup-too-long", "--data.length-warmup 8:1", "data.length_warmup goes up to 8 tokens; it must stay below model.sequence_length, 8"
    ),
    tiny(
        "warmup-by-tensor",
        "--data.length-warmup 3:1 --mesh.tensor 2",
        "data.length_warmup has a length of 3, which mesh.tensor 2",
        "2 or 4",
    ),
    tiny("weight", "--data.train corpus:0.5", "data.train is 'corpus:0.5'", "write corpus"),
    tiny("empty-prefix", "--data.train ''", "data.train is ('',); it must not be empty"),
    tiny("no-corpus", "--data.train", "data.train is empty"),
    tiny("empty-index", "--data.train emptyindex", "emptyindex.idx is empty"),
    tiny("empty-tokens", "--data.train emptytokens", "emptytokens.bin is empty"),
    tiny("bad-magic", "--data.train magic", "magic.idx is not a Megatron index"),
    tiny("bad-version", "--data.train version", "version.idx is of version 2"),
    tiny("bad-dtype", "--data.train dtype", "dtype.idx has the dtype code 99"),
    tiny("float-tokens", "--data.train floats", "floats.idx says that floats.bin holds float32"),
    *(
        tiny(f"index-cut-at-{size}", f"--data.train cut{size}", f"cut{size}.idx is cut off: it has {size} bytes")
        for size in (5, 20, 33, 40, 60)
    ),
    tiny("index-too-long", "--data.train long", "long.idx goes on after its end"),
    tiny("tokens-cut-off", "--data.train shorttokens", "shorttokens.idx does not fit shorttokens.bin: sequence 0", "cut off"),
    tiny("damaged-record", "--data.train badrecord", "badrecord.json is not the tokenizer record of badrecord.bin"),
    tiny("recorded-vocabulary", "--data.train wide", "data.train wide was prepared with a vocabulary of 50257", "vocabulary_size is 257"),
    tiny("unrecorded-vocabulary", "--data.train foreign", "foreign.bin holds the token id 300 (token 50", "vocabulary_size is 257"),
    tiny("shorter-than-a-sample", "--data.train few", "few holds 8 tokens, too few", "sequence_length 8 + 1", "7 or less"),
    tiny("longer-samples", "--model.sequence-length 4096", "corpus holds 101 tokens, too few", "sequence length of 100 or less"),
    tiny("evaluation-without-data", "--training.eval-every 5", "training.eval_every is 5, but data.validation names nothing"),
    tiny("no-such-validation", "--data.validation nope", "data.validation is nope, but there is no nope.idx"),
    tiny("validation-too-short", "--data.validation few", "few holds 8 tokens, too few"),
    case(
        "real-size-without-data",
        "pretrain --config gpt2_124m",
        "data.train is empty",
        "prepare_data.py FILE... --output data/train",
        "prepare_data.py HELD_OUT_FILE... --output data/validation",
    ),
)

CONFIG_FILES = {
    "syntax": ("def config(:\n", "config syntax.py failed: SyntaxError: "),
    "raises": ("\nraise RuntimeError('two\\nlines')\n", "config raises.py failed in line 2 of raises.py: RuntimeError: two lines"),
    "exits": ("raise SystemExit(0)\n", "config exits.py failed in line 1 of exits.py: SystemExit: 0"),
    "imports": ("import no_such_module\n", "config imports.py failed in line 1 of imports.py: ModuleNotFoundError: "),
    "other": ("def config():\n    return 3\n", "config other.py: config() in other.py returns 3, not a RunConfig"),
    "without": ("", "config without.py: without.py defines no function config()"),
    "value": ("config = 3\n", "config value.py: value.py defines no function config()"),
    "binary": ("\0\0", "config binary.py failed: ", "null bytes"),
    "text": (TINY.replace("num_layers=1", "num_layers='1'"), "config text.py: model.num_layers is '1'; it must be a whole number"),
    "boolean": (TINY.replace("num_layers=1", "num_layers=True"), "config boolean.py: model.num_layers is True; it must be a whole number"),
    "bare": (TINY.replace('("corpus",)', '"corpus"'), "config bare.py: data.train is 'corpus'; it must be a tuple of strings"),
    "nested": (TINY.replace('("corpus",)', "(1,)"), "config nested.py: data.train is (1,); it must be a tuple of strings"),
    "group": (
        TINY.replace("logging=LoggingConfig(tensorboard=False)", "logging=None"),
        "config group.py: logging is None; it must be a Log",
    ),
    "field": (TINY.replace("num_layers", "num_layer"), "config field.py failed in line 7 of field.py: TypeError: ", "'num_layer'"),
    "choice": (TINY.replace("hidden_size", "head='tide', hidden_size"), "model.head is 'tide'; it must be one of tied, untied", "tied?"),
    "zero-byte": (TINY.replace('name="tiny"', r'name="tiny", run_dir="a\0b"'), "run_dir is 'a\\x00b'; it must not be empty or hold a zero"),
}
CONFIGS = tuple(case(f"config-{name}", f"pretrain --config {name}.py", *says) for name, (_, *says) in CONFIG_FILES.items())

RUN_DIRECTORY = (
    tiny("run-is-a-file", "--run-dir a.txt", "the run directory a.txt cannot be written: File exists"),
    tiny("run-under-a-file", "--run-dir a.txt/x/y", "the run directory a.txt/x/y cannot be written: Not a directory"),
    tiny("run-of-a-long-name", f"--run-dir new/{'a' * 300}", "cannot be written: File name too long"),
    tiny(
        "run-without-room", "--run-dir new/run --checkpoint.keep 1000000000000", "new/run has room for", "checkpoint.keep 1000000000000 + 1"
    ),
    tiny("checkpoints-is-a-file", "--run-dir runs/file", "runs/file/checkpoints is no folder"),
    tiny("config-json-is-a-folder", "--run-dir runs/folder", "runs/folder/config.json is a folder"),
    # Nothing may be left of a run directory that was found good before the data was found bad.
    tiny("run-with-bad-data", "--run-dir new/run --data.train magic", "magic.idx is not a Megatron index"),
)

GENERATE = (
    case("generate-nothing", "generate", "--run is missing"),
    case("generate-empty-run", "generate --run ''", "--run is empty"),
    case("generate-no-such-run", "generate --run nope", "nope is not the directory of a run", "no config.json"),
    case("generate-from-a-file", "generate --run a.txt", "a.txt is not the directory of a run"),
    case("generate-from-a-folder", "generate --run sub", "sub is not the directory of a run"),
    case("generate-untokenized", "generate --run runs/synthetic", "runs/synthetic is not the directory of a run", "no tokenizer.json"),
    *(
        case(f"generate-config-{name}", f"generate --run runs/{name}", f"runs/{name}/config.json is damaged", says)
        for name, says in (("torn", "line"), ("list", "not a JSON object"), ("number", "not a JSON object"), ("latin", "codec"))
    ),
    case("generate-config-folder", "generate --run runs/folder", "cannot read runs/folder/config.json: Is a directory"),
    case("generate-config-field", "generate --run runs/field", "runs/field/config.json is damaged", "model.num_layer;"),
    case("generate-config-type", "generate --run runs/type", "runs/type/config.json is damaged", "model.num_layers is 'one'"),
    case("generate-tokenizer-torn", "generate --run runs/tokenizer", "runs/tokenizer/tokenizer.json is damaged"),
    case("generate-cold", "generate --run runs/good --temperature -1", "--temperature is -1.0; it must be a number of at least 0"),
    case("generate-nan", "generate --run runs/good --temperature nan", "--temperature is nan"),
    case("generate-infinite", "generate --run runs/good --temperature inf", "--temperature is inf"),
    case("generate-empty-prompt", "generate --run runs/good --prompt ''", "--prompt is empty"),
    case("generate-no-tokens", "generate --run runs/good --max-tokens 0", "--max-tokens is 0; it must be at least 1"),
    case("generate-negative-seed", "generate --run runs/good --seed -1", "--seed is -1; it must be from 0 to 4294967295"),
    case("generate-unknown-option", "generate --run runs/good --temprature 1", "--temprature, 1 cannot be understood"),
    case("generate-top-0", "generate --run runs/good --top-k 0", "--top-k is 0; it must be at least 1, or None to choose among all"),
    case("generate-no-probability", "generate --run runs/good --top-p 0", "--top-p is 0.0; it must be above 0 and at most 1"),
    case("generate-nan-probability", "generate --run runs/good --top-p nan", "--top-p is nan; it must be above 0 and at most 1"),
    case("generate-penalty", "generate --run runs/good --repetition-penalty 0", "--repetition-penalty is 0.0; it must be a number above 0"),
    case("generate-empty-stop", "generate --run runs/good --stop a ''", "--stop has an empty string"),
    case("generate-both", "generate --run runs/good --prompt a --prompts a.txt", "--prompt and --prompts are both given"),
    case("generate-no-batch", "generate --run runs/good --prompts a.txt --batch-size 0", "--batch-size is 0; it must be at least 1"),
    case("generate-no-file", "generate --run runs/good --prompts nope", "--prompts nope cannot be read: No such file or directory"),
    case("generate-of-a-folder", "generate --run runs/good --prompts sub", "--prompts sub cannot be read: Is a directory"),
    case("generate-binary", "generate --run runs/good --prompts latin.txt", "--prompts latin.txt is not UTF-8: line 2 has the byte 0xff"),
    case("generate-of-nothing", "generate --run runs/good --prompts empty.txt", "--prompts empty.txt holds nothing but blank lines"),
    case("generate-empty-line", "generate --run runs/good --prompts quotes.txt", 'quotes.txt line 3 is ""; a prompt has at least one char'),
    case("generate-over", "generate --run runs/good --output a.txt", "--output a.txt is there already; nothing is overwritten"),
    case("generate-nowhere", "generate --run runs/good --output nope/x", "--output is nope/x, but there is no folder nope"),
)

EVALUATE = (
    case("evaluate-nothing", "evaluate --run runs/good", "--data PREFIX and --tasks FILE are missing"),
    case("evaluate-no-such-run", "evaluate --run nope --data corpus", "nope is not the directory of a run", "no config.json"),
    case("evaluate-no-corpus", "evaluate --run runs/good --data nope", "--data is nope, but there is no nope.idx"),
    case("evaluate-damaged", "evaluate --run runs/good --data magic", "magic.idx is not a Megatron index"),
    case("evaluate-synthetic", "evaluate --run runs/good --data synthetic", "--data is synthetic, random tokens"),
    case("evaluate-wide", "evaluate --run runs/good --data wide", "--data wide was prepared with a vocabulary of 50257", "is 257"),
    case("evaluate-words", "evaluate --run runs/good --data words", "--data words was prepared with another tokenizer (huggingface"),
    case("evaluate-untokenized", "evaluate --run runs/synthetic --tasks a.txt", "runs/synthetic is not the directory", "no tokenizer.json"),
    case("evaluate-text", "evaluate --run runs/good --tasks a.txt", "--tasks a.txt line 1 is not JSON", '{"text": ...}'),
    case("evaluate-other-form", "evaluate --run runs/good --tasks form.jsonl", "form.jsonl line 1 has ctx, endings; each line is"),
    case("evaluate-long-choice", "evaluate --run runs/good --tasks long.jsonl", "long.jsonl line 1: ' 123456789'... has 10 tokens", ", 8"),
    case("evaluate-json", "evaluate --run runs/good --data corpus --json sub", "--json is sub, a folder; name a file"),
    case("evaluate-no-batch", "evaluate --run runs/good --data corpus --batch-size 0", "--batch-size is 0; it must be at least 1"),
)

PLAN = (
    case("plan-no-cluster", "plan --config gpt13b", "--cluster is missing"),
    case("plan-no-such-cluster", "plan --config gpt13b --cluster v100", "there is no cluster v100", "v100x4-tcp100"),
    case("plan-no-nodes", "plan --config gpt13b --cluster v100x0-tcp100", "there is no cluster v100x0-tcp100"),
    case("plan-no-such-config", "plan --config gpt13 --cluster v100x4-tcp100", "there is no config gpt13; did you mean gpt13b?"),
    case("plan-bad-config", "plan --config text.py --cluster v100x4-tcp100", "config text.py: model.num_layers is '1'"),
    case("plan-no-rows", "plan --config gpt13b --cluster v100x4-tcp100 --top 0", "--top is 0; it must be at least 1"),
    case("plan-too-small", "plan --config gpt3_175b --cluster v100x1-tcp100", "gpt3_175b does not fit v100x1-tcp100", "take about"),
    case("plan-too-many-nodes", "plan --config gpt13b --cluster v100x300-tcp100", "has 300 nodes; plans go up to 128"),
    case(
        "plan-no-such-strategy", "plan --config gpt13b --cluster v100x4-tcp100 --strategy zero", "--strategy is 'zero'; it must be one of"
    ),
    case("plan-no-such-file", "plan --config gpt13b --cluster lab.toml", "cluster file lab.toml cannot be read: No such file"),
    case(
        "plan-verify-a-baseline",
        "plan --config gpt13b --cluster v100x4-tcp100 --strategy zero3 --verify",
        "--verify compiles a plan of this program, which --strategy zero3 is not",
    ),
    case(
        "plan-megatron-on-one-node",
        "plan --config gpt13b --cluster v100x1-tcp100 --strategy megatron",
        "--strategy megatron is tensor 4 x pipe 4, which 1 nodes of 8 GPUs",
    ),
    tiny("no-such-mesh-plan", "--mesh.plan best", "--mesh.plan is 'best'; it must be one of 'config', 'auto'"),
)

PREPARE = (
    case("prepare-nothing", "prepare_data --output new/p", "no FILE was given"),
    case("prepare-no-output", "prepare_data a.txt", "--output is missing"),
    case("prepare-missing", "prepare_data nope.txt --output new/p", "cannot read nope.txt: No such file"),
    case("prepare-folder", "prepare_data sub --output new/p", "sub is a folder; name the text files in it"),
    case("prepare-empty", "prepare_data a.txt empty.txt --output new/p", "empty.txt is empty"),
    case("prepare-twice", "prepare_data a.txt a.txt --output new/p", "a.txt was given twice"),
    case("prepare-link", "prepare_data a.txt link.txt --output new/p", "a.txt was given twice, the second time as link.txt"),
    case("prepare-existing", "prepare_data a.txt --output corpus", "corpus.bin exists already"),
    case("prepare-existing-index", "prepare_data a.txt --output notokens", "notokens.json exists already"),
    case("prepare-output-folder", "prepare_data a.txt --output sub", "--output is 'sub', a folder"),
    case("prepare-output-under-a-file", "prepare_data a.txt --output a.txt/x/p", "its folder a.txt/x cannot be made: Not a directory"),
    case("prepare-output-of-a-long-name", f"prepare_data a.txt --output new/{'a' * 300}", "File name too long"),
    case("prepare-tokenizer", "prepare_data a.txt --output new/p --tokenizer byte", "no tokenizer 'byte'", "did you mean bytes?"),
)

CASES = (
    *(*COMMAND_LINE, *TYPES, *NUMBERS, *DIVISORS, *PROCESSES_AND_DEGREES, *LOSS_SCALE, *NOT_YET, *PIPELINE, *DATA, *CONFIGS),
    *(*RUN_DIRECTORY, *GENERATE, *EVALUATE, *PLAN, *PREPARE),
)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good and broken inputs."""
    folder = tmp_path_factory.mktemp("stock")
    for path in ("sub", "folder.py", "runs/folder/config.json", "runs/file"):
        (folder / path).mkdir(parents=True)
    ids = [*range(50), 7, *range(50)]

    def corpus(name: str, ids: list[int], record: TokenizerRecord | None = RECORD, dtype: type | None = None) -> None:
        with write_indexed(str(folder / name), record, None if dtype is None else np.dtype(dtype)) as writer:
            writer.append(np.array(ids))
            writer.end_document()

    def damaged(name: str, change: Callable[[bytes], bytes], ending: str = ".idx") -> None:
        corpus(name, ids)
        path = folder / f"{name}{ending}"
        path.write_bytes(change(path.read_bytes()))

    corpus("corpus", ids)
    corpus("sub/inner", ids)
    corpus("few", ids[:8])
    corpus("wide", ids, dataclasses.replace(RECORD, vocabulary_size=50257))
    corpus("foreign", [*range(50), 300, *range(50)], None, np.uint16)
    halves = np.split(np.array([*ids, 7]), [1])
    with write_indexed(str(folder / "halves"), RECORD) as writer:
        for half in [*halves, np.array([7])]:
            writer.append(half)
            writer.end_document()
    Path(folder / "vocab.txt").write_text("\n".join(["[UNK]", "[SEP]", *map(chr, range(97, 112))]))
    words = load_tokenizer(str(folder / "vocab.txt"))
    for name in ("words", "lost", "exchanged"):
        corpus(name, [1, 2, 3] * 20, record_of(words))
        (folder / f"{name}.tokenizer.json").write_bytes(words.file)
    (folder / "lost.tokenizer.json").unlink()
    (folder / "exchanged.tokenizer.json").write_bytes(words.file + b" ")
    corpus("unknown", ids, dataclasses.replace(RECORD, tokenizer="runes"))
    damaged("magic", lambda index: b"X" + index[1:])
    damaged("version", lambda index: index[:9] + struct.pack("<Q", 2) + index[17:])
    damaged("dtype", lambda index: index[:17] + b"\x63" + index[18:])
    damaged("floats", lambda index: index[:17] + b"\x07" + index[18:])
    damaged("long", lambda index: index + b"\0")
    damaged("emptyindex", lambda index: b"")
    damaged("emptytokens", lambda tokens: b"", ".bin")
    damaged("shorttokens", lambda tokens: tokens[:-2], ".bin")
    damaged("badrecord", lambda record: record[:9], ".json")
    for size in (5, 20, 33, 40, 60):
        damaged(f"cut{size}", operator.itemgetter(slice(size)))
    for name, ending in (("noindex", ".idx"), ("notokens", ".bin")):
        corpus(name, ids)
        (folder / f"{name}{ending}").unlink()
    (folder / "a.txt").write_text("some text")
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes(b"a\n\xff\n")
    (folder / "quotes.txt").write_text('a\n\n""\n')
    (folder / "form.jsonl").write_text('{"ctx": "a", "endings": ["b", "c"]}\n')
    (folder / "long.jsonl").write_text('{"text": "a 123456789"}\n')
    (folder / "link.txt").symlink_to("a.txt")
    (folder / "tiny.py").write_text(TINY)
    for name, (text, *_) in CONFIG_FILES.items():
        (folder / f"{name}.py").write_text(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = command_line.preset("tiny.py")

    def run(name: str, change: Callable[[bytes], bytes], file: str = "config.json") -> None:
        (folder / "runs" / name).mkdir()
        write_record(folder / "runs" / name / "config.json", config)
        write_record(folder / "runs" / name / "tokenizer.json", RECORD)
        path = folder / "runs" / name / file
        path.write_bytes(change(path.read_bytes()))

    run("good", lambda config: config)
    run("torn", lambda config: config[:-20])
    run("list", lambda config: b"[]")
    run("number", lambda config: b"3")
    run("latin", lambda config: b'"\xff"')
    run("field", lambda config: config.replace(b"num_layers", b"num_layer"))
    run("type", lambda config: config.replace(b'"num_layers": 1', b'"num_layers": "one"'))
    run("tokenizer", lambda record: record[:9], "tokenizer.json")
    run("synthetic", lambda config: config)
    (folder / "runs/synthetic/tokenizer.json").unlink()
    (folder / "runs/file/checkpoints").touch()
    return folder


@pytest.fixture
def folder(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stock, which is the working directory and holds the cache folder."""
    work = tmp_path / "work"
    shutil.copytree(stock, work, symlinks=True, copy_function=shutil.copyfile)
    (work / "cache").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(work / "cache"))
    # The GPUs of the machine that tests run on are not the subject.
    monkeypatch.setattr(cluster, "_query_gpus", lambda: [])
    return work


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file with its content and every folder; of the cache only files, for what starts JAX may make its folder."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
    return {name: content for name, content in found.items() if content is not None or not name.startswith("cache/")}


class Outcome(NamedTuple):
    """How a program ended."""

    code: int
    out: str
    err: str


class Run(Protocol):
    """Runs a whole script in this process, as `python scripts/NAME.py ARGUMENTS` does."""

    def __call__(self, command: str, starts_jax: bool = False) -> Outcome: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def run(command: str, starts_jax: bool = False) -> Outcome:
        name, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [f"scripts/{name}.py", *arguments])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        for variable in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_CPP_MIN_LOG_LEVEL"):
            monkeypatch.setenv(variable, os.environ.get(variable, "0.5"))
        if not starts_jax:
            monkeypatch.setattr(runtime, "start", lambda *_: pytest.fail("JAX was started before the refusal"))
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        return Outcome(int(exit.value.code or 0), *capsys.readouterr())

    yield run
    jax.config.update("jax_compilation_cache_dir", COMPILED)


def run_process(command: str, first: str = "", environment: dict[str, str] | None = None, folder: Path | None = None) -> Outcome:
    """The same in a process of its own, as a user starts it, or after the statements `first`."""
    name, *arguments = shlex.split(command)
    start = [str(SCRIPTS / f"{name}.py")]
    if first:
        start = ["-c", f"{first}\nimport runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')", *start]
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        timeout=120,
        env=os.environ | (environment or {}),
        cwd=folder,
        check=False,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


def check_refused(outcome: Outcome, *says: str) -> None:
    """Assert exit code 2 and exactly one clear line that holds the phrases `says`."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.endswith("\n") and outcome.err.count("\n") == 1, outcome.err
    sentence = outcome.err.removesuffix("\n")
    assert sentence.startswith("error: ") and sentence.lower().count("error: ") == 1 + sentence.count("Error: "), sentence
    for phrase in ("Traceback", "Errno", "<class", "[/", "│", "  "):
        assert phrase not in sentence, sentence
    assert sentence == sentence.strip() and not sentence.endswith((".", ";", ":", ",")), sentence
    for phrase in says:
        assert phrase in sentence, sentence


def test_there_are_cases_enough() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len({case.command for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_is_refused_and_nothing_is_written(case: Case, folder: Path, run: Run) -> None:
    before = snapshot(folder)
    check_refused(run(case.command), *case.says)
    assert snapshot(folder) == before


PROCESSES = (
    tiny("process-unknown-field", "--training.num-step 3", "there is no field --training.num-step; did you mean --training.num-steps?"),
    tiny("process-bytes", "--run-dir a.txt/\udcff", "a.txt/\\udcff cannot be written: Not a directory"),
    case("process-real-size-without-data", "pretrain --config gpt2_124m", "data.train is empty"),
    tiny("process-mesh-of-2", "--mesh.data 2 --run-dir new/run", "this job has 1", "or add --runtime.num-cpu-devices 2"),
    case("process-generate", "generate --run runs/good", "runs/good/checkpoints holds no whole checkpoint"),
    case("process-evaluate", "evaluate --run runs/good --data corpus", "runs/good/checkpoints holds no whole checkpoint"),
    case("process-prepare", "prepare_data sub --output new/p", "sub is a folder"),
    case("process-plan", "plan --config gpt13b --cluster v100", "there is no cluster v100"),
)


@pytest.mark.parametrize("case", PROCESSES, ids=[case.name for case in PROCESSES])
def test_a_process_refuses_alike(case: Case, folder: Path) -> None:
    before = snapshot(folder)
    # Neither the GPUs of this machine nor the eight CPU devices of the other tests.
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    check_refused(run_process(case.command, environment=environment), *case.says)
    assert snapshot(folder) == before


def test_a_terminal_without_unicode_gets_the_same_sentence(folder: Path) -> None:
    outcome = run_process("plan --config gpt13b", environment={"PYTHONIOENCODING": "ascii"})
    assert outcome == Outcome(2, "", "error: --cluster is missing\n")


def test_a_model_too_large_for_memory_is_refused_without_jax(folder: Path) -> None:
    before = snapshot(folder)
    memory = f"from giantjax import cluster; cluster._query_gpus, cluster._host_memory = lambda: [], lambda: {24 * GIB}"
    loaded = "import atexit, sys; atexit.register(lambda: print({'jax', 'flax', 'orbax', 'grain'} & set(sys.modules)))"
    outcome = run_process("pretrain --config gpt13b", first=f"{memory}\n{loaded}")
    assert outcome.out == "set()\n"
    check_refused(
        outcome._replace(out=""),
        "gpt13b needs 208.6 GiB (223,951,486,976 bytes) of memory",
        "this machine (CPU) has 24.0 GiB (25,769,803,776 bytes)",
        "the largest shipped config that fits is gpt_345m",
        "`python scripts/plan.py --config gpt13b --cluster v100x4-tcp100` says what would hold it",
    )
    assert snapshot(folder) == before


def test_a_model_too_large_for_a_gpu_is_refused(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cluster, "_query_gpus", lambda: [InstalledGPU(i, f"GPU-{i}", f"{i}", "NVIDIA A100-SXM4-40GB", 40 * GIB) for i in range(8)]
    )
    says = ("on each GPU", "this machine (NVIDIA A100-SXM4-40GB) has 40.0 GiB (42,949,672,960 bytes)", "config that fits is gpt3_1b3")
    check_refused(run("pretrain --config gpt3_6b7"), *says)
    check_refused(run("pretrain --config gpt3_175b"), "gpt3_175b does not fit this machine: even on pipe", "take about", "nodes")


def test_a_driver_that_hangs_is_refused(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(cluster, "_query_gpus", QUERY_GPUS)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", hang)
    check_refused(run("pretrain --config tiny.py"), "nvidia-smi did not answer within 30 s")


ADVICE = "set mesh.data to 8, or add --runtime.num-cpu-devices 16"
NEEDS_JAX = (
    tiny("mesh-of-16", "--mesh.data 16 --training.global-batch-size 16 --run-dir new/run", "mesh.data 16", "this job has 8", ADVICE),
    tiny("cache-under-a-file", "--runtime.compilation-cache a.txt/x", "runtime.compilation_cache a.txt/x cannot be made: Not a directory"),
)


@pytest.mark.parametrize("case", NEEDS_JAX, ids=[case.name for case in NEEDS_JAX])
def test_what_only_the_devices_tell_is_refused_and_nothing_is_written(case: Case, folder: Path, run: Run) -> None:
    before = snapshot(folder)
    check_refused(run(case.command, starts_jax=True), *case.says)
    assert snapshot(folder) == before


def test_a_token_that_its_record_denies_is_refused_when_it_is_read(folder: Path, run: Run) -> None:
    for ending, name in ((".bin", "foreign"), (".idx", "foreign"), (".json", "corpus")):
        shutil.copy(f"{name}{ending}", f"lie{ending}")
    options = "--data.train lie --training.global-batch-size 12 --runtime.compilation-cache off"
    outcome = run(f"pretrain --config tiny.py {options}", starts_jax=True)
    check_refused(outcome._replace(out=""), "lie.bin holds the token id 300 in sample", "(token 50", "vocabulary_size is 257")
    assert "step 1/" not in outcome.out


@pytest.fixture(scope="session")
def trained(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    path = tmp_path_factory.mktemp("trained") / "run"
    done = run_process(
        f"pretrain --config tiny.py --run-dir {path} --runtime.compilation-cache {COMPILED}",
        environment={"JAX_PLATFORMS": "cpu"},
        folder=stock,
    )
    assert done.code == 0, done
    return path


RESUMES = (
    tiny("other-seed", "--seed 3", "seed was 0 and is 3;", "`--checkpoint.accept-change seed`", "name another --run-dir"),
    tiny(
        "two-other-fields",
        "--optimizer.beta2 0.9 --training.global-batch-size 8",
        *("training.global_batch_size was 4 and is 8, optimizer.beta2 was 0.95 and is 0.9;",),
        "`--checkpoint.accept-change training.global_batch_size optimizer.beta2`",
    ),
    tiny(
        "one-of-two-accepted",
        "--seed 3 --optimizer.warmup 1 --checkpoint.accept-change seed",
        "configuration: optimizer.warmup was 0 and is 1;",
    ),
    tiny("other-corpus", "--data.train sub/inner", "data.train was corpus (", ") and is sub/inner ("),
    tiny(
        "other-shape", "--model.num-layers 2 --checkpoint.accept-change model.num_layers", "do not fit", "model.num_layers was 1 and is 2"
    ),
)


@pytest.mark.xdist_group("trained")
@pytest.mark.parametrize("case", RESUMES, ids=[case.name for case in RESUMES])
def test_a_run_is_not_resumed_as_another(case: Case, folder: Path, trained: Path, run: Run) -> None:
    shutil.copytree(trained, folder / "runs" / "tiny")
    before = snapshot(folder)
    check_refused(run(f"{case.command} --runtime.compilation-cache off", starts_jax=True), *case.says)
    assert snapshot(folder) == before


@pytest.mark.xdist_group("trained")
def test_another_text_under_the_old_name_is_another_corpus(folder: Path, trained: Path, run: Run) -> None:
    shutil.copytree(trained, folder / "runs" / "tiny")
    tokens = (folder / "corpus.bin").read_bytes()
    (folder / "corpus.bin").write_bytes(tokens[2:] + tokens[:2])
    outcome = run("pretrain --config tiny.py --runtime.compilation-cache off", starts_jax=True)
    check_refused(outcome, "data.train was corpus (", ") and is corpus (")


@pytest.mark.xdist_group("trained")
@pytest.mark.parametrize("command", ["generate --run runs/tiny", "pretrain --config tiny.py --training.num-steps 3"])
def test_a_damaged_checkpoint_is_named(command: str, folder: Path, trained: Path, run: Run) -> None:
    shutil.copytree(trained, folder / "runs" / "tiny")
    (folder / "runs/tiny/checkpoints/2/position/metadata").write_bytes(b"")
    before = snapshot(folder)
    check_refused(run(command, starts_jax=True), "checkpoint runs/tiny/checkpoints/2 cannot be read (", "move it away to start anew")
    assert snapshot(folder) == before


@pytest.mark.xdist_group("trained")
def test_a_config_of_another_model_does_not_read_a_checkpoint(folder: Path, trained: Path, run: Run) -> None:
    shutil.copytree(trained, folder / "runs" / "tiny")
    config = folder / "runs/tiny/config.json"
    config.write_text(config.read_text().replace('"num_layers": 1', '"num_layers": 2'))
    before = snapshot(folder)
    says = "runs/tiny/checkpoints/2 is of another model than runs/tiny/config.json says"
    check_refused(run("generate --run runs/tiny", starts_jax=True), says)
    assert snapshot(folder) == before


@pytest.mark.xdist_group("trained")
def test_an_accepted_change_is_said(folder: Path, trained: Path, run: Run) -> None:
    shutil.copytree(trained, folder / "runs" / "tiny")
    change = "--optimizer.learning-rate 0.1 --checkpoint.accept-change optimizer.learning-rate --runtime.compilation-cache off"
    code, out, err = run(f"pretrain --config tiny.py {change}", starts_jax=True)
    assert (code, err) == (0, "")
    assert "accepted change: optimizer.learning_rate was 0.0003 and is 0.1\n" in out and "nothing to do: step 2 of 2 is done\n" in out


@pytest.fixture
def mount(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory on `mounted`, with options, or skips the test."""
    place = folder / "mounted"

    def mount(options: str) -> Path:
        if shutil.which("mount") is None:
            pytest.skip("needs the program mount")
        place.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs to mount a file system: {done.stderr.strip()}")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


READ_ONLY = (
    tiny("run", "--run-dir mounted", "the run directory mounted cannot be written: Read-only file system"),
    tiny("new-run", "--run-dir mounted/new/run", "the run directory mounted/new/run cannot be written: Read-only file system"),
    case("corpus", "prepare_data a.txt --output mounted/p", "cannot write mounted/p.bin: Read-only file system"),
    case("new-folder", "prepare_data a.txt --output mounted/new/p", "its folder mounted/new cannot be made: Read-only file system"),
)


@pytest.mark.parametrize("case", READ_ONLY, ids=[case.name for case in READ_ONLY])
def test_a_disk_that_cannot_be_written(case: Case, folder: Path, run: Run, mount: Callable[[str], Path]) -> None:
    mount("ro")
    before = snapshot(folder)
    check_refused(run(case.command), *case.says)
    assert snapshot(folder) == before


# A case and the KiB that the disk has left.
FULL = (
    (tiny("run-without-room", "--run-dir mounted/new/run", "has room for 64.0 KiB, but checkpoint.keep 3 + 1 checkpoints of"), 64),
    (tiny("new-run", "--run-dir mounted/new/run", "the run directory mounted/new/run cannot be written: No space left on device"), 0),
    (tiny("run", "--run-dir mounted/old", "the run directory mounted/old cannot be written: No space left on device"), 0),
    (case("corpus", "prepare_data large.txt --output mounted/new/p", "cannot write mounted/new/p.bin: No space left on device"), 64),
)


@pytest.mark.parametrize(("case", "free"), FULL, ids=[case.name for case, _ in FULL])
def test_a_disk_that_is_full(case: Case, free: int, folder: Path, run: Run, mount: Callable[[str], Path]) -> None:
    place = mount("size=256k")
    shutil.copytree(folder / "runs" / "good", place / "old")
    (place / "filler").write_bytes(bytes(shutil.disk_usage(place).free - free * 2**10))
    (folder / "large.txt").write_bytes(b"x" * 10**5)
    before = snapshot(folder)
    check_refused(run(case.command), *case.says)
    assert snapshot(folder) == before


LIMITED = (
    tiny("new-run", "--run-dir new/run", "the run directory new/run cannot be written: File too large"),
    tiny("run", "--run-dir runs/good", "the run directory runs/good cannot be written: File too large"),
    case("corpus", "prepare_data large.txt --output new/p", "cannot write new/p.bin: File too large"),
)


@pytest.mark.parametrize("case", LIMITED, ids=[case.name for case in LIMITED])
def test_a_limit_on_the_size_of_files(case: Case, folder: Path) -> None:
    """What a full disk does, for those who may not mount one."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    (folder / "large.txt").write_bytes(b"x" * 10**5)
    before = snapshot(folder)
    check_refused(run_process(case.command, first=limit), *case.says)
    assert snapshot(folder) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write where the permissions say no")
@pytest.mark.parametrize("run_dir", ["locked", "locked/new"])
def test_a_folder_without_permission(run_dir: str, folder: Path, run: Run) -> None:
    (folder / "locked").mkdir(mode=0o555)
    before = snapshot(folder)
    check_refused(
        run(f"pretrain --config tiny.py --run-dir {run_dir}"), f"the run directory {run_dir} cannot be written: Permission denied"
    )
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", ["pretrain", "generate", "evaluate", "prepare_data", "plan"])
@pytest.mark.parametrize("option", ["-h", "--help", "--help-all"])
def test_help_is_no_error(name: str, option: str, folder: Path, run: Run) -> None:
    code, out, err = run(f"{name} {option}")
    assert (code, err) == (0, "") and "--help" in out


def test_help_shows_the_common_fields_and_help_all_every_one(folder: Path, run: Run) -> None:
    flags = {f"--{path.replace('_', '-')}" for path in leaves(command_line.preset("tiny.py"))}
    common = {f"--{path.replace('_', '-')}" for path in command_line.COMMON}
    assert common < flags

    def shown(option: str) -> set[str]:
        words = run(f"pretrain --config tiny.py {option}").out.replace("│", " ").replace(",", " ").split()
        return {word for word in words if word in flags or word.replace(".no-", ".") in flags}

    assert shown("--help") == common
    assert flags <= {flag.replace(".no-", ".") for flag in shown("--help-all")}


def test_spellings_that_are_no_mistakes(folder: Path) -> None:
    words = ["--config=tiny.py", "--training.num_steps=7", "--run_dir", "a_b", "--seed", "1", "--seed=2", "--logging.no-tensorboard"]
    config = command_line.parse_run(words, "")
    assert (config.training.num_steps, config.run_dir, config.seed, config.logging.tensorboard) == (7, "a_b", 2, False)


def test_output_that_nobody_reads_to_the_end(tmp_path: Path) -> None:
    """As under `| head`; and on a disk that is full, which is a fault."""
    script = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "pretrain.py"), "--help-all"]
    with subprocess.Popen(script, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(script, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (3, b"stopped: what is printed cannot be written: No space left on device\n")
