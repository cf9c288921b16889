"""The audit of batches that are written out here."""

import numpy as np
import pyarrow as pa

from pipelines.filtering.mask_audit import AuditedBatch, MaskAudit


def test_rows_are_counted_from_half_of_their_negatives_on() -> None:
    texts = pa.table({"id": [f"d{row}" for row in range(5)], "text": [f"text {row}" for row in range(5)]})
    rule_of = np.zeros((4, 5), dtype=np.uint8)
    for row, masked in enumerate((1, 2, 3, 4)):  # of four negatives
        rule_of[row, [column for column in range(5) if column != row][:masked]] = 1
    audit = MaskAudit()
    audit.add(AuditedBatch(0, 0, rule_of, texts, texts, None))
    assert audit.found["rows"] == {"all": 4, "with_half_masked": 3, "without_negatives": 1}
    assert (audit.found["batches"], audit.found["negatives"]) == (1, 16)
