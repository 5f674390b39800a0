// Page accounting for the scheduler; no page contents here.
#include "page_pool.h"

#include <algorithm>
#include <stdexcept>

namespace fiw::cli {

std::int32_t PrefixTree::child(std::int32_t parent, std::uint64_t block_hash) {
  const auto next = static_cast<std::int32_t>(children_.size()) + 1;
  return children_.try_emplace({parent, block_hash}, next).first->second;
}

PagePool::PagePool(std::int32_t num_pages) : pages_(num_pages), free_(num_pages) {
  // Pages are handed out from the back, so that the first one is page 0.
  for (std::int32_t i = 0; i < num_pages; ++i) free_[i] = num_pages - 1 - i;
}

std::int32_t PagePool::allocate() {
  std::int32_t page = 0;
  if (!free_.empty()) {
    page = free_.back();
    free_.pop_back();
  } else if (!kept_.empty()) {
    page = kept_.front();
    kept_.pop_front();
    published_.erase(*pages_[page].key);
    pages_[page].key.reset();
  } else {
    throw std::logic_error("page pool: nothing is available, so the caller's reservation is wrong");
  }
  pages_[page].references = 1;
  note_use();
  return page;
}

std::optional<std::int32_t> PagePool::acquire(const PageKey& key) {
  const auto found = published_.find(key);
  if (found == published_.end()) return std::nullopt;
  Page& page = pages_[found->second];
  if (page.references++ == 0) kept_.erase(page.kept);
  note_use();
  return found->second;
}

void PagePool::release(std::int32_t index) {
  Page& page = pages_[index];
  if (page.references == 0) throw std::logic_error("page pool: a page was released more often than it was taken");
  if (--page.references > 0) return;
  if (page.key) {
    page.kept = kept_.insert(kept_.end(), index);
  } else {
    free_.push_back(index);
  }
}

void PagePool::publish(std::int32_t page, const PageKey& key) {
  if (pages_[page].key || !published_.try_emplace(key, page).second) return;
  pages_[page].key = key;
}

bool PagePool::in_use(const PageKey& key) const {
  const auto found = published_.find(key);
  return found != published_.end() && pages_[found->second].references > 0;
}

void PagePool::note_use() noexcept { peak_used_ = std::max(peak_used_, used()); }

}  // namespace fiw::cli
