// The mHC boundary in one launch: write, coefficients of the next site, collapse, RMS norm, quantised copy (spec/model.md 2).
//
// A cluster of 16 blocks shares a few rows: each block owns 320 channels of every stream and holds the projection's columns of
// them in shared memory, cut into two bf16 terms, for as long as it lives; clusters walk over the rows. A warp owns 32 channels
// (one group of the quantiser), a lane 8 channels of one row, so that what it writes to the streams is already the right operand of
// the matrix instruction: 24 outputs x two terms are its 48 rows, the rows of the batch its columns. Sums over channels are added
// in one fixed order (lanes, warps, blocks of the cluster): a row's result depends neither on the number of rows nor on its
// neighbours. What follows a cluster's exchange (norm, quantiser) is done while the next rows are read; Sinkhorn, a chain of 39
// dependent steps, is done for up to 32 rows of a block at once.

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

struct Arguments {
  const __nv_bfloat16* y;       // [T, D]; none when entering
  const __nv_bfloat16* x;       // [T, S, D] with strides
  int64_t x_row, x_stream;
  const float* coefficients;    // [T, M] of the site that is left; its first S are what reads
  int64_t coefficients_row;
  const float* projection;      // [M, S * D] of the site that is entered
  const float* base;            // [M]
  const float* scale;           // [M]
  const __nv_bfloat16* weight;  // [D] of the norm
  __nv_bfloat16* out;           // [T, S, D]; none when entering
  float* next;                  // [T, M]
  __nv_bfloat16* plain;         // [T, D]
  __nv_bfloat16* quantised;     // [T, D]
  __nv_bfloat16* mean;          // [T, D], or none
  uint32_t rows, width, span;   // rows of a cluster in one turn: 8 or 16; rows x S x D < 2^32
  int iterations;
  float eps, norm_eps, inverse_width;
};

namespace {

constexpr int STREAMS = 4;
constexpr int OUTPUTS = 2 * STREAMS + STREAMS * STREAMS;  // 24
constexpr int BLOCKS = 16;                                // of a cluster
constexpr int GROUPS = 10;                                // of 32 channels, a block
constexpr int GROUP = 32;
constexpr int SETS = 2;  // of GROUPS warps, each with 8 rows
constexpr int ROWS = 8;  // of a set: the columns of one matrix instruction
constexpr int THREADS = SETS * GROUPS * 32;
constexpr int STEPS = 2 * STREAMS;     // matrix instructions of 16 channels that a group's channels take
constexpr int TILES = 3;               // of 16 of the 48 rows
constexpr int SUMS = OUTPUTS * ROWS + 2 * ROWS;
constexpr int KEPT = 32;  // one a lane
constexpr int SLOTS = 4;  // turns whose exchange may be under way at once
constexpr uint32_t RECEIVED_BYTES = BLOCKS * (OUTPUTS + 1) * 4, SQUARES_BYTES = BLOCKS * ROWS * 4;

struct Shared {
  uint4 weight[GROUPS][STEPS][TILES][32];
  // rows of a turn: the sublayer's output, then the streams; padded, so that rows begin in different banks
  alignas(16) __nv_bfloat16 staged[SETS][ROWS][STREAMS + 1][GROUPS * GROUP + GROUP];
  alignas(16) float coefficients[2][SETS * ROWS][OUTPUTS + 4];  // padded: rows begin in different banks
  float sums[SETS][GROUPS][SUMS];
  float received[SLOTS][BLOCKS][OUTPUTS + 1];    // of this block's row: projections and the sum of squares
  float squares[SLOTS][SETS * ROWS][BLOCKS];     // of every row's collapsed channels
  float base[OUTPUTS], scale[OUTPUTS];
  float kept[KEPT][OUTPUTS + 1];                 // sums of this block's rows, until they are finished together
  uint64_t staged_all[SETS];                     // barriers: everything above has come
  uint64_t received_all[SLOTS];
  uint64_t squares_all[SLOTS][SETS];
};

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A value into another block's shared memory, counted by a barrier there.
__device__ __forceinline__ void push(float* mine, uint64_t* barrier, uint32_t block, float value) {
  uint32_t remote, remote_barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(mine)), "r"(block));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(block));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(remote),
               "r"(__float_as_uint(value)), "r"(remote_barrier)
               : "memory");
}

