// Exact top-k of fp32 scores for Hopper: a radix selection over order-preserving keys (11 + 11 + 10 bits), the chosen places in ascending
// order. Ties go to the lowest place; NaN and -inf are never chosen.
//
// A block reads its scores twice, the second time from a cache. First it counts the best of small groups of scores by their first 11
// bits: the `count`-th best group bounds the `count`-th best score from below. Then it lists what lies above that bound, not much more
// than `count`, and selects in the list. Where too many scores lie above (many equal ones), it selects among all of them instead.
// A long row is cut into parts first; the best of the parts, in order, are a short row. How a row is cut cannot be seen.
//
// Where the best score of each block of eight entries is known, a row is read through these: an entry of the best `count` lies in a
// block of the best `count` blocks (in each of those another entry comes before it), so only these blocks' scores are read.

#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int BINS = 2048;
constexpr int LEVELS = 3;
constexpr int LISTED = 6144;  // scores above the bound that a block keeps in shared memory
constexpr int AHEAD = 4;      // loads of four scores that a thread has in flight
constexpr int MEMBERS = 8;    // entries of a candidate block
constexpr uint32_t LEAST = 0x00800000;  // the key of the lowest finite score: no score has one in the first bins but 0, for none

struct Arguments {
  const float* score;      // a row of `limit` scores, or with `place` of parts * count
  const int* place;        // or none; the places of a row's scores, the best of its parts
  const float* peak;       // or none: best scores of blocks of MEMBERS entries, one block (the newest) perhaps too high
  const int64_t* visible;  // or none: every row has `limit` places
  const int* candidate;    // or none; then places are those of a row's candidate blocks
  int* out;
  float* out_score;  // or none: this is the last launch
  int64_t score_stride, peak_stride;
  int limit, divisor, count, candidates, members, words, parts;
};

__device__ __forceinline__ uint32_t order_key(float score) {
  const uint32_t bits = __float_as_uint(score + 0.f);  // the two zeros are equal
  const uint32_t key = bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000u);
  return score > -INFINITY ? key : 0;  // NaN compares false
}

__device__ __forceinline__ float score_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

struct Shared {
  uint32_t count[1 + LEVELS][BINS];  // groups by their best score, then keys by digit
  uint32_t key[LISTED];
  int place[LISTED];
  uint64_t partial[32];
  int listed;
  int bin;
  uint32_t above;  // keys in bins above `bin`
  uint32_t members;
};

// Exclusive sum over the block of one number a thread; `whole` is the sum of all. No more than 32 warps.
template <typename T>
__device__ __forceinline__ T exclusive_sum(T mine, T* partial, T& whole) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  auto inclusive = [&](T sum) {
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      const T other = __shfl_up_sync(~0u, sum, i);
      if (lane >= i) sum += other;
    }
    return sum;
  };
  const T sum = inclusive(mine);
  __syncthreads();
  if (lane == 31) partial[warp] = sum;
  __syncthreads();
  const T warps_before = inclusive(lane < warps ? partial[lane] : 0);
  whole = __shfl_sync(~0u, warps_before, 31);
  const T before = __shfl_sync(~0u, warps_before, warp == 0 ? 0 : warp - 1);
  return (warp == 0 ? 0 : before) + sum - mine;
}

// The bin of the `need`-th largest key of a level: in `bin`, with the number of keys above it and its own; -1 where there are fewer keys.
__device__ __forceinline__ void find_bin(Shared& s, int level, uint32_t need) {
  __syncthreads();
  const uint32_t* total = s.count[level];
  const int each = BINS / blockDim.x;  // at most 8
  uint32_t mine[8];
  uint32_t sum = 0;
  const int top = BINS - 1 - threadIdx.x * each;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < each) sum += mine[i] = top - i > 0 || level > 1 ? total[top - i] : 0;  // bin 0 of the first digit holds what is no score
  uint32_t whole;
  if (threadIdx.x == 0) s.bin = -1;
  uint32_t above = exclusive_sum<uint32_t>(sum, reinterpret_cast<uint32_t*>(s.partial), whole);
  if (above < need && above + sum >= need) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (i < each) {
        if (above < need && above + mine[i] >= need) {
          s.bin = top - i;
          s.above = above;
          s.members = mine[i];
        }
        above += mine[i];
      }
    }
  }
  __syncthreads();
}

// Scores in memory.
struct Scores {
  const float* score;
  int size;

