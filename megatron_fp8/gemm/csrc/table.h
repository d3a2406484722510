// The table entry of a kernel. Each .cu file lists a family of kernels; library.cu searches the lists.
#pragma once

#include <cuda_runtime.h>

#include "abi.h"

namespace mfp8 {

struct Entry {
  mfp8_info info;
  int (*run)(const mfp8_args&, int sms, uint32_t* counter);  // counter: a zero in global memory (counted.cuh)
};

struct GroupedEntry {
  mfp8_info info;
  int sums;  // whether it sums over an expert's rows
  int (*run)(const mfp8_grouped_args&, int sms, uint32_t* counter);
};

struct Family {
  const Entry* entries;
  int count;
};

struct GroupedFamily {
  const GroupedEntry* entries;
  int count;
};

template <int Count>
constexpr Family family(const Entry (&entries)[Count]) {
  return {entries, Count};
}

template <int Count>
constexpr GroupedFamily family(const GroupedEntry (&entries)[Count]) {
  return {entries, Count};
}

}  // namespace mfp8
