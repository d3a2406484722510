// The library's functions: the number of kernels, a description of each, and a GEMM by one of them.
#include <atomic>

#include "table.h"

#define MFP8_EXPORT __attribute__((visibility("default")))

namespace mfp8 {

extern const Family e4m3_fast, e4m3_promoted, e5m2_promoted, e5m2_fp32, e5m2_fast, e5m2_right;
static const Family* const families[] = {&e4m3_fast, &e4m3_promoted, &e5m2_promoted,
                                         &e5m2_fp32, &e5m2_fast,     &e5m2_right};

static const Entry* find(int kernel) {
  for (const Family* family : families) {
    if (kernel < 0) return nullptr;
    if (kernel < family->count) return &family->entries[kernel];
    kernel -= family->count;
  }
  return nullptr;
}

// Each launch takes the next counter (counted.cuh). There are more counters than launches that run or wait on a GPU at
// a time. A launch in a CUDA graph keeps its counter for all replays, so these launches have counters of their own.
constexpr uint32_t Counters = 1 << 14;
static __device__ uint32_t counters[2][Counters];
static std::atomic<uint32_t> launches[2];

// A device's properties, queried once; multiprocessors is 0 if the query fails.
struct Device {
  int multiprocessors;
  uint32_t* counters;
};

static Device current(int device) {
  static Device known[64];
  if (device < 0 || device >= 64) return {0, nullptr};
  Device& one = known[device];
  if (one.multiprocessors == 0) {
    void* at = nullptr;
    int count = 0;
    if (cudaGetSymbolAddress(&at, counters) != cudaSuccess) return {0, nullptr};
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return {0, nullptr};
    one = {count, static_cast<uint32_t*>(at)};
  }
  return one;
}

}  // namespace mfp8

extern "C" {

MFP8_EXPORT int mfp8_abi() { return MFP8_ABI; }

MFP8_EXPORT int mfp8_kernels() {
  int count = 0;
  for (const mfp8::Family* family : mfp8::families) count += family->count;
  return count;
}

MFP8_EXPORT int mfp8_describe(int kernel, mfp8_info* info) {
  const mfp8::Entry* entry = mfp8::find(kernel);
  if (entry == nullptr) return MFP8_UNKNOWN;
  *info = entry->info;
  return MFP8_OK;
}

// Launches the GEMM on the stream, without waiting.
MFP8_EXPORT int mfp8_gemm(int kernel, const mfp8_args* args) {
  const mfp8::Entry* entry = mfp8::find(kernel);
  if (entry == nullptr) return MFP8_UNKNOWN;
  int device = -1;  // current in this library's own CUDA runtime; torch's runtime may have another
  if (cudaGetDevice(&device) != cudaSuccess) return MFP8_FAILED;
  if (device != args->device && cudaSetDevice(args->device) != cudaSuccess) return MFP8_FAILED;
  mfp8::Device here = mfp8::current(args->device);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t asked = cudaStreamIsCapturing(static_cast<cudaStream_t>(args->stream), &capture);
  if (asked != cudaSuccess || here.multiprocessors == 0) return MFP8_FAILED;
  int kept = capture != cudaStreamCaptureStatusNone;
  uint32_t turn = mfp8::launches[kept]++ % mfp8::Counters;
  return entry->run(*args, here.multiprocessors, here.counters + kept * mfp8::Counters + turn);
}

}  // extern "C"
