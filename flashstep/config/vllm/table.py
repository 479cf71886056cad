"""vLLM 0.33's flags that are not ours: what is always so here, what is not there yet, what has no counterpart.

``TABLE`` has each of them once; a flag that is ours (``line.py``) is in no table. docs/from-vllm.md is made of it.
"""

from collections.abc import Iterator

from flashstep.config.vllm.flags import Flag, Key, Standing, rows

PARSER = "deepseek_v41"
WHY_ONE = "layouts of many GPUs; an engine is one process on one GPU"
TRY_ONE = (
    "a checkpoint that fits one GPU is served there without these; one rank of the released model's layout can be measured: "
    "`flashstep bench forward --released --load-format dummy --emulate tp4:0` (or dep8:0)"
)
KERNELS = "each op takes its kernel by device and shape, as `flashstep kernels` prints"
GRAPHS = (
    "CUDA graphs are made of decoding steps, for a fixed list of batch sizes up to --max-num-seqs; other steps are launched "
    "kernel by kernel"
)
TEXT_ONLY = "requests are text"
IMAGES = "images, sounds and videos in requests"
LEAVE = "leave it out"


def _always() -> Iterator[Flag]:
    def so(notation: str, reason: str, instead: str = LEAVE) -> Iterator[Flag]:
        yield from rows(Standing.ALWAYS, notation, reason, instead)

    yield from so("runner=auto|generate convert=auto|none", "it generates text")
    yield from so(
        "tokenizer-mode=auto|deepseek_v41 config-format=auto|hf model-impl=auto|vllm",
        "there is one model here, and one prompt encoding, DeepSeek-V4.1's",
    )
    yield from so(f"tool-call-parser={PARSER} reasoning-parser={PARSER}", "V4.1's markup is parsed")
    yield from so("+enable-auto-tool-choice", "tools are offered whenever a request brings some")
    yield from so(
        "+exclude-tools-when-tool-choice-none", 'with tool_choice "none" the model is not told of the tools'
    )
    yield from so(
        "-+trust-remote-code", "no code of a checkpoint is ever run, so there is nothing to allow or forbid"
    )
    yield from so(
        "dtype=auto|bfloat16 quantization=fp8|deepseek_v4_fp8",
        "the checkpoint's config.json says how it is stored and computed",
    )
    yield from so(
        "kv-cache-dtype=auto|fp8|fp8_ds_mla|nvfp4_ds_mla",
        "records are those that the model was trained with: windows of 8 bits, compressed entries of 4, 890 bytes a token",
    )
    yield from so("+enable-chunked-prefill", "a prompt that is longer than a step is cut into chunks")
    yield from so("+async-scheduling", "the next step is planned and launched while one runs")
    yield from so(
        "+scheduler-reserve-full-isl", "a prompt is admitted when all blocks that it needs are free"
    )
    yield from so(
        "long-prefill-token-threshold-adaptive",
        "a step's tokens are shared among waiting prompts by one rule",
        "--long-prefill-token-threshold N sets a limit",
    )
    yield from so("watermark=0|0.0", "no share of the blocks is kept free")
    yield from so("prefill-schedule-interval=1", "every step may carry parts of prompts")
    yield from so("prefix-caching-hash-algo=sha256", "blocks are known by a chain of SHA-256")
    yield from so("distributed-executor-backend=mp|uni", "the engine is a process of its own, on one GPU")
    yield from so("api-server-count=1", "one process serves HTTP before one engine")
    yield from so("+aggregate-engine-logging", "there is one engine")
    yield from so("+disable-custom-all-reduce", "one GPU has nothing to reduce over")
    yield from so("+disable-cascade-attn", "no such kernel exists")
    yield from so("stream-interval=1", "tokens are sent as soon as a step gave them")
    yield from so("max-logprobs=20", "a request may ask for up to 20")
    yield from so(
        "logprobs-mode=raw_logprobs",
        "log-probabilities are of the raw logits, before penalties and temperature",
    )
    yield from so("response-role=assistant", "an answer's role is assistant")
    yield from so(
        "chat-template-content-format=auto", "parts of a message are joined as V4.1's encoding wants it"
    )
    yield from so("+enable-server-load-tracking", "/load tells how many requests are in flight")
    yield from so("+enable-request-id-headers", "X-Request-Id comes back with every answer")
    yield from so("tool-strict-level=auto", 'a tool with "strict": true is held to its schema')
    yield from so("+enable-prompt-tokens-details", "usage tells cached tokens, always")
    yield from so("optimization-level=2|3", "whatever makes it fast is on", "--enforce-eager starts sooner")
    yield from so("performance-mode=balanced", "there is one way to run, for small and large batches")
    yield from so("-+use-tqdm-on-load", "there is no bar; loading is one line")
    yield from so("enable-log-deltas", "no output is logged")
    yield from so(
        "anthropic-disabled-thinking-effort=auto",
        'thinking {"type": "disabled"} switches reasoning off, whatever the effort',
    )


