// Scores of index keys for Hopper with wgmma, from E2M1 keys, in two forms that give the same bits.
//
// Integers: where the four scales of each key of a tile (and of each query vector of a run) lie within three octaves, a vector is
// integers of one scale, and a dot product over all channels is exact in the tensor core's 32 bits. Else e4m3: the product of one
// group of 32 channels of e2m1 x e2m1 values is an integer below 2^13 times its unit, which the fp8 tensor core adds without loss; the
// query's scales are folded into its e4m3 numbers and its head weight (a vector whose groups lie too far apart for that has a factor a
// group), the key's are applied in fp32. Scales are powers of two. What is rounded are three additions over groups and one for each of
// the heads, always in the same order: the score of a (row, entry) does not depend on its neighbours.
//
// Keys are the rows of the product (A, decoded into registers), queries its columns (B, shared memory), so that the sum over heads
// stays within four neighbouring lanes.

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int HEADS = 32;
constexpr int CHANNELS = 128;
constexpr int GROUPS = 4;
constexpr int TILE = 64;     // keys of one product
constexpr int MEMBERS = 8;   // entries of a candidate block
constexpr int MOST_RUN = 8;  // rows that share a decoded key
constexpr int THREADS = 512;
constexpr int STAGES = 4;    // of a warp's ring of keys

struct Keys {
  const uint8_t* data;
  const uint8_t* scale;
  const int64_t* table;
  int64_t data_stride, scale_stride, table_stride;
  int shift;  // a cache block has 2^shift entries

  __device__ int place(int entry) const { return entry & ((1 << shift) - 1); }
};

__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  // K-major, 128-byte swizzle: eight rows of 128 bytes an atom
  return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void mma(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 0, 1, 1;"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),
        "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void mma(int (&d)[32], const uint32_t (&a)[4], uint64_t b, bool keep) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, p;}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
        "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
        "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep));
}

// Whether any thread of this warpgroup says so.
__device__ __forceinline__ bool warpgroup_any(bool mine) {
  int any;
  asm volatile("{.reg .pred p, q; setp.ne.b32 p, %1, 0; bar.red.or.pred q, %2, 128, p; selp.b32 %0, 1, 0, q;}"
               : "=r"(any) : "r"((int)mine), "r"(1 + (int)(threadIdx.x >> 7)) : "memory");
  return any;
}

// e4m3 numbers (times 2^6) of the even and the odd channels of eight E2M1 codes
__device__ __forceinline__ uint32_t even_codes(uint32_t x) { return ((x << 4) & 0x80808080u) | ((x << 2) & 0x1C1C1C1Cu); }
__device__ __forceinline__ uint32_t odd_codes(uint32_t x) { return (x & 0x80808080u) | ((x >> 2) & 0x1C1C1C1Cu); }

__device__ __forceinline__ float scale_of(uint32_t exponent) {
  return exponent == 255 ? __int_as_float(0x7FC00000) : __int_as_float(exponent == 0 ? 1 << 22 : exponent << 23);
}

// Clamped to 0 .. 1, NaN to 0: the relu of what is known to be below 1, at the rate of a multiplication.
__device__ __forceinline__ float fma_clamped(float x, float y, float z) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(x), "f"(y), "f"(z));
  return d;
}

// relu(n) * 2^-22 of an integer below 2^22: read as fp32 it is its value times 2^-149, or not a number where it is negative.
__device__ __forceinline__ float clamped(int n) {
  float d;
  asm("mul.rn.sat.f32 %0, %1, 0f7F000000;" : "=f"(d) : "f"(__int_as_float(n)));
  return d;
}

__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
  return d;
}

__device__ __forceinline__ float power_of_two(int exponent) {  // within the normal numbers
  return __int_as_float((min(max(exponent, -126), 127) + 127) << 23);
}

// The prologue of a launch with the programmatic attribute: let dependents start, then wait for the producers' memory.
__device__ __forceinline__ void wait_for_producers() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- queries ------------------------------------------------------------------------------------------------------

// The query vectors of rows, in two forms of [HEADS][128 bytes] a row, swizzled as the tensor core reads them.
struct Queries {
  uint8_t* q_int;  // integers in units of a vector's scale; byte 32 g + 16 j + 4 c + i is channel 32 c + 8 g + 4 j + i
  uint8_t* q;      // e4m3 numbers; byte 32 g + 16 j + 4 c + i is channel 32 g + 8 c + 2 i + j
  float* weight;   // [HEADS] a row, with the scales of the vectors
  float* factor;   // [HEADS][GROUPS] a row, of a form with a scale a group
};