__device__ __forceinline__ void expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// Bytes (a multiple of 16) into this block's shared memory, by the copy engine, counted by a barrier.
__device__ __forceinline__ void copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void set_meets(int set) {
  asm volatile("bar.sync %0, %1;" ::"r"(set + 1), "r"(GROUPS * 32) : "memory");
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float of(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ uint32_t of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ uint32_t pack(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ void multiply(float (&sum)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float over_lanes_of_row(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Q8 of 32 channels, 8 in each of 4 lanes, as gemm.quantise_input does it; bf16 pairs in and out.
__device__ __forceinline__ uint4 quantise(const uint32_t (&u)[4]) {
  constexpr uint32_t MAGNITUDE = 0x7fff7fff;  // as integers, magnitudes have the order of the numbers, and NaN is the largest
  uint32_t most = larger(larger(u[0] & MAGNITUDE, u[1] & MAGNITUDE), larger(u[2] & MAGNITUDE, u[3] & MAGNITUDE));
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
  most = max(most << 16, most & 0xffff0000u);
  const float scaled = fmaxf(__uint_as_float(most), 1e-4f) * (1.0f / 448.0f);
  const uint32_t exponent = (__float_as_uint(scaled) + 0x7fffffu) & 0x7f800000u;
  const float scale = most < 0x7f800000u ? __uint_as_float(exponent) : NAN;
  const float inverse = __uint_as_float((254u << 23) - exponent);
  uint32_t out[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint16_t code;
    uint32_t half;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(high(u[q]) * inverse), "f"(low(u[q]) * inverse));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half) : "h"(code));
    const float2 value = __half22float2(*reinterpret_cast<const __half2*>(&half));
    out[q] = pack(value.x * scale, value.y * scale);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// 12 of a lane's weights (outputs g, g + 8, g + 16; four channels each) as the rows of three tiles: 24 first terms, 24 second ones.
__device__ __forceinline__ void split(const float4 (&w)[3], uint4 (&tile)[3]) {
  uint32_t first[3][2], second[3][2];
#pragma unroll
  for (int o = 0; o < 3; ++o) {
    first[o][0] = pack(w[o].x, w[o].y);
    first[o][1] = pack(w[o].z, w[o].w);
    second[o][0] = pack(w[o].x - low(first[o][0]), w[o].y - high(first[o][0]));
    second[o][1] = pack(w[o].z - low(first[o][1]), w[o].w - high(first[o][1]));
  }
  tile[0] = make_uint4(first[0][0], first[1][0], first[0][1], first[1][1]);
  tile[1] = make_uint4(first[2][0], second[0][0], first[2][1], second[0][1]);
  tile[2] = make_uint4(second[1][0], second[2][0], second[1][1], second[2][1]);
}

__device__ __forceinline__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ float inverse_root(float v) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ float sigmoid(float v) { return reciprocal(1.0f + __expf(-v)); }

// A row's 24 projections and sum of squares, each summed over the channels -> its coefficients. One lane's work.
__device__ __noinline__ void finish_coefficients(const Shared& s, const float* sums, float statistic, float eps, int iterations,
                                                 float* next) {
  float4 pre_post[2];
#pragma unroll
  for (int i = 0; i < 2 * STREAMS; ++i) {
    const float share = sigmoid(fmaf(sums[i] * statistic, s.scale[i], s.base[i]));
    reinterpret_cast<float*>(pre_post)[i] = i < STREAMS ? share + eps : 2.0f * share;
  }
  reinterpret_cast<float4*>(next)[0] = pre_post[0];
  reinterpret_cast<float4*>(next)[1] = pre_post[1];
  float k[STREAMS][STREAMS];
#pragma unroll
  for (int i = 0; i < STREAMS; ++i) {
#pragma unroll
    for (int j = 0; j < STREAMS; ++j) {
      const int o = 2 * STREAMS + i * STREAMS + j;
      k[i][j] = fmaf(sums[o] * statistic, s.scale[o], s.base[o]);
    }
    const float top = fmaxf(fmaxf(k[i][0], k[i][1]), fmaxf(k[i][2], k[i][3]));
#pragma unroll
    for (int j = 0; j < STREAMS; ++j) k[i][j] = __expf(k[i][j] - top);
    const float share = reciprocal((k[i][0] + k[i][1]) + (k[i][2] + k[i][3]));
#pragma unroll
    for (int j = 0; j < STREAMS; ++j) k[i][j] = fmaf(k[i][j], share, eps);
  }
  // The matrix stays; each division goes into a row's or a column's factor. With m the sum that a factor f meets,
  // f' = f / (f m + eps) = 1 / (m + eps / f): the divisors are carried, and the factors are their reciprocals.
  float row_divisor[STREAMS] = {1, 1, 1, 1}, column_divisor[STREAMS] = {1, 1, 1, 1};
  float row_factor[STREAMS] = {1, 1, 1, 1}, column_factor[STREAMS];
#pragma unroll 1
  for (int turn = 0;; ++turn) {
#pragma unroll
    for (int j = 0; j < STREAMS; ++j) {
      float divisor = eps * column_divisor[j];
#pragma unroll
      for (int i = 0; i < STREAMS; ++i) divisor = fmaf(k[i][j], row_factor[i], divisor);
      column_divisor[j] = divisor;
      column_factor[j] = reciprocal(divisor);
    }
    if (turn + 1 == iterations) break;
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) {
      float divisor = eps * row_divisor[i];
#pragma unroll
      for (int j = 0; j < STREAMS; ++j) divisor = fmaf(k[i][j], column_factor[j], divisor);
      row_divisor[i] = divisor;
      row_factor[i] = reciprocal(divisor);
    }
  }
#pragma unroll
  for (int i = 0; i < STREAMS; ++i)
    reinterpret_cast<float4*>(next + 2 * STREAMS)[i] =
        make_float4(k[i][0] * row_factor[i] * column_factor[0], k[i][1] * row_factor[i] * column_factor[1],
                    k[i][2] * row_factor[i] * column_factor[2], k[i][3] * row_factor[i] * column_factor[3]);
}

template <bool WRITE, bool MEAN>
__global__ void __launch_bounds__(THREADS, 1) boundary(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t block = cluster_rank();
  const int cluster = blockIdx.x / BLOCKS, clusters = gridDim.x / BLOCKS;
  const int tiles = (a.rows + a.span - 1) / a.span;
  const int turns = (tiles - cluster + clusters - 1) / clusters;

  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (threadIdx.x == 0) {
    auto begin = [](uint64_t* barrier) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    };
    auto arm = [&](uint64_t* barrier, uint32_t bytes) {
      begin(barrier);
      expect(barrier, bytes);
    };
    for (int set = 0; set < SETS; ++set) begin(&s.staged_all[set]);
    for (int slot = 0; slot < SLOTS; ++slot) {
      arm(&s.received_all[slot], RECEIVED_BYTES);
      for (int set = 0; set < SETS; ++set) arm(&s.squares_all[slot][set], SQUARES_BYTES);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_arrive();  // whoever waits for this may write to the other blocks: all have started

  const int set = warp / GROUPS, group = warp % GROUPS;
  const int g = lane / 4, t = lane % 4;
  const uint32_t channel = (block * GROUPS + group) * GROUP + 8 * t;
  const bool held = channel < a.width;
  const bool works = set * ROWS < a.span;

  // Weights do not change: they are read before the wait. Each set brings two of the streams.
  float4 w[2][2][3];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int o = 0; o < 3; ++o) {
        const int64_t at = static_cast<int64_t>(g + 8 * o) * STREAMS * a.width + (2 * set + i) * a.width + channel + 4 * h;
        w[i][h][o] = held ? __ldg(reinterpret_cast<const float4*>(a.projection + at)) : make_float4(0, 0, 0, 0);
      }
  if (threadIdx.x < OUTPUTS) {
    s.base[threadIdx.x] = a.base[threadIdx.x];
    s.scale[threadIdx.x] = a.scale[threadIdx.x];
  }
  const uint4 norm = held ? __ldg(reinterpret_cast<const uint4*>(a.weight + channel)) : make_uint4(0, 0, 0, 0);

  asm volatile("griddepcontrol.wait;" ::: "memory");

  const int first = cluster * a.span + set * ROWS, step = clusters * a.span;  // rows of the set's turns
  const int thread = group * 32 + lane;                                       // of the set
  // Of rows that are not there nothing is read, and whatever lies in their places is not stored.
  const uint32_t begin = block * GROUPS * GROUP;
  const uint32_t bytes = a.width > begin ? min(a.width - begin, static_cast<uint32_t>(GROUPS * GROUP)) * 2 : 0;
  auto fetch = [&](int turn) {  // by one lane of each of the first warps: a row each
    constexpr uint32_t BYTES = WRITE ? OUTPUTS * 4 : STREAMS * 4;
    const uint32_t from = first + turn * step, row = from + group;
    uint64_t* barrier = &s.staged_all[set];
    if (group == 0) {
      const uint32_t there = from < a.rows ? min(a.rows - from, static_cast<uint32_t>(ROWS)) : 0;
      expect(barrier, there * (BYTES + (WRITE ? STREAMS + 1 : STREAMS) * bytes));
    }
    if (row >= a.rows) return;
    copy(s.coefficients[turn & 1][set * ROWS + group], a.coefficients + row * static_cast<uint32_t>(a.coefficients_row), BYTES, barrier);
    if (!bytes) return;
    if (WRITE) copy(s.staged[set][group][0], a.y + (row * a.width + begin), bytes, barrier);
    const __nv_bfloat16* x = a.x + (row * static_cast<uint32_t>(a.x_row) + begin);
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) copy(s.staged[set][group][1 + i], x + i * static_cast<uint32_t>(a.x_stream), bytes, barrier);
  };
  const bool fetches = works && group < ROWS && lane == 0;
  if (fetches) fetch(0);

#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint4 tile[3];
      split(w[i][h], tile);
#pragma unroll
      for (int m = 0; m < TILES; ++m) s.weight[group][2 * (2 * set + i) + h][m][lane] = tile[m];
    }
  __syncthreads();
  cluster_wait();

  // the warp that keeps the sums of this block's row of each turn; with one set at work (in a single turn) one of the idle ones
  const bool keeps = block < a.span && (a.span == ROWS ? warp == GROUPS : set == block / ROWS && group == GROUPS - 1);
  uint32_t before[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int turn = 0; turn <= turns; ++turn) {
    uint32_t collapsed[4] = {0, 0, 0, 0};
    if (works && turn < turns) {
      wait(&s.staged_all[set], turn & 1);
      const uint32_t row = first + g + turn * step;
      const bool there = held && row < a.rows;
      uint4 y4 = make_uint4(0, 0, 0, 0), x4[STREAMS];
      const __nv_bfloat16* staged = &s.staged[set][g][0][group * GROUP + 8 * t];
      constexpr int NEXT = GROUPS * GROUP + GROUP;
      if (WRITE && held) y4 = *reinterpret_cast<const uint4*>(staged);
#pragma unroll
      for (int i = 0; i < STREAMS; ++i)
        x4[i] = held ? *reinterpret_cast<const uint4*>(staged + (1 + i) * NEXT) : make_uint4(0, 0, 0, 0);
      asm volatile("" ::"r"(y4.x), "r"(x4[0].x), "r"(x4[1].x), "r"(x4[2].x), "r"(x4[3].x) : "memory");
      set_meets(set);  // all have read what the next turn overwrites
      if (fetches && turn + 1 < turns) fetch(turn + 1);
      const float4* coefficients = reinterpret_cast<const float4*>(s.coefficients[turn & 1][set * ROWS + g]);
      const float4 pre = coefficients[0];
      float4 post, comb[STREAMS];
      if (WRITE) {
        post = coefficients[1];
#pragma unroll
        for (int i = 0; i < STREAMS; ++i) comb[i] = coefficients[2 + i];
      }
      uint32_t written[STREAMS][4];
      float total = 0.0f, squares = 0.0f;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float x0[STREAMS], x1[STREAMS], c0 = 0.0f, c1 = 0.0f;
        const float y0 = low(of(y4, q)), y1 = high(of(y4, q));
#pragma unroll
        for (int i = 0; i < STREAMS; ++i) {
          x0[i] = low(of(x4[i], q));
          x1[i] = high(of(x4[i], q));
        }
#pragma unroll
        for (int j = 0; j < STREAMS; ++j) {
          written[j][q] = of(x4[j], q);
          if (WRITE) {
            float v0 = of(post, j) * y0, v1 = of(post, j) * y1;
#pragma unroll
            for (int i = 0; i < STREAMS; ++i) {
              v0 = fmaf(of(comb[i], j), x0[i], v0);
              v1 = fmaf(of(comb[i], j), x1[i], v1);
            }
            written[j][q] = pack(v0, v1);
          }
          const float v0 = low(written[j][q]), v1 = high(written[j][q]);
          c0 = fmaf(of(pre, j), v0, c0);
          c1 = fmaf(of(pre, j), v1, c1);
          total = fmaf(v0, v0, total);
          total = fmaf(v1, v1, total);
        }
        collapsed[q] = pack(c0, c1);
        c0 = low(collapsed[q]);
        c1 = high(collapsed[q]);
        squares = fmaf(c0, c0, squares);
        squares = fmaf(c1, c1, squares);
      }
      if (there) {
        if (WRITE) {
          __nv_bfloat16* out = a.out + (row * STREAMS * a.width + channel);
#pragma unroll
          for (int j = 0; j < STREAMS; ++j)
            *reinterpret_cast<uint4*>(out + j * a.width) = make_uint4(written[j][0], written[j][1], written[j][2], written[j][3]);
        }
        if (MEAN) {
          uint32_t mean[4];
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const float m0 = (low(written[0][q]) + low(written[1][q])) + (low(written[2][q]) + low(written[3][q]));
            const float m1 = (high(written[0][q]) + high(written[1][q])) + (high(written[2][q]) + high(written[3][q]));
            mean[q] = pack(m0 * (1.0f / STREAMS), m1 * (1.0f / STREAMS));
          }
          *reinterpret_cast<uint4*>(a.mean + (row * a.width + channel)) = make_uint4(mean[0], mean[1], mean[2], mean[3]);
        }
      }
      float sum[TILES][4] = {};
#pragma unroll
      for (int j = 0; j < STREAMS; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile)
            multiply(sum[tile], s.weight[group][2 * j + h][tile][lane], written[j][2 * h], written[j][2 * h + 1]);
      float* mine = s.sums[set][group];
      *reinterpret_cast<float2*>(mine + (g + 0) * ROWS + 2 * t) = make_float2(sum[0][0] + sum[1][2], sum[0][1] + sum[1][3]);
      *reinterpret_cast<float2*>(mine + (g + 8) * ROWS + 2 * t) = make_float2(sum[0][2] + sum[2][0], sum[0][3] + sum[2][1]);
      *reinterpret_cast<float2*>(mine + (g + 16) * ROWS + 2 * t) = make_float2(sum[1][0] + sum[2][2], sum[1][1] + sum[2][3]);
      total = over_lanes_of_row(total);
      squares = over_lanes_of_row(squares);
      if (t < 2) mine[(OUTPUTS + t) * ROWS + g] = t ? squares : total;
      // Whoever pushes turn n has seen every block's turn n - 2, and those met here behind their reading of turn n - 4.
      set_meets(set);
      const int slot = turn % SLOTS;
      constexpr int OWN = (OUTPUTS + 1) * ROWS;
      if (thread < OWN + ROWS * 4) {
        const int n = thread % ROWS, which = thread < OWN ? thread : OWN + n;
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) part += s.sums[set][i][which];
        if (thread < OWN)
          push(&s.received[slot][block][thread / ROWS], &s.received_all[slot], set * ROWS + n, part);
        else
#pragma unroll
          for (int i = 0; i < BLOCKS / 4; ++i)
            push(&s.squares[slot][set * ROWS + n][block], &s.squares_all[slot][set], (thread - OWN) / ROWS * 4 + i, part);
      }
    }
    if (turn && works) {
      const uint32_t row = first + g + (turn - 1) * step;
      const int slot = (turn - 1) % SLOTS;
      wait(&s.squares_all[slot][set], (turn - 1) / SLOTS % 2);
      if (thread == 0) expect(&s.squares_all[slot][set], SQUARES_BYTES);
      const float4 parts = *reinterpret_cast<const float4*>(&s.squares[slot][set * ROWS + g][4 * t]);
      const float scale = inverse_root(over_lanes_of_row((parts.x + parts.y) + (parts.z + parts.w)) * a.inverse_width + a.norm_eps);
      uint32_t u[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        u[q] = pack(low(before[q]) * scale * low(of(norm, q)), high(before[q]) * scale * high(of(norm, q)));
      const uint4 quantised = quantise(u);
      if (held && row < a.rows) {
        const uint32_t at = row * a.width + channel;
        *reinterpret_cast<uint4*>(a.plain + at) = make_uint4(u[0], u[1], u[2], u[3]);
        *reinterpret_cast<uint4*>(a.quantised + at) = quantised;
      }
    }
    if (turn && keeps) {
      const int of = turn - 1, slot = of % SLOTS;
      wait(&s.received_all[slot], of / SLOTS % 2);
      if (lane == 0) expect(&s.received_all[slot], RECEIVED_BYTES);
      float sum = 0.0f;
      if (lane <= OUTPUTS) {
#pragma unroll
        for (int from = 0; from < BLOCKS; ++from) sum += s.received[slot][from][lane];
        s.kept[of % KEPT][lane] = sum;
      }
      __syncwarp();
      if (of % KEPT == KEPT - 1 || turn == turns) {
        const int oldest = of / KEPT * KEPT;
        const uint32_t row = (cluster + (oldest + lane) * clusters) * a.span + block;
        if (oldest + lane < turns && row < a.rows) {
          const float statistic = inverse_root(s.kept[lane][OUTPUTS] * a.inverse_width * (1.0f / STREAMS) + a.norm_eps);
          finish_coefficients(s, s.kept[lane], statistic, a.eps, a.iterations, a.next + row * OUTPUTS);
        }
        __syncwarp();
      }
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) before[q] = collapsed[q];
  }
}

