"""What the tests of one file share: a corpus, and a run that nothing happened to."""

from pathlib import Path

import pytest

from giantjax.config import RunConfig
from tests.training.runs import small_run, train_here, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus) -> RunConfig:
    """Thirty steps, evaluated after every 8; checkpoints 18, 24 and 30 are there."""
    config = small_run(tmp_path_factory.mktemp("whole") / "run", corpus)
    assert train_here(config) == 0
    return config