// One warp a vector. Bits of `spread`: 1 where a vector is not exact as e4m3 with one scale, 2 where not as integers.
__device__ __forceinline__ void query_vector(uint2 raw, float weight, float scale, int vector, const Queries& out, bool by_groups,
                                             int* spread) {
  const int lane = threadIdx.x & 31;
  float x[4] = {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xFFFF0000u), __uint_as_float(raw.y << 16),
                __uint_as_float(raw.y & 0xFFFF0000u)};
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) most = max(most, __float_as_uint(x[i]) & 0x7FFFFFFFu);
#pragma unroll
  for (int i = 1; i < 8; i <<= 1) most = max(most, __shfl_xor_sync(~0u, most, i));
  uint32_t all = most;
#pragma unroll
  for (int i = 8; i < 32; i <<= 1) all = max(all, __shfl_xor_sync(~0u, all, i));
  // octave of the largest number; what is below 2^-118 counts as that small, and a group of zeros as its vector
  const int octave = max((int)(all >> 23) - 127, -118);
  const int mine = most == 0 ? octave : max((int)(most >> 23) - 127, -118);
  const float unit = power_of_two(8 - (by_groups ? mine : octave));
  uint32_t code[4], number[4];
  bool exact = true, integer = true;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float y = x[i] * unit;
    code[i] = __nv_cvt_float_to_fp8(y, __NV_SATFINITE, __NV_E4M3);
    exact &= __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)code[i], __NV_E4M3))) == y;
    const int n = __float2int_rn(y * 0.25f);
    number[i] = n & 255;
    integer &= (float)n == y * 0.25f;
  }
  if (!by_groups && !(exact && integer)) atomicOr(spread, (exact ? 0 : 1) | (integer ? 0 : 2));
  const int group = lane >> 3, c = (lane & 7) >> 1, i = (lane & 1) * 2;
  uint8_t* row = out.q + vector * CHANNELS;
  const int even = group * 32 + c * 4 + i, odd = even + 16;
  *reinterpret_cast<uint16_t*>(row + (((even >> 4) ^ (vector & 7)) << 4 | (even & 15))) = code[0] | code[2] << 8;
  *reinterpret_cast<uint16_t*>(row + (((odd >> 4) ^ (vector & 7)) << 4 | (odd & 15))) = code[1] | code[3] << 8;
  const int at = ((lane & 7) >> 1) * 32 + (lane & 1) * 16 + group * 4;
  *reinterpret_cast<uint32_t*>(out.q_int + vector * CHANNELS + (((at >> 4) ^ (vector & 7)) << 4 | (at & 15))) =
      number[0] | number[1] << 8 | number[2] << 16 | number[3] << 24;
  if ((lane & 7) == 0) out.factor[vector * GROUPS + group] = by_groups ? power_of_two(mine - octave) : 1.f;
  if (lane == 0) {
    const float w = weight * scale;
    out.weight[vector] = all >= 0x7F800000u ? __int_as_float(0x7FC00000) : w * power_of_two(octave - 2);
  }
}

// All vectors of one row; gives the bits of `spread`, which is shared.
__device__ __forceinline__ int row_queries(const __nv_bfloat16* q, const __nv_bfloat16* weight, float scale, const Queries& out,
                                           int* spread) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  auto each = [&](bool by_groups) {
    for (int v = warp; v < HEADS; v += warps)
      query_vector(__ldg(reinterpret_cast<const uint2*>(q + v * CHANNELS) + lane), __bfloat162float(weight[v]), scale, v, out, by_groups,
                   spread);
  };
  if (threadIdx.x == 0) *spread = 0;
  __syncthreads();
  each(false);
  __syncthreads();
  const int form = *spread;
  if (form & 1) each(true);
  return form;
}

// ---- keys ---------------------------------------------------------------------------------------------------------

// A warp's next keys on their way through shared memory, sixteen a stage. A lane asks for sixteen bytes of keys r and r + 8, the first
// of four also for their scales; within a key the sixteens are swapped such that no two lanes meet in a bank when they read.
struct Ring {
  uint8_t* base;

  static constexpr int STAGE = 16 * (CHANNELS / 2 + GROUPS);
  static constexpr int BYTES = STAGES * STAGE;

