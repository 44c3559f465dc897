"""Runs that several contract tests compare with."""

import json
from typing import Any

import pytest

from fedlens.api import Result
from tests.contract.contract_kit import Baseline, experiment


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Runs an experiment once, on the kit's default engine; whoever asks for it again gets the same result."""
    results: dict[str, Result] = {}

    def run(algorithm: str, partition: str, **changes: Any) -> Result:
        key = json.dumps([algorithm, partition, changes], sort_keys=True)
        if key not in results:
            directory = tmp_path_factory.mktemp("baseline") / "run"
            results[key] = experiment(algorithm, partition, **changes).run(directory)
        return results[key]

    return run
