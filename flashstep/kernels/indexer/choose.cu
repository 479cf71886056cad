// Exact top-k of fp32 scores for Hopper over order-preserving keys, the chosen places in ascending order. Ties go to the lowest place; NaN
// and -inf are never chosen.
//
// A block of a row: a sample, spread over it, gives a bound that at least `count` of its scores reach; what reaches the bound is listed,
// and selected in the list by one level of bins and comparisons inside the last one. Where the list overflows, it gives a better bound
// and the row is read again. Where that ends (many equal scores) a radix selection over all scores (11 + 11 + 10 bits) decides.
// A long row is cut into parts first; the best of the parts, in order, are a short row. How a row is cut cannot be seen.
//
// Where the best score of each block of eight entries is known, a row is read through these: an entry of the best `count` lies in a
// block of the best `count` blocks (in each of those another entry comes before it), so only these blocks' scores are read.
//
// Most calls are short, and code that runs once comes from memory: there is one copy of everything (2026-12-01).

#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int THREADS = 1024;  // with 512, two blocks a multiprocessor, every shape took longer (2026-12-01)
constexpr int BINS = 2048;
constexpr int LISTED = 8192;   // keys that a block keeps in shared memory
constexpr int AHEAD = 4;       // loads of four scores that a thread has in flight
constexpr int SAMPLE = 8;      // loads of four scores of a thread's sample
constexpr int BOUND_BITS = 14;  // of a bound
constexpr int ATTEMPTS = 4;    // to list what reaches a bound
constexpr int BOUNDARY = 256;  // keys of the last bin that are compared with each other
constexpr int MEMBERS = 8;     // entries of a candidate block
constexpr uint32_t LEAST = 0x00800000;  // the key of the lowest finite score; 0 is none
constexpr uint32_t ALL = 0xFFFFFFFFu;

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
  uint32_t count[BINS];
  uint32_t key[LISTED];
  int place[LISTED];
  uint32_t boundary_key[BOUNDARY];
  int boundary_place[BOUNDARY];
  uint64_t partial[32];
  uint32_t total[3];
  uint32_t most;
  int at_boundary;
  int listed;
  int bin;
  uint32_t above;  // keys in bins above `bin`
  uint32_t members;
};

// Exclusive sum over the block of one number a thread; `whole` is the sum of all.
template <typename T>
__device__ __forceinline__ T exclusive_sum(T mine, T* partial, T& whole) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  T sum = mine;
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    const T other = __shfl_up_sync(ALL, sum, i);
    if (lane >= i) sum += other;
  }
  __syncthreads();
  if (lane == 31) partial[warp] = sum;
  __syncthreads();
  T warps_before = lane < THREADS / 32 ? partial[lane] : 0;
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    const T other = __shfl_up_sync(ALL, warps_before, i);
    if (lane >= i) warps_before += other;
  }
  whole = __shfl_sync(ALL, warps_before, 31);
  const T before = __shfl_sync(ALL, warps_before, warp == 0 ? 0 : warp - 1);
  return (warp == 0 ? 0 : before) + sum - mine;
}

// The bin of the `need`-th largest of what was counted: in `bin`, with the number above it and its own; -1 where there are fewer.
// The counts are zero again behind it.
__device__ __noinline__ void find_bin(Shared& s, uint32_t need) {
  constexpr int EACH = BINS / THREADS;
  __syncthreads();
  const int top = BINS - 1 - threadIdx.x * EACH;
  uint32_t mine[EACH], sum = 0, whole;
#pragma unroll
  for (int i = 0; i < EACH; i++) sum += mine[i] = s.count[top - i];
  if (threadIdx.x == 0) s.bin = -1;
  uint32_t above = exclusive_sum<uint32_t>(sum, reinterpret_cast<uint32_t*>(s.partial), whole);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    s.count[top - i] = 0;
    if (above < need && above + mine[i] >= need) {
      s.bin = top - i;
      s.above = above;
      s.members = mine[i];
    }
    above += mine[i];
  }
  __syncthreads();
}

