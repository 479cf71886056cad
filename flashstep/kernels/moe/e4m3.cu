// Routed experts in E4M3: FP4 weights become E4M3 in registers and meet rows of E4M3 in wgmma products.
//
// A weight's scale goes into its code: in E4M3 a group may be 2^-11 of the largest of its output. Eight magnitudes of a scale are eight
// bytes, of which byte permutation takes four at once. Every 128 inputs the sums of the matrix units, which have some 13 bits, go on
// in fp32, times the scales of the rows. 384 rows on 12 experts take 290 us: without converting 223, without going on in fp32 241,
// without both 198 (H200, 2026-12-01).
#include "experts.cuh"

namespace {

constexpr int FRAGMENT8 = 1088;              // 16 outputs x 128 inputs: two halves of 16 bytes a lane, then 8 bytes of scales a lane group
constexpr int TILE = TOGETHER * FRAGMENT8;   // 128 outputs x 128 inputs
constexpr int TILES = 2;                     // of a block: with gate and up in turns 128 channels, a step of the next product
constexpr int ROW = 132;                     // bytes of a row's 128 inputs: codes and their scale
constexpr int FARTHEST = 11;                  // binades from an output's largest scale that codes hold exactly; beyond, codes are rounded
constexpr int OUTROW = 272;                  // bytes of 128 bf16 on their way out, and 16 against bank conflicts
constexpr int FEW_PAIRS = 1024, MOST_EXPERTS = 1024;

// Bytes of shared memory for items of N rows: stages of rows and weights, then what goes out.
template <int N> struct Shape {
    static constexpr int X = N * ROW, STAGE = (X + TILES * TILE + 1023) / 1024 * 1024;
    static constexpr int RESIDENT = N <= 16 ? 2 : 1, LEAN = RESIDENT == 2 ? 24 : 40, RICH = RESIDENT == 2 ? 104 : 232;
    static constexpr int ROOM = 227 * 1024 / RESIDENT - 3072 - N * OUTROW, STAGES = ROOM / STAGE < 8 ? ROOM / STAGE : 8;
    static constexpr int BYTES = STAGES * STAGE + N * OUTROW;
};

struct Call {
    const unsigned char* x;     // tiles [items, steps, N rows of 128 codes swizzled, then N scales]
    const unsigned char* data;  // fragments [E, tiles, steps, TOGETHER, FRAGMENT8]
    const float* worth;         // [E, tiles, 128]: an output's largest scale times 2^-6
    unsigned char* inner;       // tiles as x (gate and up)
    uint16_t* out;              // bf16 [pairs, outputs] (down)
    const float* weights;       // of a pair
    const int* order;           // pairs by expert
    const int4* items;          // expert, first and end in that order
    const int* used;
    int steps, tiles, outputs, inner_steps;
    float limit;
};

__device__ __forceinline__ void expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// wgmma m64nNk32 with A in registers, B swizzled in shared memory, and N / 2 sums a thread, which begin anew unless kept.
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define WIDE_FORM(N, SUMS, A0, A1, A2, A3, B, P, ...)                                                                                 \
    template <> struct Wide<N> {                                                                                                     \
        static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int keep) {           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" SUMS "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3  \
                         "}, %" #B ", p, 1, 1;\n}"                                                                                   \
                         : __VA_ARGS__                                                                                               \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                                           \
        }                                                                                                                            \
    };
#define SUMS_4 "%0, %1, %2, %3"
#define SUMS_8 SUMS_4 ", %4, %5, %6, %7"
#define SUMS_16 SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_52 SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51"
template <int N> struct Wide;
WIDE_FORM(8, SUMS_4, 4, 5, 6, 7, 8, 9, FOUR(0))
WIDE_FORM(16, SUMS_8, 8, 9, 10, 11, 12, 13, EIGHT(0))
WIDE_FORM(32, SUMS_16, 16, 17, 18, 19, 20, 21, EIGHT(0), EIGHT(8))
WIDE_FORM(64, SUMS_32, 32, 33, 34, 35, 36, 37, EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24))
WIDE_FORM(104, SUMS_52, 52, 53, 54, 55, 56, 57, EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), FOUR(48))