  __device__ __forceinline__ void ask(int stage, const Keys& keys, int half, int block, int place) const {
    const int lane = threadIdx.x & 31, c = lane & 3, key = (lane >> 2) + half * 8;
    uint8_t* to = base + stage * STAGE;
    const int there = block >= 0 ? 1 : 0;  // else zeros
    const int64_t held = block >= 0 ? block : 0;
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to + key * (CHANNELS / 2) + ((c ^ (key >> 1 & 3)) << 4));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at),
                 "l"(keys.data + held * keys.data_stride + place * (CHANNELS / 2) + c * 16), "r"(there << 4)
                 : "memory");
    if (c == 0) {
      const uint32_t scale_at = (uint32_t)__cvta_generic_to_shared(to + 16 * (CHANNELS / 2) + key * GROUPS);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(scale_at),
                   "l"(keys.scale + held * keys.scale_stride + place * GROUPS), "r"(there << 2)
                   : "memory");
    }
  }

  static __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  // The oldest stage asked for is there, and all lanes have read the one before it.
  static __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();
  }

  __device__ __forceinline__ uint32_t scales(int stage, int half) const {
    const int key = (threadIdx.x >> 2 & 7) + half * 8;
    return *reinterpret_cast<const uint32_t*>(base + stage * STAGE + 16 * (CHANNELS / 2) + key * GROUPS);
  }

  // Group g of a key.
  __device__ __forceinline__ const uint8_t* group(int stage, int half, int g) const {
    const int key = (threadIdx.x >> 2 & 7) + half * 8;
    return base + stage * STAGE + key * (CHANNELS / 2) + ((g ^ (key >> 1 & 3)) << 4);
  }
};

// A lane's two keys in the cache blocks of one request.
struct Walk {
  const int64_t* table;
  int stop;
  int block[2];

  static __device__ int within() { return (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7); }

  __device__ __forceinline__ void find(const Keys& keys, int begin) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int entry = begin + within() + half * 8;
      block[half] = entry < stop ? (int)__ldg(table + (entry >> keys.shift)) : -1;
    }
  }

  __device__ __forceinline__ void ask(const Ring& ring, int stage, const Keys& keys, int begin) const {
#pragma unroll
    for (int half = 0; half < 2; half++) ring.ask(stage, keys, half, block[half], keys.place(begin + within() + half * 8));
    Ring::commit();
  }
};

__device__ __forceinline__ uint32_t most_of(uint32_t scales) {
  return max(max(scales & 255, (scales >> 8) & 255), max((scales >> 16) & 255, scales >> 24));
}

// Two keys of each lane (r and r + 8 of a warp's sixteen) as e4m3 numbers, and their scales: relative ones of the groups, 2^13 below,
// so that no dot product reaches 1, and the largest of them.
struct Tile {
  uint32_t a[GROUPS][4];
  float relative[2][GROUPS];
  float scale[2];
};

__device__ __forceinline__ void decode(const Ring& ring, int stage, const uint32_t (&scales)[2], Tile& tile) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t most = most_of(scales[half]);
    tile.scale[half] = scale_of(most);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const uint32_t x = *reinterpret_cast<const uint32_t*>(ring.group(stage, half, g) + c * 4);
      tile.a[g][half] = even_codes(x);
      tile.a[g][2 + half] = odd_codes(x);
      tile.relative[half][g] = __int_as_float(max((int)(scales[half] >> (8 * g) & 255) - (int)most + 127 - 13, 0) << 23);
    }
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++)  // decoded before the products begin
    asm volatile("" : "+r"(tile.a[g][0]), "+r"(tile.a[g][1]), "+r"(tile.a[g][2]), "+r"(tile.a[g][3]));
}

// The same of keys whose scales lie within three octaves: integers of one scale a key, whose whole dot products are exact.
struct IntegerTile {
  uint32_t a[GROUPS][4];
  float scale[2];
};

__device__ __forceinline__ bool is_narrow(uint32_t scales) {
  const uint32_t most = most_of(scales);
  const uint32_t least = min(min(scales & 255, (scales >> 8) & 255), min((scales >> 16) & 255, scales >> 24));
  return most - least <= 3 && most < 240;
}

// A lane has group c = its number in four of each key.
__device__ __forceinline__ void decode(const Ring& ring, int stage, const uint32_t (&scales)[2], IntegerTile& tile) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t most = most_of(scales[half]);
    tile.scale[half] = __int_as_float((most + 22 - 8) << 23);
    const int shift = 3 - (int)(most - (scales[half] >> (8 * c) & 255));
    const uint32_t low = 0x03020100u << shift, high = 0x0C080604u << shift;  // twice the magnitudes of the codes
    const uint4 words = *reinterpret_cast<const uint4*>(ring.group(stage, half, c));
    const uint32_t word[GROUPS] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      // a selector with its top bit gives the sign of the byte, 0: magnitudes of the positive and of the negative codes
      const uint32_t x = word[g], y = x ^ 0x88888888u;
      tile.a[g][half] = (permute(low, high, x) - permute(low, high, y) + 0x80808080u) ^ 0x80808080u;
      tile.a[g][2 + half] = (permute(low, high, x >> 16) - permute(low, high, y >> 16) + 0x80808080u) ^ 0x80808080u;
    }
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
    asm volatile("" : "+r"(tile.a[g][0]), "+r"(tile.a[g][1]), "+r"(tile.a[g][2]), "+r"(tile.a[g][3]));
}

