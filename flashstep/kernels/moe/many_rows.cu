// Routed experts for many rows of an expert: weights are converted in registers and meet up to 128 rows in wgmma products.
//
// Every output is one chain over the inputs, of the same sums as few_rows.cu: a product of m16n8k16 and one of m64nNk16 give the same
// bits (seen on an H200, 2026-12-01; tests/kernels/test_moe.py holds it).
#include "experts.cuh"

namespace {

__device__ __forceinline__ uint4 stream16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t stream4(const void* p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// wgmma m64nNk16 with A in registers, B swizzled in shared memory, and N / 2 sums a thread.
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WIDE_FORM(N, SUMS, A0, A1, A2, A3, B, ...)                                                                                       \
    template <> struct Wide<N> {                                                                                                        \
        static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {                        \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SUMS "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3     \
                         "}, %" #B ", 1, 1, 1, 0;"                                                                                      \
                         : __VA_ARGS__                                                                                                  \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
        }                                                                                                                               \
    };
#define SUMS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_56 SUMS_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55"
#define SUMS_64 SUMS_56 ", " \
    "%56, %57, %58, %59, %60, %61, %62, %63"
template <int N> struct Wide;
WIDE_FORM(64, SUMS_32, 32, 33, 34, 35, 36, EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24))
WIDE_FORM(112, SUMS_56, 56, 57, 58, 59, 60, EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48))
WIDE_FORM(128, SUMS_64, 64, 65, 66, 67, 68, EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56))

// What a consumer warpgroup holds of its weights while an item lasts.
template <int MB, int DEPTH> struct Weights {
    const unsigned char* data[MB];
    uint4 code[DEPTH][MB];
    uint32_t scale[DEPTH][MB];
};

// The registers of A for inputs 16 j to 16 j + 15 of the step at hand.
template <int MB, int DEPTH> __device__ __forceinline__ void convert(uint32_t (&a)[MB][4], const Weights<MB, DEPTH>& w, int j) {
#pragma unroll
    for (int m = 0; m < MB; m++) {
        const uint32_t word = j == 0 ? w.code[0][m].x : j == 1 ? w.code[0][m].y : j == 2 ? w.code[0][m].z : w.code[0][m].w;
        const uint32_t low = scale_pair(w.scale[0][m], (j / 2) * 2), high = scale_pair(w.scale[0][m], (j / 2) * 2 + 1);
        decode(word, a[m]);
        a[m][0] = times(a[m][0], low);
        a[m][1] = times(a[m][1], high);
        a[m][2] = times(a[m][2], low);
        a[m][3] = times(a[m][3], high);
    }
}

// All steps of an item. What comes next is converted while the matrix units work; every step ends with its sums complete: what the
// compiler (nvcc 13.0) may read behind the loop is there.
template <int N, int MB, int DEEP, int DEPTH>
__device__ __forceinline__ void multiply_steps(float (&sum)[MB][N / 2], Weights<MB, DEPTH>& w, int steps, uint32_t base, uint32_t full, uint32_t empty,
                                               int& stage, uint32_t& phase, bool speaks, int lane) {
    uint32_t a[2][MB][4];
    convert(a[0], w, 0);
    for (int step = 0; step < steps; step++) {
        wait_barrier(full + stage * 8, phase);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what the copies wrote, for the matrix units
        const uint64_t b = ((uint64_t)((base + stage * (N * 128)) & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int m = 0; m < MB; m++) Wide<N>::multiply(sum[m], a[j % 2][m], b + j * 2);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (j < 3) {
                convert(a[(j + 1) % 2], w, j + 1);
                continue;
            }
#pragma unroll
            for (int m = 0; m < MB; m++) {
#pragma unroll
                for (int d = 0; d + 1 < DEPTH; d++) w.code[d][m] = w.code[d + 1][m], w.scale[d][m] = w.scale[d + 1][m];
                const unsigned char* from = w.data[m] + (size_t)min(step + DEPTH, steps - 1) * STEP;
                w.code[DEPTH - 1][m] = stream16(from + lane * 16);
                w.scale[DEPTH - 1][m] = stream4(from + 512 + lane / 4 * 4);
            }
            convert(a[0], w, 0);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (speaks) arrive(empty + stage * 8);
        }
        if (++stage == DEEP) stage = 0, phase ^= 1;
    }
}

