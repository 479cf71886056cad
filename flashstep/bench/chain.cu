// Kernels of `flashstep bench chain` and `bench pdl`: a plain producer, one that lets its dependents start early, and a consumer that waits for the
// memory of its producers; each launched in one of three ways. C interface; every function gives CUDA's error code.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;

enum Way { kChevron = 0, kExtensible = 1, kProgrammatic = 2 };

__device__ __forceinline__ void grow(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = fmaf(x[i], 0.999f, 0.5f);
}

__global__ void plain(float* x, int n) { grow(x, n); }

__global__ void early(float* x, int n) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  grow(x, n);
}

__global__ void waiting(float* x, int n) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  grow(x, n);
}

// y [rows, width] = x [rows, width] times the first of each row's `count` weights
__global__ void weigh(const __nv_bfloat16* x, const float* weights, __nv_bfloat16* y, int width, int count) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  long at = static_cast<long>(blockIdx.y) * width + column;
  if (column < width) y[at] = __float2bfloat16(__bfloat162float(x[at]) * weights[blockIdx.y * count]);
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int way, void* stream, Arguments... arguments) {
  dim3 block(kThreads);
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (way == kChevron) {
    kernel<<<grid, block, 0, s>>>(arguments...);
    return cudaGetLastError();
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = s;
  config.attrs = &attribute;
  config.numAttrs = way == kProgrammatic;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

int grown(void (*kernel)(float*, int), float* x, int n, int way, void* stream) {
  return launch(kernel, dim3((n + kThreads - 1) / kThreads), way, stream, x, n);
}

}  // namespace

extern "C" int produce(float* x, int n, int way, void* stream) { return grown(plain, x, n, way, stream); }
extern "C" int produce_early(float* x, int n, int way, void* stream) { return grown(early, x, n, way, stream); }
extern "C" int consume(float* x, int n, int way, void* stream) { return grown(waiting, x, n, way, stream); }
extern "C" int consume_rows(const void* x, const float* weights, void* y, int rows, int width, int count, int way, void* stream) {
  return launch(weigh, dim3((width + kThreads - 1) / kThreads, rows), way, stream, static_cast<const __nv_bfloat16*>(x), weights,
                static_cast<__nv_bfloat16*>(y), width, count);
}
