// The router in one launch: logits, scores, the best experts and their weights (spec/model.md 5).
//
// A block multiplies 32 experts by one chunk of the width, for all rows, and leaves its sums in memory. Rows are shared out among the
// blocks: who has one waits until every block has arrived, adds the chunks in order, and selects. All blocks are resident at once.
// Of few rows a cluster has all chunks of 16 experts, a warp each; its first block adds them and leaves logits in memory. Nobody arrives:
// who selects asks for the logits until none of them is `NOTHING`, and leaves `NOTHING` behind.
// A row's logits are chains of m16n8k16 products over chunks of 256, whatever stands beside it. Of many rows (``moe_select``) the
// sums of the chunks come from elsewhere, by the same chains.
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int THREADS = 128, EXPERTS = 32, CHUNK = 256, ROW = CHUNK * 2 + 16;
constexpr int MOST_COUNT = 16, MOST_ROWS = 64;
constexpr int RESIDENT = 4;  // blocks that a multiprocessor holds at least: flashstep/kernels/moe/cuda.py launches no more than fit
constexpr int FEW_ROWS = 8, TOGETHER = 16, WARPS = THREADS / 32, MOST_CLUSTER = 8;  // of few rows: experts and chunks of a block
constexpr int WIDE_ROW = WARPS * CHUNK * 2 + 16;
constexpr uint32_t ALL = 0xFFFFFFFFu;
constexpr uint32_t NOTHING = 0xFFFFFFFFu;  // bits of a NaN that no product gives

__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool real) {
    int bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Route {
    const void* x;        // bf16 [rows, width]
    const void* gate;     // bf16 [experts, width]
    const float* bias;
    float* parts;         // fp32 [chunks, rows, experts]; of few rows the gate's own [rows, experts], `NOTHING` before and after
    unsigned* arrived;    // two counters, zero before and after
    int64_t* out_experts;
    float* out_weights;
    int rows, width, experts, count, chunks;
    float scale, temperature;
};

// The best ``count`` of a warp's keys, of equal ones the lowest id: lane c keeps the c-th. A key of 0 is none.
template <int KEYS>
__device__ __forceinline__ void take_best(uint32_t (&key)[KEYS], const int (&id)[KEYS], int count, uint32_t& won, int& winner) {
    const int lane = threadIdx.x % 32;
    won = 0, winner = 0x7FFFFFFF;
    for (int c = 0; c < count; c++) {
        uint32_t best = key[0];
#pragma unroll
        for (int i = 1; i < KEYS; i++) best = max(best, key[i]);
        const uint32_t top = __reduce_max_sync(ALL, best);
        int own = 0x7FFFFFFF;
#pragma unroll
        for (int i = 0; i < KEYS; i++)
            if (key[i] == top) own = min(own, id[i]);
        const int taken = __reduce_min_sync(ALL, own);
        if (lane == c) won = top, winner = taken;
#pragma unroll
        for (int i = 0; i < KEYS; i++)
            if (id[i] == taken) key[i] = 0;
    }
}

struct Selection {
    float score_of[512];
    uint2 best[4 * MOST_COUNT];  // keys and experts, of each warp
    int winner[MOST_COUNT];
    float reduced[8];
};

// The first THREADS threads of a block.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// The chunks' sums of this thread's experts, added in order; AT_ONCE of them are asked for together.
template <int AT_ONCE, int PER> __device__ __forceinline__ void add_chunks(const Route& p, int chunks, int row, float (&logit)[PER]) {
    for (int first = 0; first < chunks; first += AT_ONCE) {
        float part[AT_ONCE][PER];
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++)
#pragma unroll
            for (int i = 0; i < PER; i++) {
                const int expert = threadIdx.x + i * THREADS;
                part[c][i] = first + c < chunks && expert < p.experts
                                 ? __ldcg(&p.parts[((size_t)(first + c) * p.rows + row) * p.experts + expert]) : 0.0f;
            }
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++)
#pragma unroll
            for (int i = 0; i < PER; i++) logit[i] += part[c][i];
    }
}