  // four(scores, number of the first) or one(score, number) for each of them.
  template <typename Four, typename One>
  __device__ __forceinline__ void each(Four four, One one) const {
    if ((reinterpret_cast<uintptr_t>(score) & 15) == 0) {  // rows may begin anywhere: four at a time where the address allows it
      const int whole = size & ~3, step = blockDim.x * 4;
      for (int first = threadIdx.x * 4; first < whole; first += AHEAD * step) {
        float4 x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
          if (first + i * step < whole) x[i] = __ldg(reinterpret_cast<const float4*>(score + first + i * step));
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
          if (first + i * step < whole) four(x[i], first + i * step);
      }
      if ((int)threadIdx.x < size - whole) one(__ldg(score + whole + threadIdx.x), whole + (int)threadIdx.x);
    } else {
      for (int at = threadIdx.x; at < size; at += blockDim.x) one(__ldg(score + at), at);
    }
  }

  // f(key), 0 for what is never chosen.
  template <typename F>
  __device__ __forceinline__ void all(F f) const {
    each(
        [&](const float4& x, int) {
          f(order_key(x.x));
          f(order_key(x.y));
          f(order_key(x.z));
          f(order_key(x.w));
        },
        [&](float x, int) { f(order_key(x)); });
  }

  // f(key of the best) for groups of at most sixteen scores; of four and of one where rows are not aligned.
  template <typename F>
  __device__ __forceinline__ void groups(bool large, F f) const {
    float best = -INFINITY;
    int held = 0;
    each(
        [&](const float4& x, int) {
          best = fmaxf(best, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));  // NaN is passed over
          if (!large || ++held == 4) {
            f(order_key(best));
            best = -INFINITY;
            held = 0;
          }
        },
        [&](float x, int) { f(order_key(x)); });
    if (held) f(order_key(best));
  }

  // f(key, number) for the keys from `least` on.
  template <typename F>
  __device__ __forceinline__ void from(uint32_t least, F f) const {
    const float bound = score_of(least);
    auto one = [&](float x, int at) {
      if (x >= bound) f(order_key(x), at);
    };
    each(
        [&](const float4& x, int at) {
          if (fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)) >= bound) {  // few are
            one(x.x, at);
            one(x.y, at + 1);
            one(x.z, at + 2);
            one(x.w, at + 3);
          }
        },
        one);
  }
};

// Keys in shared memory, with their numbers or in their order.
struct Listed {
  const uint32_t* key;
  const int* number;
  int size;

  template <typename F>
  __device__ __forceinline__ void all(F f) const {
    for (int i = threadIdx.x; i < size; i += blockDim.x) f(key[i]);
  }

  template <typename F>
  __device__ __forceinline__ void from(uint32_t least, F f) const {
    for (int i = threadIdx.x; i < size; i += blockDim.x)
      if (key[i] >= least) f(key[i], number ? number[i] : i);
  }
};

// Mark the `count` best of `keys` in `marked`, and those that equal the last of them in `tied` instead. Returns how many of these are
// among the best. The bit words and the counts of the levels are zero before.
template <typename Keys>
__device__ __forceinline__ uint32_t mark_best(Shared& s, const Keys& keys, uint32_t* marked, uint32_t* tied, uint32_t count) {
  auto mark = [](uint32_t* bits, int number) { atomicOr(&bits[number >> 5], 1u << (number & 31)); };
  uint32_t need = count;
  keys.all([&](uint32_t key) { atomicAdd(&s.count[1][key >> 21], 1); });
  find_bin(s, 1, need);
  const int bin = s.bin;  // -1: every valid key is chosen
  const uint32_t least = bin < 0 ? LEAST : (uint32_t)bin << 21;
  if (bin < 0 || s.above + s.members == need) {
    keys.from(least, [&](uint32_t, int number) { mark(marked, number); });
    __syncthreads();
    return 0;
  }
  need -= s.above;
  keys.from(least, [&](uint32_t key, int) {
    if (key >> 21 == (uint32_t)bin) atomicAdd(&s.count[2][(key >> 10) & 2047], 1);
  });
  find_bin(s, 2, need);
  const uint32_t prefix = (uint32_t)bin << 11 | (uint32_t)s.bin;
  need -= s.above;
  keys.from(least, [&](uint32_t key, int) {
    if (key >> 10 == prefix) atomicAdd(&s.count[3][key & 1023], 1);
  });
  find_bin(s, 3, need);
  const uint32_t last = prefix << 10 | (uint32_t)s.bin;
  const uint32_t ties = need - s.above;
  keys.from(least, [&](uint32_t key, int number) {
    if (key > last) mark(marked, number);
    if (key == last) mark(tied, number);
  });
  __syncthreads();
  return ties;
}