__device__ __forceinline__ void mark(uint32_t* bits, int number) { atomicOr(&bits[number >> 5], 1u << (number & 31)); }

// Radix selection among `size` listed keys, or among scores. Marks the best, and in `tied` those that equal the last of them; gives how many
// of these are among the best.
__device__ __noinline__ uint32_t mark_by_digits(Shared& s, const float* score, int size, uint32_t* marked, uint32_t* tied, uint32_t need) {
  auto each = [&](auto f) {
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS) {
      const uint32_t key = score == nullptr ? s.key[i] : order_key(__ldg(score + i));
      if (key >= LEAST) f(key, score == nullptr ? s.place[i] : i);
    }
  };
  uint32_t prefix = 0;
  int shift = 32;
#pragma unroll 1
  for (int level = 0; level < 3; level++) {
    const int bits = level < 2 ? 11 : 10;
    each([&](uint32_t key, int) {
      if ((uint32_t)((uint64_t)key >> shift) == prefix) atomicAdd(&s.count[key >> (shift - bits) & ((1 << bits) - 1)], 1);
    });
    find_bin(s, need);
    if (s.bin < 0) {  // of the first level: there are fewer, and all are chosen
      prefix = 0;
      need = 0;
      break;
    }
    shift -= bits;
    prefix = prefix << bits | (uint32_t)s.bin;
    need -= s.above;
  }
  each([&](uint32_t key, int number) {
    if (key > prefix) mark(marked, number);
    if (key == prefix) mark(tied, number);
  });
  __syncthreads();
  return need;
}

// Counts the listed keys from `least` on in bins between it and the largest, finds the bin of the `count`-th. Gives the bins' shift.
__device__ __noinline__ int bins_of_list(Shared& s, int size, uint32_t least, uint32_t count) {
  uint32_t most = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += THREADS) most = max(most, s.key[i]);
  most = __reduce_max_sync(ALL, most);
  if (threadIdx.x == 0) s.most = 0;
  __syncthreads();
  if ((threadIdx.x & 31) == 0) atomicMax(&s.most, most);
  __syncthreads();
  most = s.most;
  const int shift = most > least ? max(21 - __clz(most - least), 0) : 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += THREADS)
    if (s.key[i] >= least) atomicAdd(&s.count[(s.key[i] - least) >> shift], 1);
  find_bin(s, count);
  return shift;
}

// As mark_by_digits, of listed keys from `least` on. `floor`: at least `count` of them reach it, where there are as many.
__device__ __forceinline__ uint32_t mark_listed(Shared& s, int size, uint32_t least, uint32_t* marked, uint32_t* tied, uint32_t count,
                                                uint32_t& floor) {
  const int shift = bins_of_list(s, size, least, count);
  const int bin = s.bin;  // -1: every key is chosen
  const uint32_t need = count - s.above, members = s.members;
  floor = bin < 0 ? least : least + ((uint32_t)bin << shift);
  const bool all = bin < 0 || members == need;
  if (!all && members > BOUNDARY) return mark_by_digits(s, nullptr, size, marked, tied, count);
  if (threadIdx.x == 0) s.at_boundary = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += THREADS) {
    const uint32_t key = s.key[i];
    if (key < floor) continue;
    if (all || (key - least) >> shift > (uint32_t)bin) {
      mark(marked, s.place[i]);
    } else {
      const int at = atomicAdd(&s.at_boundary, 1);
      s.boundary_key[at] = key;
      s.boundary_place[at] = s.place[i];
    }
  }
  __syncthreads();
  if (!all && threadIdx.x < members) {
    const uint32_t key = s.boundary_key[threadIdx.x];
    const int number = s.boundary_place[threadIdx.x];
    uint32_t better = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < members; i++)
      better += s.boundary_key[i] > key || (s.boundary_key[i] == key && s.boundary_place[i] < number);
    if (better < need) mark(marked, number);
  }
  __syncthreads();
  return 0;
}

