"""PyLate's trainer on stored batches, masks included: train_pylate.py MODEL PUBLISHED OUTPUT."""

import sys

import torch
from datasets import load_dataset
from pylate import losses, models, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from raytriever import StoredBatchSampler, training_columns
from trainers.sentence_transformers import stored_mask


class MaskedContrastive(losses.Contrastive):
    """PyLate's loss without the scores that the batch masks; its columns: each row's positive, then its negatives."""

    def forward(self, sentence_features, labels):
        rows, columns = len(labels), len(sentence_features) - 1
        masked = stored_mask(labels, columns)
        masked = torch.cat([masked[:, :rows, None], masked[:, rows:].view(rows, rows, -1)], dim=2).flatten(1)
        score, self.score_metric = self.score_metric, lambda *of, **named: score(*of, **named).masked_fill(masked, -1e9)
        loss = super().forward(sentence_features)
        self.score_metric = score
        print("batch", *labels[0, :2].tolist(), int(masked.sum()), flush=True)
        return loss


model_name, published, output = sys.argv[1:]
model = models.ColBERT(model_name, document_length=48, device="cpu")
args = SentenceTransformerTrainingArguments(
    output, per_device_train_batch_size=16, num_train_epochs=1, batch_sampler=StoredBatchSampler, save_strategy="no",
    report_to="none", use_cpu=True,
)  # fmt: skip
batches = training_columns(load_dataset(published, split="train"))
collator = utils.ColBERTCollator(model.tokenize)
trainer = SentenceTransformerTrainer(model, args, batches, loss=MaskedContrastive(model), data_collator=collator)
trainer.train()
model.save_pretrained(output)