def _one_gpu() -> Iterator[Flag]:
    later = Standing.LATER
    yield from rows(
        later,
        "tensor-parallel-size=1 pipeline-parallel-size=1 data-parallel-size=1 data-parallel-size-local=1 "
        "data-parallel-rank=0 data-parallel-start-rank=0 data-parallel-address= data-parallel-rpc-port= data-parallel-backend=mp "
        "data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb "
        "data-parallel-supervisor-port= dp-supervisor-probe-interval-s= dp-supervisor-probe-timeout-s= "
        "dp-supervisor-probe-failure-threshold= decode-context-parallel-size=1 dcp-comm-backend= dcp-q-replicate "
        "dcp-kv-cache-interleave-size=1 cp-kv-cache-interleave-size=1 prefill-context-parallel-size=1 enable-hc-sp "
        "enable-expert-parallel enable-batch-sharded-sampling enable-ep-weight-filter "
        "all2all-backend=allgather_reducescatter nnodes=1 node-rank=0 master-addr= master-port= headless "
        "distributed-timeout-seconds= cpu-distributed-timeout-seconds= disable-nccl-for-dp-synchronization "
        "dp-sync-interval= enable-dbo dbo-decode-token-threshold= dbo-prefill-token-threshold= ubatch-size=0 "
        "enable-elastic-ep elastic-ep-max-dp-size= expert-placement-strategy=linear enable-shm-tensor-arena "
        "enable-nccl-comm-suspend",
        WHY_ONE,
        TRY_ONE,
    )
    yield from rows(later, "enable-eplb eplb-config{}", "balancing of experts; one GPU holds them all", LEAVE)
    yield from rows(
        later,
        "kv-transfer-config{} kv-events-config{} ec-transfer-config{} enable-scale-out tokens-only",
        "prefill and decode in different engines, and caches in other machines",
        "one server does both; chunked prefill keeps decoding going meanwhile",
    )
    yield from rows(
        later,
        "kv-offloading-size= kv-offloading-backend=native offload-backend=auto cpu-offload-gb=0 "
        "cpu-offload-params* offload-group-size=0 offload-num-in-group= offload-prefetch-step= offload-params*",
        "caches or weights in host memory, but for the Engram tables",
        "--engram-config for those; `flashstep budget` tells what fits",
    )


def _text_only() -> Iterator[Flag]:
    yield from rows(
        Standing.ALWAYS,
        "+language-model-only +skip-mm-profiling disable-chunked-mm-input mm-processor-cache-gb=0",
        TEXT_ONLY,
        LEAVE,
    )
    none = {medium: Key((0,), IMAGES) for medium in ("image", "video", "audio")}
    yield from rows(Standing.LATER, "limit-mm-per-prompt{}", IMAGES, LEAVE, keys=none)
    yield from rows(
        Standing.LATER,
        "allowed-local-media-path= allowed-media-domains* enable-mm-embeds media-io-kwargs{} mm-processor-kwargs{} "
        "mm-processor-cache-type=lru mm-hasher-algorithm= mm-shm-cache-max-object-size-mb= mm-encoder-only "
        "mm-encoder-tp-mode= mm-encoder-attn-backend= mm-encoder-attn-dtype= mm-encoder-fp8-scale-path= "
        "mm-encoder-fp8-scale-save-path= mm-encoder-fp8-scale-save-margin= interleave-mm-strings "
        "video-pruning-rate= video-pruning-method= mm-tensor-ipc= mm-processor-device=auto|cpu "
        "mm-ipc-gpu-memory-gb= mm-device-do-normalize ec-manager-config{} trust-request-mm-kwargs "
        "enable-prompt-embeds",
        IMAGES,
        LEAVE,
    )


