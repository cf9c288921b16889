"""The folder of real collections, which not every machine has."""

import os
from pathlib import Path

import pytest

from retrieval.evaluation.judging import file_judgments


def real_data(name: str) -> Path:
    """The file or folder ``name`` of it; the test is skipped where there is none."""
    if "RAYTRIEVER_TEST_DATA" not in os.environ:
        pytest.skip("RAYTRIEVER_TEST_DATA names no folder of real collections")
    return Path(os.environ["RAYTRIEVER_TEST_DATA"]) / name


def real_qrels(name: str) -> dict[str, dict[str, int]]:
    """Grades by query and document of a BEIR file."""
    return file_judgments(str(real_data(name)), []).qrels
