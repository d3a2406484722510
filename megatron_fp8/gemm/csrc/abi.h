// The library's interface, in plain C, so that it does not depend on a version of Python or torch.
#pragma once

#include <stdint.h>

#define MFP8_ABI 2  // increment with every change below

enum { MFP8_E4M3, MFP8_E5M2, MFP8_BF16, MFP8_FP32 };
enum { MFP8_HEURISTIC, MFP8_ALONG_M, MFP8_ALONG_N };
enum { MFP8_OK, MFP8_UNKNOWN, MFP8_UNFIT, MFP8_FAILED };

typedef struct {
  const void *a, *b;              // (M, K), (N, K) in FP8, contiguous
  const void *scale_a, *scale_b;  // float32 on the device
  const void* c;                  // (M, N) in D's type, added to the product; d to accumulate; or null
  void* d;                        // (M, N)
  const void* bias;               // (N,) bfloat16, or null
  void* stream;
  int32_t m, n, k;
  int32_t device;           // the caller's current device
  int32_t swizzle, raster;  // tiles' order, for the L2: at most 1, 2, 4 or 8 side by side; one of the enum above
} mfp8_args;

typedef struct {                  // of several experts; see grouped.cuh for the matrices
  const void *a, *b;              // in FP8
  const void *scale_a, *scale_b;  // float32 on the device, one for each expert
  const void *first, *expert;     // int32 tables on the device
  void* d;
  void* stream;
  int64_t step_b, step_d;         // elements from one expert's B, or D, to the next
  int32_t m, n, k;                // rows of A and B, and what is summed over
  int32_t experts, accumulate, device;
} mfp8_grouped_args;

typedef struct {
  int32_t a, b, d;            // types
  int32_t promote;            // length of the partial sums that are added in FP32; 0: the tensor core sums all of K
  int32_t tile_m, tile_n;
  int32_t cluster_m, cluster_n;
  int32_t pingpong;
  int32_t stages, shared_bytes;
} mfp8_info;