// A key that at least `count` of the block's keys reach, as large as its first bits tell; 0 where fewer are valid.
__device__ __forceinline__ uint32_t bound_of(Shared& s, const uint32_t (&key)[SAMPLE], bool only_first, uint32_t count) {
  uint32_t bound = 0;
#pragma unroll 1
  for (int bit = 31; bit > 31 - BOUND_BITS; bit--) {
    const uint32_t next = bound | 1u << bit;
    uint32_t reach;
    if (only_first) {
      reach = __syncthreads_count(key[0] >= next);
    } else {
      uint32_t mine = 0;
#pragma unroll
      for (int i = 0; i < SAMPLE; i++) mine += key[i] >= next;
      mine = __reduce_add_sync(ALL, mine);
      if ((threadIdx.x & 31) == 0) atomicAdd(&s.total[bit % 3], mine);  // zero before
      __syncthreads();
      reach = s.total[bit % 3];
      if (threadIdx.x == 0) s.total[(bit + 1) % 3] = 0;  // all have read it, and use it again behind the next barrier
    }
    if (reach >= count) bound = next;
  }
  return bound;
}

// Mark the `count` best of a row's scores, as mark_by_digits.
__device__ __forceinline__ uint32_t mark_best(Shared& s, const float* score, int size, uint32_t* marked, uint32_t* tied, uint32_t count,
                                              uint32_t& floor) {
  const float none = -INFINITY;
  const int lane = threadIdx.x & 31;
  const int head = min((int)(-(reinterpret_cast<uintptr_t>(score) >> 2) & 3), size);  // rows may begin anywhere
  const int fours = (size - head) >> 2, rest = size - 4 * fours;
  const float4* four = reinterpret_cast<const float4*>(score + head);
  const bool whole = fours <= AHEAD * THREADS;  // the first loads are the row
  float4 x[AHEAD];
  uint32_t key[SAMPLE];
  auto best_of = [](const float4& x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); };  // NaN is passed over
  {
    float best = none, each[SAMPLE];
    float4 y[SAMPLE];
#pragma unroll
    for (int i = 0; i < SAMPLE; i++) {
      // of a long row warps' pieces of 512 bytes, evenly over it
      const int piece = (i * THREADS + (int)threadIdx.x) >> 5, pieces = SAMPLE * THREADS / 32;
      const int at = fours <= SAMPLE * THREADS ? i * THREADS + (int)threadIdx.x : (int)((int64_t)piece * (fours >> 5) / pieces) * 32 + lane;
      y[i] = at < fours ? __ldg(four + at) : make_float4(none, none, none, none);
    }
#pragma unroll
    for (int i = 0; i < SAMPLE; i++) {
      each[i] = best_of(y[i]);
      best = fmaxf(best, each[i]);
      if (i < AHEAD) x[i] = y[i];
    }
    const bool only_first = 2 * count <= THREADS;
#pragma unroll
    for (int i = 0; i < SAMPLE; i++) key[i] = order_key(only_first && i == 0 ? best : each[i]);
  }
  uint32_t least = max(bound_of(s, key, 2 * count <= THREADS, count), LEAST);
#pragma unroll 1
  for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
    const float edge = score_of(least);
    if ((int)threadIdx.x < rest) {
      const int at = (int)threadIdx.x < head ? (int)threadIdx.x : 4 * fours + (int)threadIdx.x;
      const float last = __ldg(score + at);
      if (last >= edge) {
        const int to = atomicAdd(&s.listed, 1);
        s.key[min(to, LISTED - 1)] = order_key(last);
        s.place[min(to, LISTED - 1)] = at;
      }
    }
#pragma unroll 1
    for (int base = 0; base < fours; base += AHEAD * THREADS) {
      if (!whole) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          const int at = base + i * THREADS + (int)threadIdx.x;
          x[i] = at < fours ? __ldg(four + at) : make_float4(none, none, none, none);
        }
      }
      int hits = 0;
