// The interface of the grouped GEMMs in plain C, and the table entry of a kernel.
#pragma once

#include <cuda_runtime.h>

#include "abi.h"

typedef struct {
  const void *a, *b;              // FP8, contiguous; see grouped.cuh
  const void *scale_a, *scale_b;  // float32 on the device: one, or one for each expert
  void* d;
  const void *first, *expert;     // int32 tables on the device
  const void* counts;             // int32, rows of each expert without padding (ptr_array.cu)
  void *workspace, *stream;       // workspace: of ptr_array.cu
  int64_t workspace_bytes;
  int32_t m, n, k;                // Rows: m is R; Sum: k is R
  int32_t experts, step_a, step_b, accumulate, device;
} mfp8_grouped;

namespace mfp8 {

struct GroupedEntry {
  mfp8_info info;
  int sums;       // wgrad
  int ptr_array;  // CUTLASS' own grouped kernel
  int (*run)(const mfp8_grouped&, int sms, uint32_t* counter);
};

struct GroupedFamily {
  const GroupedEntry* entries;
  int count;
};

template <int Count>
constexpr GroupedFamily grouped_family(const GroupedEntry (&entries)[Count]) {
  return {entries, Count};
}

}  // namespace mfp8
