"""The card's header as the hub reads it, and what its text says."""

import re
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from retrieval.encoders.specification import EncoderContract, VectorForm
from trainers.objectives.pair_settings import ContrastiveSettings
from trainers.objectives.union import AnyObjectiveSettings
from trainers.record.model_card import Measured, model_card

CONTRACT = EncoderContract(
    model="f" * 64, pooling="mean", normalize=True, query_prompt="query: ", document_prompt="", max_length=256,
    dtype="float32", dimension=384,
)  # fmt: skip
MEASURED = Measured(
    dataset="NQ | dev set",
    split="dev",
    step=400,
    measures={"nDCG@10": 0.41234567, "RR@10": 0.35, "average rank": float("nan")},
    start={"nDCG@10": 0.3},
)
INPUTS = {"batches": "b" * 64, "encoder.model": "e" * 64}
POINTS = [{"examples": 8}, {"examples": 8}]


def card(base: str = "sentence-transformers/all-MiniLM-L6-v2", kind: str = "contrastive", **named: Any) -> str:
    config = {"objective": {"kind": kind}, "training": {"seed": 0}}
    return model_card(base, config, INPUTS, CONTRACT, POINTS, paper=ContrastiveSettings.paper, **named)


def test_the_hub_reads_the_header() -> None:
    data = ModelCard(card(measured=MEASURED)).data
    assert data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert data.library_name == "sentence-transformers"
    assert data.pipeline_tag == "sentence-similarity"
    assert data.tags[-1] == "contrastive"


def test_prompts_are_told_by_name() -> None:
    named = CONTRACT.model_copy(update={"prompts": {"classification": "classification: "}})
    text = model_card("any", {}, INPUTS, named, POINTS)
    assert "| prompt `classification` | `'classification: '` |" in text
    assert "prompt_name='classification'" in text
    assert "prompt_name" not in card()


def test_the_text_says_data_measures_and_how_to_load() -> None:
    text = card(measured=MEASURED)
    assert f"| batches | `{'b' * 64}` |" in text
    assert "| query prompt | `'query: '` |" in text
    assert "| document prompt | none |" in text
    assert "encode_query" in text
    assert "| nDCG@10 | 0.4123 | 0.3000 |" in text
    assert "| RR@10 | 0.3500 | |" in text
    assert "those after 400 steps" in text
    assert "Morris & Rush (2024). [Contextual Document Embeddings](https://arxiv.org/abs/2410.02525)." in text


def test_training_is_counted_up_to_the_weights_that_validation_chose() -> None:
    points = [{"step": step, "examples": 8 if step > 1 else 4} for step in range(1, 1001)]
    config = {"objective": {"kind": "contrastive"}}
    text = model_card("mine", config, INPUTS, CONTRACT, points, best_step=200)
    assert "| training | 200 steps, 1,596 examples: the weights after step 200 of 1,000, chosen by validation |" in text
    assert "| training | 1,000 steps, 7,996 examples |" in model_card("mine", config, INPUTS, CONTRACT, points)


@pytest.mark.parametrize(
    ("form", "alone"),
    [
        (VectorForm(), None),
        (VectorForm(kind="layers", layers=(4, 6)), "last layer"),
        (VectorForm(kind="layers", layers=(4, 6), reduction="last"), None),
        (VectorForm(kind="layers", layers=(4, 6), reduction="average"), None),
        (VectorForm(kind="layers", layers=(4, 6), reduction="scalar_mix"), None),
        (VectorForm(kind="first_tokens", tokens=8), "first token"),
        (VectorForm(kind="first_tokens", tokens=8, reduction="last"), None),
        (VectorForm(kind="first_tokens", tokens=8, reduction="average"), "first token"),
        (VectorForm(kind="first_tokens", tokens=8, reduction="scalar_mix"), "first token"),
        (VectorForm(kind="all_tokens"), "first token"),
        (VectorForm(kind="all_tokens", reduction="average"), None),
        (VectorForm(kind="all_tokens", reduction="last"), None),
    ],
)
def test_a_fallback_is_called_one(form: VectorForm, alone: str | None) -> None:
    """What sentence-transformers gives of each form is what tests/unit/retrieval/encoders/test_towers.py compares."""
    contract = CONTRACT.model_copy(update={"form": str(form)})
    text = model_card("mine", {"objective": {"kind": "multi_layer"}}, INPUTS, contract, POINTS)
    assert ("fallback" in text) == (alone is not None)
    if alone is not None:
        assert f"vectors here are: {form}, and the lines above load a fallback" in text
        assert f"`encode_document` gives the vector of the {alone} alone" in text
        assert "`raytriever embed` gives what was trained" in text


def test_without_validation_there_are_no_measures() -> None:
    assert "## Measures" not in card()


@pytest.mark.parametrize("path", ["./models/mine", "/data/model", "mine", "a/b/c", "s3://bucket/model", "../x/y"])
def test_a_path_is_no_base_model_of_the_hub(path: str) -> None:
    text = card(path)
    assert "base_model" not in yaml.safe_load(text.split("---")[1])
    assert path not in text or path == "mine"


def test_the_same_run_gives_the_same_card() -> None:
    assert card(measured=MEASURED) == card(measured=MEASURED)


def test_every_objective_has_its_paper() -> None:
    settings = AnyObjectiveSettings.__args__[0].__args__
    assert len(settings) >= 4
    for kind in settings:
        assert re.fullmatch("https://(arxiv.org/abs/[0-9]{4}[.][0-9]{5}|aclanthology.org/.*/)", kind.paper.url)