#pragma unroll
      for (int i = 0; i < AHEAD; i++) hits += (x[i].x >= edge) + (x[i].y >= edge) + (x[i].z >= edge) + (x[i].w >= edge);
      if (!__any_sync(ALL, hits)) continue;
      int to = hits;
#pragma unroll
      for (int i = 1; i < 32; i <<= 1) {
        const int other = __shfl_up_sync(ALL, to, i);
        if (lane >= i) to += other;
      }
      int start = 0;
      if (lane == 31) start = atomicAdd(&s.listed, to);
      to += __shfl_sync(ALL, start, 31) - hits;
      if (!hits || to + hits > LISTED) continue;  // what does not fit is asked for again
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        if (best_of(x[i]) < edge) continue;
        const float each[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (each[k] >= edge) {
            s.key[to] = order_key(each[k]);
            s.place[to++] = head + (base + i * THREADS + (int)threadIdx.x) * 4 + k;
          }
      }
    }
    __syncthreads();
    const int listed = s.listed;
    if (listed <= LISTED) return mark_listed(s, listed, least, marked, tied, count, floor);
    const int shift = bins_of_list(s, LISTED - 128, least, count);
    if (s.bin <= 0) break;
    least += (uint32_t)s.bin << shift;
    __syncthreads();
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
  }
  floor = LEAST;
  return mark_by_digits(s, score, size, marked, tied, count);
}

// Calls emit(place in order, number) for what was marked; gives how many they are.
template <typename Emit>
__device__ __forceinline__ int in_order(Shared& s, const uint32_t* marked, const uint32_t* tied, int words, uint32_t ties, Emit emit) {
  const int each = (words + THREADS - 1) / THREADS;
  const int low = min((int)threadIdx.x * each, words), high = min(low + each, words);
  uint64_t mine = 0;  // two counts in one sum: marked, ties
#pragma unroll 1
  for (int i = low; i < high; i++) mine += (uint64_t)__popc(marked[i]) << 32 | (uint32_t)__popc(tied[i]);
  uint64_t all;
  const uint64_t before = exclusive_sum<uint64_t>(mine, s.partial, all);
  uint32_t m = (uint32_t)(before >> 32), t = (uint32_t)before;
#pragma unroll 1
  for (int i = low; i < high; i++) {
    const uint32_t is_tied = tied[i];
#pragma unroll 1
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
__global__ void __launch_bounds__(THREADS) choose(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  uint32_t* marked = reinterpret_cast<uint32_t*>(memory + sizeof(Shared));
  uint32_t* tied = marked + p.words;
  int* block = reinterpret_cast<int*>(tied + p.words);  // with peaks, the best blocks
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  auto clear = [&] {
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * p.words; i += THREADS) marked[i] = 0;
    if (threadIdx.x == 0) s.listed = s.total[0] = s.total[1] = s.total[2] = 0;
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < BINS; i += THREADS) s.count[i] = 0;
  clear();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int64_t row = blockIdx.y;
  const int part = blockIdx.x, parts = gridDim.x;
  const float* score = p.score + row * p.score_stride;
  const int* candidate = p.candidate == nullptr ? nullptr : p.candidate + row * p.candidates;
  int* out = p.out + (row * parts + part) * p.count;
  float* out_score = p.out_score == nullptr ? nullptr : p.out_score + (row * parts + part) * p.count;

  int places = p.limit, whole = p.limit, visible = p.limit;
  bool everything = false;
  if (p.visible != nullptr) {
    visible = (int)p.visible[row];
    places = whole = (visible + p.divisor - 1) / p.divisor;
    everything = places <= p.count;
    if (candidate != nullptr) {
      int kept = 0;
#pragma unroll 1
      for (int i = 0; i < p.candidates; i += THREADS)
        kept += __syncthreads_count(i + (int)threadIdx.x < p.candidates && candidate[i + threadIdx.x] >= 0);
      places = kept * p.members;
      everything = everything && places >= visible;
    }
    places = min(places, p.limit);
  }
  if (everything) {  // whatever the scores
    if (out_score == nullptr)
      for (int i = threadIdx.x; i < p.count; i += THREADS) out[i] = i < whole ? i : -1;
    return;
  }
  // what is selected among first
  const int* listed = p.place == nullptr ? nullptr : p.place + row * p.parts * p.count;
  const float* from = score;
  int begin = 0, size = p.parts * p.count;
  if (p.peak != nullptr) {
    from = p.peak + row * p.peak_stride;
    size = (places + MEMBERS - 1) / MEMBERS;
  } else if (listed == nullptr) {
    const int share = ((places + parts - 1) / parts + 31) & ~31;
    begin = min(part * share, places);
    size = min(begin + share, places) - begin;
    from = score + begin;
  }
  __syncthreads();
  uint32_t floor, ties = mark_best(s, from, size, marked, tied, p.count + (p.peak != nullptr), floor);
  bool last = p.peak == nullptr;
  int kept;
#pragma unroll 1
  while (true) {
    kept = in_order(s, marked, tied, (size + 31) / 32, ties, [&](int at, int number) {
      if (!last) {
        block[at] = number;
        return;
      }
      int place = begin + number;
      if (p.peak != nullptr) place = block[number / MEMBERS] * MEMBERS + number % MEMBERS;
      if (out_score != nullptr) out_score[at] = score[place];
      if (listed != nullptr) place = listed[number];
      if (candidate != nullptr && out_score == nullptr) place = candidate[place / p.members] * p.members + place % p.members;
      out[at] = place;
    });
    if (last) break;
    __syncthreads();
    clear();
    __syncthreads();
    size = kept * MEMBERS;
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS) {
      const int place = block[i / MEMBERS] * MEMBERS + i % MEMBERS;
      const uint32_t key = place < visible ? order_key(__ldg(score + place)) : 0;
      if (key < floor || key == 0) continue;  // `count` entries of these blocks reach it
      const int at = atomicAdd(&s.listed, 1);
      s.key[at] = key;
      s.place[at] = i;
    }
    __syncthreads();
    ties = mark_listed(s, s.listed, floor, marked, tied, p.count, floor);
    last = true;
  }
  for (int i = kept + threadIdx.x; i < p.count; i += THREADS) {
    out[i] = -1;
    if (out_score != nullptr) out_score[i] = -INFINITY;
  }
}

