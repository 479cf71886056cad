// Routed experts for few rows of an expert: weights stream through shared memory and meet up to 32 rows in m16n8k16 products.
//
// The blocks plan for themselves where the pairs (row, choice) are few: no launch before the first product. Every output is one chain
// over the inputs, whatever stands beside it.
#include "experts.cuh"

namespace {

constexpr int CHUNK = 3;                // steps that arrive together
constexpr int XROW = CHUNK * 128 + 16;  // bytes of a row of x in a chunk: 16 more, so that eight rows meet in no bank
constexpr int STAGES = 3;               // chunks in shared memory
constexpr int AHEAD = 8;                // items whose pairs are remembered: more than can be on their way

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Bytes of shared memory, without the plan. WARPS consume: each has one block of the item's tile, or of its half.
template <int NT, int WARPS, bool DOWN> struct Shape {
    static constexpr int ROWS = NT * 8, CHANNELS = WARPS * (DOWN ? 16 : 8), OUTROW = CHANNELS * 2 + 16, WEIGHTS = CHUNK * WARPS * FRAGMENT;
    static constexpr int STAGE = WEIGHTS + ROWS * XROW, BYTES = STAGES * STAGE + ROWS * OUTROW;
};

// NT: eights of rows of an item. DOWN: plain outputs, of rows at a pair's place. Otherwise a block is eight gates over the eight ups of
// the same channels, rows are of a pair's token, outputs are Q8. The last warp asks for weights and rows, chunk by chunk of its block's
// items, as long as there is room.
template <int NT, int WARPS, int RESIDENT, bool DOWN>
__global__ void __launch_bounds__((WARPS + 1) * 32, RESIDENT) product(const Product p) {
    using S = Shape<NT, WARPS, DOWN>;
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int ROWS = S::ROWS, THREADS = (WARPS + 1) * 32, PARTS = TOGETHER / WARPS;
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    __shared__ int pair_of[AHEAD][ROWS];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const uint32_t base = shared_address(memory), full = shared_address(barriers), empty = full + STAGES * 8;
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + i * 8));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + i * 8), "n"(WARPS));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    begin_programmatic();
    const int tiles = p.tiles * PARTS, chunks = (p.steps + CHUNK - 1) / CHUNK;
    const int* order = p.order;
    int* ids = nullptr;
    const int4* items = p.items;
    int total;
    if (order) {
        total = *p.used * tiles;
    } else {
        __shared__ int used;
        int4* own_items = (int4*)(memory + S::BYTES);
        ids = (int*)(own_items + p.pairs);
        for (int pair = thread; pair < p.pairs; pair += THREADS) ids[pair] = (int)p.chosen[pair];
        count_items<THREADS>(ids, p.pairs, p.experts, p.block_t, ids + p.pairs, own_items, &used);
        __syncthreads();
        items = own_items, total = used * tiles;
    }
    __syncthreads();
    int stage = 0, slot = 0;
    uint32_t phase = 0;

    if (warp == WARPS) {
        for (int work = blockIdx.x; work < total; work += gridDim.x) {
            const int4 item = items[work / tiles];
            const int tile = work % tiles, rows = item.z - item.y;
            if (order) {
                if (lane < rows) pair_of[slot][lane] = order[item.y + lane];
            } else {  // the expert's pairs in their order, of which the item has those from y to z
                int seen = 0;
                for (int first = 0; first < p.pairs && seen < item.z; first += 32) {
                    const bool mine = first + lane < p.pairs && ids[first + lane] == item.x;
                    const uint32_t all = __ballot_sync(0xFFFFFFFFu, mine);
                    const int rank = seen + __popc(all & ((1u << lane) - 1));
                    if (mine && rank >= item.y && rank < item.z) pair_of[slot][rank - item.y] = first + lane;
                    seen += __popc(all);
                }
            }
            __syncwarp();
            const unsigned char* row = (const unsigned char*)p.x;  // this lane's
            if (lane < rows) row += (size_t)(DOWN ? pair_of[slot][lane] : pair_of[slot][lane] / p.count) * p.inputs * 2;
            const unsigned char* data = p.data + ((size_t)item.x * p.tiles + tile / PARTS) * p.steps * STEP + tile % PARTS * (WARPS * FRAGMENT);
            for (int chunk = 0; chunk < chunks; chunk++) {
                const int steps = min(p.steps - chunk * CHUNK, CHUNK), bytes = min(p.inputs * 2 - chunk * (CHUNK * 128), CHUNK * 128);
                const uint32_t to = base + stage * S::STAGE, x_to = to + S::WEIGHTS + lane * XROW, barrier = full + stage * 8;
                wait_barrier(empty + stage * 8, phase ^ 1);
                if (bytes % 128 && lane < rows)  // half a step: its other half's weights are zeros, and so must x be
                    for (int i = 0; i < 64; i += 16) asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(x_to + bytes + i), "r"(0) : "memory");
                __syncwarp();
                if (lane == 0) expect(barrier, steps * (WARPS * FRAGMENT) + rows * bytes);
                __syncwarp();
                if (PARTS == 1 && lane == 0) copy_bulk(to, data + (size_t)chunk * (CHUNK * STEP), steps * STEP, barrier);
                if (PARTS > 1 && lane < steps) copy_bulk(to + lane * (WARPS * FRAGMENT), data + (size_t)(chunk * CHUNK + lane) * STEP, WARPS * FRAGMENT, barrier);
                if (lane < rows) copy_bulk(x_to, row + chunk * (CHUNK * 128), bytes, barrier);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            slot = (slot + 1) % AHEAD;
        }
        return;
    }

    const int g = lane / 4, q = lane % 4;
    unsigned char* turned = memory + STAGES * S::STAGE;
    for (int work = blockIdx.x; work < total; work += gridDim.x) {
        const int4 item = items[work / tiles];
        const int rows = item.z - item.y;
        float sum[NT][4] = {};
        for (int chunk = 0; chunk < chunks; chunk++) {
            wait_barrier(full + stage * 8, phase);
            const unsigned char* fragment = memory + stage * S::STAGE + warp * FRAGMENT;
            const uint32_t xs = base + stage * S::STAGE + S::WEIGHTS + (lane % 8) * XROW + (lane / 8) * 16;
#pragma unroll
            for (int at = 0; at < CHUNK; at++) {
                if (at && chunk * CHUNK + at >= p.steps) break;
                const uint4 code = *(const uint4*)(fragment + at * (WARPS * FRAGMENT) + lane * 16);
                const uint32_t scale = *(const uint32_t*)(fragment + at * (WARPS * FRAGMENT) + 512 + g * 4);
                const uint32_t word[4] = {code.x, code.y, code.z, code.w};
                uint32_t x[NT][2][4];
#pragma unroll
                for (int n = 0; n < NT; n++)
                    if (n == 0 || n * 8 < rows) {
                        load_matrices(xs + n * 8 * XROW + at * 128, x[n][0]);
                        load_matrices(xs + n * 8 * XROW + at * 128 + 64, x[n][1]);
                    }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t low = scale_pair(scale, (j / 2) * 2), high = scale_pair(scale, (j / 2) * 2 + 1);
                    uint32_t a[4];
                    decode(word[j], a);
                    a[0] = times(a[0], low);
                    a[1] = times(a[1], high);
                    a[2] = times(a[2], low);
                    a[3] = times(a[3], high);
#pragma unroll
                    for (int n = 0; n < NT; n++)
                        if (n == 0 || n * 8 < rows) multiply(sum[n], a, x[n][j / 2][j % 2 * 2], x[n][j / 2][j % 2 * 2 + 1]);
                }
            }
            __syncwarp();
            if (lane == 0) arrive(empty + stage * 8);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = n * 8 + q * 2 + i;
                if (n && n * 8 >= rows) continue;
                unsigned char* to = turned + row * S::OUTROW;
                if (DOWN) {
                    *(uint16_t*)(to + (warp * 16 + g) * 2) = bf16_bits(sum[n][i]);
                    *(uint16_t*)(to + (warp * 16 + g) * 2 + 16) = bf16_bits(sum[n][i + 2]);
                } else {
                    const float weight = p.weights[pair_of[slot][min(row, rows - 1)]];
                    *(uint16_t*)(to + (warp * 8 + g) * 2) = bf16_bits(gated(sum[n][i], sum[n][i + 2], p.limit, weight));
                }
            }
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
        constexpr int PIECES = S::CHANNELS / 8;  // of eight channels; four neighbouring threads hold a group of 32
        for (int i = thread; i < ROWS * PIECES; i += WARPS * 32) {
            const int row = i / PIECES, channel = (i % PIECES) * 8;
            uint4 piece = *(const uint4*)(turned + row * S::OUTROW + channel * 2);
            if (!DOWN) piece = quantised_piece(piece);
            const int o = work % tiles * S::CHANNELS + channel;
            if (row < rows && o < p.outputs) *(uint4*)(p.out + (size_t)pair_of[slot][row] * p.outputs + o) = piece;
        }
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
        slot = (slot + 1) % AHEAD;
    }
}

