// See plan_cache.h.
#include "core/plan_cache.h"

#include <algorithm>

namespace fiw {

namespace detail {

bool Plan::matches(const PlanKeyView& key) const noexcept {
  return hash == key.hash && traits == key.traits && std::ranges::equal(kv_counts, key.kv_counts) &&
         std::ranges::equal(qo_indptr, key.qo_indptr) && (key.table == nullptr || table == *key.table);
}

void Plan::set_key(const PlanKeyView& key) {
  traits = key.traits;
  kv_counts.assign(key.kv_counts.begin(), key.kv_counts.end());
  qo_indptr.assign(key.qo_indptr.begin(), key.qo_indptr.end());
  if (key.table != nullptr) table = *key.table;
  hash = key.hash;
}

}  // namespace detail

std::shared_ptr<detail::Plan> PlanCache::find(const PlanKeyView& key) noexcept {
  for (Entry& entry : entries_) {
    if (!entry.plan->matches(key)) continue;
    entry.last_used = ++clock_;
    ++stats_.hits;
    return entry.plan;
  }
  return nullptr;
}

std::shared_ptr<detail::Plan> PlanCache::blank() {
  if (spares_.empty()) return std::make_shared<detail::Plan>();
  std::shared_ptr<detail::Plan> plan = std::move(spares_.back());
  spares_.pop_back();
  return plan;
}

void PlanCache::insert(std::shared_ptr<detail::Plan> plan) {
  ++stats_.misses;
  if (entries_.capacity() < max_entries_) {
    entries_.reserve(max_entries_);
    spares_.reserve(max_entries_ + 1);
  }
  if (entries_.size() < max_entries_) {
    entries_.push_back({std::move(plan), ++clock_});
    return;
  }
  Entry& oldest = *std::ranges::min_element(entries_, {}, &Entry::last_used);
  retire(oldest);
  oldest = {std::move(plan), ++clock_};
  ++stats_.evictions;
}

void PlanCache::invalidate() noexcept {
  stats_.invalidations += entries_.size();
  for (Entry& entry : entries_) retire(entry);
  entries_.clear();
}

void PlanCache::clear() noexcept {
  entries_.clear();
  spares_.clear();
}

void PlanCache::retire(Entry& entry) noexcept {
  // A plan that a step still holds keeps its slice until that step goes.
  if (entry.plan.use_count() == 1) {
    entry.plan->slice = {};
    entry.plan->table = empty_table_;
    spares_.push_back(std::move(entry.plan));
  }
  entry.plan.reset();
}

CacheStats PlanCache::stats() const noexcept {
  CacheStats stats = stats_;
  stats.entries = entries_.size();
  for (const Entry& entry : entries_) stats.bytes += entry.plan->shape.bytes;
  return stats;
}

}  // namespace fiw
