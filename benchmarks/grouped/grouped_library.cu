// The functions of the benchmark's library: like those of megatron_fp8/gemm/csrc/library.cu.
#include <atomic>

#include "grouped_abi.h"

#define MFP8_EXPORT __attribute__((visibility("default")))

namespace mfp8 {

extern const GroupedFamily rows_e4m3, rows_e5m2, sum_bf16, sum_fp32, ptr_array_rows, ptr_array_sum;
static const GroupedFamily* const families[] = {&rows_e4m3, &rows_e5m2,      &sum_bf16,
                                                &sum_fp32,  &ptr_array_rows, &ptr_array_sum};

static const GroupedEntry* find(int kernel) {
  for (const GroupedFamily* family : families) {
    if (kernel < 0) return nullptr;
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

MFP8_EXPORT int mfp8_grouped_kernels() {
  int count = 0;
  for (const mfp8::GroupedFamily* family : mfp8::families) count += family->count;
  return count;
}

// sums: whether it is a weight gradient; ptr_array: whether it is CUTLASS' own.
MFP8_EXPORT int mfp8_grouped_describe(int kernel, mfp8_info* info, int* sums, int* ptr_array) {
  const mfp8::GroupedEntry* entry = mfp8::find(kernel);
  if (entry == nullptr) return MFP8_UNKNOWN;
  *info = entry->info, *sums = entry->sums, *ptr_array = entry->ptr_array;
  return MFP8_OK;
}

// Launches the GEMM on the stream, without waiting. The message of a CUDA error is printed by the caller.
MFP8_EXPORT int mfp8_grouped_gemm(int kernel, const mfp8_grouped* args) {
  const mfp8::GroupedEntry* entry = mfp8::find(kernel);
  if (entry == nullptr) return MFP8_UNKNOWN;
  int device = -1, sms = 0;
  void* at = nullptr;
  if (cudaGetDevice(&device) != cudaSuccess) return MFP8_FAILED;
  if (device != args->device && cudaSetDevice(args->device) != cudaSuccess) return MFP8_FAILED;
  if (cudaGetSymbolAddress(&at, mfp8::counters) != cudaSuccess) return MFP8_FAILED;
  if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, args->device) != cudaSuccess) return MFP8_FAILED;
  return entry->run(*args, sms, static_cast<uint32_t*>(at) + mfp8::launches++ % mfp8::Counters);
}

// The last CUDA error of this library's runtime, as text; it is then forgotten.
MFP8_EXPORT const char* mfp8_grouped_error() { return cudaGetErrorString(cudaGetLastError()); }

}  // extern "C"
