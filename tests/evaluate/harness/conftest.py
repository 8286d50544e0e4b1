"""Make a tiny model, tasks of every kind and a reference engine, once for this folder."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench_world import make_model, make_tasks
from reference_engine import ReferenceEngine

from holdfast.evaluate.types.harness import ModelFacts

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DISABLE_MULTIPROC": "1",  # lm-eval's bootstrap in this process: a pool would fork pytest
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True)
class World:
    model: Path
    tasks: Path

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            model=0, name="tiny/llama", tokenizer=str(self.model), max_length=0, digest="d1"
        )

    def engine(self, seed: int = 0) -> ReferenceEngine:
        return ReferenceEngine(self.model, seed=seed)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        caches = {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_DATASETS_CACHE": str(folder / "datasets"),
        }
        for name, value in {**ENVIRONMENT, **caches}.items():
            patch.setenv(name, value)
        # Read when `datasets` is imported, which another test may have done.
        import datasets

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(caches["HF_DATASETS_CACHE"]))
        patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
        yield World(model=make_model(folder / "model"), tasks=make_tasks(folder / "tasks"))


@pytest.fixture
def environment(world: World) -> dict[str, str]:
    """Return the environment for processes."""
    return {**os.environ, **ENVIRONMENT}