__device__ __forceinline__ uint32_t permuted(uint32_t low, uint32_t high, uint32_t select) {  // looks at 16 bits of select
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(select));
    return d;
}

// The registers of A of 64 inputs of this warp's 16 outputs, two products' worth.
__device__ __forceinline__ void convert(uint32_t (&a)[2][4], uint32_t fragment, int half, int lane) {
    uint32_t word[4], far;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(fragment + half * 512 + lane * 16));
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(far) : "r"(fragment + 1024 + lane / 4 * 8 + half * 4));
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint32_t binades = __byte_perm(far, 0, 0x4440 + k), select = word[k] & 0x77777777u;
        // 0, .5, 1, 1.5 and 2, 3, 4, 6, times 2^(6 - binades)
        const uint32_t low = 0x6C686000u - binades * 0x08080800u, high = 0x7C787470u - binades * 0x08080808u;
        a[k / 2][k % 2] = permuted(low, high, select) | (word[k] & 0x80808080u);
        a[k / 2][k % 2 + 2] = permuted(low, high, select >> 16) | ((word[k] << 4) & 0x80808080u);
    }
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int COUNT> __device__ __forceinline__ void finish(float (&d)[COUNT]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int COUNT> __device__ __forceinline__ void promote(float (&sum)[COUNT], const float (&part)[COUNT], const float (&scale)[COUNT / 2]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum[i] = fmaf(part[i], scale[i / 4 * 2 + i % 2], sum[i]);
}

// Sixteen channels of a row in E4M3; eight lanes hold a row's step and share its scale. Q8 before, where asked for.
template <bool Q8> __device__ __forceinline__ void store_codes(const uint32_t (&word)[8], unsigned char* step, int rows, int row, int column, bool real) {
    float value[16], amax = 0.0f;
    int broken = 0;
#pragma unroll
    for (int k = 0; k < 16; k++) {
        value[k] = __uint_as_float(k % 2 ? word[k / 2] & 0xFFFF0000u : word[k / 2] << 16);
        amax = fmaxf(amax, fabsf(value[k]));
        broken |= !(fabsf(value[k]) < __uint_as_float(0x7F800000u));
    }
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
    broken |= __shfl_xor_sync(0xFFFFFFFFu, broken, 1);
    float inverse, shared_inverse, most = amax;
    const float scale = group_scale(amax, broken, inverse);
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 4));
    const float shared_scale = group_scale(most, false, shared_inverse);
    uint32_t code[4];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float low = value[k * 2], high = value[k * 2 + 1];
        if (Q8) {
            const uint32_t pair = quantised(low, high, scale, inverse);
            low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000u);
        }
        const uint32_t packed = e4m3_pair(low * shared_inverse, high * shared_inverse);
        code[k / 2] = k % 2 ? code[k / 2] | packed << 16 : packed;
    }
    if (!real) return;
    *(uint4*)(step + row * 128 + (column ^ row % 8) * 16) = *(const uint4*)code;
    if (column == 0) *(float*)(step + rows * 128 + row * 4) = shared_scale;
}

