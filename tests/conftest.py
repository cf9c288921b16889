"""What every test may use: a cache of the session's own, an object store on loopback, a tiny encoder."""

import gc
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytriever.reports.log import configure_log, log, log_to

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it when it is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve the processes that tests start

_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 8e9:  # a disk may need milliseconds to remove a folder
    tempfile.tempdir = os.environ.setdefault("TMPDIR", str(_MEMORY))  # which tempfile may have been asked for already

_BUCKET = "raytriever-tests"
_numbers = itertools.count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """By two processes: the tests that start a Ray of their own in one of them, one after another; other files in any.

    `make test` runs `-n 2`; without it, or without pytest-xdist, all tests run in one process.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "tests/cluster" if file.startswith("tests/cluster/") else file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """What collecting has left stays to the end: no later search for garbage goes over it again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for this session, which workers inherit."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYTRIEVER_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """No test's files have to outlive a loss of power; a disk would be waited for at each of ten thousand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def shown_log() -> None:
    """As the command shows it; ``capsys`` has its lines."""
    configure_log()


@pytest.fixture
def json_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the command shows it with ``RAYTRIEVER_LOG=json``."""
    monkeypatch.setenv("RAYTRIEVER_LOG", "json")
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    handlers = log.handlers
    configure_log()
    yield
    log.handlers = handlers


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines of the log during this test, which are then not shown."""
    lines: list[str] = []
    with log_to(lambda record: lines.append(record.getMessage())):
        yield lines


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors as small as a test's are slowed down by more threads, tenfold where the cores are busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def object_store() -> Iterator[str]:
    """The URI of a bucket in an S3 server on loopback; its address and keys are in the environment."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        S3FileSystem(endpoint_override=address, allow_bucket_creation=True).create_dir(_BUCKET)
        yield f"s3://{_BUCKET}"
    server.stop()


@pytest.fixture(params=["local", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that doesn't exist yet, on the local disk and in an object store."""
    if request.param == "local":
        return str(tmp_path / "place")
    return f"{request.getfixturevalue('object_store')}/place-{next(_numbers)}"


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 2 layers and width 32 without pooling settings, saved as the hub would.

    Its weights are random, its tokenizer knows the commonest words of the standard library. Both are the same in every
    session: a trainer of vocabularies breaks ties in an order of its own.
    """
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-encoder")
    library = Path(json.__file__).parent.parent
    texts = [path.read_text(encoding="utf-8") for path in sorted(library.glob("a*.py"))]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = Counter(re.findall(r"\w+|[^\w\s]", " ".join(texts).lower()))
    letters = sorted({letter for word in words for letter in word if letter.isascii()})
    known = [*special, *letters, *(f"##{letter}" for letter in letters)]
    common = sorted((word for word in words if len(word) > 1), key=lambda word: (-words[word], word))
    vocabulary = {token: number for number, token in enumerate([*known, *common[: 600 - len(known)]])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", special.index("[CLS]")), ("[SEP]", special.index("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=600,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    return folder