// Many rows: two warpgroups of consumers, each MB times 64 outputs by up to N rows with the converted weight in registers, and one of
// producers that gathers rows into swizzled stages. Otherwise as ``product``.
template <int N, int MB, int DEEP, int DEPTH, int RESIDENT, int LEAN, int RICH, bool DOWN>
__global__ void __launch_bounds__(384, RESIDENT) wide_product(const Product p) {
    extern __shared__ __align__(1024) unsigned char stages[];
    constexpr int STAGE = N * 128, OUTROW = DOWN ? 144 : 80;
    __shared__ __align__(8) uint64_t barriers[2 * DEEP];
    __shared__ int pair_of[N];
    const int thread = threadIdx.x, group = thread / 128;
    const uint32_t base = shared_address(stages), full = shared_address(barriers), empty = full + DEEP * 8;
    if (thread == 0) {
        for (int i = 0; i < DEEP; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(full + i * 8));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(empty + i * 8));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    begin_programmatic();
    __syncthreads();
    const int tiles = (p.tiles + MB - 1) / MB;
    const int total = *p.used * tiles;
    int stage = 0;
    uint32_t phase = 0;

    if (group == 0) {  // producers
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LEAN));
        constexpr int MINE = N / 16;
        const int column = thread % 8, first = thread / 8;
        const uint32_t to = base + first * 128 + ((column ^ (first % 8)) * 16);
        for (int work = blockIdx.x; work < total; work += gridDim.x) {
            const int4 item = p.items[work / tiles];
            const uint4* source = (const uint4*)p.x + column;
            uint32_t from[MINE], real = 0;
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                const int place = item.y + first + i * 16;
                const int pair = p.order[min(place, item.z - 1)];
                if (place < item.z) real |= 1u << i;
                from[i] = (uint32_t)(DOWN ? pair : pair / p.count) * (uint32_t)(p.inputs / 8);
            }
            for (int step = 0; step < p.steps; step++) {
                wait_barrier(empty + stage * 8, phase ^ 1);
                const bool inside = step * 128 + column * 16 < p.inputs * 2;
#pragma unroll
                for (int i = 0; i < MINE; i++) {
                    const bool take = inside && (real >> i & 1);
                    copy16(to + stage * STAGE + i * 2048, source + from[i], take);
                }
                source += 8;
                asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + stage * 8) : "memory");
                if (++stage == DEEP) stage = 0, phase ^= 1;
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(RICH));
        const int mine = thread - 128, warp = mine % 128 / 32, lane = mine % 32, g = lane / 4, q = lane % 4;
        unsigned char* turned = stages + DEEP * STAGE + (group - 1) * N * OUTROW;
        for (int work = blockIdx.x; work < total; work += gridDim.x) {
            const int4 item = p.items[work / tiles];
            const int tile = work % tiles, rows = item.z - item.y;
            Weights<MB, DEPTH> w;
#pragma unroll
            for (int m = 0; m < MB; m++) {
                const size_t at = (size_t)item.x * p.tiles + min(tile * MB + m, p.tiles - 1);
                w.data[m] = p.data + at * p.steps * STEP + ((group - 1) * 4 + warp) * FRAGMENT;
#pragma unroll
                for (int d = 0; d < DEPTH; d++) {
                    const unsigned char* from = w.data[m] + (size_t)min(d, p.steps - 1) * STEP;
                    w.code[d][m] = stream16(from + lane * 16);
                    w.scale[d][m] = stream4(from + 512 + g * 4);
                }
            }
            asm volatile("bar.sync 1, 256;" ::: "memory");  // the item before is stored
            for (int i = mine; i < N; i += 256) pair_of[i] = p.order[min(item.y + i, item.z - 1)];
            float sum[MB][N / 2];
#pragma unroll
            for (int m = 0; m < MB; m++)
#pragma unroll
                for (int i = 0; i < N / 2; i++) sum[m][i] = 0.0f;
            const bool speaks = mine % 128 == 0;
            multiply_steps<N, MB, DEEP, DEPTH>(sum, w, p.steps, base, full, empty, stage, phase, speaks, lane);
            asm volatile("bar.sync 1, 256;" ::: "memory");  // pair_of is there
#pragma unroll
            for (int m = 0; m < MB; m++) {
                if (m) asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int row = n * 8 + q * 2 + i;
                        unsigned char* to = turned + row * OUTROW;
                        if (DOWN) {
                            *(uint16_t*)(to + (warp * 16 + g) * 2) = bf16_bits(sum[m][n * 4 + i]);
                            *(uint16_t*)(to + (warp * 16 + g) * 2 + 16) = bf16_bits(sum[m][n * 4 + i + 2]);
                        } else {
                            const float weight = p.weights[pair_of[row]];
                            *(uint16_t*)(to + (warp * 8 + g) * 2) = bf16_bits(gated(sum[m][n * 4 + i], sum[m][n * 4 + i + 2], p.limit, weight));
                        }
                    }
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                constexpr int PIECES = DOWN ? 8 : 4;
                const int o_first = ((tile * MB + m) * TOGETHER + (group - 1) * 4) * (DOWN ? 16 : 8);
                for (int i = mine % 128; i < N * PIECES; i += 128) {
                    const int row = i / PIECES, channel = (i % PIECES) * 8;
                    if (row - i % 32 / PIECES >= rows) break;  // for whole warps
                    uint4 piece = *(const uint4*)(turned + row * OUTROW + channel * 2);
                    if (!DOWN) piece = quantised_piece(piece);
                    if (row < rows && o_first + channel < p.outputs)
                        *(uint4*)(p.out + (size_t)pair_of[row] * p.outputs + o_first + channel) = piece;
                }
            }
        }
    }
}

