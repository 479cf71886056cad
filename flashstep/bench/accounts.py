"""Which part of a step an op belongs to: from the range that a kernel was launched in to the names that ``floors`` uses.

An account is "phase/family.op[shape]" (``timeline``): the family says most of it, for linear layers the shape of the weight does.
Takes the configuration of the rank that runs. What belongs to no part of the floors (norms, casts, copies) has a name of its own.
"""

from flashstep.config.model import ModelConfig

TARGET, SAMPLE, DRAFT, MARKOV = "target", "sample", "draft", "markov"  # phases
ATTENTION, SHARED, ROUTED = "attention linears", "shared expert", "routed experts"
MHC, SPARSE, SCAN, PROJECTIONS = "mHC", "sparse attention", "indexer scan", "indexer projections"
ROUTER, ENGRAM, HEAD = "router", "Engram projections", "head"
DRAFT_LINEARS, DRAFT_ROUTED, DRAFT_HEAD, MARKOV_HEAD = (
    "draft linears",
    "draft routed experts",
    "draft head",
    "Markov head",
)
DRAFT_REST = "draft mHC, router, records"
CASTS, SAMPLING, GLUE = "norms, rotations, casts", "sampling", "copies and the rest"
WITHOUT_FLOOR = (CASTS, SAMPLING, GLUE)

FAMILIES = {
    "attention": SPARSE,
    "indexer": SCAN,
    "mhc": MHC,
    "fused": CASTS,
    "engram": ENGRAM,
    "norm_rope": CASTS,
    "cast": CASTS,
    "sampling": SAMPLING,
    "decode": SAMPLING,  # the verdict, and what a step leaves in the state
}
OPS = {
    "moe.route": ROUTER,
    "moe.swiglu": SHARED,
    "moe.experts": ROUTED,
    "gemm.quantise_input": CASTS,
    "fused.look_up_quantised": ENGRAM,
    "sampling.chain": MARKOV_HEAD,
}
OF_DRAFT = {
    ATTENTION: DRAFT_LINEARS,
    SHARED: DRAFT_LINEARS,
    ROUTED: DRAFT_ROUTED,
    ROUTER: DRAFT_REST,
    MHC: DRAFT_REST,
    SPARSE: DRAFT_REST,
    PROJECTIONS: DRAFT_LINEARS,  # shapes that an indexer's weights have too
    HEAD: DRAFT_HEAD,
}


def weights_of(model: ModelConfig) -> dict[str, str]:
    """The part that each linear layer belongs to, by the shape of its weights as ``prepare_*`` took them, "outputs x inputs"."""
    m, d = model, model.hidden_size
    channels, inner = m.num_attention_heads * m.head_dim, m.moe_intermediate_size
    features = len(m.dspark_target_layer_ids) * d
    shapes = {  # of one shape in two parts the later counts
        (m.index_n_heads * m.index_head_dim, m.q_lora_rank): PROJECTIONS,
        (m.index_n_heads, d): PROJECTIONS,
        (2 * m.head_dim, d): PROJECTIONS,
        (m.head_dim, d): PROJECTIONS,
        (m.index_head_dim, m.head_dim): PROJECTIONS,
        (m.vocab_size, d): HEAD,
        (m.vocab_size, m.dspark_markov_rank): MARKOV_HEAD,
        (1, d + m.dspark_markov_rank): MARKOV_HEAD,
        (d, features): DRAFT_LINEARS,
        (m.q_lora_rank + m.head_dim, d): ATTENTION,
        (m.q_lora_rank, d): ATTENTION,
        (channels, m.q_lora_rank): ATTENTION,
        (
            channels + m.index_n_heads * m.index_head_dim,
            m.q_lora_rank,
        ): ATTENTION,  # and the indexer's in the same product
        (m.o_groups * m.o_lora_rank, channels // m.o_groups): ATTENTION,
        (d, m.o_groups * m.o_lora_rank): ATTENTION,
        (2 * inner, d): SHARED,
        (d, inner): SHARED,
    }
    return {f"{outputs}x{inputs}": part for (outputs, inputs), part in shapes.items()}


def part_of(account: str, model: ModelConfig) -> str:
    """The part that ``account`` belongs to, on a rank with ``model``'s shapes."""
    phase, _, op = account.partition("/")
    if not op:
        return SAMPLING if phase == SAMPLE else GLUE
    name, _, shape = op.removesuffix("]").partition("[")
    family = name.partition(".")[0]
    part = OPS.get(name) or FAMILIES.get(family)
    if part is None and family == "gemm":
        inputs = shape.rpartition("x")[2]
        wide = int(inputs) == model.hash_columns * model.engram_head_dim if inputs else False
        part = weights_of(model).get(shape, ENGRAM if wide else GLUE)
        if (
            phase == TARGET
            and part == PROJECTIONS
            and name == "gemm.lin8"
            and shape == f"{model.head_dim}x{model.hidden_size}"
        ):
            part = DRAFT_LINEARS  # the draft layers' records of the target's rows
    part = part or GLUE
    if phase in (DRAFT, MARKOV):
        return OF_DRAFT.get(part, part)
    return part
