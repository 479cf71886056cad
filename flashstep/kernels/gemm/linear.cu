// FP8-block linears on Hopper: out^T = W x^T. Weights are the left operand: codes become bf16 in registers, exactly.
//
// A weight lies in blocks of 64 outputs x 64 inputs in the order of the matrix instruction's registers, a block's scales behind its
// codes, so that the part of a program is one run of bytes, which the copy engine brings and which may be asked for before the
// producers of x have finished. The inputs are cut into chunks whose length depends on the weight's shape only; a chunk is one
// chain of matrix instructions, chunks are added in order: by the blocks of a cluster, or by one block that computes all of them.
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

// What the caller says; the other side is flashstep/kernels/gemm/cuda.py.
struct Call {
    void *x, *weight, *out;
    int64_t x_row, x_group;  // strides of x, in elements
    int rows, groups, outputs, steps;
    int format;     // Format
    int wide;       // out is fp32
    int chunk, chunks;
    int tile_rows;  // N
    int loop;       // a block computes all chunks: of how many times 64 outputs, or 0
    int shared;     // bytes of shared memory that a block may take
    int programmatic;
    cudaStream_t stream;
};

namespace {

constexpr int STEP = 64;  // inputs of a block of the weight
constexpr int CODES = 64 * STEP;
constexpr int ROW_TILES = 8;  // tiles of rows that read one weight tile while it lies in L2
constexpr int MOST_STAGES = 16;
constexpr int FEW = 16;  // rows that the warps' own matrix instructions multiply; the sums are the same, bit for bit

enum Format { BLOCKS, ROWS, PLAIN };  // E4M3 with scales of 32 x 32 blocks, or of a row's 32 inputs; bf16 [outputs, inputs]

struct Product {
    const uint8_t* weight;  // [groups, tiles, steps, block bytes]; PLAIN is read by its map
    void* out;              // bf16 or fp32 [T, groups, outputs]
    int rows, outputs, steps, tiles, chunk, chunks, stages;
    bool wide;              // out is fp32
};

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, int phase) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;\n}" ::"r"(bar), "r"(phase) : "memory");
}
__device__ __forceinline__ void copy_run(uint32_t to, const void* from, int bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap* map, int row, int step, int group, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(step), "r"(group), "r"(bar) : "memory");
}
__device__ __forceinline__ uint32_t at_rank(uint32_t address, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void send(uint32_t to, const float* v, uint32_t bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar) : "memory");
}

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint4 shared16(uint32_t a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ float4 shared_floats(uint32_t a) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t shared4(uint32_t a) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
    return v;
}

#define D4 "%0,%1,%2,%3"
#define D8 D4 ",%4,%5,%6,%7"
#define D16 D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D24 D16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define D32 D24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define D48 D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define D64 D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8 F4(0), F4(4)
#define F16 F8, F4(8), F4(12)
#define F24 F16, F4(16), F4(20)
#define F32 F24, F4(24), F4(28)
#define F48 F32, F4(32), F4(36), F4(40), F4(44)
#define F64 F48, F4(48), F4(52), F4(56), F4(60)
#define WGMMA(N, D, A, B, ...)                                                                              \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" D "}, {" A "}, " B ", p, 1, 1, 0;\n}" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d [64, N] += a [64, 16] b [16, N]; b lies in shared memory, 64 inputs of a row together.
template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t* a, uint64_t b) {
    if constexpr (N == 8) WGMMA("8", D4, "%4,%5,%6,%7", "%8", F4(0));
    if constexpr (N == 16) WGMMA("16", D8, "%8,%9,%10,%11", "%12", F8);
    if constexpr (N == 32) WGMMA("32", D16, "%16,%17,%18,%19", "%20", F16);
    if constexpr (N == 48) WGMMA("48", D24, "%24,%25,%26,%27", "%28", F24);
    if constexpr (N == 64) WGMMA("64", D32, "%32,%33,%34,%35", "%36", F32);
    if constexpr (N == 96) WGMMA("96", D48, "%48,%49,%50,%51", "%52", F48);
    if constexpr (N == 128) WGMMA("128", D64, "%64,%65,%66,%67", "%68", F64);
}

#define WGMMA_SHARED(N, D, A, B, ...)                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" D "}, " A ", " B ", p, 1, 1, 0, 0;\n}" \
                 : __VA_ARGS__ : "l"(a), "l"(b))

