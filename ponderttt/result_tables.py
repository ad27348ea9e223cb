"""Schemas of what is computed from the scores; apart, so that a change here reruns no model."""

import pyarrow as pa

# What one chunk costs. Kept apart from `scores`: clocks never give the same bytes twice.
COST = pa.schema(
    [
        ("part", pa.string()),  # backbone | layer_skip | layer_update | head
        ("flops", pa.int64()),  # of matrix products, counted
        ("seconds", pa.float64()),  # lower quartile of the rounds
        ("rounds", pa.int32()),
        ("threads", pa.int32()),
        ("device", pa.string()),
    ]
)

GATE = pa.schema(
    [
        ("scale", pa.string()),
        ("seed", pa.int32()),
        ("language", pa.string()),
        ("variant", pa.string()),
        ("chunk_id", pa.string()),
        ("order", pa.int32()),
        ("policy", pa.string()),
        ("signal", pa.float64()),  # null where the policy looks at none
        ("threshold", pa.float64()),  # the one this chunk was compared with
        ("rate_ema", pa.float64()),
        ("calibration", pa.bool_()),
        ("update", pa.bool_()),
    ]
)

# Every result in long form. `low` and `high` bound the 95 % interval over clusters, `plain_*` the
# one that takes chunks for independent. Null where there is none; `reason` says why.
METRICS = pa.schema(
    [
        ("table", pa.string()),
        ("scale", pa.string()),
        ("seed", pa.int32()),  # null: over all seeds
        ("language", pa.string()),
        ("variant", pa.string()),
        ("policy", pa.string()),
        ("signal", pa.string()),
        ("reference", pa.string()),
        ("rate", pa.float64()),  # the target
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("plain_low", pa.float64()),
        ("plain_high", pa.float64()),
        ("p", pa.float64()),
        ("p_holm", pa.float64()),
        ("n", pa.int32()),  # chunks
        ("clusters", pa.int32()),
        ("reason", pa.string()),
    ]
)