// This thread's experts' logits, which may not be there yet.
template <int PER> __device__ __forceinline__ void await_logits(const Route& p, int row, float (&logit)[PER]) {
    uint32_t* at = reinterpret_cast<uint32_t*>(p.parts) + (size_t)row * p.experts + threadIdx.x;
    uint32_t bits[PER];
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            bits[i] = 0;
            if (threadIdx.x + i * THREADS < p.experts)
                asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits[i]) : "l"(at + i * THREADS) : "memory");
        }
#pragma unroll
        for (int i = 0; i < PER; i++) missing |= bits[i] == NOTHING;
    } while (missing);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        logit[i] = __uint_as_float(bits[i]);
        if (threadIdx.x + i * THREADS < p.experts) at[i * THREADS] = NOTHING;
    }
}

// One row by 128 threads: the chunks' sums added in order, scores, and the best of score + bias in ascending experts. PER: experts a thread.
template <int PER, bool SOFTMAX, bool AWAIT> __device__ __forceinline__ void select(const Route& p, int chunks, int row, Selection& shared) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    float logit[PER] = {}, bias[PER], score[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) bias[i] = thread + i * THREADS < p.experts ? p.bias[thread + i * THREADS] : 0.0f;
    if (AWAIT)
        await_logits(p, row, logit);
    else if (chunks == 1)
        add_chunks<1>(p, 1, row, logit);
    else if (chunks <= 10)
        add_chunks<10>(p, chunks, row, logit);
    else
        add_chunks<PER == 4 ? 10 : 20>(p, chunks, row, logit);
#pragma unroll
    for (int i = 0; i < PER; i++) logit[i] = __fdiv_rn(logit[i], p.temperature);
    if (SOFTMAX) {
        float best = __uint_as_float(0xFF800000u);
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (thread + i * THREADS < p.experts) best = fmaxf(best, logit[i]);
#pragma unroll
        for (int far = 16; far; far /= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, far));
        if (lane == 0) shared.reduced[warp] = best;
        meet();
        best = fmaxf(fmaxf(shared.reduced[0], shared.reduced[1]), fmaxf(shared.reduced[2], shared.reduced[3]));
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            score[i] = thread + i * THREADS < p.experts ? expf(logit[i] - best) : 0.0f;
            sum += score[i];
        }
#pragma unroll
        for (int far = 16; far; far /= 2) sum += __shfl_xor_sync(ALL, sum, far);
        if (lane == 0) shared.reduced[4 + warp] = sum;
        meet();
        sum = (shared.reduced[4] + shared.reduced[5]) + (shared.reduced[6] + shared.reduced[7]);
#pragma unroll
        for (int i = 0; i < PER; i++) score[i] = __fdiv_rn(score[i], sum);
    } else {
#pragma unroll
        for (int i = 0; i < PER; i++) score[i] = __fsqrt_rn(fmaxf(logit[i], 0.0f) + log1pf(expf(-fabsf(logit[i]))));
    }
    uint32_t key[PER], won;
    int id[PER], winner;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const float biased = score[i] + bias[i];
        const uint32_t bits = __float_as_uint(biased + 0.0f);  // -0 is 0
        // order-preserving; 0 is none, 1 a NaN, which is never better
        key[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        key[i] = biased == biased ? max(key[i], 2u) : 1u;
        id[i] = thread + i * THREADS;
        if (id[i] >= p.experts) key[i] = 0;
        if (id[i] < p.experts) shared.score_of[id[i]] = score[i];
    }
    take_best<PER>(key, id, p.count, won, winner);
    if (lane < p.count) shared.best[warp * p.count + lane] = make_uint2(won, (uint32_t)winner);
    meet();
    if (warp) return;
    // the rank of each of the warps' best among all, by key and then id; a lane has two of them
#pragma unroll
    for (int i = 0; i < 4 * MOST_COUNT / 32; i++) {
        const int at = lane + 32 * i;
        const uint2 own = at < 4 * p.count ? shared.best[at] : make_uint2(0, 0);
        int rank = 0;
        for (int k = 0; k < 4 * p.count; k += 4) {
            uint2 other[4];
#pragma unroll
            for (int n = 0; n < 4; n++) other[n] = shared.best[k + n];
#pragma unroll
            for (int n = 0; n < 4; n++) rank += other[n].x > own.x || (other[n].x == own.x && other[n].y < own.y);
        }
        if (own.x && rank < p.count) shared.winner[rank] = (int)own.y;
        if (4 * p.count <= 32) break;
    }
    __syncwarp();
    winner = lane < p.count ? shared.winner[lane] : 0x7FFFFFFF;
    int place = 0;