// DOWN: plain outputs, at a pair's place. Otherwise a block is eight gates over the eight ups of the same channels, and outputs are Q8
// in tiles of rows. One thread asks for weights and rows, step by step of its block's items, as long as there is room.
template <int N, bool DOWN>
__global__ void __launch_bounds__(384, Shape<N>::RESIDENT) product(const Call p) {
    using S = Shape<N>;
    constexpr int STAGES = S::STAGES;
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    __shared__ int pair_of[N];
    const int thread = threadIdx.x, group = thread / 128;
    const uint32_t base = shared_address(memory), full = shared_address(barriers), empty = full + STAGES * 8;
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + i * 8));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" ::"r"(empty + i * 8));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    begin_programmatic();
    __syncthreads();
    const int tiles = (p.tiles + TILES - 1) / TILES, total = *p.used * tiles;
    int stage = 0;
    uint32_t phase = 0;

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::LEAN));
        if (thread != 0) return;
        for (int work = blockIdx.x; work < total; work += gridDim.x) {
            const int at = work / tiles, tile = work % tiles * TILES;
            const unsigned char* x = p.x + (size_t)at * p.steps * S::X;
            const unsigned char* first = p.data + ((size_t)p.items[at].x * p.tiles + tile) * p.steps * TILE;
            const unsigned char* second = first + (tile + 1 < p.tiles ? (size_t)p.steps * TILE : 0);
            for (int step = 0; step < p.steps; step++) {
                const uint32_t to = base + stage * S::STAGE, barrier = full + stage * 8;
                wait_barrier(empty + stage * 8, phase ^ 1);
                expect(barrier, S::X + TILES * TILE);
                copy_bulk(to + S::X, first + (size_t)step * TILE, TILE, barrier);
                copy_bulk(to + S::X + TILE, second + (size_t)step * TILE, TILE, barrier);
                copy_bulk(to, x + (size_t)step * S::X, S::X, barrier);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::RICH));
    const int mine = thread - 128, warp = mine / 32, lane = mine % 32, g = lane / 4, q = lane % 4;
    unsigned char* turned = memory + STAGES * S::STAGE;
    for (int work = blockIdx.x; work < total; work += gridDim.x) {
        const int at = work / tiles, tile = work % tiles * TILES;
        const int4 item = p.items[at];
        const int rows = item.z - item.y;
        asm volatile("bar.sync 1, 256;" ::: "memory");  // the item before is stored
        for (int i = mine; i < N; i += 256) pair_of[i] = p.order[min(item.y + i, item.z - 1)];
        float sum[TILES][N / 2];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < N / 2; i++) sum[m][i] = 0.0f;
        uint32_t a[2][2][4];
        const uint32_t fragment = base + S::X + warp * FRAGMENT8;
        wait_barrier(full + stage * 8, phase);
        convert(a[0], fragment + stage * S::STAGE, 0, lane);
        for (int step = 0; step < p.steps; step++) {
            const uint32_t here = stage * S::STAGE, done = empty + stage * 8;
            const uint64_t b = ((uint64_t)((base + here) & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
            if (step + 1 < p.steps && ++stage == STAGES) stage = 0, phase ^= 1;  // not at the end: what is converted ahead there is not used
            float scale[N / 4];
#pragma unroll
            for (int n = 0; n < N / 4; n += 2)
                asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(scale[n]), "=f"(scale[n + 1]) : "r"(base + here + N * 128 + q * 8 + n * 16));
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                float part[N / 2];
                begin_products();
                Wide<N>::multiply(part, a[0][0], b, 0);
                Wide<N>::multiply(part, a[0][1], b + 2, 1);
                commit_products();
                convert(a[1], fragment + here + m * TILE, 1, lane);
                begin_products();
                Wide<N>::multiply(part, a[1][0], b + 4, 1);
                Wide<N>::multiply(part, a[1][1], b + 6, 1);
                commit_products();
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (m + 1 < TILES) {
                    convert(a[0], fragment + here + (m + 1) * TILE, 0, lane);
                } else {
                    wait_barrier(full + stage * 8, phase);
                    convert(a[0], fragment + stage * S::STAGE, 0, lane);
                }
                finish(part);
                promote(sum[m], part, scale);
            }
            __syncwarp();
            if (lane == 0) arrive(done);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
        asm volatile("bar.sync 1, 256;" ::: "memory");  // pair_of is there
        const float* worth = p.worth + ((size_t)item.x * p.tiles + tile) * 128 + warp * 16 + g;
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            const bool there = tile + m < p.tiles;
            const float low = there ? worth[m * 128] : 0.0f, high = there ? worth[m * 128 + 8] : 0.0f;
            if (DOWN && m) asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int row = n * 8 + q * 2 + i;
                    unsigned char* to = turned + row * OUTROW;
                    const float first = sum[m][n * 4 + i] * low, second = sum[m][n * 4 + i + 2] * high;
                    if (DOWN) {
                        *(uint16_t*)(to + (warp * 16 + g) * 2) = bf16_bits(first);
                        *(uint16_t*)(to + (warp * 16 + g) * 2 + 16) = bf16_bits(second);
                    } else {
                        *(uint16_t*)(to + (m * 64 + warp * 8 + g) * 2) = bf16_bits(gated(first, second, p.limit, p.weights[pair_of[row]]));
                    }
                }
            if (!DOWN) continue;
            asm volatile("bar.sync 1, 256;" ::: "memory");
            for (int i = mine; i < N * 16; i += 256) {
                const int row = i / 16, channel = i % 16 * 8, o = (tile + m) * 128 + channel;
                if (row < rows && o < p.outputs) *(uint4*)(p.out + (size_t)pair_of[row] * p.outputs + o) = *(const uint4*)(turned + row * OUTROW + channel * 2);
            }
        }
        if (DOWN) continue;
        asm volatile("bar.sync 1, 256;" ::: "memory");
        unsigned char* to = p.inner + ((size_t)at * p.inner_steps + tile / TILES) * S::X;
        for (int i = mine; i < N * 8; i += 256) {
            const int row = i / 8, column = i % 8;
            uint32_t word[8];
            *(uint4*)word = *(const uint4*)(turned + row * OUTROW + column * 32);
            *(uint4*)(word + 4) = *(const uint4*)(turned + row * OUTROW + column * 32 + 16);
            store_codes<true>(word, to, N, row, column, row < rows);
        }
    }
}

