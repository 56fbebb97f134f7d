"""The extension built from ``csrc``; pointers are ``Tensor.data_ptr()``. Call it through ``megarl.ops``, which
checks."""

FLOAT32: int
BFLOAT16: int
FLOAT16: int

class Logits:
    def __init__(
        self,
        *,
        data: int,
        dtype: int,
        rows: int,
        cols: int,
        row_stride: int,
        vocab_start: int,
        valid_cols: int,
        temperature: float,
    ) -> None: ...

def logprob_local(logits: Logits, targets: int, stats: int, threads: int, /) -> None: ...
def logprob_combine(
    stats: int, shards: int, rows: int, targets: int, logp: int, entropy: int, norm: int, /
) -> None: ...
def logprob_backward(
    logits: Logits,
    targets: int,
    norm: int,
    entropy: int,
    grad_logp: int,
    grad_entropy: int,
    out: int,
    out_stride: int,
    threads: int,
    /,
) -> None: ...
def gae(
    rewards: int,
    values: int,
    cu_seqlens: int,
    sequences: int,
    bootstrap: int,
    gamma: float,
    lam: float,
    advantages: int,
    returns: int,
    threads: int,
    /,
) -> None: ...
def digest_table(boxes: list[int], count: int, table: int, /) -> int: ...
def isa() -> str: ...
def use_isa(name: str, /) -> bool: ...
