"""The limits that the scheduler plans under; names and meanings are vLLM's."""

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``policy`` is "fcfs" or "priority" (smaller number first, ties by arrival).

    ``long_prefill_token_threshold`` caps one prompt's rows in a step while others wait (0: no cap but the share rule of
    ``scheduler.policy``).
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