// The products of two rows, on their way.
__device__ __forceinline__ void begin_products(const IntegerTile& tile, uint64_t q_descriptor, int (&d)[32]) {
  mma_fence();
#pragma unroll
  for (int g = 0; g < GROUPS; g++) mma(d, tile.a[g], q_descriptor + g * 2, g > 0);
  mma_commit();
}

// A lane's share of the scores of two rows.
__device__ __forceinline__ void integer_sums(const IntegerTile& tile, const float* weights, int (&d)[32], float (&sums)[2][2]) {
#pragma unroll
  for (int i = 0; i < 32; i++) asm volatile("" : "+r"(d[i])::"memory");
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 weight = *reinterpret_cast<const float2*>(weights + r * HEADS + i * 8);
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float dot = clamped(d[r * 16 + i * 4 + half * 2 + j]);
          sum[half] = fmaf(dot, j ? weight.y : weight.x, sum[half]);
        }
    }
    sums[r][0] = sum[0] * tile.scale[0];
    sums[r][1] = sum[1] * tile.scale[1];
  }
}

// put(pair of rows, sums) for PAIRS pairs; the products of a pair run while the one before is summed.
template <int PAIRS, typename Put>
__device__ __forceinline__ void integer_rows(const IntegerTile& tile, const float* weights, uint64_t q_descriptor, Put put) {
  constexpr int PAIR = 2 * HEADS * CHANNELS / 16;
  int d[2][32];
  begin_products(tile, q_descriptor, d[0]);
#pragma unroll
  for (int pair = 0; pair < PAIRS; pair++) {
    if (pair + 1 < PAIRS) {
      begin_products(tile, q_descriptor + (pair + 1) * PAIR, d[(pair + 1) & 1]);
      mma_wait<1>();
    } else {
      mma_wait<0>();
    }
    float sums[2][2];
    integer_sums(tile, weights + pair * 2 * HEADS, d[pair & 1], sums);
    put(pair, sums);
  }
}

// A lane's share of the scores of one row: keys r and r + 8 of a warp's sixteen, summed over its eight heads.
template <bool BY_GROUPS>
__device__ __forceinline__ void row_sums(const Tile& tile, const Queries& queries, uint64_t q_descriptor, int column, float (&sum)[2]) {
  float d[GROUPS][16];
  mma_fence();
#pragma unroll
  for (int g = 0; g < GROUPS; g++) mma(d[g], tile.a[g], q_descriptor + g * 2);
  mma_commit();
  mma_wait<0>();
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+f"(d[g][i])::"memory");
  sum[0] = sum[1] = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 weight = *reinterpret_cast<const float2*>(queries.weight + column + i * 8);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float4 f;
      if (BY_GROUPS) f = *reinterpret_cast<const float4*>(queries.factor + (column + i * 8 + j) * GROUPS);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int at = i * 4 + half * 2 + j;
        float dot;
        const float* relative = tile.relative[half];
        if (BY_GROUPS) {
          dot = d[0][at] * f.x * relative[0];
          dot = fmaf(d[1][at] * f.y, relative[1], dot);
          dot = fmaf(d[2][at] * f.z, relative[2], dot);
          dot = fma_clamped(d[3][at] * f.w, relative[3], dot);
        } else {
          dot = d[0][at] * relative[0];
          dot = fmaf(d[1][at], relative[1], dot);
          dot = fmaf(d[2][at], relative[2], dot);
          dot = fma_clamped(d[3][at], relative[3], dot);
        }
        sum[half] = fmaf(dot, j ? weight.y : weight.x, sum[half]);
      }
    }
  }
  sum[0] = sum[0] * 8192.f * tile.scale[0];
  sum[1] = sum[1] * 8192.f * tile.scale[1];
}

// Sums over the four lanes c of a key, of two rows at once: lane c is given row c >> 1 and key r + 8 (c & 1).
__device__ __forceinline__ float share_out(const float (&first)[2], const float (&second)[2], int c) {
  const bool lower = c & 2, upper = c & 1;
  float mine[2];
#pragma unroll
  for (int half = 0; half < 2; half++)
    mine[half] = (lower ? second[half] : first[half]) + __shfl_xor_sync(~0u, lower ? first[half] : second[half], 2);
  return (upper ? mine[1] : mine[0]) + __shfl_xor_sync(~0u, upper ? mine[0] : mine[1], 1);
}

// ---- runs ---------------------------------------------------------------------------------------------------------

