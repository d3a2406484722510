// All experts' backward products: E5M2 x E4M3, promoted every 256 of K; weight gradients into BF16 and FP32.
#include "grouped.cuh"

namespace mfp8 {

static const GroupedEntry entries[] = {
    GroupedTiled<E5M2, E4M3, BF16, 128, 256, 1, 2, Groups::Rows>::promoted<256, 128>(),
    GroupedTiled<E5M2, E4M3, BF16, 128, 256, 1, 1, Groups::Rows>::promoted<256, 128>(),
    GroupedTiled<E5M2, E4M3, BF16, 128, 256, 2, 1, Groups::Sum>::promoted<256, 128>(),
    GroupedTiled<E5M2, E4M3, FP32, 128, 256, 2, 1, Groups::Sum>::promoted<256, 128>(),
};

extern const GroupedFamily e5m2_grouped = family(entries);

}  // namespace mfp8