// Write and collapse of chosen rows, and the norm of that: a block a row, a thread 8 channels.
__global__ void __launch_bounds__(1024) leave(const __grid_constant__ Arguments a, const int64_t* chosen) {
  __shared__ float sums[32];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int channel = threadIdx.x * 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool held = channel < a.width;
  const uint4 norm = held ? __ldg(reinterpret_cast<const uint4*>(a.weight + channel)) : make_uint4(0, 0, 0, 0);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int64_t row = chosen ? chosen[blockIdx.x] : blockIdx.x;
  const float4* coefficients = reinterpret_cast<const float4*>(a.coefficients + row * a.coefficients_row);
  const float4 pre = coefficients[0], post = coefficients[1];
  float4 comb[STREAMS];
#pragma unroll
  for (int i = 0; i < STREAMS; ++i) comb[i] = coefficients[2 + i];
  uint4 y4 = make_uint4(0, 0, 0, 0), x4[STREAMS];
  if (held) y4 = *reinterpret_cast<const uint4*>(a.y + row * a.width + channel);
#pragma unroll
  for (int i = 0; i < STREAMS; ++i)
    x4[i] = held ? *reinterpret_cast<const uint4*>(a.x + row * a.x_row + i * a.x_stream + channel) : make_uint4(0, 0, 0, 0);
  uint32_t collapsed[4];
  float squares = 0.0f;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    float c0 = 0.0f, c1 = 0.0f;
#pragma unroll
    for (int j = 0; j < STREAMS; ++j) {
      float v0 = of(post, j) * low(of(y4, q)), v1 = of(post, j) * high(of(y4, q));
#pragma unroll
      for (int i = 0; i < STREAMS; ++i) {
        v0 = fmaf(of(comb[i], j), low(of(x4[i], q)), v0);
        v1 = fmaf(of(comb[i], j), high(of(x4[i], q)), v1);
      }
      const uint32_t rounded = pack(v0, v1);
      c0 = fmaf(of(pre, j), low(rounded), c0);
      c1 = fmaf(of(pre, j), high(rounded), c1);
    }
    collapsed[q] = pack(c0, c1);
    squares = fmaf(low(collapsed[q]), low(collapsed[q]), squares);
    squares = fmaf(high(collapsed[q]), high(collapsed[q]), squares);
  }