// The same of an ``a`` that lies in shared memory like ``b``.
template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b) {
    if constexpr (N == 8) WGMMA_SHARED("8", D4, "%4", "%5", F4(0));
    if constexpr (N == 16) WGMMA_SHARED("16", D8, "%8", "%9", F8);
    if constexpr (N == 32) WGMMA_SHARED("32", D16, "%16", "%17", F16);
    if constexpr (N == 48) WGMMA_SHARED("48", D24, "%24", "%25", F24);
    if constexpr (N == 64) WGMMA_SHARED("64", D32, "%32", "%33", F32);
    if constexpr (N == 96) WGMMA_SHARED("96", D48, "%48", "%49", F48);
    if constexpr (N == 128) WGMMA_SHARED("128", D64, "%64", "%65", F64);
}

// The 64 x 64 weights of a block that this thread multiplies: 16 registers, four for each 16 inputs.
template <Format F> __device__ __forceinline__ void decode(uint32_t block, uint32_t (&a)[16]) {
    int thread = threadIdx.x % 128;
    uint32_t low, high, low8, high8;  // scales of inputs 0..31 and 32..63, of the rows g and g + 8
    if constexpr (F == ROWS) {
        uint32_t at = block + CODES + ((thread / 32) * 16 + (thread % 32) / 4) * 4;
        uint32_t s = shared4(at), s8 = shared4(at + 32);
        low = __byte_perm(s, 0, 0x1010), high = __byte_perm(s, 0, 0x3232);
        low8 = __byte_perm(s8, 0, 0x1010), high8 = __byte_perm(s8, 0, 0x3232);
    } else {
        uint32_t s = shared4(block + CODES + (thread / 64) * 4);
        low8 = low = __byte_perm(s, 0, 0x1010), high8 = high = __byte_perm(s, 0, 0x3232);
    }
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
        uint4 v = shared16(block + piece * 2048 + thread * 16);
        uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            uint32_t first = w[r] & 0x87F087F0u;
            uint32_t second = (__funnelshift_l(w[r], w[r], 28) & 0x87808780u) | ((w[r] << 4) & 0x00700070u);
            a[piece * 4 + r] = times(first, r & 1 ? low8 : low);
            a[8 + piece * 4 + r] = times(second, r & 1 ? high8 : high);
        }
    }
}

