"""Losses and gradients of a published data set's first batch: sentence_transformers_loss.py MODEL PUBLISHED OUTPUT."""

import sys

import torch
from datasets import load_dataset
from sentence_transformers import SentenceTransformer

from raytriever import CachedMaskedContrastiveLoss, MaskedContrastiveLoss, training_columns

folder, published, output = sys.argv[1:]
rows = training_columns(load_dataset(published, split="train"))[:16]
found = {}
for kind in (MaskedContrastiveLoss, CachedMaskedContrastiveLoss):
    model = SentenceTransformer(folder, device="cpu").eval()
    features = [model.tokenize(texts) for name, texts in rows.items() if name != "label"]
    loss = kind(model, similarity_temperature=0.07)(features, torch.tensor(rows["label"]))
    loss.backward()
    weights = {name.split("model.")[1]: weight.grad for name, weight in model.named_parameters()}
    found[kind.__name__] = {
        "loss": loss.detach(),
        **{name: value for name, value in weights.items() if value is not None},
    }
torch.save(found, output)
