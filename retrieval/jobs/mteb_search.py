"""MTEB 2 over our stages: its corpora and queries become artifacts, and our indexes answer.

    search = RaytrieverSearch("runs/mteb", embed={"encoder": {"model": "sentence-transformers/all-MiniLM-L6-v2"}})
    mteb.evaluate(search, mteb.get_tasks(["NFCorpus"]))

How prompts are chosen: see ``mteb_encoder``.
"""

from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.collections.dataset_rows import DatasetRows
from raytriever.retrieval.collections.stored import COLLECTION, StoredCollection, TextPart
from raytriever.retrieval.configuration import validate, without_inputs
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.cluster import RaySession
from raytriever.retrieval.jobs.collect import source_fingerprint, write_collection
from raytriever.retrieval.jobs.embed import Embed
from raytriever.retrieval.jobs.index import Index
from raytriever.retrieval.jobs.search import Search
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig, run_stage
from raytriever.retrieval.mteb_encoder import (
    described_model,
    import_mteb,
    load_described,
    model_meta,
    refuse_precision,
    result_name,
)
from raytriever.retrieval.progress import ProgressLine
from raytriever.retrieval.rerank import rerank
from raytriever.retrieval.runs import StoredRun
from raytriever.retrieval.top_k import Ranking
from raytriever.retrieval.vectors import StoredVectors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from datasets import Dataset
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models import ModelMeta

Scores = dict[str, dict[str, float]]