int launch(const Arguments& p, int rows, int parts, int places, int programmatic, cudaStream_t stream) {
  Arguments q = p;
  q.words = (((places + parts - 1) / parts + 31) & ~31) / 32;
  if (p.peak != nullptr) q.words = q.words > (p.count + 1) * MEMBERS / 32 + 1 ? q.words : (p.count + 1) * MEMBERS / 32 + 1;
  const int bytes = (int)sizeof(Shared) + 2 * q.words * 4 + (p.peak == nullptr ? 0 : (p.count + 1) * 4);
  const cudaError_t error = cudaFuncSetAttribute(choose, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(parts, rows);
  config.blockDim = dim3(THREADS);
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
                                int divisor, int count, int candidates, int members, int parts, int programmatic,
                                cudaStream_t stream) {
  if (peak != nullptr && (count + 1) * MEMBERS > LISTED) return cudaErrorInvalidValue;
  Arguments p{score, nullptr, peak, visible, candidate, out, nullptr, score_stride, peak_stride,
              limit, divisor, count, candidates, members, 0, parts};
  const int places = peak == nullptr ? limit : (limit + MEMBERS - 1) / MEMBERS;
  if (parts == 1) return launch(p, rows, 1, places, programmatic, stream);
  p.out = listed;
  p.out_score = listed_score;
  const int error = launch(p, rows, parts, places, programmatic, stream);
  if (error) return error;
  p.out = out;
  p.out_score = nullptr;
  p.score = listed_score;
  p.place = listed;
  p.score_stride = (int64_t)parts * count;
  return launch(p, rows, 1, parts * count, programmatic, stream);
}