// A run is the rows of one request between two multiples of `run`; its keys are read once for all of them. Blocks share the work
// of all runs (keys x rows) evenly, whatever each of them sees.
struct RunArguments {
  const __nv_bfloat16* q;
  const __nv_bfloat16* weight;
  const int64_t* request;
  const int64_t* visible;
  uint8_t* prepared;
  float* score;
  float* peak;
  Keys keys;
  int64_t score_stride, peak_stride;
  int rows, run, least;
  float scale;
};

constexpr int UNIT = THREADS / 128 * TILE;  // keys that a block scores at a time

// What every block knows of the rows.
struct Plan {
  int* before;   // [rows + 1] the work of the runs that begin before a row
  int* request;  // [rows]
  int* visible;  // [rows]

  // How many rows the run has that begins at `first`, and the most entries that one of them sees.
  __device__ __forceinline__ int2 run_at(int first, int stop) const {
    int rows = 0, most = 0;
    for (int t = first; t < stop && request[t] == request[first]; t++, rows++) most = max(most, visible[t]);
    return make_int2(rows, most);
  }
};

// What the first kernel leaves to the second, in `prepared`.
struct Prepared {
  Queries queries;
  int* form;  // [rows]
  Plan plan;

  static constexpr int ROW = HEADS * (2 * CHANNELS + 4 + 4 * GROUPS) + 4 + 3 * 4;  // bytes, and 4 for the end of `before`

  __device__ Prepared(uint8_t* base, int rows) {
    queries.q_int = base;
    queries.q = queries.q_int + (int64_t)rows * HEADS * CHANNELS;
    queries.weight = reinterpret_cast<float*>(queries.q + (int64_t)rows * HEADS * CHANNELS);
    queries.factor = queries.weight + rows * HEADS;
    form = reinterpret_cast<int*>(queries.factor + rows * HEADS * GROUPS);
    plan.request = form + rows;
    plan.visible = plan.request + rows;
    plan.before = plan.visible + rows;
  }
};

// Block t: the queries of row t. The last block: the plan. The work of a run is its rows times its units of keys; one that sees at most
// `least` entries has none.
__global__ void __launch_bounds__(1024) prepare(const __grid_constant__ RunArguments p) {
  __shared__ int partial[32];
  __shared__ int spread;
  wait_for_producers();
  const Prepared prepared(p.prepared, p.rows);
  const Plan& plan = prepared.plan;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  if (blockIdx.x < p.rows) {
    const int64_t row = blockIdx.x;
    Queries out = prepared.queries;
    out.q_int += row * HEADS * CHANNELS;
    out.q += row * HEADS * CHANNELS;
    out.weight += row * HEADS;
    out.factor += row * HEADS * GROUPS;
    const int form = row_queries(p.q + row * HEADS * CHANNELS, p.weight + row * HEADS, p.scale, out, &spread);
    if (threadIdx.x == 0) prepared.form[row] = form;
    return;
  }
  for (int t = threadIdx.x; t < p.rows; t += blockDim.x) {
    plan.request[t] = (int)p.request[t];
    plan.visible[t] = (int)p.visible[t];
  }
  __syncthreads();
  int carry = 0;
  for (int base = 0; base < p.rows; base += blockDim.x) {
    const int t = base + threadIdx.x;
    int work = 0;
    if (t < p.rows && (t % p.run == 0 || plan.request[t - 1] != plan.request[t])) {
      const int2 run = plan.run_at(t, min((t / p.run + 1) * p.run, p.rows));
      if (run.y > p.least) work = (run.y + UNIT - 1) / UNIT * run.x;
    }
    int sum = work;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      const int other = __shfl_up_sync(~0u, sum, i);
      if (lane >= i) sum += other;
    }
    __syncthreads();
    if (lane == 31) partial[warp] = sum;
    __syncthreads();
    int whole = 0, mine = 0;
    for (int i = 0; i < warps; i++) {
      if (i == warp) mine = whole;
      whole += partial[i];
    }
    if (t < p.rows) plan.before[t] = carry + mine + sum - work;
    carry += whole;
  }
  if (threadIdx.x == 0) plan.before[p.rows] = carry;
}

// Asks for `bytes` (a multiple of 16) of global memory.
__device__ __forceinline__ void ask_for(void* to, const void* from, int bytes) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
  for (int i = threadIdx.x * 16; i < bytes; i += THREADS * 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + i), "l"(static_cast<const uint8_t*>(from) + i) : "memory");
}

