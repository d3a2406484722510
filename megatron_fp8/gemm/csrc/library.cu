// The library's functions: the number of kernels, a description of each, and a GEMM by one of them; the same of grouped
// GEMMs.
#include <atomic>

#include "table.h"

#define MFP8_EXPORT __attribute__((visibility("default")))

namespace mfp8 {

extern const Family e4m3_fast, e4m3_promoted, e5m2_promoted, e5m2_fp32, e5m2_fast, e5m2_right;
extern const GroupedFamily e4m3_grouped, e5m2_grouped;
static const Family* const families[] = {&e4m3_fast, &e4m3_promoted, &e5m2_promoted,
                                         &e5m2_fp32, &e5m2_fast,     &e5m2_right};
static const GroupedFamily* const grouped[] = {&e4m3_grouped, &e5m2_grouped};

template <class Family, int Count>
static int kernels(const Family* const (&families)[Count]) {
  int count = 0;
  for (const Family* family : families) count += family->count;
  return count;
}

template <class Family, int Count>
static auto find(const Family* const (&families)[Count], int kernel) -> decltype(families[0]->entries) {
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

// Launches a kernel on the arguments' stream, without waiting.
template <class Entry, class Args>
static int launch(const Entry* entry, const Args& args) {
  if (entry == nullptr) return MFP8_UNKNOWN;
  int device = -1;  // current in this library's own CUDA runtime; torch's runtime may have another
  if (cudaGetDevice(&device) != cudaSuccess) return MFP8_FAILED;
  if (device != args.device && cudaSetDevice(args.device) != cudaSuccess) return MFP8_FAILED;
  Device here = current(args.device);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t asked = cudaStreamIsCapturing(static_cast<cudaStream_t>(args.stream), &capture);
  if (asked != cudaSuccess || here.multiprocessors == 0) return MFP8_FAILED;
  int kept = capture != cudaStreamCaptureStatusNone;
  uint32_t turn = launches[kept]++ % Counters;
  return entry->run(args, here.multiprocessors, here.counters + kept * Counters + turn);
}

}  // namespace mfp8

extern "C" {

MFP8_EXPORT int mfp8_abi() { return MFP8_ABI; }

MFP8_EXPORT int mfp8_kernels() { return mfp8::kernels(mfp8::families); }

MFP8_EXPORT int mfp8_describe(int kernel, mfp8_info* info) {
  const mfp8::Entry* entry = mfp8::find(mfp8::families, kernel);
  if (entry == nullptr) return MFP8_UNKNOWN;
  *info = entry->info;
  return MFP8_OK;
}

MFP8_EXPORT int mfp8_gemm(int kernel, const mfp8_args* args) {
  return mfp8::launch(mfp8::find(mfp8::families, kernel), *args);
}

MFP8_EXPORT int mfp8_grouped_kernels() { return mfp8::kernels(mfp8::grouped); }

// sums: whether the kernel sums over an expert's rows.
MFP8_EXPORT int mfp8_grouped_describe(int kernel, mfp8_info* info, int32_t* sums) {
  const mfp8::GroupedEntry* entry = mfp8::find(mfp8::grouped, kernel);
  if (entry == nullptr) return MFP8_UNKNOWN;
  *info = entry->info, *sums = entry->sums;
  return MFP8_OK;
}

MFP8_EXPORT int mfp8_grouped_gemm(int kernel, const mfp8_grouped_args* args) {
  return mfp8::launch(mfp8::find(mfp8::grouped, kernel), *args);
}

}  // extern "C"