// A row of x, which is Q8 already, in its place of an item's tiles, by a warp.
template <int N> __device__ __forceinline__ void tile_row(const uint4* from, unsigned char* tiles, int row, int inputs, int steps) {
    const int lane = threadIdx.x % 32, column = lane % 8;
    for (int first = 0; first < steps; first += 4) {
        const int step = first + lane / 8, piece = step * 16 + column * 2;
        uint32_t word[8] = {};
        if (piece * 8 < inputs) *(uint4*)word = from[piece], *(uint4*)(word + 4) = from[piece + 1];
        store_codes<false>(word, tiles + (size_t)step * (N * ROW), N, row, column, step < steps);
    }
}

template <int N>
__global__ void __launch_bounds__(256) tile_rows(const uint4* x, unsigned char* tiles, const int* order, const int4* items, const int* used, int inputs,
                                                 int steps, int count) {
    begin_programmatic();
    const int at = blockIdx.x, row = blockIdx.y * 8 + threadIdx.x / 32;
    if (at >= *used) return;
    const int4 item = items[at];
    if (item.y + row < item.z)
        tile_row<N>(x + (size_t)(order[item.y + row] / count) * (inputs / 8), tiles + (size_t)at * steps * (N * ROW), row, inputs, steps);
}

// The same where pairs are few: every block plans for itself, and the first of an item leaves its plan for the products.
template <int N>
__global__ void __launch_bounds__(256) plan_and_tile(const uint4* x, unsigned char* tiles, const int64_t* chosen, int* order, int4* items, int* used,
                                                     int pairs, int experts, int inputs, int steps, int count) {
    __shared__ int ids[FEW_PAIRS], first[MOST_EXPERTS], total, pair_of[N];
    __shared__ int4 own_items[FEW_PAIRS];
    begin_programmatic();
    const int thread = threadIdx.x, at = blockIdx.x, warp = thread / 32, lane = thread % 32;
    const bool leaves = blockIdx.y == 0;
    for (int pair = thread; pair < pairs; pair += 256) ids[pair] = (int)chosen[pair];
    __syncthreads();
    count_items<256>(ids, pairs, experts, N, first, own_items, &total, false);
    __syncthreads();
    if (at == 0 && leaves && thread == 0) *used = total;
    if (at >= total) return;
    const int4 item = own_items[at];
    if (warp == 0) {  // the expert's pairs in their order, of which the item has those from y to z
        int seen = first[item.x];
        for (int low = 0; low < pairs && seen < item.z; low += 32) {
            const bool here = low + lane < pairs && ids[low + lane] == item.x;
            const uint32_t all = __ballot_sync(0xFFFFFFFFu, here);
            const int place = seen + __popc(all & ((1u << lane) - 1));
            if (here && place >= item.y && place < item.z) {
                pair_of[place - item.y] = low + lane;
                if (leaves) order[place] = low + lane;
            }
            seen += __popc(all);
        }
        if (leaves && lane == 0) items[at] = item;
    }
    __syncthreads();
    const int row = blockIdx.y * 8 + warp;
    if (item.y + row < item.z) tile_row<N>(x + (size_t)(pair_of[row] / count) * (inputs / 8), tiles + (size_t)at * steps * (N * ROW), row, inputs, steps);
}