#pragma unroll
    for (int c = 0; c < MOST_COUNT; c++) place += __shfl_sync(ALL, winner, c) < winner;  // lanes behind the last hold no id
    const float mine = lane < p.count ? shared.score_of[winner] : 0.0f;
    float sum = mine;
#pragma unroll
    for (int far = 16; far; far /= 2) sum += __shfl_xor_sync(ALL, sum, far);
    if (lane < p.count) {
        p.out_experts[(size_t)row * p.count + place] = winner;
        p.out_weights[(size_t)row * p.count + place] = __fdiv_rn(mine, sum + 1e-20f) * p.scale;
    }
}

// Behind a block's last sums, which its thread 0 must have seen written: arrive, and select the rows that are this block's.
template <int PER, bool SOFTMAX> __device__ __forceinline__ void finish(const Route& p, int chunks, Selection& shared) {
    const int thread = threadIdx.x;
    if (thread == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&p.arrived[0]) : "memory");
    if (blockIdx.x < p.rows && thread < THREADS) {
        if (thread == 0) {
            unsigned seen;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(&p.arrived[0]) : "memory");
            } while (seen < gridDim.x);
        }
        meet();
        for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
            select<PER, SOFTMAX, false>(p, chunks, row, shared);
            meet();
        }
    }
    if (thread == 0 && atomicAdd(&p.arrived[1], 1u) == gridDim.x - 1) p.arrived[0] = 0, p.arrived[1] = 0;
}

// Up to FEW_ROWS rows: block (chunks of a warp each) of a cluster (experts).
template <int PER, bool SOFTMAX> __global__ void __launch_bounds__(THREADS, 2) route_few(const Route p) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Selection shared;
    __shared__ float sums[MOST_CLUSTER * WARPS][FEW_ROWS][TOGETHER];  // of the cluster's first block
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
    const uint32_t ws = (uint32_t)__cvta_generic_to_shared(memory), xs = ws + TOGETHER * WIDE_ROW;
    const int blocks = (p.chunks + WARPS - 1) / WARPS, block = blockIdx.x % blocks, first = blockIdx.x / blocks * TOGETHER;
    const int column = block * WARPS * CHUNK, bytes = min(WARPS * CHUNK, p.width - column) * 2;
    constexpr int PIECES = WARPS * CHUNK / 8;
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // until all blocks have begun
#pragma unroll 4
    for (int i = thread; i < TOGETHER * PIECES; i += THREADS) {  // weights are nobody's output: before the wait
        const int row = i / PIECES, byte = i % PIECES * 16;
        const bool real = first + row < p.experts && byte < bytes;
        copy16(ws + row * WIDE_ROW + byte, (const char*)p.gate + (real ? ((size_t)(first + row) * p.width + column) * 2 + byte : 0), real);
    }
    asm volatile("cp.async.commit_group;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 4
    for (int i = thread; i < p.rows * PIECES; i += THREADS) {  // what stands behind them comes to sums that nobody reads
        const int row = i / PIECES, byte = i % PIECES * 16;
        const bool real = byte < bytes;
        copy16(xs + row * WIDE_ROW + byte, (const char*)p.x + (real ? ((size_t)row * p.width + column) * 2 + byte : 0), real);
    }
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    float sum[4] = {};
    const uint32_t a_at = ws + lane % 16 * WIDE_ROW + warp * CHUNK * 2 + lane / 16 * 16;
    const uint32_t b_at = xs + lane % 8 * WIDE_ROW + warp * CHUNK * 2 + lane / 8 * 16;
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step += 2) {
        uint32_t a[2][4], b[4];
        load_matrices(a_at + step * 32, a[0]);
        load_matrices(a_at + step * 32 + 32, a[1]);
        load_matrices(b_at + step * 32, b);
#pragma unroll
        for (int k = 0; k < 2; k++) multiply(sum, a[k], b[k * 2], b[k * 2 + 1]);
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    uint32_t to = (uint32_t)__cvta_generic_to_shared(&sums[block * WARPS + warp][0][0]);
    asm volatile("mapa.shared::cluster.u32 %0, %0, 0;" : "+r"(to));
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to + ((q * 2 + (i & 1)) * TOGETHER + g + (i / 2) * 8) * 4), "f"(sum[i]) : "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (block == 0) {
        const int row = thread / TOGETHER, expert = thread % TOGETHER;
        float logit = 0.0f;