__device__ __forceinline__ void clear(Shared& s, uint32_t* marked, uint32_t* tied, int words) {
  for (int i = threadIdx.x; i < (1 + LEVELS) * BINS; i += blockDim.x) (&s.count[0][0])[i] = 0;
  for (int i = threadIdx.x; i < words; i += blockDim.x) marked[i] = tied[i] = 0;
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
}

// As mark_best, of scores in memory.
__device__ __forceinline__ uint32_t mark_best_scores(Shared& s, const Scores& scores, uint32_t* marked, uint32_t* tied, uint32_t count) {
  clear(s, marked, tied, (scores.size + 31) / 32);
  scores.groups(scores.size >= 32 * (int)count, [&](uint32_t key) { atomicAdd(&s.count[0][key >> 21], 1); });
  find_bin(s, 0, count);
  scores.from(s.bin < 0 ? LEAST : (uint32_t)s.bin << 21, [&](uint32_t key, int number) {
    const int at = atomicAdd(&s.listed, 1);
    if (at < LISTED) {
      s.key[at] = key;
      s.place[at] = number;
    }
  });
  __syncthreads();
  const int listed = s.listed;
  if (listed <= LISTED) return mark_best(s, Listed{s.key, s.place, listed}, marked, tied, count);
  return mark_best(s, scores, marked, tied, count);
}

// Calls emit(place in order, number) for what was marked; gives how many they are.
template <typename Emit>
__device__ __forceinline__ int in_order(Shared& s, const uint32_t* marked, const uint32_t* tied, int words, uint32_t ties, Emit emit) {
  const int each = (words + blockDim.x - 1) / blockDim.x;
  const int low = min((int)threadIdx.x * each, words), high = min(low + each, words);
  uint64_t mine = 0;  // two counts in one sum: marked, ties
  for (int i = low; i < high; i++) mine += (uint64_t)__popc(marked[i]) << 32 | (uint32_t)__popc(tied[i]);
  uint64_t all;
  const uint64_t before = exclusive_sum<uint64_t>(mine, s.partial, all);
  uint32_t m = (uint32_t)(before >> 32), t = (uint32_t)before;
  for (int i = low; i < high; i++) {
    const uint32_t is_tied = tied[i];
    for (uint32_t left = marked[i] | is_tied; left; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      const bool tie = is_tied >> bit & 1;
      if (!tie || t < ties) emit((int)(m + min(t, ties)), i * 32 + bit);
      if (tie) t++; else m++;
    }
  }
  return (int)((uint32_t)(all >> 32) + min((uint32_t)all, ties));
}