template <bool BY_GROUPS, bool PEAKS>
__device__ __forceinline__ void score_tiles(const RunArguments& p, const Queries& queries, const int* visible_s,
                                            int first, int rows, int begin, int stop, bool integers, const Ring& ring, Walk& walk) {
  // this warpgroup's tiles begin, begin + UNIT, ... before stop
  const int lane = threadIdx.x & 31, c = lane & 3;
  const uint64_t q_descriptor = descriptor((uint32_t)__cvta_generic_to_shared(queries.q));
  const uint64_t q_int_descriptor = descriptor((uint32_t)__cvta_generic_to_shared(queries.q_int));
  const int within = Walk::within();
  int stage = 0;
  for (; begin < stop; begin += UNIT) {
    Ring::wait();
    const int now = stage;
    const uint32_t scales[2] = {ring.scales(now, 0), ring.scales(now, 1)};
    const int entry = begin + within + (c & 1) * 8;
    float* score_out = p.score + (int64_t)(first + (c >> 1)) * p.score_stride + entry;
    float* peak_out = PEAKS ? p.peak + (int64_t)(first + (c >> 1)) * p.peak_stride + entry / MEMBERS : nullptr;
    auto put = [&](int pair, const float (&sums)[2][2]) {
      const float score = share_out(sums[0], sums[1], c);
      const int visible = visible_s[pair * 2 + (c >> 1)];  // 0 behind the last row
      const bool sees = entry < visible;
      if (sees) score_out[pair * 2 * p.score_stride] = score;
      if (PEAKS) {
        float best = sees && score == score ? score : -INFINITY;
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 4));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
        if (entry / MEMBERS == (visible - 1) / MEMBERS) best = INFINITY;
        if (lane < 4 && sees) peak_out[pair * 2 * p.peak_stride] = best;  // lanes 0 .. 3 have the first member
      }
    };
    walk.ask(ring, (stage + STAGES - 1) % STAGES, p.keys, begin + (STAGES - 1) * UNIT);
    walk.find(p.keys, begin + STAGES * UNIT);
    stage = (stage + 1) % STAGES;
    if (!BY_GROUPS && integers && !warpgroup_any(!(is_narrow(scales[0]) && is_narrow(scales[1])))) {
      IntegerTile tile;
      decode(ring, now, scales, tile);
      const float* weights = queries.weight + c * 2;
      if (rows <= 2)
        integer_rows<1>(tile, weights, q_int_descriptor, put);
      else if (rows <= 4)
        integer_rows<2>(tile, weights, q_int_descriptor, put);
      else if (rows <= 6)
        integer_rows<3>(tile, weights, q_int_descriptor, put);
      else
        integer_rows<4>(tile, weights, q_int_descriptor, put);
    } else {
      Tile tile;
      decode(ring, now, scales, tile);
      for (int row = 0; row < rows; row += 2) {
        float sums[2][2] = {};
        row_sums<BY_GROUPS>(tile, queries, q_descriptor + row * (HEADS * CHANNELS / 16), row * HEADS + c * 2, sums[0]);
        if (row + 1 < rows)
          row_sums<BY_GROUPS>(tile, queries, q_descriptor + (row + 1) * (HEADS * CHANNELS / 16), (row + 1) * HEADS + c * 2, sums[1]);
        put(row / 2, sums);
      }
    }
  }
}

