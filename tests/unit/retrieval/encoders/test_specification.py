"""The contract: every field of it keeps vectors apart, but for the name under which the same files were asked for."""

from typing import Any

import pytest
import torch

from raytriever.errors import UserError
from retrieval.encoders.specification import (
    EncoderContract,
    EncoderSettings,
    bfloat16_of_x86,
    has_bfloat16,
    require_dtype,
    resolve_dtype,
)

CONTRACT = EncoderContract(
    model="a" * 64, revision="main", pooling="mean", head="full", normalize=True, query_prompt="query: ",
    document_prompt="", max_length=128, append_eos=False, dtype="float32", dimension=32,
)  # fmt: skip
OTHERS: dict[str, Any] = {
    "model": "b" * 64, "pooling": "last_token", "head": "pooled", "normalize": False, "query_prompt": "q: ",
    "document_prompt": "d: ", "max_length": 256, "append_eos": True, "dtype": "bfloat16", "dimension": 64,
    "bidirectional": True, "form": "layers 4, 6", "projection": "linear", "document_model": "c" * 64,
    "list_scorer": "transformer over lists", "architecture": "contextual, 64 vectors", "context": "d" * 64,
}  # fmt: skip


@pytest.mark.parametrize("field", OTHERS)
def test_a_difference_is_an_error_that_names_it(field: str) -> None:
    other = CONTRACT.model_copy(update={field: OTHERS[field], "revision": "0123abc"})
    with pytest.raises(UserError) as raised:
        CONTRACT.require_same(other, "runs/index", "runs/vectors")
    difference = f"{field} {getattr(CONTRACT, field)!r} against {OTHERS[field]!r}"
    assert str(raised.value) == (
        f"The vectors of runs/index and runs/vectors come from different encoders: {difference}. Use the encoder that"
        " made them, with the same settings."
    )
    assert OTHERS.keys() | {"revision", "prompts"} == set(EncoderContract.model_fields)


def test_the_same_files_may_be_asked_for_by_another_name() -> None:
    renamed = CONTRACT.model_copy(update={"revision": "0123abc"})
    CONTRACT.require_same(renamed, "one", "two")
    assert renamed.fingerprint == CONTRACT.fingerprint
    assert CONTRACT.model_copy(update={"normalize": not CONTRACT.normalize}).fingerprint != CONTRACT.fingerprint


def test_queries_of_an_encoder_that_was_trained_for_the_documents_may_search_them() -> None:
    queries = CONTRACT.model_copy(update={"model": "another", "document_model": CONTRACT.fingerprint, "max_length": 9})
    CONTRACT.require_queries(CONTRACT, "index", "queries")
    CONTRACT.require_queries(queries, "index", "queries")
    queries.require_queries(queries, "its own index", "queries")  # what it made of documents itself
    other = CONTRACT.model_copy(update={"pooling": "cls"})
    with pytest.raises(UserError, match=r"queries was trained for documents of another encoder .* behind index"):
        other.require_queries(queries, "index", "queries")
    with pytest.raises(UserError, match="come from different encoders: pooling"):
        other.require_queries(CONTRACT, "index", "queries")
    with pytest.raises(UserError, match=r"come from different encoders: .*document_model"):
        CONTRACT.require_same(queries, "one", "two")
    scored = queries.model_copy(update={"list_scorer": "transformer over lists"})  # searches nothing, is ranked by it
    with pytest.raises(UserError, match=r"queries of vectors was trained with a scoring module \(transformer over"):
        CONTRACT.require_queries(scored, "index", "vectors")
    CONTRACT.require_queries(scored, "documents", "vectors", by_list_scorer=True)
    with pytest.raises(UserError, match="was trained for documents of another encoder"):
        other.require_queries(scored, "documents", "vectors", by_list_scorer=True)


WRONG = {"pooling": "first", "dtype": "float16", "append_eos": "maybe", "prompt": "q"}


@pytest.mark.parametrize("setting", WRONG)
def test_settings_that_do_not_exist_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        EncoderSettings(model="any", **{setting: WRONG[setting]})


def cpu(monkeypatch: pytest.MonkeyPatch, **capabilities: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(("capabilities", "capability", "asked", "expected"), [
    ({"avx512_bf16": True}, None, {}, "bfloat16"),
    ({"amx_bf16": True}, None, {}, "bfloat16"),
    ({"bf16": True}, None, {}, "bfloat16"),
    ({"avx512_bf16": False, "amx_bf16": False, "bf16": False}, None, {}, "float32"),
    ({}, (9, 0), {}, "float32"),
    ({}, (8, 0), {"gpu": True}, "bfloat16"),
    ({"amx_bf16": True}, (7, 0), {}, "bfloat16"),
    ({"amx_bf16": True}, (7, 0), {"gpu": True}, "float32"),
    ({}, None, {"gpu": True}, "bfloat16"),  # a head node without one: its workers are asked when they load
])  # fmt: skip
def test_auto_asks_the_processor_that_will_compute(monkeypatch, capabilities, capability, asked, expected):
    cpu(monkeypatch, avx2=True, **capabilities)
    gpu(monkeypatch, capability)
    assert resolve_dtype("auto", **asked) == expected
    assert has_bfloat16(**{"gpu": False} | asked) == (expected == "bfloat16")
    assert resolve_dtype("bfloat16", **asked) == "bfloat16"


def test_a_worker_without_the_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for processor, has_it, capability in (("CPU", False, (8, 0)), ("GPU", True, (7, 5))):
        cpu(monkeypatch, bf16=has_it)
        gpu(monkeypatch, capability)
        require_dtype("float32", "node-7", gpu=processor == "GPU")
        with pytest.raises(UserError, match=f"bfloat16, but the {processor} of node-7 has no instructions for it"):
            require_dtype("bfloat16", "node-7", gpu=processor == "GPU")


@pytest.mark.parametrize(("cpuinfo", "release", "found"), [
    ("processor\t: 0\nflags\t\t: fpu avx512_bf16 sse\n", "6.8.0-45-generic", True),
    ("flags\t\t: fpu amx_bf16\nflags\t\t: fpu\n", "4.4.0", True),
    ("flags\t\t: fpu avx512f\n", "5.16.1", False),
    ("flags\t\t: fpu avx512f\n", "5.15.0-100-generic", None),  # amx_bf16 had no name yet
    ("flags\t\t: fpu\n", "unknown", None),
    ("Features\t: fp asimd bf16\n", "6.8.0", None),
    ("", "6.8.0", None),
])  # fmt: skip
def test_the_kernel_tells_of_the_cpu_without_torch(cpuinfo: str, release: str, found: bool | None) -> None:
    assert bfloat16_of_x86(cpuinfo, release) is found
