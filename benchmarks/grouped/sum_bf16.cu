// Weight gradients of all experts in BF16: E5M2 x E4M3, promoted every 256 of K, and without promotion for comparison.
#include "grouped.cuh"

namespace mfp8 {

static const GroupedEntry entries[] = {
    GroupedTiled<E5M2, E4M3, BF16, 128, 256, 2, 1, Groups::Sum>::promoted<256, 128>(),
    GroupedTiled<E5M2, E4M3, BF16, 128, 256, 2, 1, Groups::Sum>::fast(),
};

extern const GroupedFamily sum_bf16 = grouped_family(entries);

}  // namespace mfp8
