// What stands around the products of routed experts: fragments made of stored weights, the plan of many pairs, the sum over a row's
// choices, and the gated activation that the shared expert uses too.
#include "experts.cuh"

namespace {

// The plan of many pairs, once for both products. Experts <= 1,024.
__global__ void __launch_bounds__(1024) plan(const int64_t* chosen, int* order, int4* items, int* used, int pairs, int experts, int block_t) {
    __shared__ int count[1024];
    begin_programmatic();
    count_items<1024>(chosen, pairs, experts, block_t, count, items, used, false);
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += 1024) {  // which row of an expert comes first is left to chance: no result depends on it
        const int expert = (int)chosen[pair];
        if (expert >= 0) order[atomicAdd(&count[expert], 1)] = pair;
    }
}

// Eight channels of a row: its choices' outputs in their order, then the shared one's, fp32, rounded once.
__global__ void __launch_bounds__(128) combine(const uint4* y, const int64_t* chosen, const uint4* shared, uint4* out, int pieces, int count) {
    begin_programmatic();
    const int row = blockIdx.x, piece = blockIdx.y * 128 + threadIdx.x;
    if (piece >= pieces) return;
    float sum[8] = {};
    auto add = [&](uint4 v) {
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum[2 * k] += __uint_as_float(word[k] << 16);
            sum[2 * k + 1] += __uint_as_float(word[k] & 0xFFFF0000u);
        }
    };
    const uint4 last = shared[(size_t)row * pieces + piece];
    constexpr int AT_ONCE = 6;  // choices whose outputs are asked for at once, those that are not here too
    for (int first = 0; first < count; first += AT_ONCE) {
        uint4 part[AT_ONCE];
        int64_t whose[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const size_t pair = (size_t)row * count + min(first + k, count - 1);
            whose[k] = first + k < count ? chosen[pair] : -1;
            part[k] = y[pair * pieces + piece];
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (whose[k] >= 0) add(part[k]);
    }
    add(last);
    uint4 v;
    uint32_t* word = (uint32_t*)&v;
#pragma unroll
    for (int k = 0; k < 4; k++) word[k] = bf16_pair(sum[2 * k], sum[2 * k + 1]);
    out[(size_t)row * pieces + piece] = v;
}

// Stored FP4 weights (two columns a byte) and E8M0 scales in fragments; ``up`` given: eight rows of ``first`` over the same of ``up``.
__global__ void __launch_bounds__(256) arrange(const uint8_t* first, const uint8_t* up, const uint8_t* first_scales, const uint8_t* up_scales,
                                               uint32_t* data, long long words, int rows, int inputs, int tiles, int steps) {
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= words) return;
    const int word = i % (FRAGMENT / 4);
    const long long fragment = i / (FRAGMENT / 4);
    const int step = fragment / TOGETHER % steps, block = fragment / TOGETHER / steps % tiles * TOGETHER + fragment % TOGETHER;
    const long long expert = fragment / TOGETHER / steps / tiles;
    auto row_of = [&](int in_block) { return up ? block * 8 + in_block % 8 : block * 16 + in_block; };
    uint32_t value = 0;
    if (word < 128) {
        const int j = word % 4, g = word / 16, q = word / 4 % 4;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int in_block = g + 8 * (e & 1), byte = step * 32 + j * 8 + q + 4 * (e >> 1), row = row_of(in_block);
            const uint8_t* from = up && in_block >= 8 ? up : first;
            const uint32_t pair = row < rows && byte < inputs / 2 ? from[(expert * rows + row) * (inputs / 2) + byte] : 0;
            const uint32_t w = (pair & 15) | (pair >> 4) << 16, sign = w & 0x00080008u, size = w & 0x00070007u;
            if (e == 0) value |= sign << 12 | size << 6;
            if (e == 1) value |= sign << 9 | size << 3;
            if (e == 2) value |= sign << 6 | size;
            if (e == 3) value |= sign << 11 | (w & 0x00040004u) << 11 | (w & 0x00030003u) << 10;
        }
    } else {  // (row, group), (row + 8, group) and the same of the next group: each E8M0 byte plus 126
        const int g = word - 128;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int in_block = g + 8 * (part & 1), group = step * 2 + part / 2, row = row_of(in_block);
            const uint8_t* from = up && in_block >= 8 ? up_scales : first_scales;
            const uint32_t scale = row < rows && group < inputs / 32 ? from[(expert * rows + row) * (inputs / 32) + group] : 0;
            value |= (scale + 126 & 255) << 8 * part;
        }
    }
    data[i] = value;
}

// Q8 of silu(min(gate, limit)) * clamp(up), rounded to bf16 before: rows of gates beside ups, eight channels a thread.
__global__ void __launch_bounds__(128) swiglu(const uint4* gate_up, uint4* out, int pieces, float limit) {
    begin_programmatic();
    const int piece = blockIdx.y * 128 + threadIdx.x;
    const size_t row = blockIdx.x;
    uint4 gate = make_uint4(0, 0, 0, 0), up = gate;
    if (piece < pieces) gate = gate_up[row * 2 * pieces + piece], up = gate_up[(row * 2 + 1) * pieces + piece];
    const uint32_t gates[4] = {gate.x, gate.y, gate.z, gate.w}, ups[4] = {up.x, up.y, up.z, up.w};
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float low = gated(__uint_as_float(gates[k] << 16), __uint_as_float(ups[k] << 16), limit, 1.0f);
        const float high = gated(__uint_as_float(gates[k] & 0xFFFF0000u), __uint_as_float(ups[k] & 0xFFFF0000u), limit, 1.0f);
        word[k] = bf16_pair(low, high);
    }
    const uint4 q8 = quantised_piece(make_uint4(word[0], word[1], word[2], word[3]));
    if (piece < pieces) out[row * pieces + piece] = q8;
}

}  // namespace

extern "C" {

int moe_arrange(const void* first, const void* up, const void* first_scales, const void* up_scales, void* data, int experts, int rows, int inputs,
                int tiles, int steps, void* stream) {
    const long long words = (long long)experts * tiles * steps * TOGETHER * (FRAGMENT / 4);
    return launch(arrange, dim3((unsigned)((words + 255) / 256)), 256, 0, (cudaStream_t)stream, false, (const uint8_t*)first, (const uint8_t*)up,
                  (const uint8_t*)first_scales, (const uint8_t*)up_scales, (uint32_t*)data, words, rows, inputs, tiles, steps);
}

int moe_plan(const int64_t* chosen, int* order, void* items, int* used, int pairs, int experts, int block_t, void* stream, int programmatic) {
    return launch(plan, dim3(1), 1024, 0, (cudaStream_t)stream, programmatic, chosen, order, (int4*)items, used, pairs, experts, block_t);
}

int moe_swiglu(const void* gate_up, void* out, int rows, int inner, float limit, void* stream, int programmatic) {
    const int pieces = inner / 8;
    return launch(swiglu, dim3(rows, (pieces + 127) / 128), 128, 0, (cudaStream_t)stream, programmatic, (const uint4*)gate_up, (uint4*)out, pieces,
                  limit);
}

int moe_combine(const void* y, const int64_t* chosen, const void* shared, void* out, int rows, int width, int count, void* stream, int programmatic) {
    const int pieces = width / 8;
    return launch(combine, dim3(rows, (pieces + 127) / 128), 128, 0, (cudaStream_t)stream, programmatic, (const uint4*)y, chosen,
                  (const uint4*)shared, (uint4*)out, pieces, count);
}
}