def _never() -> Iterator[Flag]:
    def none(
        notation: str, reason: str, instead: str = LEAVE, keys: dict[str, Key] | None = None
    ) -> Iterator[Flag]:
        yield from rows(Standing.NEVER, notation, reason, instead, keys=keys)

    yield from none(
        "config=",
        "there is no second config language: flags are the configuration, typed and checked",
        "write the file's entries as flags (`key: value` is `--key value`)",
    )
    yield from none(
        "tokenizer= tokenizer-revision= code-revision= hf-config-path= skip-tokenizer-init",
        "tokenizer and configuration are the checkpoint's own: its token ids are hashed into the Engram tables",
        LEAVE,
    )
    yield from none("hf-token=", "nothing is downloaded", "`hf download MODEL --token ...` once, before")
    yield from none(
        "hf-overrides{} model-class-overrides{} disable-sliding-window pooler-config{}",
        "the checkpoint's config.json is the model",
        "change config.json in a copy of the folder",
    )
    yield from none(
        "quantization-config{} allow-deprecated-quantization kv-cache-dtype-skip-layers*",
        "weights and records are kept as the checkpoint and the model have them",
    )
    yield from none(
        "lora-modules* enable-lora max-loras= max-lora-rank= lora-dtype= lora-target-modules* default-mm-loras{} "
        "max-cpu-loras= fully-sharded-loras enable-tower-connector-lora specialize-active-lora "
        "enable-mixed-moe-lora-format enable-moe-shared-loras max-lora-cls-labels=",
        "adapters are not applied",
        "serve a checkpoint with the adapter merged into it",
    )
    yield from none(
        "chat-template= trust-request-chat-template",
        "V4.1's prompt encoding is no template: deepseek-recipe makes it, token for token",
        "chat_template_kwargs (thinking, reasoning_effort) and /v1/completions with a raw prompt",
    )
    yield from none(
        "tool-parser-plugin= reasoning-parser-plugin= logits-processors* io-processor-plugin= scheduler-cls= worker-cls=auto "
        "worker-extension-cls= middleware* tool-server=",
        "there are no plugins",
        "logit_bias, bad_words and structured_outputs in the request; a proxy before the server",
    )
    yield from none(
        "attention-backend= moe-backend=auto linear-backend=auto sparse-indexer-topk-backend=auto "
        "enable-flashinfer-autotune monokernel ir-op-priority{}",
        KERNELS,
        "--kernels reference, or reference:FAMILY.OP for one op",
    )
    yield from none(
        "cudagraph-capture-sizes* max-cudagraph-capture-size=",
        GRAPHS,
        "--max-num-seqs for the largest, --enforce-eager for none",
    )
    yield from none(
        "max-num-active-seqs= max-num-scheduled-tokens=",
        "what may run and what may be scheduled are one limit each",
        "--max-num-seqs and --max-num-batched-tokens",
    )
    yield from none(
        "disable-hybrid-kv-cache-manager kv-sharing-fast-prefill prefix-cache-retention-interval=0 prefix-match-unit=",
        "groups of records have blocks of their own, and a hit ends at any whole block",
    )
    yield from none(
        "enable-sleep-mode sleep-mode-backend= sleep-mode-offload-cudagraph sleep-preserve-parameter-names* "
        "enable-cumem-allocator weight-transfer-config{}",
        "an engine keeps its memory and weights for as long as it lives",
        "stop the server and start it again",
    )
    yield from none(
        "download-dir= safetensors-load-strategy= safetensors-prefetch-num-threads= safetensors-prefetch-block-size= "
        "model-loader-extra-config{} ignore-patterns* pt-load-map-location=cpu max-parallel-loading-workers=",
        "safetensors files are read one way",
        "MODEL may be a folder, or a name that is in the Hugging Face cache ($HF_HOME)",
    )
    yield from none(
        "device-ids= numa-bind-nodes* numa-bind-cpus* ray-workers-use-nsight",
        "one engine takes the first device that it sees",
        "CUDA_VISIBLE_DEVICES=N before the command; --numa-bind",
    )
    yield from none(
        "grpc grpc-port= enable-tokenizer-info-endpoint disable-fastapi-docs enable-offline-docs",
        "the server speaks HTTP, with the endpoints of docs/http-api.md",
    )
    yield from none(
        "enable-return-routed-experts return-sampling-mask enable-trace-replay use-fp64-gumbel aux-output-config{}",
        "answers hold text, token ids and log-probabilities",
    )
    yield from none(
        "return-tokens-as-token-ids", "it is a field of the request", "return_tokens_as_token_ids: true there"
    )
    yield from none(
        "reasoning-effort-map{}",
        "efforts are DeepSeek's: low 50, high 75, max 100, or a number",
        "reasoning_effort: 1..100 in the request",
    )
    yield from none(
        "fingerprint-mode= fingerprint-value=", "system_fingerprint tells version and hit policy, always"
    )
    yield from none(
        "log-config-file= logging-config{} log-level= log-error-stack enable-log-outputs",
        "logs are lines of one form on stderr, without prompts and outputs",
        "--uvicorn-log-level for the HTTP server's own",
    )
    yield from none(
        "show-hidden-metrics-for-version= kv-cache-metrics kv-cache-metrics-sample= custom-histogram-buckets{} "
        "cudagraph-metrics enable-mfu-metrics enable-logging-iteration-details collect-detailed-traces* "
        "enable-layerwise-nvtx-tracing jit-monitor-mode= jit-monitor-verbose profiler-config{} watchdog-config{}",
        "/metrics is one fixed set",
        "`flashstep bench forward` and `bench latency` measure steps and parts of them",
    )
    yield from none(
        "enable-fault-tolerance fault-tolerance-config{}",
        "an engine that fails ends its requests with 503",
        "have the process restarted (systemd, Kubernetes): /health is 503 then",
    )
    yield from none(
        "fail-on-environ-validation",
        "variables VLLM_* are not read here; those that are set are named",
        "flags, as that note says",
    )
    yield from none(
        "ssl-ca-certs= ssl-cert-reqs=0 ssl-ciphers= enable-ssl-refresh",
        "https needs a key and a certificate, and no more; certificates are read at the start",
        "--ssl-keyfile and --ssl-certfile; for client certificates a proxy before the server",
    )
    yield from none(
        "uds= root-path=",
        "the server listens on --host and --port, and its paths begin at /",
        "a proxy before the server",
    )
    yield from none(
        "enable-log-requests max-log-len=",
        "the log has one line for each request, without its text",
        "--disable-uvicorn-access-log for none",
    )
    yield from none(
        "enable-per-request-metrics", "it is a field of the request", "return_metrics: true there"
    )
    yield from none("renderer-num-workers=1", "prompts are made in the server's process")
    yield from none(
        "mamba-backend= mamba-ssu-algorithm= enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds= "
        "mamba-cache-dtype= mamba-ssm-cache-dtype= mamba-block-size= mamba-cache-mode= enable-mamba-shared-prefix-checkpoint "
        "replayssm-buffer-len= use-replayssm diffusion-config{} watermark-config{} gdn-prefill-backend= "
        "kda-prefill-backend= kda-decode-backend= enable-flash-late-interaction cohere-is-reasoning-model cohere-format=",
        "it is of other models",
    )