template <int N, int MB, int DEEP, int DEPTH, int RESIDENT, int LEAN, int RICH, bool DOWN>
int launch_wide(const Product& p, int bound, int multiprocessors, cudaStream_t stream, bool programmatic) {
    constexpr int BYTES = DEEP * N * 128 + 2 * N * (DOWN ? 144 : 80);
    auto kernel = wide_product<N, MB, DEEP, DEPTH, RESIDENT, LEAN, RICH, DOWN>;
    static bool ready = false;
    if (!ready) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
        if (error) return (int)error;
        ready = true;
    }
    const long long work = (long long)bound * ((p.tiles + MB - 1) / MB), resident = (long long)RESIDENT * multiprocessors;
    return launch(kernel, dim3((unsigned)(work < resident ? work : resident)), 384, BYTES, stream, programmatic, p);
}

}  // namespace

extern "C" int moe_many(const void* x, const void* data, void* out, const float* weights, const int* order, const void* items, const int* used,
                        const int64_t* chosen, int pairs, int experts, int block_t, int inputs, int steps, int tiles, int outputs, int count,
                        float limit, int down, int bound, int multiprocessors, void* stream, int programmatic) {
    const Product p = {x, (const unsigned char*)data, (uint16_t*)out, weights, order, (const int4*)items, used, chosen, pairs, experts, block_t,
                       inputs, steps, tiles, outputs, count, limit};
    cudaStream_t s = (cudaStream_t)stream;
#define ROWS_OF_ITEM(ROWS, ...)                                                                          \
    if (block_t == ROWS)                                                                                 \
        return down ? launch_wide<ROWS, __VA_ARGS__, true>(p, bound, multiprocessors, s, programmatic)    \
                    : launch_wide<ROWS, __VA_ARGS__, false>(p, bound, multiprocessors, s, programmatic);
    ROWS_OF_ITEM(64, 2, 6, 4, 1, 56, 224)
    ROWS_OF_ITEM(112, 2, 5, 3, 1, 56, 224)
    ROWS_OF_ITEM(128, 2, 5, 3, 1, 56, 224)
    return (int)cudaErrorInvalidValue;
}