// Rows of 128 bytes with a 128-byte swizzle, 1024 bytes from eight rows to the next.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | ((uint64_t)1 << 16) | ((uint64_t)64 << 32) | ((uint64_t)1 << 62);
}
// Up to 16 rows: each warp multiplies its 16 outputs by itself. The order and the roundings of the sums are wgmma's, bit for bit
// (tests/kernels/test_gemm.py), without its latency.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void multiply_warp(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <int N> __device__ __forceinline__ void multiply_few(float (&d)[N / 2], const uint32_t (&a)[16], uint32_t x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int unit = 0; unit < N / 8; ++unit) {
        uint32_t low[4], high[4], at = x + unit * 1024 + lane % 8 * 128;
        load_matrices(at + (((lane / 8) ^ (lane % 8)) * 16), low);
        load_matrices(at + (((4 + lane / 8) ^ (lane % 8)) * 16), high);
        multiply_warp(d + 4 * unit, a, low[0], low[1]);
        multiply_warp(d + 4 * unit, a + 4, low[2], low[3]);
        multiply_warp(d + 4 * unit, a + 8, high[0], high[1]);
        multiply_warp(d + 4 * unit, a + 12, high[2], high[3]);
    }
}
// A block of bf16 weights as ``decode`` would give it.
__device__ __forceinline__ void load_plain(uint32_t block, uint32_t (&a)[16]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < 4; ++k) load_matrices(block + row * 128 + (((2 * k + lane / 16) ^ (row % 8)) * 16), *reinterpret_cast<uint32_t(*)[4]>(a + 4 * k));
}
template <int N> __device__ __forceinline__ void multiply_step(float (&d)[N / 2], const uint32_t (&a)[16], uint32_t x) {
    if constexpr (N <= FEW) return multiply_few<N>(d, a, x);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply<N>(d, a + 4 * k, operand(x) + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void multiply_step(float (&d)[N / 2], uint32_t w, uint32_t x) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply<N>(d, operand(w) + 2 * k, operand(x) + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void finish(float (&d)[N / 2]) {
    if constexpr (N <= FEW) return __syncwarp();
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// bf16 of a tile, by way of the shared memory at ``base`` (the stages are done with), so that rows of outputs are written together.
template <int N, int WG>
__device__ __forceinline__ void store_tile(const float (&d)[N / 2], uint32_t base, uint16_t* out, int64_t row, int t0, int rows, int o0, int outputs) {
    constexpr int ROW = WG * 64 * 2 + 16, PIECES = WG * 8;  // of a row: bytes, with some between rows for the banks; pieces of 16
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, piece = threadIdx.x % PIECES;
    asm volatile("bar.sync 1, %0;" ::"n"(WG * 128) : "memory");
#pragma unroll
    for (int unit = 0; unit < N / 8; unit += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[i]) : "f"(d[4 * unit + 2 * i + 1]), "f"(d[4 * unit + 2 * i]));
        uint32_t to = base + (8 * (unit + lane / 16) + lane % 8) * ROW + (warp * 16 + lane / 8 % 2 * 8) * 2;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
    }
    asm volatile("bar.sync 1, %0;" ::"n"(WG * 128) : "memory");
    for (int t = threadIdx.x / PIECES; t < N && t0 + t < rows; t += 128 * WG / PIECES)
        if (o0 + piece * 8 < outputs)
            *reinterpret_cast<uint4*>(out + (t0 + t) * row + o0 + piece * 8) = shared16(base + t * ROW + piece * 16);
}

template <int N, int U, int WG, Format F> struct Stage {
    static constexpr int BLOCK = F == PLAIN ? 2 * CODES : CODES + (F == ROWS ? 256 : 16);
    static constexpr int X = U * N * 128;  // bytes of x, which lies apart from the weights
    static constexpr int BYTES = X + WG * U * BLOCK;
};

constexpr int WIDEST = 3;  // WG that leaves no registers for a second sum: for weights of one chunk

// One tile of 64 WG outputs x N rows. LOOP: all chunks here; otherwise the one of the block's place in its cluster.
// U: steps of a stage.
template <int N, int U, int WG, bool LOOP, Format F>
__global__ void __launch_bounds__(WG * 128 + 32, WG == 1 ? 2 : 1)
    linear_tile(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap plain, const Product p) {
    using S = Stage<N, U, WG, F>;
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t barriers[2 * MOST_STAGES + 1];
    asm volatile("griddepcontrol.launch_dependents;");
    const uint32_t base = shared_address(memory), full = shared_address(barriers), empty = full + MOST_STAGES * 8;
    const uint32_t first_weight = base + p.stages * S::X;
    const uint32_t arrived = empty + MOST_STAGES * 8;  // the sums of all chunks
    const int tiles = (p.tiles + WG - 1) / WG, row_tiles = (p.rows + N - 1) / N;
    const int band = blockIdx.x / (ROW_TILES * tiles), in_band = blockIdx.x % (ROW_TILES * tiles);
    const int band_rows = min(row_tiles - band * ROW_TILES, ROW_TILES);
    const int tile = in_band / band_rows * WG, t0 = (band * ROW_TILES + in_band % band_rows) * N;
    const int group = blockIdx.z, warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // the compiler sees that it is uniform
    const int begin = LOOP ? 0 : blockIdx.y * p.chunk, end = LOOP ? p.steps : min(begin + p.chunk, p.steps);
    // of the sums of a warp's four registers, which block of the cluster adds which: item i goes to i % chunks
    const int items = N / 8 * WG * 4, owned = LOOP ? 0 : (items - (int)blockIdx.y + p.chunks - 1) / p.chunks;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
        if constexpr (F == PLAIN) asm volatile("prefetch.tensormap [%0];" ::"l"(&plain) : "memory");
        for (int s = 0; s < p.stages; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, WG * 4);
        if (!LOOP && p.chunks > 1 && owned) {
            barrier_init(arrived, 1);
            barrier_expect(arrived, owned * p.chunks * 512);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (!LOOP && p.chunks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

    constexpr bool ADDS = LOOP && WG < WIDEST;
    float sum[N / 2], total[ADDS ? N / 2 : 1];
    if (warp == WG * 4) {
        uint32_t chosen;
        asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
        if (chosen) {
            const uint8_t* weight = p.weight + ((int64_t)(group * p.tiles + tile) * p.steps) * S::BLOCK;
            const int there = min(WG, p.tiles - tile);
            auto weights = [&](int stage, int step, int count) {
                uint32_t bar = full + 8 * stage, to = first_weight + stage * (S::BYTES - S::X);
                barrier_expect(bar, F == PLAIN ? S::BYTES : count * there * S::BLOCK + S::X);
                if constexpr (F == PLAIN) copy_tile(to, &plain, tile * 64, step, 0, bar);
                else
                    for (int w = 0; w < there; ++w)
                        copy_run(to + w * U * S::BLOCK, weight + ((int64_t)w * p.steps + step) * S::BLOCK, count * S::BLOCK, bar);
            };
            auto inputs = [&](int stage, int step) { copy_tile(base + stage * S::X, &x, t0, step, group, full + 8 * stage); };
            // stages restart with each chunk
            int ahead = 0, step = begin, stop = min(begin + p.chunk, end);
            auto next = [&](int& step, int& stop) {
                int count = min(U, stop - step);
                step += count;
                if (step == stop) stop = min(stop + p.chunk, end);
                return count;
            };
            for (int s = step, e = stop; ahead < p.stages && s < end; ++ahead) {
                int at = s, count = next(s, e);
                weights(ahead, at, count);
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int i = 0; step < end; ++i) {
                int stage = i % p.stages, at = step, count = next(step, stop);
                if (i >= ahead) {
                    barrier_wait(empty + 8 * stage, ((i / p.stages) & 1) ^ 1);
                    weights(stage, at, count);
                }
                inputs(stage, at);
            }
        }
    } else {
        const uint32_t own = first_weight + (warp / 4) * (F == PLAIN ? 1 : U) * S::BLOCK;
        int stage = 0, phase = 0, held = 0;  // the stage that is read next and its phase; the one whose product runs
        for (int from = begin; from < end; from += p.chunk) {
            const int n = min(p.chunk, end - from);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sum[i] = 0.0f;
            uint32_t a[16], b[16];
            auto load = [&](int s, uint32_t (&to)[16]) {
                if (s % U == 0) barrier_wait(full + 8 * stage, phase);
                if constexpr (F == PLAIN && N <= FEW) load_plain(own + stage * (S::BYTES - S::X) + (s % U) * WG * S::BLOCK, to);
                if constexpr (F != PLAIN) decode<F>(own + stage * (S::BYTES - S::X) + (s % U) * S::BLOCK, to);
            };
            auto product = [&](int s, const uint32_t (&with)[16]) {
                const uint32_t at = base + stage * S::X + (s % U) * N * 128;
                if constexpr (F == PLAIN && N > FEW) multiply_step<N>(sum, own + stage * (S::BYTES - S::X) + (s % U) * WG * S::BLOCK, at);
                else multiply_step<N>(sum, with, at);
                held = stage;
                if (s % U == U - 1 || s + 1 == n) {
                    if (++stage == p.stages) stage = 0, phase ^= 1;
                }
            };
            auto release = [&](int s) {
                finish<N>(sum);
                if ((s % U == U - 1 || s + 1 == n) && threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * held);
            };
            load(0, a);
            for (int s = 0; s < n; s += 2) {
                product(s, a);
                if (s + 1 < n) load(s + 1, b);
                release(s);
                if (s + 1 < n) {
                    product(s + 1, b);
                    if (s + 2 < n) load(s + 2, a);
                    release(s + 1);
                }
            }
            if constexpr (ADDS) {
#pragma unroll
                for (int i = 0; i < N / 2; ++i) total[i] = from ? total[i] + sum[i] : sum[i];
            }
        }
    }

    // register i of a warp's sums
    auto store = [&](int warp, int i, float v) {
        int lane = threadIdx.x % 32, t = t0 + (i / 4) * 8 + lane % 4 * 2 + (i & 1);
        int at = (tile + warp / 4) * 64 + warp % 4 * 16 + lane / 4 + ((i >> 1) & 1) * 8;
        if (t >= p.rows || at >= p.outputs) return;
        int64_t place = ((int64_t)t * gridDim.z + group) * p.outputs + at;
        if (p.wide) reinterpret_cast<float*>(p.out)[place] = v;
        else asm volatile("{.reg .b16 h;\ncvt.rn.bf16.f32 h, %1;\nst.global.b16 [%0], h;}" ::"l"(reinterpret_cast<uint16_t*>(p.out) + place), "f"(v) : "memory");
    };
    if constexpr (LOOP) {
        const auto& found = [&]() -> const float(&)[N / 2] {
            if constexpr (ADDS) return total;
            else return sum;
        }();
        if (warp < WG * 4 && !p.wide && p.outputs % 8 == 0) {
            store_tile<N, WG>(found, base, reinterpret_cast<uint16_t*>(p.out) + (int64_t)group * p.outputs, (int64_t)gridDim.z * p.outputs, t0,
                              p.rows, tile * 64, p.outputs);
        } else if (warp < WG * 4) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) store(warp, i, found[i]);
        }
    } else if (p.chunks == 1) {
        if (warp < WG * 4)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) store(warp, i, sum[i]);
    } else if (warp < WG * 4) {
        __syncwarp();
        // nobody writes before every barrier of the cluster is made
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        const int rank = blockIdx.y, lane = threadIdx.x % 32;
        const uint32_t sums = base + p.stages * S::BYTES + lane * 16;
#pragma unroll
        for (int unit = 0; unit < N / 8; ++unit) {
            int item = unit * WG * 4 + warp, owner = item % p.chunks;
            send(at_rank(sums + (item / p.chunks * p.chunks + rank) * 512, owner), sum + 4 * unit, at_rank(arrived, owner));
        }
        if (warp < owned) barrier_wait(arrived, 0);
        for (int i = warp; i < owned; i += WG * 4) {
            float4 v = shared_floats(sums + i * p.chunks * 512);
#pragma unroll 4
            for (int c = 1; c < p.chunks; ++c) {
                float4 w = shared_floats(sums + (i * p.chunks + c) * 512);
                v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
            }
            int item = i * p.chunks + rank, source = item % (WG * 4), first = item / (WG * 4) * 4;
            store(source, first, v.x), store(source, first + 1, v.y), store(source, first + 2, v.z), store(source, first + 3, v.w);
        }
    } else {
        __syncwarp();
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

// One block of the weight as bf16 [64, 64] of out [groups * outputs, inputs].
template <Format F>
__global__ void __launch_bounds__(128) expand_block(const uint8_t* weight, uint16_t* out, int outputs, int inputs) {
    constexpr int BLOCK = Stage<8, 1, 1, F>::BLOCK, ROW = STEP * 2 + 16;
    __shared__ __align__(16) uint8_t block[BLOCK], rows[64 * ROW];
    const int step = blockIdx.x, tile = blockIdx.y, group = blockIdx.z, thread = threadIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(weight + ((int64_t)(group * gridDim.y + tile) * gridDim.x + step) * BLOCK);
    for (int i = thread; i < BLOCK / 16; i += 128) reinterpret_cast<uint4*>(block)[i] = __ldg(from + i);
    __syncthreads();
    uint32_t a[16];
    decode<F>(shared_address(block), a);
    const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 16; ++i)
        *reinterpret_cast<uint32_t*>(rows + (row + (i & 1) * 8) * ROW + (i / 4) * 32 + ((i >> 1) & 1) * 16 + (thread % 4) * 4) = a[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int r = i * 16 + thread / 8, o = tile * 64 + r, at = step * STEP + thread % 8 * 8;
        if (o < outputs && at < inputs)
            *reinterpret_cast<uint4*>(out + ((int64_t)group * outputs + o) * inputs + at) = *reinterpret_cast<uint4*>(rows + r * ROW + thread % 8 * 16);
    }
}

// bf16 rows of ``steps`` x 64 inputs, as boxes of ``rows_together`` rows x ``together`` steps: [step, row, 64].
CUresult encode(CUtensorMap* map, void* x, int rows, int groups, int steps, int64_t row, int64_t group, int rows_together, int together) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static Encode function = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return reinterpret_cast<Encode>(found);
    }();
    if (function == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    cuuint64_t size[4] = {STEP, (cuuint64_t)rows, (cuuint64_t)steps, (cuuint64_t)groups};
    cuuint64_t stride[3] = {(cuuint64_t)row * 2, STEP * 2, (cuuint64_t)group * 2};
    cuuint32_t box[4] = {STEP, (cuuint32_t)rows_together, (cuuint32_t)together, 1}, one[4] = {1, 1, 1, 1};
    return function(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x, size, stride, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <int N, int U, int WG, bool LOOP, Format F>
int launch(const Call& c, Product p) {
    CUtensorMap x, plain;
    if (encode(&x, c.x, c.rows, c.groups, c.steps, c.x_row, c.x_group, N, U)) return cudaErrorInvalidValue;
    if (F != PLAIN) plain = x;  // not read
    else if (encode(&plain, c.weight, c.outputs, 1, c.steps, c.steps * STEP, c.steps * STEP, 64 * WG, U)) return cudaErrorInvalidValue;
    auto kernel = linear_tile<N, U, WG, LOOP, F>;
    using S = Stage<N, U, WG, F>;
    const bool cluster = !LOOP && p.chunks > 1;
    const int owned = (N / 8 * WG * 4 + p.chunks - 1) / p.chunks;  // of the block that adds most
    const int sums = cluster ? owned * p.chunks * 512 : 0;
    p.stages = max(min(min((c.shared - 2048 - sums) / S::BYTES, MOST_STAGES), ((LOOP ? p.steps : p.chunk) + U - 1) / U), 2);
    const int bytes = p.stages * S::BYTES + sums;
    static int allowed = 0;
    if (bytes > allowed) {
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error) return error;
        allowed = bytes;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((p.tiles + WG - 1) / WG * ((p.rows + N - 1) / N), LOOP ? 1 : p.chunks, c.groups);
    config.blockDim = dim3(WG * 128 + 32);
    config.dynamicSmemBytes = bytes;
    config.stream = c.stream;
    cudaLaunchAttribute attributes[2];
    config.attrs = attributes;
    if (c.programmatic) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim.x = 1;
        attributes[config.numAttrs].val.clusterDim.y = p.chunks;
        attributes[config.numAttrs++].val.clusterDim.z = 1;
    }
    return cudaLaunchKernelEx(&config, kernel, x, plain, p);
}

template <int N, int U, int WG, bool LOOP> int launch(const Call& c, const Product& p) {
    if (c.format == BLOCKS) return launch<N, U, WG, LOOP, BLOCKS>(c, p);
    if (c.format == ROWS) return launch<N, U, WG, LOOP, ROWS>(c, p);
    return launch<N, U, WG, LOOP, PLAIN>(c, p);
}

}  // namespace

// 0, or a CUDA error.
extern "C" int linear(const Call* call) {
    const Call& c = *call;
    Product p = {static_cast<const uint8_t*>(c.weight), c.out, c.rows, c.outputs, c.steps, (c.outputs + 63) / 64, c.chunk, c.chunks, 0, c.wide != 0};
    if (c.loop == WIDEST && c.chunks > 1) return cudaErrorInvalidConfiguration;
    switch (c.loop * 1000 + c.tile_rows) {
        case 8: return launch<8, 2, 1, false>(c, p);
        case 16: return launch<16, 2, 1, false>(c, p);
        case 32: return launch<32, 1, 1, false>(c, p);
        case 48: return launch<48, 1, 1, false>(c, p);
        case 64: return launch<64, 1, 1, false>(c, p);
        case 96: return launch<96, 1, 1, false>(c, p);
        case 128: return launch<128, 1, 2, false>(c, p);
        case 1064: return launch<64, 2, 1, true>(c, p);
        case 1096: return launch<96, 2, 1, true>(c, p);
        case 2096: return launch<96, 2, 2, true>(c, p);
        case 2128: return launch<128, 2, 2, true>(c, p);
        case 3128: return launch<128, 1, 3, true>(c, p);
    }
    return cudaErrorInvalidConfiguration;
}

// bf16 out [groups * outputs, inputs], inputs a multiple of 8.
extern "C" int expand(const void* weight, void* out, int groups, int outputs, int inputs, int row_scales, cudaStream_t stream) {
    dim3 grid((inputs + STEP - 1) / STEP, (outputs + 63) / 64, groups);
    auto kernel = row_scales ? expand_block<ROWS> : expand_block<BLOCKS>;
    kernel<<<grid, 128, 0, stream>>>(static_cast<const uint8_t*>(weight), static_cast<uint16_t*>(out), outputs, inputs);
    return cudaGetLastError();
}
