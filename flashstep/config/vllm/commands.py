"""vLLM's other commands and its environment variables: what answers the same question here."""

COMMANDS: dict[str, str] = {
    "bench forward": 'times one step too: `flashstep bench forward "32*6@131072"`, with requests written as [N*]Q@K[:D]',
    "bench latency": "times steps from the engine's door: `flashstep bench latency --input-len 128 --output-len 256 "
    "--batch-size 16`",
    "bench serve": "drives a server from outside: vLLM's own works here unchanged (`vllm bench serve --base-url "
    "http://127.0.0.1:8000 ...`), and so does AgentX",
    "bench throughput": "no counterpart; `flashstep bench latency --batch-size N` tells tokens/s of a full batch",
    "bench startup": "no counterpart; `flashstep serve` prints how long it took to be ready",
    "bench sweep": "no counterpart; a shell loop over `flashstep bench forward` or `bench latency` with --output-json",
    "bench mm-processor": "no counterpart: requests are text",
    "chat": "`flashstep chat --url http://127.0.0.1:8000/v1`, or without --url in process",
    "complete": '`flashstep generate "PROMPT"`',
    "run-batch": "no counterpart: send the file's bodies to the endpoints that they name",
    "collect-env": "no counterpart; `flashstep kernels` prints the device and what runs on it",
    "launch": "no counterpart: server and engine start together",
    "preload": "no counterpart: weights are read at every start",
    "snapshot": "no counterpart: weights are read at every start",
    "download-kernels": "no counterpart: kernels are compiled at the first start and kept in ~/.cache/flashstep",
}
"""By the words behind ``vllm``: what to run instead."""

API_KEY = "VLLM_API_KEY"
VARIABLES: dict[str, str] = {
    API_KEY: "--api-key-file, or --api-key",
    "VLLM_BATCH_INVARIANT": "--batch-invariant",
    "VLLM_ENGINE_READY_TIMEOUT_S": "--ready-timeout-s",
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "--max-body-bytes",
    "VLLM_LOGGING_LEVEL": "--uvicorn-log-level for the HTTP server",
    "VLLM_LOG_STATS_INTERVAL": "--acceptance-log-s",
    "VLLM_USE_RUST_FRONTEND": "nothing: there is one front end",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "--enforce-eager for no graphs",
    "VLLM_USE_V2_MODEL_RUNNER": "nothing: there is one runner",
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "nothing: scratch memory is measured at the start",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": "--kernels",
    "VLLM_USE_DEEP_GEMM": "--kernels",
    "VLLM_CACHE_ROOT": "XDG_CACHE_HOME: compiled kernels lie in ~/.cache/flashstep",
    "VLLM_NO_USAGE_STATS": "nothing: no statistics are sent anywhere",
    "VLLM_DO_NOT_TRACK": "nothing: no statistics are sent anywhere",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "nothing: prefill and decode in different engines are not there yet",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "nothing: prefill and decode in different engines are not there yet",
    "VLLM_PLUGINS": "nothing: there are no plugins",
    "VLLM_USE_MODELSCOPE": "a checkpoint folder on disk",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "nothing: a context over the model's positions is refused",
    "VLLM_SERVER_DEV_MODE": "nothing: there are no endpoints of that kind",
    "VLLM_WORKER_MULTIPROC_METHOD": "nothing: the engine process is spawned",
}
"""What takes the place of a variable that vLLM reads; here none is read, flags are the configuration."""


def answer(words: list[str]) -> str | None:
    """What to run instead of ``vllm WORDS``; None where it is no command of vLLM's."""
    for count in (2, 1):
        command = " ".join(words[:count])
        if command in COMMANDS:
            return f"vllm {command}: {COMMANDS[command]}"
    return None
