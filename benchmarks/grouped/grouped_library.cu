// The functions of the benchmark's library, over the product's grouped kernels and those of this folder: as those of
// megatron_fp8/gemm/csrc/library.cu.
#include <atomic>

#include "table.h"

#define MFP8_EXPORT __attribute__((visibility("default")))

namespace mfp8 {

extern const GroupedFamily e4m3_grouped, e5m2_grouped, ptr_array;

static const GroupedEntry* find(int kernel) {
  for (const GroupedFamily* family : {&e4m3_grouped, &e5m2_grouped, &ptr_array}) {
    if (kernel < family->count) return &family->entries[kernel];
    kernel -= family->count;
  }
  return nullptr;
}

constexpr uint32_t Counters = 1 << 14;
static __device__ uint32_t counters[Counters];
static std::atomic<uint32_t> launches;

}  // namespace mfp8

extern "C" {

// ptr_array: whether it is CUTLASS' own.
MFP8_EXPORT int mfp8_grouped_describe(int kernel, mfp8_info* info, int32_t* sums, int32_t* ptr_array) {
  const mfp8::GroupedEntry* entry = mfp8::find(kernel);
  if (entry == nullptr) return MFP8_UNKNOWN;
  const mfp8::GroupedFamily& own = mfp8::ptr_array;
  *info = entry->info, *sums = entry->sums;
  *ptr_array = entry >= own.entries && entry < own.entries + own.count;
  return MFP8_OK;
}

// Launches the GEMM on the stream, without waiting.
MFP8_EXPORT int mfp8_grouped_gemm(int kernel, const mfp8_grouped_args* args) {
  const mfp8::GroupedEntry* entry = mfp8::find(kernel);
  if (entry == nullptr) return MFP8_UNKNOWN;
  int sms = 0;
  void* at = nullptr;
  if (cudaSetDevice(args->device) != cudaSuccess) return MFP8_FAILED;
  if (cudaGetSymbolAddress(&at, mfp8::counters) != cudaSuccess) return MFP8_FAILED;
  if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, args->device) != cudaSuccess) return MFP8_FAILED;
  return entry->run(*args, sms, static_cast<uint32_t*>(at) + mfp8::launches++ % mfp8::Counters);
}

// The last CUDA error of this library's runtime, as text; it is then forgotten.
MFP8_EXPORT const char* mfp8_grouped_error() { return cudaGetErrorString(cudaGetLastError()); }

}  // extern "C"