// What an output's largest scale is, as E8M0 and as ``Call::worth``, in the order of the blocks. ``up`` as in ``fragments``.
__global__ void __launch_bounds__(256) largest(const uint8_t* scales, const uint8_t* up_scales, uint8_t* most, float* worth, int total, int rows,
                                               int groups, int tiles) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const int o = i % (tiles * 128), row = up_scales ? o / 16 * 8 + o % 8 : o;
    const long long expert = i / (tiles * 128);
    const uint8_t* from = (up_scales && o % 16 >= 8 ? up_scales : scales) + (expert * rows + row) * groups;
    int best = 0;
    if (row < rows)
        for (int group = 0; group < groups; group++) best = max(best, (int)from[group]);
    most[i] = best;
    worth[i] = best == 255 ? __uint_as_float(0x7FC00000u) : ldexpf(1.0f, best - 133);
}

// Stored FP4 weights (two columns a byte) in fragments; ``up`` given: eight rows of ``first`` over the same of ``up``.
__global__ void __launch_bounds__(256) fragments(const uint8_t* first, const uint8_t* up, const uint8_t* scales, const uint8_t* up_scales,
                                                 const uint8_t* most, uint32_t* data, long long words, int rows, int inputs, int tiles, int steps) {
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= words) return;
    const int word = i % (FRAGMENT8 / 4);
    const long long fragment = i / (FRAGMENT8 / 4);
    const int step = fragment / TOGETHER % steps, block = fragment / TOGETHER / steps % tiles * TOGETHER + fragment % TOGETHER;
    const long long expert = fragment / TOGETHER / steps / tiles;
    auto row_of = [&](int in_block) { return up ? block * 8 + in_block % 8 : block * 16 + in_block; };
    auto binades = [&](int in_block, int group) {  // to the largest scale of the output
        const uint8_t* from = up && in_block >= 8 ? up_scales : scales;
        return most[(expert * tiles * TOGETHER + block) * 16 + in_block] - from[(expert * rows + row_of(in_block)) * (inputs / 32) + group];
    };
    uint32_t value = 0;
    if (word < 256) {
        const int half = word / 128, lane = word / 4 % 32, k = word % 4, in_block = lane / 4 + 8 * (k % 2), row = row_of(in_block);
        const int group = step * 4 + half * 2 + k / 2;
        const uint8_t* from = up && in_block >= 8 ? up : first;
        if (row < rows && group < inputs / 32) {
            const float beyond = exp2f((float)min(FARTHEST - binades(in_block, group), 0));
            for (int part = 0; part < 2; part++)
                for (int byte = 0; byte < 4; byte++) {
                    const int column = group * 32 + part * 16 + lane % 4 * 4 + byte;
                    uint32_t code = from[(expert * rows + row) * (inputs / 2) + column / 2] >> 4 * (column % 2) & 15;
                    if (beyond < 1.0f) {
                        const int size = code & 7;
                        const float x = (size < 4 ? size * 0.5f : (size % 2 ? 3.0f : 2.0f) * (size / 6 + 1)) * beyond;  // at most 3
                        code = (code & 8) | (x < 2.0f ? (uint32_t)rintf(x * 2.0f) : (uint32_t)rintf(x) + 2);
                    }
                    value |= (code & 7) << (16 * part + 4 * byte) | (code >> 3) << (8 * byte + (part ? 3 : 7));
                }
        }
    } else {
        const int g = (word - 256) / 2, half = word % 2;
        for (int k = 0; k < 4; k++) {
            const int in_block = g + 8 * (k % 2), group = step * 4 + half * 2 + k / 2;
            if (row_of(in_block) < rows && group < inputs / 32) value |= (uint32_t)min(binades(in_block, group), FARTHEST) << 8 * k;
        }
    }
    data[i] = value;
}

