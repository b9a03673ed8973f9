// References for whatever runs beside the pool, such as a copy in flight.

#include <algorithm>
#include <iterator>

#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"

namespace pagedkv {

std::shared_ptr<Fence> BlockPool::fence(std::span<Sequence* const> sequences) {
  auto fence = std::make_shared<Fence>();
  fence->pool = this;
  auto call = begin();
  for (const Sequence* sequence : sequences) {
    if (sequence->pool != this)
      throw UsageError("fence: expected a sequence of this pool, got one of another pool");
    if (sequence->is_closed) throw StateError("fence: expected an open sequence, got a closed one");
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    std::vector<BlockId>& pages = fence->pages.emplace_back();
    for (const Sequence* sequence : sequences)
      std::ranges::reverse_copy(sequence->tables[g].held(), std::back_inserter(pages));
  }
  fences_.insert(fence.get());
  for (size_t g = 0; g < groups_.size(); ++g)
    for (BlockId id : fence->pages[g]) ref(g, id);
  return fence;
}

void BlockPool::release(Fence& fence) {
  auto call = begin();
  if (fence.pool != this)
    throw UsageError("release: expected a fence of this pool, got one of another pool");
  if (fence.is_released)
    throw StateError("release: expected a fence that holds, got a released one");
  fence.is_released = true;
  fences_.erase(&fence);
  for (size_t g = 0; g < groups_.size(); ++g)
    for (BlockId id : fence.pages[g]) unref(g, id);
}

}  // namespace pagedkv