#pragma unroll 4
        for (int chunk = 0; chunk < p.chunks; chunk++) logit += sums[chunk][row][expert];
        const uint32_t bits = __float_as_uint(logit);
        if (row < p.rows && first + expert < p.experts)
            asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p.parts + (size_t)row * p.experts + first + expert),
                         "r"(bits == NOTHING ? 0x7FFFFFFFu : bits) : "memory");
    }
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        select<PER, SOFTMAX, true>(p, 1, row, shared);
        __syncthreads();
    }
}

template <int TILE, int PER, bool SOFTMAX>  // TILE: eights of rows, at least as many as there are
__global__ void __launch_bounds__(THREADS, RESIDENT) route(const Route p) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Selection shared;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
    const uint32_t ws = (uint32_t)__cvta_generic_to_shared(memory), xs = ws + EXPERTS * ROW;
    const int chunk = blockIdx.x % p.chunks, first = blockIdx.x / p.chunks * EXPERTS;
    const int bytes = min(CHUNK, p.width - chunk * CHUNK) * 2;
    asm volatile("griddepcontrol.launch_dependents;");
    for (int i = thread; i < EXPERTS * (CHUNK / 8); i += THREADS) {  // weights are nobody's output: before the wait
        const int row = i / (CHUNK / 8), byte = i % (CHUNK / 8) * 16;
        const bool real = first + row < p.experts && byte < bytes;
        copy16(ws + row * ROW + byte, (const char*)p.gate + (real ? ((size_t)(first + row) * p.width + chunk * CHUNK) * 2 + byte : 0), real);
    }
    asm volatile("cp.async.commit_group;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int eights = (p.rows + 7) / 8;
    for (int i = thread; i < eights * 8 * (CHUNK / 8); i += THREADS) {
        const int row = i / (CHUNK / 8), byte = i % (CHUNK / 8) * 16;
        const bool real = row < p.rows && byte < bytes;
        copy16(xs + row * ROW + byte, (const char*)p.x + (real ? ((size_t)row * p.width + chunk * CHUNK) * 2 + byte : 0), real);
    }
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    constexpr int MINE = (TILE + 1) / 2;
    float sum[MINE][4] = {};
    // matrices of A: rows 0-7 and 8-15 of the first eight inputs, then of the next eight
    const uint32_t a_at = ws + ((warp & 1) * 16 + lane % 16) * ROW + lane / 16 * 16;
    const uint32_t b_at = xs + (warp / 2 * 8 + lane % 8) * ROW + lane / 8 * 16;
    if (warp / 2 < eights) {
#pragma unroll
        for (int step = 0; step < CHUNK / 16; step += 2) {
            uint32_t a[2][4];
            load_matrices(a_at + step * 32, a[0]);
            load_matrices(a_at + step * 32 + 32, a[1]);
#pragma unroll
            for (int n = 0; n < MINE; n++)
                if (n == 0 || warp / 2 + n * 2 < eights) {
                    uint32_t b[4];
                    load_matrices(b_at + n * 16 * ROW + step * 32, b);
#pragma unroll
                    for (int k = 0; k < 2; k++) multiply(sum[n], a[k], b[k * 2], b[k * 2 + 1]);
                }
        }
    }
#pragma unroll
    for (int n = 0; n < MINE; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = (warp / 2 + n * 2) * 8 + q * 2 + (i & 1), expert = first + (warp & 1) * 16 + g + (i / 2) * 8;
            if (row < p.rows && expert < p.experts) __stcg(&p.parts[((size_t)chunk * p.rows + row) * p.experts + expert], sum[n][i]);
        }
    __syncthreads();
    finish<PER, SOFTMAX>(p, p.chunks, shared);
}