// Block (part, row).
__global__ void __launch_bounds__(1024) choose(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(16) uint8_t raw[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  Shared& s = *reinterpret_cast<Shared*>(raw);
  uint32_t* marked = reinterpret_cast<uint32_t*>(raw + sizeof(Shared));
  uint32_t* tied = marked + p.words;
  const int64_t row = blockIdx.y;
  const int part = blockIdx.x, parts = gridDim.x;
  const float* score = p.score + row * p.score_stride;
  const int* candidate = p.candidate == nullptr ? nullptr : p.candidate + row * p.candidates;
  int* out = p.out + (row * parts + part) * p.count;

  int places = p.limit, whole = p.limit, visible = p.limit;
  bool everything = false;
  if (p.visible != nullptr) {
    visible = (int)p.visible[row];
    places = whole = (visible + p.divisor - 1) / p.divisor;
    everything = places <= p.count;
    if (candidate != nullptr) {
      int kept = 0;
      for (int i = 0; i < p.candidates; i += blockDim.x)
        kept += __syncthreads_count(i + (int)threadIdx.x < p.candidates && candidate[i + threadIdx.x] >= 0);
      places = kept * p.members;
      everything = everything && places >= visible;
    }
    places = min(places, p.limit);
  }
  if (everything) {  // whatever the scores
    if (p.out_score == nullptr)
      for (int i = threadIdx.x; i < p.count; i += blockDim.x) out[i] = i < whole ? i : -1;
    return;
  }
  auto entry = [&](int place) {
    return candidate == nullptr ? place : candidate[place / p.members] * p.members + place % p.members;
  };
  int kept;
  if (p.place != nullptr) {
    const int* listed = p.place + row * p.parts * p.count;
    const Scores scores{score, p.parts * p.count};
    const uint32_t ties = mark_best_scores(s, scores, marked, tied, p.count);
    kept = in_order(s, marked, tied, (scores.size + 31) / 32, ties, [&](int at, int number) { out[at] = entry(listed[number]); });
  } else if (p.peak == nullptr) {
    const int share = ((places + parts - 1) / parts + 31) & ~31;
    const int begin = min(part * share, places), end = min(begin + share, places);
    const uint32_t ties = mark_best_scores(s, Scores{score + begin, end - begin}, marked, tied, p.count);
    float* out_score = p.out_score == nullptr ? nullptr : p.out_score + (row * parts + part) * p.count;
    kept = in_order(s, marked, tied, (end - begin + 31) / 32, ties, [&](int at, int number) {
      const int place = begin + number;
      out[at] = out_score == nullptr ? entry(place) : place;
      if (out_score != nullptr) out_score[at] = score[place];
    });
    if (out_score != nullptr)
      for (int i = kept + threadIdx.x; i < p.count; i += blockDim.x) out_score[i] = -INFINITY;
  } else {
    const Scores peaks{p.peak + row * p.peak_stride, (places + MEMBERS - 1) / MEMBERS};
    int* block = reinterpret_cast<int*>(tied + p.words);  // the best blocks
    uint32_t* key = reinterpret_cast<uint32_t*>(block + p.count + 1);
    uint32_t ties = mark_best_scores(s, peaks, marked, tied, p.count + 1);
    const int blocks = in_order(s, marked, tied, (peaks.size + 31) / 32, ties, [&](int at, int number) { block[at] = number; });
    __syncthreads();
    const int entries = blocks * MEMBERS;
    for (int i = threadIdx.x; i < entries; i += blockDim.x) {
      const int place = block[i / MEMBERS] * MEMBERS + i % MEMBERS;
      key[i] = place < visible ? order_key(__ldg(score + place)) : 0;
    }
    clear(s, marked, tied, (entries + 31) / 32);
    ties = mark_best(s, Listed{key, nullptr, entries}, marked, tied, p.count);
    kept = in_order(s, marked, tied, (entries + 31) / 32, ties,
                    [&](int at, int number) { out[at] = block[number / MEMBERS] * MEMBERS + number % MEMBERS; });
  }
  for (int i = kept + threadIdx.x; i < p.count; i += blockDim.x) out[i] = -1;
}

int launch(const Arguments& p, int rows, int parts, int places, int threads, int programmatic, cudaStream_t stream) {
  Arguments q = p;
  q.words = (((places + parts - 1) / parts + 31) & ~31) / 32;
  if (p.peak != nullptr) q.words = q.words > (p.count + 1) * MEMBERS / 32 + 1 ? q.words : (p.count + 1) * MEMBERS / 32 + 1;
  const int bytes = (int)sizeof(Shared) + 2 * q.words * 4 + (p.peak == nullptr ? 0 : (p.count + 1) * (1 + MEMBERS) * 4);
  const cudaError_t error = cudaFuncSetAttribute(choose, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(parts, rows);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, choose, q);
}

}  // namespace

// `listed` and `listed_score`, [rows, parts, count] each, are needed where parts > 1; rows with peaks have one part.
extern "C" int flashstep_choose(const float* score, const float* peak, const int64_t* visible, const int* candidate, int* out,
                                int* listed, float* listed_score, int64_t score_stride, int64_t peak_stride, int rows, int limit,
                                int divisor, int count, int candidates, int members, int parts, int threads, int programmatic,
                                cudaStream_t stream) {
  Arguments p{score, nullptr, peak, visible, candidate, out, nullptr, score_stride, peak_stride,
              limit, divisor, count, candidates, members, 0, parts};
  const int places = peak == nullptr ? limit : (limit + MEMBERS - 1) / MEMBERS;
  if (parts == 1) return launch(p, rows, 1, places, threads, programmatic, stream);
  p.out = listed;
  p.out_score = listed_score;
  const int error = launch(p, rows, parts, places, threads, programmatic, stream);
  if (error) return error;
  p.out = out;
  p.out_score = nullptr;
  p.score = listed_score;
  p.place = listed;
  p.score_stride = (int64_t)parts * count;
  return launch(p, rows, 1, parts * count, threads, programmatic, stream);
}