template <int NT, int WARPS, int RESIDENT, bool DOWN>
int launch_product(const Product& p, int bound, int multiprocessors, cudaStream_t stream, bool programmatic) {
    const int bytes = Shape<NT, WARPS, DOWN>::BYTES + (p.order ? 0 : 20 * p.pairs + 4 * p.experts);
    auto kernel = product<NT, WARPS, RESIDENT, DOWN>;
    static int resident = 0, bytes_of = 0;
    if (bytes_of != bytes) {
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error) return (int)error;
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, (WARPS + 1) * 32, bytes);
        if (error) return (int)error;
        bytes_of = bytes;
    }
    const long long work = (long long)bound * p.tiles * (TOGETHER / WARPS), room = (long long)resident * multiprocessors;
    return launch(kernel, dim3((unsigned)(work < room ? work : room)), (WARPS + 1) * 32, bytes, stream, programmatic, p);
}

// Half tiles where whole ones are too few to share out evenly.
template <int NT, bool DOWN> int launch_product(const Product& p, int bound, int multiprocessors, cudaStream_t stream, bool programmatic) {
    constexpr int WHOLE = NT == 1 ? 4 : NT == 2 ? 3 : 2, HALF = NT == 1 ? 6 : NT == 2 ? 5 : 3;
    if ((long long)bound * p.tiles < 4 * multiprocessors) return launch_product<NT, TOGETHER / 2, HALF, DOWN>(p, bound, multiprocessors, stream, programmatic);
    return launch_product<NT, TOGETHER, WHOLE, DOWN>(p, bound, multiprocessors, stream, programmatic);
}

}  // namespace

extern "C" int moe_few(const void* x, const void* data, void* out, const float* weights, const int* order, const void* items, const int* used,
                       const int64_t* chosen, int pairs, int experts, int block_t, int inputs, int steps, int tiles, int outputs, int count,
                       float limit, int down, int bound, int multiprocessors, void* stream, int programmatic) {
    const Product p = {x, (const unsigned char*)data, (uint16_t*)out, weights, order, (const int4*)items, used, chosen, pairs, experts, block_t,
                       inputs, steps, tiles, outputs, count, limit};
    cudaStream_t s = (cudaStream_t)stream;
#define ROWS_OF_ITEM(ROWS)                                                                                                          \
    if (block_t == ROWS)                                                                                                            \
        return down ? launch_product<ROWS / 8, true>(p, bound, multiprocessors, s, programmatic)                                   \
                    : launch_product<ROWS / 8, false>(p, bound, multiprocessors, s, programmatic);
    ROWS_OF_ITEM(8)
    ROWS_OF_ITEM(16)
    ROWS_OF_ITEM(32)
    return (int)cudaErrorInvalidValue;
}