template <bool PEAKS>
__global__ void __launch_bounds__(THREADS, 1) score_runs(const __grid_constant__ RunArguments p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ int visible_s[MOST_RUN + 1];
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
  uint8_t* start = shared + ((1024 - (base & 1023)) & 1023);
  const int even = (p.run + 1) & ~1;  // an odd run's last product reads one row more
  Queries queries;
  queries.q_int = start;
  queries.q = queries.q_int + even * HEADS * CHANNELS;
  queries.weight = reinterpret_cast<float*>(queries.q + p.run * HEADS * CHANNELS);
  queries.factor = queries.weight + even * HEADS;
  uint8_t* rings = reinterpret_cast<uint8_t*>(queries.factor + p.run * HEADS * GROUPS);
  const Ring ring{rings + (threadIdx.x >> 5) * Ring::BYTES};
  int* numbers = reinterpret_cast<int*>(rings + (THREADS >> 5) * Ring::BYTES);
  wait_for_producers();
  const Prepared prepared(p.prepared, p.rows);
  for (int i = threadIdx.x; i < 4 * p.rows + 1; i += THREADS) numbers[i] = __ldg(prepared.form + i);
  __syncthreads();
  const int* form = numbers;
  const Plan plan{numbers + 3 * p.rows, numbers + p.rows, numbers + 2 * p.rows};
  const int* before = plan.before;
  const int low = (int)((int64_t)before[p.rows] * blockIdx.x / gridDim.x);
  const int high = (int)((int64_t)before[p.rows] * (blockIdx.x + 1) / gridDim.x);
  if (low >= high) return;
  int first = 0;  // the last row behind at most `low` of the work: a run begins there
  for (int stop = p.rows; stop - first > 1;) {
    const int middle = (first + stop) >> 1;
    if (before[middle] <= low) first = middle; else stop = middle;
  }
  while (first < p.rows && before[first] < high) {
    const int2 run = plan.run_at(first, min((first / p.run + 1) * p.run, p.rows));
    const int rows = run.x, work = before[first + rows] - before[first];
    // a unit of a run belongs to the block that its first piece of work falls to
    const int from = (max(low - before[first], 0) + rows - 1) / rows, to = (min(high - before[first], work) + rows - 1) / rows;
    if (from < to) {
      __syncthreads();  // the run before this one has been scored
      ask_for(queries.q_int, prepared.queries.q_int + (int64_t)first * HEADS * CHANNELS, rows * HEADS * CHANNELS);
      ask_for(queries.q, prepared.queries.q + (int64_t)first * HEADS * CHANNELS, rows * HEADS * CHANNELS);
      ask_for(queries.weight, prepared.queries.weight + first * HEADS, rows * HEADS * 4);
      ask_for(queries.factor, prepared.queries.factor + first * HEADS * GROUPS, rows * HEADS * GROUPS * 4);
      Ring::commit();
      const int64_t* table = p.keys.table + (int64_t)max(plan.request[first], 0) * p.keys.table_stride;
      const int begin = from * UNIT + (threadIdx.x >> 7) * TILE, stop = min(to * UNIT, run.y);
      Walk walks[STAGES];
#pragma unroll
      for (int i = 0; i < STAGES; i++) {
        walks[i].table = table;
        walks[i].stop = stop;
        walks[i].find(p.keys, begin + i * UNIT);
      }
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) walks[i].ask(ring, i, p.keys, begin + i * UNIT);
      if (threadIdx.x <= MOST_RUN) visible_s[threadIdx.x] = threadIdx.x < rows ? plan.visible[first + threadIdx.x] : 0;
      int forms = 0;
      for (int row = first; row < first + rows; row++) forms |= form[row];
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");  // the queries
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      Walk& walk = walks[STAGES - 1];
      if (forms & 1)
        score_tiles<true, PEAKS>(p, queries, visible_s, first, rows, begin, stop, false, ring, walk);
      else
        score_tiles<false, PEAKS>(p, queries, visible_s, first, rows, begin, stop, forms == 0, ring, walk);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    first += rows;
  }
}

// ---- candidates ---------------------------------------------------------------------------------------------------

struct CandidateArguments {
  const __nv_bfloat16* q;
  const __nv_bfloat16* weight;
  const int64_t* request;
  const int64_t* visible;
  const int* candidate;
  float* score;
  Keys keys;
  int64_t score_stride;
  int candidates;
  float scale;
};