#pragma unroll
  for (int distance = 16; distance; distance /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, distance);
  if (lane == 0) sums[warp] = squares;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) sum += sums[i];
  const float scale = inverse_root(sum * a.inverse_width + a.norm_eps);
  uint32_t u[4];
#pragma unroll
  for (int q = 0; q < 4; ++q)
    u[q] = pack(low(collapsed[q]) * scale * low(of(norm, q)), high(collapsed[q]) * scale * high(of(norm, q)));
  if (held) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * a.width + channel;
    *reinterpret_cast<uint4*>(a.out + at) = make_uint4(collapsed[0], collapsed[1], collapsed[2], collapsed[3]);
    *reinterpret_cast<uint4*>(a.plain + at) = make_uint4(u[0], u[1], u[2], u[3]);
  }
}

using Kernel = void (*)(Arguments);

constexpr Kernel KERNELS[2][2] = {{boundary<false, false>, boundary<false, true>}, {boundary<true, false>, boundary<true, true>}};

void configure(cudaLaunchConfig_t& config, cudaLaunchAttribute (&attribute)[2], int blocks, int cluster, int threads,
               size_t memory, bool programmatic, cudaStream_t stream) {
  config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = memory;
  config.stream = stream;
  config.attrs = attribute;
  if (programmatic) {
    attribute[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attribute[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attribute[config.numAttrs].val.clusterDim.x = cluster;
    attribute[config.numAttrs].val.clusterDim.y = 1;
    attribute[config.numAttrs++].val.clusterDim.z = 1;
  }
}

}  // namespace

// Clusters that fit on the current device at once, or minus the error. Call it once before the first launch, outside of a capture.
extern "C" int flashstep_boundary_clusters() {
  cudaError_t error = cudaSuccess;
  for (const auto& pair : KERNELS)
    for (const Kernel kernel : pair) {
      if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    }
  if (error != cudaSuccess) return -static_cast<int>(error);
  cudaLaunchConfig_t config;
  cudaLaunchAttribute attribute[2];
  configure(config, attribute, BLOCKS, BLOCKS, THREADS, sizeof(Shared), false, nullptr);
  int clusters = 0;
  error = cudaOccupancyMaxActiveClusters(&clusters, KERNELS[1][0], &config);
  return error == cudaSuccess ? clusters : -static_cast<int>(error);
}

extern "C" int flashstep_boundary(const Arguments* a, int clusters, int programmatic, cudaStream_t stream) {
  cudaLaunchConfig_t config;
  cudaLaunchAttribute attribute[2];
  configure(config, attribute, clusters * BLOCKS, BLOCKS, THREADS, sizeof(Shared), programmatic, stream);
  return cudaLaunchKernelEx(&config, KERNELS[a->y != nullptr][a->mean != nullptr], *a);
}

extern "C" int flashstep_leave(const Arguments* a, const int64_t* chosen, int count, int programmatic, cudaStream_t stream) {
  cudaLaunchConfig_t config;
  cudaLaunchAttribute attribute[2];
  configure(config, attribute, count, 1, (a->width / 8 + 31) / 32 * 32, 0, programmatic, stream);
  return cudaLaunchKernelEx(&config, leave, *a, chosen);
}