template <int PER, bool SOFTMAX> __global__ void __launch_bounds__(THREADS, RESIDENT) select_rows(const Route p) {
    __shared__ Selection shared;
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    select<PER, SOFTMAX, false>(p, p.chunks, blockIdx.x, shared);
}

int launch(void (*kernel)(Route), const Route& p, int blocks, int threads, int bytes, cudaStream_t stream, bool programmatic, int cluster = 1) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error) return (int)error;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {(unsigned)cluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = programmatic ? 2 : 1;
    return (int)cudaLaunchKernelEx(&config, kernel, p);
}

template <int PER, bool SOFTMAX> int launch_route(const Route& p, cudaStream_t stream, bool programmatic) {
    const int blocks = p.chunks * ((p.experts + EXPERTS - 1) / EXPERTS);
    const int cluster = (p.chunks + WARPS - 1) / WARPS, clusters = (p.experts + TOGETHER - 1) / TOGETHER;
    if (p.rows <= FEW_ROWS && cluster <= MOST_CLUSTER)
        return launch(route_few<PER, SOFTMAX>, p, clusters * cluster, THREADS, (TOGETHER + FEW_ROWS) * WIDE_ROW, stream, programmatic, cluster);
    if (p.rows <= 8) return launch(route<1, PER, SOFTMAX>, p, blocks, THREADS, (EXPERTS + 8) * ROW, stream, programmatic);
    if (p.rows <= 16) return launch(route<2, PER, SOFTMAX>, p, blocks, THREADS, (EXPERTS + 16) * ROW, stream, programmatic);
    return launch(route<MOST_ROWS / 8, PER, SOFTMAX>, p, blocks, THREADS, (EXPERTS + MOST_ROWS) * ROW, stream, programmatic);
}

template <bool SOFTMAX> int launch_route(const Route& p, cudaStream_t stream, bool programmatic) {
    if (p.experts <= THREADS) return launch_route<1, SOFTMAX>(p, stream, programmatic);
    if (p.experts <= 3 * THREADS) return launch_route<3, SOFTMAX>(p, stream, programmatic);
    return launch_route<4, SOFTMAX>(p, stream, programmatic);
}

template <bool SOFTMAX> int launch_select(const Route& p, cudaStream_t stream, bool programmatic) {
    if (p.experts <= THREADS) return launch(select_rows<1, SOFTMAX>, p, p.rows, THREADS, 0, stream, programmatic);
    if (p.experts <= 3 * THREADS) return launch(select_rows<3, SOFTMAX>, p, p.rows, THREADS, 0, stream, programmatic);
    return launch(select_rows<4, SOFTMAX>, p, p.rows, THREADS, 0, stream, programmatic);
}

}  // namespace

extern "C" {

int moe_route(const void* x, const void* gate, const float* bias, float* parts, unsigned* arrived, int64_t* experts, float* weights, int rows,
              int width, int num_experts, int count, float scale, float temperature, int softmax, void* stream, int programmatic) {
    if (num_experts > 4 * THREADS || count > MOST_COUNT || width % 8 || rows > MOST_ROWS) return (int)cudaErrorInvalidValue;
    const Route p = {x, gate, bias, parts, arrived, experts, weights, rows, width, num_experts, count, (width + CHUNK - 1) / CHUNK, scale, temperature};
    cudaStream_t s = (cudaStream_t)stream;
    return softmax ? launch_route<true>(p, s, programmatic) : launch_route<false>(p, s, programmatic);
}

int moe_select(float* parts, const float* bias, int64_t* experts, float* weights, int chunks, int rows, int num_experts, int count, float scale,
               float temperature, int softmax, void* stream, int programmatic) {
    if (num_experts > 4 * THREADS || count > MOST_COUNT) return (int)cudaErrorInvalidValue;
    const Route p = {nullptr, nullptr, bias, parts, nullptr, experts, weights, rows, 0, num_experts, count, chunks, scale, temperature};
    cudaStream_t s = (cudaStream_t)stream;
    return softmax ? launch_select<true>(p, s, programmatic) : launch_select<false>(p, s, programmatic);
}
}