template <int N, bool DOWN> int launch_product(const Call& p, int bound, int multiprocessors, cudaStream_t stream, bool programmatic) {
    auto kernel = product<N, DOWN>;
    static bool ready = false;
    if (!ready) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape<N>::BYTES);
        if (error) return (int)error;
        ready = true;
    }
    const int work = bound * ((p.tiles + TILES - 1) / TILES), room = Shape<N>::RESIDENT * multiprocessors;
    return launch(kernel, dim3(work < room ? work : room), 384, Shape<N>::BYTES, stream, programmatic, p);
}

}  // namespace

extern "C" {

int moe_fragments(const void* first, const void* up, const void* scales, const void* up_scales, void* most, void* worth, void* data, int experts,
                  int rows, int inputs, int tiles, int steps, void* stream) {
    const int total = experts * tiles * 128;
    const int error = launch(largest, dim3((total + 255) / 256), 256, 0, (cudaStream_t)stream, false, (const uint8_t*)scales, (const uint8_t*)up_scales,
                             (uint8_t*)most, (float*)worth, total, rows, inputs / 32, tiles);
    if (error) return error;
    const long long words = (long long)experts * tiles * steps * TOGETHER * (FRAGMENT8 / 4);
    return launch(fragments, dim3((unsigned)((words + 255) / 256)), 256, 0, (cudaStream_t)stream, false, (const uint8_t*)first, (const uint8_t*)up,
                  (const uint8_t*)scales, (const uint8_t*)up_scales, (const uint8_t*)most, (uint32_t*)data, words, rows, inputs, tiles, steps);
}

#define ROWS_OF_ITEMS ROWS_OF_ITEM(8) ROWS_OF_ITEM(16) ROWS_OF_ITEM(32) ROWS_OF_ITEM(64) ROWS_OF_ITEM(104)

int moe_tiles(const void* x, void* tiles, const int64_t* chosen, int* order, void* items, int* used, int planned, int pairs, int experts, int block_t,
              int bound, int inputs, int steps, int count, void* stream, int programmatic) {
    const cudaStream_t s = (cudaStream_t)stream;
    const dim3 grid(bound, block_t / 8);
#define ROWS_OF_ITEM(N)                                                                                                                              \
    if (block_t == N)                                                                                                                                \
        return planned ? launch(tile_rows<N>, grid, 256, 0, s, programmatic, (const uint4*)x, (unsigned char*)tiles, (const int*)order,              \
                                (const int4*)items, (const int*)used, inputs, steps, count)                                                          \
                       : launch(plan_and_tile<N>, grid, 256, 0, s, programmatic, (const uint4*)x, (unsigned char*)tiles, chosen, order, (int4*)items, \
                                used, pairs, experts, inputs, steps, count);
    ROWS_OF_ITEMS
#undef ROWS_OF_ITEM
    return (int)cudaErrorInvalidValue;
}

int moe_product(const void* x, const void* data, const float* worth, void* inner, void* out, const float* weights, const int* order, const void* items,
                const int* used, int block_t, int steps, int tiles, int outputs, int inner_steps, float limit, int down, int bound, int multiprocessors,
                void* stream, int programmatic) {
    const Call p = {(const unsigned char*)x, (const unsigned char*)data, worth, (unsigned char*)inner, (uint16_t*)out, weights, order,
                    (const int4*)items, used, steps, tiles, outputs, inner_steps, limit};
    const cudaStream_t s = (cudaStream_t)stream;
#define ROWS_OF_ITEM(N)                                                                      \
    if (block_t == N)                                                                        \
        return down ? launch_product<N, true>(p, bound, multiprocessors, s, programmatic)    \
                    : launch_product<N, false>(p, bound, multiprocessors, s, programmatic);
    ROWS_OF_ITEMS
#undef ROWS_OF_ITEM
    return (int)cudaErrorInvalidValue;
}
}