_OBJECTS = {
    "compilation-config": (
        "nothing is compiled with torch.compile, and which graphs are made is fixed",
        "leave it out, or say --enforce-eager for no graphs",
        {
            "mode": Key((0, "NONE"), "nothing is compiled with torch.compile"),
            "cudagraph_mode": Key(("FULL", "FULL_DECODE_ONLY", "NONE"), GRAPHS),
        },
    ),
    "additional-config": (
        KERNELS,
        LEAVE,
        {
            "decode_backend": Key(
                ("auto",), "there is one decoding path, and it takes the fastest kernels that fit"
            )
        },
    ),
    "attention-config": (
        KERNELS,
        "--kernels reference, or reference:FAMILY.OP for one op",
        {
            "indexer_kv_dtype": Key(("auto", "mxfp4"), "index keys are of 4 bits, as the model was trained"),
            "indexer_sparse_logits": Key((True,), "layers behind the candidate source score candidates only"),
        },
    ),
    "kernel-config": (
        KERNELS,
        "--kernels reference, or reference:FAMILY.OP for one op",
        {
            name: Key(("auto",), KERNELS)
            for name in ("moe_backend", "linear_backend", "sparse_indexer_topk_backend")
        }
        | {"enable_flashinfer_autotune": Key((False,), "no kernel is tuned at the start")},
    ),
    "structured-outputs-config": (
        "grammars are llguidance's, behind </think>",
        LEAVE,
        {
            "backend": Key(
                ("auto", "guidance"), "grammars are enforced by llguidance, which vLLM calls guidance"
            ),
            "disable_any_whitespace": Key(
                (False,), "white space between JSON's parts is bounded (docs/http-api.md)"
            ),
            "disable_additional_properties": Key((False,), "a schema means what it says"),
            "enable_in_reasoning": Key((False,), "reasoning is free; grammars begin behind </think>"),
            "reasoning_parser": Key(("", PARSER), "V4.1's reasoning is parsed"),
        },
    ),
    "reasoning-config": (
        "V4.1's reasoning is parsed",
        LEAVE,
        {
            "reasoning_parser": Key(("", PARSER), "V4.1's reasoning is parsed"),
            "reasoning_start_str": Key(("<think>",), "reasoning begins with V4.1's own token"),
            "reasoning_end_str": Key(("</think>",), "reasoning ends with V4.1's own token"),
        },
    ),
}


def _objects() -> Iterator[Flag]:
    for name, (reason, instead, keys) in _OBJECTS.items():
        yield from rows(Standing.ALWAYS, name + "{}", reason, instead, keys=keys)


TABLE: dict[str, Flag] = {
    flag.name: flag for part in (_always, _one_gpu, _text_only, _never, _objects) for flag in part()
}

SHORT = {
    "O": "optimization-level",
    "ac": "attention-config",
    "asc": "api-server-count",
    "cc": "compilation-config",
    "dc": "diffusion-config",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "dpa": "data-parallel-address",
    "dpb": "data-parallel-backend",
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "dpl": "data-parallel-size-local",
    "dpm": "data-parallel-multi-port-external-lb",
    "dpn": "data-parallel-rank",
    "dpp": "data-parallel-rpc-port",
    "dpr": "data-parallel-start-rank",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "r": "node-rank",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}
"""vLLM's flags of one dash."""