template <bool BY_GROUPS>
__device__ __forceinline__ void score_blocks(const CandidateArguments& p, const Queries& queries, const Ring& ring, const int2* blocks, int low,
                                             int high, int visible, float* score) {
  // blocks[i]: the cache block and the first entry of candidate low + i; a warp takes two candidates a tile
  const int lane = threadIdx.x & 31, c = lane & 3, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const uint64_t q_descriptor = descriptor((uint32_t)__cvta_generic_to_shared(queries.q));
  const int member = lane >> 2;
  auto ask = [&](int stage, int at) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int2 block = at + half < high ? blocks[at + half - low] : make_int2(-1, 0);
      ring.ask(stage, p.keys, half, block.x, p.keys.place(block.y + member));
    }
    Ring::commit();
  };
  int at = low + warp * 2, stage = 0;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) ask(i, at + i * warps * 2);
  for (int tile_low = low; tile_low < high; tile_low += warps * 2, at += warps * 2) {  // all warps of a product go round together
    Ring::wait();
    const int now = stage;
    const uint32_t scales[2] = {ring.scales(now, 0), ring.scales(now, 1)};
    ask((stage + STAGES - 1) % STAGES, at + (STAGES - 1) * warps * 2);
    stage = (stage + 1) % STAGES;
    Tile tile;
    decode(ring, now, scales, tile);
    float sums[2], none[2] = {0.f, 0.f};
    row_sums<BY_GROUPS>(tile, queries, q_descriptor, c * 2, sums);
    const float mine = share_out(sums, none, c);
    const int own = at + (c & 1);
    if (own < high && c < 2) {
      const int2 block = blocks[own - low];
      if (block.y >= 0) score[own * MEMBERS + member] = block.y + member < visible ? mine : -INFINITY;
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__global__ void __launch_bounds__(THREADS, 1) score_candidates(const __grid_constant__ CandidateArguments p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ int spread;
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
  uint8_t* start = shared + ((1024 - (base & 1023)) & 1023);
  Queries queries;
  queries.q_int = start;
  queries.q = start + HEADS * CHANNELS;
  queries.weight = reinterpret_cast<float*>(queries.q + HEADS * CHANNELS);
  queries.factor = queries.weight + HEADS;
  uint8_t* rings = reinterpret_cast<uint8_t*>(queries.factor + HEADS * GROUPS);
  const Ring ring{rings + (threadIdx.x >> 5) * Ring::BYTES};
  int2* blocks = reinterpret_cast<int2*>(rings + (blockDim.x >> 5) * Ring::BYTES);
  wait_for_producers();
  const int64_t row = blockIdx.x;
  const int share = (p.candidates + gridDim.y - 1) / gridDim.y;
  const int low = blockIdx.y * share, high = min(low + share, p.candidates);
  const int visible = (int)p.visible[row];
  const int64_t request = p.request[row];
  const int64_t* table = p.keys.table + (request < 0 ? 0 : request) * p.keys.table_stride;
  const int* candidate = p.candidate + row * p.candidates;
  if (low >= high || candidate[low] < 0) return;  // candidates stand in front
  for (int i = low + threadIdx.x; i < high; i += blockDim.x) {
    const int entry = candidate[i] < 0 ? -1 : candidate[i] * MEMBERS;
    blocks[i - low] = make_int2(entry >= 0 && entry < visible ? (int)__ldg(table + (entry >> p.keys.shift)) : -1, entry);
  }
  const bool by_groups = 1 & row_queries(p.q + row * HEADS * CHANNELS, p.weight + row * HEADS, p.scale, queries, &spread);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  float* score = p.score + row * p.score_stride;
  if (by_groups)
    score_blocks<true>(p, queries, ring, blocks, low, high, visible, score);
  else
    score_blocks<false>(p, queries, ring, blocks, low, high, visible, score);
}

template <typename Arguments>
int launch(void (*kernel)(Arguments), const Arguments& arguments, dim3 blocks, int threads, int bytes, int programmatic,
           cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace

extern "C" int flashstep_score_candidates(const void* q, const void* weight, const void* data, const void* scales,
                                          const int64_t* request, const int64_t* visible, const int64_t* table, const int* candidate,
                                          float* score, int64_t data_stride, int64_t scale_stride, int64_t table_stride,
                                          int64_t score_stride, int shift, int rows, int candidates, float scale, int splits,
                                          int threads, int programmatic, cudaStream_t stream) {
  CandidateArguments p{(const __nv_bfloat16*)q, (const __nv_bfloat16*)weight, request, visible, candidate, score,
                       Keys{(const uint8_t*)data, (const uint8_t*)scales, table, data_stride, scale_stride, table_stride, shift},
                       score_stride, candidates, scale};
  const int share = (candidates + splits - 1) / splits;
  const int bytes = 1024 + HEADS * (2 * CHANNELS + 4 + 4 * GROUPS) + threads / 32 * Ring::BYTES + share * 8;
  return launch(score_candidates, p, dim3(rows, splits), threads, bytes, programmatic, stream);
}

// `prepared` holds flashstep_prepared_bytes(rows).
extern "C" int64_t flashstep_prepared_bytes(int rows) { return (int64_t)rows * Prepared::ROW + 4; }

extern "C" int flashstep_score_runs(const void* q, const void* weight, const void* data, const void* scales, const int64_t* request,
                                    const int64_t* visible, const int64_t* table, void* prepared, float* score, float* peak,
                                    int64_t data_stride, int64_t scale_stride, int64_t table_stride, int64_t score_stride,
                                    int64_t peak_stride, int shift, int rows, int run, int least, float scale, int blocks,
                                    int programmatic, cudaStream_t stream) {
  RunArguments p{(const __nv_bfloat16*)q, (const __nv_bfloat16*)weight, request, visible, (uint8_t*)prepared, score, peak,
                 Keys{(const uint8_t*)data, (const uint8_t*)scales, table, data_stride, scale_stride, table_stride, shift},
                 score_stride, peak_stride, rows, run, least, scale};
  const int even = (run + 1) & ~1;
  const int bytes = 1024 + (even + run) * HEADS * CHANNELS + even * HEADS * 4 + run * HEADS * GROUPS * 4 + THREADS / 32 * Ring::BYTES +
                    4 * (4 * rows + 1);
  const int error = launch(prepare, p, dim3(rows + 1), 1024, 0, programmatic, stream);
  if (error) return error;
  return launch(peak ? score_runs<true> : score_runs<false>, p, dim3(blocks), THREADS, bytes, programmatic, stream);
}
