// What the kernels of routed experts share: the fragments of FP4 weights, the gated activation, Q8, the items of a step, launches.
//
// A weight lies in fragments of 16 outputs x 64 inputs (flashstep/kernels/moe/cuda.py says how): codes, 16 bytes a lane, then a word
// of scales for each lane group. Codes become bf16 in registers, exactly. An item is some rows of one expert.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int FRAGMENT = 544;              // bytes: 16 for each lane, then 4 for each lane group
constexpr int TOGETHER = 8;                // blocks of 16 outputs whose fragments of one step lie together: a tile
constexpr int STEP = TOGETHER * FRAGMENT;  // bytes of a tile's step of 64 inputs

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void begin_programmatic() {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool real) {
    int bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Eight codes -> four registers of a fragment, times 2^-126: E2M1's bits where bf16 has its lowest exponents.
__device__ __forceinline__ void decode(uint32_t c, uint32_t (&a)[4]) {
    a[0] = c & 0x81C081C0u;
    a[1] = (c << 3) & 0x81C081C0u;
    a[2] = (c << 6) & 0x81C081C0u;
    a[3] = ((c << 1) & 0x80008000u) | ((c >> 5) & 0x01000100u) | ((c >> 4) & 0x00C000C0u);
}

__device__ __forceinline__ uint32_t scale_pair(uint32_t word, int byte) {
    return __byte_perm(word, 0, 0x4040 | byte | (byte << 8)) << 7;  // two bf16 powers of two
}

__device__ __forceinline__ uint32_t bf16_bits(float x) {
    uint16_t b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(x));
    return b;
}
__device__ __forceinline__ float rounded(float x) { return __uint_as_float(bf16_bits(x) << 16); }

// silu(min(gate, limit)) * clamp(up) * weight: the gate is clamped from above only, a NaN stays one.
__device__ __forceinline__ float gated(float gate, float up, float limit, float weight) {
    gate = rounded(gate);
    up = rounded(up);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    return __fdividef(gate, 1.0f + __expf(-gate)) * up * weight;
}

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Q8 of two values (spec/model.md 0), as bf16; the group's scale and its inverse are powers of two, or NaN of a broken group.
__device__ __forceinline__ uint32_t quantised(float low, float high, float scale, float inverse) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high * inverse), "f"(low * inverse));
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(halves));
    return bf16_pair(low * scale, high * scale);
}

__device__ __forceinline__ float group_scale(float amax, bool broken, float& inverse) {
    float scaled = fmaxf(amax, 1e-4f) * (1.0f / 448.0f);
    uint32_t exponent = ((__float_as_uint(scaled) + 0x7FFFFFu) >> 23) & 0xFFu;
    inverse = __uint_as_float((254u - exponent) << 23);
    return broken ? __uint_as_float(0x7FC00000u) : __uint_as_float(exponent << 23);
}

// Q8 of eight channels; four neighbouring lanes hold a group of 32.
__device__ __forceinline__ uint4 quantised_piece(uint4 piece) {
    uint32_t word[4] = {piece.x, piece.y, piece.z, piece.w};
    float value[8], amax = 0.0f;
    int broken = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        value[k] = __uint_as_float(k % 2 ? word[k / 2] & 0xFFFF0000u : word[k / 2] << 16);
        amax = fmaxf(amax, fabsf(value[k]));
        broken |= !(fabsf(value[k]) < __uint_as_float(0x7F800000u));
    }
#pragma unroll
    for (int far = 1; far < 4; far *= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, far));
        broken |= __shfl_xor_sync(0xFFFFFFFFu, broken, far);
    }
    float inverse;
    const float scale = group_scale(amax, broken, inverse);
#pragma unroll
    for (int k = 0; k < 4; k++) word[k] = quantised(value[k * 2], value[k * 2 + 1], scale, inverse);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

struct Product {
    const void* x;           // bf16 rows
    const unsigned char* data;  // fragments [E, tiles, steps, TOGETHER, FRAGMENT]
    uint16_t* out;           // bf16 [pairs, outputs]
    const float* weights;    // of a pair (gate and up only)
    const int* order;        // pairs by expert
    const int4* items;       // expert, first and end in that order
    const int* used;
    const int64_t* chosen;   // the experts of the pairs, for blocks that plan themselves (order is null)
    int pairs, experts, block_t;
    int inputs, steps, tiles, outputs, count;
    float limit;
};

// The experts' rows (ascending experts) cut into items of block_t rows, by a whole block. ``count`` takes the place at which an
// expert's rows begin; where ``own`` an item's rows are counted from its expert's first.
template <int THREADS, typename Id>
__device__ void count_items(const Id* chosen, int pairs, int experts, int block_t, int* count, int4* items, int* used, bool own = true) {
    __shared__ int rows_of[THREADS / 32], items_of[THREADS / 32];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    for (int expert = thread; expert < experts; expert += THREADS) count[expert] = 0;
    __syncthreads();
    for (int pair = thread; pair < pairs; pair += THREADS) {
        const int expert = (int)chosen[pair];
        if (expert >= 0) atomicAdd(&count[expert], 1);
    }
    __syncthreads();
    const int each = (experts + THREADS - 1) / THREADS, begin = min(thread * each, experts), end = min(begin + each, experts);
    int rows = 0, tiles = 0;
    for (int expert = begin; expert < end; expert++) rows += count[expert], tiles += (count[expert] + block_t - 1) / block_t;
    int place = rows, item = tiles;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
        const int a = __shfl_up_sync(0xFFFFFFFFu, place, far), b = __shfl_up_sync(0xFFFFFFFFu, item, far);
        if (lane >= far) place += a, item += b;
    }
    if (lane == 31) rows_of[warp] = place, items_of[warp] = item;
    __syncthreads();
    for (int w = 0; w < warp; w++) place += rows_of[w], item += items_of[w];
    if (thread == THREADS - 1) *used = item;
    place -= rows, item -= tiles;
    for (int expert = begin; expert < end; expert++) {
        const int here = count[expert], first = own ? 0 : place;
        count[expert] = place;
        const int cuts = (here + block_t - 1) / block_t, even = cuts ? ((here + cuts - 1) / cuts + 7) / 8 * 8 : 0;
        for (int row = 0; row < here; row += even) items[item++] = make_int4(expert, first + row, first + min(row + even, here), 0);
        place += here;
    }
}

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, int bytes, cudaStream_t stream, bool programmatic, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = programmatic ? 1 : 0;
    return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace
